"""Running kernels: CuPy, torch and other GPU arrays; NumPy arrays run the interpreter."""

from lngen.runtime.norm import Norm, compile
from lngen.runtime.saved import Saved

__all__ = ["Norm", "Saved", "compile"]
