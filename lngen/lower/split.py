"""Cut a graph at its column sums: the part of the row kernels, and the part that depends on the sums."""

from __future__ import annotations

from dataclasses import dataclass

from lngen.errors import LowerError
from lngen.ir import D, Eqn, Graph, M, S, Value, has_segments, is_row_fold, is_sum
from lngen.passes.edit import extract, upstream
from lngen.schedule import depths


@dataclass(frozen=True)
class Split:
    """``rows``: results with rows. ``sums``: the column sums. ``finish``: [D] results, which may depend on the sums."""

    rows: Graph
    sums: tuple[Eqn, ...]
    finish: Graph | None


def split(graph: Graph) -> Split:
    """The parts of ``graph``; LowerError if a part would need a result of another row of the same kernel."""
    sums = tuple(e for e in graph.eqns if is_sum(e, M))
    by_row = tuple(r for r in graph.results if M in r.type.axes)
    by_column = tuple(r for r in graph.results if M not in r.type.axes)
    for value in by_row:
        if any(e.out in upstream(graph.eqns, [value]) for e in sums):
            raise LowerError(
                f"graph @{graph.name}: the row result '{value}' depends on a sum over rows; that takes two graphs, "
                "one for the sum and one for the result."
            )
    for eqn in sums:
        if any(is_sum(e, M) for e in graph.eqns if e.out in upstream(graph.eqns, eqn.args)):
            raise LowerError(f"graph @{graph.name}: '{eqn.out}' is a sum over rows of sums over rows.")
    for eqn in graph.eqns:
        if (is_row_fold(eqn) or is_sum(eqn, S)) and M not in eqn.out.type.axes:
            raise LowerError(
                f"graph @{graph.name}: '{eqn.out}' reduces over D a value that has no rows; pass it as an input."
            )
    _check(graph, sums)
    _check_segments(graph)
    rows = extract(graph, graph.name, graph.params, (*by_row, *dict.fromkeys(a for e in sums for a in e.args)))
    if not by_column:
        return Split(rows, sums, None)
    narrow = tuple(p for p in graph.params if M not in p.type.axes)
    finish = extract(graph, graph.name, (*(e.out for e in sums), *narrow), by_column)
    if any(is_row_fold(e) for e in finish.eqns) or has_segments(finish) or any(r.type.axes != (D,) for r in by_column):
        raise LowerError(
            f"graph @{graph.name}: results without rows are expected to be [D] and elementwise in the column sums."
        )
    return Split(rows, sums, finish)


def _check(graph: Graph, sums: tuple[Eqn, ...]) -> None:
    """LowerError for results and sums that no kernel computes."""
    for value in graph.results:
        if value in graph.params:
            raise LowerError(f"graph @{graph.name}: the result '{value}' is an input; leave it out, the caller has it.")
    for eqn in sums:
        if D not in eqn.out.type.axes:
            raise LowerError(f"graph @{graph.name}: '{eqn.out}' sums over rows a value without D; add it up outside.")


def _check_segments(graph: Graph) -> None:
    """LowerError for sums over S that no reduction of a row comes before."""
    levels = depths(graph)
    for eqn in graph.eqns:
        if is_sum(eqn, S) and levels[eqn.out] == 0:
            raise LowerError(
                f"graph @{graph.name}: '{eqn.out}' adds over S values that depend on no sum of segments; pass it as an "
                "input."
            )


def column_graph(parts: Split, graph: Graph) -> tuple[Graph, tuple[Value, ...]]:
    """The graph of a kernel that only adds columns, and the per-row values that it takes from the row kernel.

    Where an operand of a column sum depends on row sums, the [M] values computed from them become parameters.
    """
    levels = depths(graph)
    operands = tuple(dict.fromkeys(a for e in parts.sums for a in e.args))
    needed = upstream(graph.eqns, operands)
    handed = tuple(
        e.out
        for e in graph.eqns
        if e.out in needed and e.out.type.axes == (M,) and levels[e.out] > 0
        if e.out in operands or _feeds_columns(graph, e.out, needed)
    )
    columns = extract(graph, graph.name, (*graph.params, *handed), operands)
    for eqn in columns.eqns:
        if S in eqn.out.type.axes:
            raise LowerError(
                f"graph @{graph.name}: '{eqn.out}' varies along S, and a sum over rows needs it; with form=multipass, "
                "that takes two graphs, one for the values and one for their sum."
            )
    return columns, handed


def _feeds_columns(graph: Graph, value: Value, needed: set[Value]) -> bool:
    """True if an equation that is not per row uses ``value`` on the way to a column sum."""
    return any(value in e.args and e.out in needed and e.out.type.axes != (M,) for e in graph.eqns)
