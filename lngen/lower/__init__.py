"""Lowering: from a spec and a schedule to a plan."""

from lngen.lower.lower import lower
from lngen.lower.plan import Argument, Buffer, Extent, Kernel, Phase, Plan, Statement, ctype

__all__ = ["Argument", "Buffer", "Extent", "Kernel", "Phase", "Plan", "Statement", "ctype", "lower"]
