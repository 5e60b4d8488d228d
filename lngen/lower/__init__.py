"""Lowering: from a spec and a schedule to a plan."""

from lngen.ir.ops import ctype
from lngen.lower.lower import lower
from lngen.lower.parts import Argument, Phase, Place, Statement
from lngen.lower.plan import Buffer, Extent, Kernel, Plan
from lngen.lower.spread import asked_shared

__all__ = [
    "Argument", "Buffer", "Extent", "Kernel", "Phase", "Place", "Plan", "Statement", "asked_shared", "ctype", "lower",
]  # fmt: skip
