"""Running kernels: CuPy, torch and other GPU arrays; NumPy arrays run the interpreter."""

from lngen.launch.array_norm import Saved
from lngen.launch.runtime.norm import Norm, compile

__all__ = ["Norm", "Saved", "compile"]
