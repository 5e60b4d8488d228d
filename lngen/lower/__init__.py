"""Lowering: from a spec and a schedule to a plan."""

from lngen.ir import ctype
from lngen.lower.finish import requested_shared
from lngen.lower.lower import lower
from lngen.lower.parts import NUMBERS, Argument, Phase, Place, Statement, number
from lngen.lower.plan import Buffer, Extent, Kernel, Plan

__all__ = [
    "NUMBERS", "Argument", "Buffer", "Extent", "Kernel", "Phase", "Place", "Plan", "Statement", "ctype",
    "lower", "number", "requested_shared",
]  # fmt: skip
