"""Emission: from a plan to CUDA text."""

from lngen.emit.emit import emit, environment

__all__ = ["emit", "environment"]
