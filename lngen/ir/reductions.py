"""Which equations reduce: over the rows, or over the features of a row."""

from __future__ import annotations

from lngen.ir.types import Axis, D, Eqn

# The ops that add along an axis, in an order that their attributes spell; and all that reduce one.
SUMS = ("reduce_sum", "reduce_dot")
REDUCTIONS = (*SUMS, "reduce_max")


def is_sum(eqn: Eqn, axis: Axis) -> bool:
    """True for a sum over ``axis``."""
    return eqn.op in SUMS and eqn.attr("axis") is axis


def is_row_fold(eqn: Eqn) -> bool:
    """True for a sum or a maximum over D: what ends a phase."""
    return is_sum(eqn, D) or eqn.op == "reduce_max"
