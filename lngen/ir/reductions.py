"""Which equations reduce: over the rows, or over the features of a row; and what a spread does with a sum."""

from __future__ import annotations

from lngen.ir.types import Axis, D, Eqn, Graph, Value

# The ops that add along an axis, in an order that their attributes spell; all that reduce one; and all that spell one.
SUMS = ("reduce_sum", "reduce_dot", "reduce_spread")
REDUCTIONS = (*SUMS, "reduce_max")
ORDERED = (*SUMS, "segment_mean")
OF_SEGMENTS = ("reduce_spread", "segment_mean")  # what needs the sums of segments


def is_sum(eqn: Eqn, axis: Axis) -> bool:
    """True for a sum over ``axis``."""
    return eqn.op in SUMS and eqn.attr("axis") is axis


def is_row_fold(eqn: Eqn) -> bool:
    """True for a sum or a maximum over D: what ends a phase."""
    return is_sum(eqn, D) or eqn.op == "reduce_max"


def spread_sums(graph: Graph) -> dict[Value, Value]:
    """The sums over D that come with a spread of the same operand in the same order, each with that operand's spread.

    A spread needs the sums of segments, and has the sum of the row when it is done.
    """
    spreads = {(e.args, e.attrs): e.out for e in graph.eqns if e.op == "reduce_spread"}
    sums = (e for e in graph.eqns if e.op == "reduce_sum" and e.attr("axis") is D)
    return {e.out: spreads[e.args, e.attrs] for e in sums if (e.args, e.attrs) in spreads}
