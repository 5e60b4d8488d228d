"""Maxima over all rows that the kernel of the rows completes: they have no order, so blocks join theirs in any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lngen.compiler.ir import F32, WIDE, Eqn, Graph, M, Value, is_column_fold, is_number_fold
from lngen.compiler.ir.places import downstream, once, upstream


@dataclass(frozen=True)
class Maximum:
    """A maximum over all rows.

    eqn    its equation, from [M] to a number
    term   the equation whose operand a thread takes: ``eqn``, or the maximum over D before it, if only ``eqn`` needs it
    """

    eqn: Eqn
    term: Eqn


@once
def maxima_of(graph: Graph) -> tuple[Maximum, ...]:
    """The maxima over all rows, if every result without rows is one, joined to what is given; else none.

    Bits are joined, and those of numbers with sign 0 are in order. With column sums a kernel follows that of the rows.
    """
    folds = [e for e in graph.eqns if is_number_fold(e)]
    late = downstream(graph.eqns, [e.out for e in folds])
    operands = [a for e in folds for a in e.args]
    of_rows = upstream(graph.eqns, [*operands, *(r for r in graph.results if M in r.type.axes)])
    fits = (
        all(e.op == "reduce_max" and e.axis is M and e.out.type.dtype is F32 for e in folds),
        all(_has_sign_0(graph, v) and v not in late for v in operands),
        all(_is_joined(graph, folds, r) for r in graph.results if r in late or not r.type.axes),
        any(p.type.axes == WIDE and p in of_rows for p in graph.params),
        not any(map(is_column_fold, graph.eqns)),
    )
    return tuple(Maximum(e, _of_elements(graph, e)) for e in folds) if all(fits) else ()


def of_maxima_alone(graph: Graph) -> set[Eqn]:
    """The equations of elements, and maxima over D, that only maxima over all rows need: no row is reduced for them."""
    terms = {m.term for m in maxima_of(graph) if m.term is not m.eqn}
    needed = upstream([e for e in graph.eqns if e not in terms], graph.results)
    return terms | {e for e in graph.eqns if terms and e.out not in needed}


def _has_sign_0(graph: Graph, value: Value) -> bool:
    """True for an absolute value, and for the largest one of several."""
    made = graph.producers().get(value)
    if made is None or made.op == "abs":
        return made is not None
    return made.op in ("reduce_max", "stop_gradient") and _has_sign_0(graph, made.args[0])


def _is_joined(graph: Graph, folds: Sequence[Eqn], result: Value) -> bool:
    """True if ``result`` is the larger one of one of ``folds`` and of what depends on none."""
    needed = upstream(graph.eqns, [result])
    own = [e for e in folds if e.out in needed]
    follow = downstream(graph.eqns, [e.out for e in own]) & needed
    eqns = [e for e in graph.eqns if e.out in follow and e not in own]
    same = all(e.op in ("maximum", "stop_gradient", "cast") and e.out.type == own[0].out.type for e in eqns)
    return len(own) == 1 and same


def _of_elements(graph: Graph, eqn: Eqn) -> Eqn:
    """The maximum over D of which ``eqn`` is the maximum over M, if nothing else needs it; else ``eqn``."""
    (row,) = eqn.args
    made = graph.producers().get(row, eqn)
    of_elements = made.op == "reduce_max" and made.to is None and made.args[0].type.axes == WIDE
    alone = row not in graph.results and all(e is eqn for e in graph.eqns if row in e.args)
    return made if of_elements and alone else eqn
