"""The NumPy interpreter of the IR."""

from lngen.interpret.interpreter import interpret

__all__ = ["interpret"]
