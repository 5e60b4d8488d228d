"""The equations that reduce: over the rows, over the features of a row, or over a segment of them."""

from __future__ import annotations

from lngen.ir.types import Axis, D, Eqn, Graph, M, S

# The ops that add along a whole axis, in the order of their attributes; those that add along each segment of D; those
# that reduce a whole axis; all that reduce; and all that have an order as attributes.
SUMS = ("reduce_sum", "reduce_dot")
SEGMENT_SUMS = ("segment_sum", "segment_dot")
FOLDS = (*SUMS, "reduce_max")
REDUCTIONS = (*FOLDS, *SEGMENT_SUMS)
OF_SEGMENTS = (*SEGMENT_SUMS, "segment_size")
ORDERED = (*SUMS, *OF_SEGMENTS)

# Versions of the rule that gives sums their order, the default first: lngen/passes/order_v1.toml.
ORDERS = ("v1",)


def is_sum(eqn: Eqn, axis: Axis) -> bool:
    """True for a sum over all of ``axis``."""
    return eqn.op in SUMS and eqn.attr("axis") is axis


def is_row_fold(eqn: Eqn) -> bool:
    """True for a sum or a maximum over D, of a row or of each of its segments, which ends a phase."""
    along_d = eqn.op in SEGMENT_SUMS or (eqn.op in FOLDS and eqn.axis is D)
    return along_d and M in eqn.out.type.axes


def is_column_fold(eqn: Eqn) -> bool:
    """True for a sum or a maximum over the rows of each column: [M, D] to [D]."""
    return eqn.op in FOLDS and eqn.axis is M and D in eqn.out.type.axes


def is_number_fold(eqn: Eqn) -> bool:
    """True for a sum or a maximum of all elements of a vector: [D] or [M] to []."""
    return eqn.op in FOLDS and not eqn.out.type.axes


def independent_rows(graph: Graph) -> bool:
    """True if no equation joins rows: then some of the rows have the results that they have among all."""
    return all(dict(eqn.attrs).get("axis") is not M for eqn in graph.eqns)


def segment_of(graph: Graph, d: int) -> int:
    """Elements of a segment along S in rows of ``d``: the row if no equation has segments (``verify``: all agree)."""
    lengths = (eqn.int_attr("segment") for eqn in graph.eqns if eqn.op in OF_SEGMENTS and "segment" in dict(eqn.attrs))
    return next(lengths, d)


def has_segments(graph: Graph) -> bool:
    """True if a value of ``graph`` varies along S."""
    return any(S in eqn.out.type.axes for eqn in graph.eqns)


def indexed_by_elements(eqn: Eqn) -> tuple[bool, ...]:
    """For each operand, whether S is combined with D: the operand varies along S, and the equation works along D."""
    along_d = any(D in v.type.axes for v in (eqn.out, *eqn.args))
    return tuple(along_d and S in a.type.axes for a in eqn.args)
