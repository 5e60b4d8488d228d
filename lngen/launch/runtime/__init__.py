"""Running kernels: CuPy, torch and other GPU arrays; NumPy arrays run the interpreter."""

from lngen.launch.runtime.norm import Norm, compile
from lngen.launch.runtime.saved import Saved

__all__ = ["Norm", "Saved", "compile"]
