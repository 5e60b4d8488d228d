"""Emission: from a plan to CUDA text."""

from lngen.emit.emit import emit, environment, make_environment, module

__all__ = ["emit", "environment", "make_environment", "module"]
