"""Running kernels: CuPy, torch and other GPU arrays; NumPy arrays run the interpreter."""

from lngen.runtime.norm import Norm, Saved, compile

__all__ = ["Norm", "Saved", "compile"]
