"""Cut a graph at its reductions over rows and of vectors: rows, column sums, what follows from them, and numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lngen.compiler.ir import (
    SUMS,
    D,
    Eqn,
    Graph,
    M,
    Value,
    is_block_fold,
    is_column_fold,
    is_join,
    is_number_fold,
    is_over_heads,
    is_over_segments,
    is_over_sets,
    is_row_fold,
    is_segment_sum,
)
from lngen.compiler.ir.places import depths, downstream, extract, upstream
from lngen.compiler.problem.facts import refuse_axes
from lngen.compiler.problem.maxima import Maximum, maxima_of
from lngen.errors import LowerError


@dataclass(frozen=True)
class Parts:
    """A graph in the parts that different kernels compute.

    rows      results with rows, and the [M] values of ``handed``
    sums      the column sums, then the column maxima
    finish    [D] results, and the [D] values of ``handed``, which may depend on the column sums; None without any
    numbers   results of no axes, and [D] results that depend on a reduction of a vector; None without any
    handed    values of ``rows`` and ``finish`` that ``numbers`` reads, without those that are results anyway
    maxima    the maxima over all rows from which alone ``numbers`` follows, if the kernel of the rows completes these
    over_sets [D] results that depend on a sum over sets of rows, or [E] ones of a sum over heads; None without any
    of_sets   the sums over rows that it reads, without those that are results anyway
    """

    rows: Graph
    sums: tuple[Eqn, ...]
    finish: Graph | None
    numbers: Graph | None = None
    handed: tuple[Value, ...] = ()
    maxima: tuple[Maximum, ...] = ()
    over_sets: Graph | None = None
    of_sets: tuple[Value, ...] = ()


def cut(graph: Graph) -> Parts:
    """The parts of ``graph``; LowerError if a value with rows needs a sum over rows, or a number of the whole graph."""
    refuse_axes(graph)
    _check(graph)
    sums = tuple(sorted(filter(is_column_fold, graph.eqns), key=lambda e: e.op not in SUMS))
    by_row = tuple(r for r in graph.results if M in r.type.axes)
    late = downstream(graph.eqns, [e.out for e in graph.eqns if is_number_fold(e)]) - {*graph.params}
    numbers = tuple(r for r in graph.results if not r.type.axes or (r in late and r not in by_row))
    maxima = maxima_of(graph)
    handed = () if maxima else _handed(graph, late, numbers)
    operands = tuple(dict.fromkeys(a for e in (*sums, *(m.term for m in maxima)) for a in e.args))
    of_rows = tuple(v for v in handed if M in v.type.axes)
    rows = extract(graph, graph.name, graph.params, tuple(dict.fromkeys((*by_row, *of_rows, *operands))))
    _check_rows(graph, rows, late)
    narrow = tuple(p for p in graph.params if M not in p.type.axes)
    ends = [e.out for e in graph.eqns if is_over_sets(e) or is_over_heads(e)]
    over = downstream(graph.eqns, ends) - {*graph.params}
    of_all_sets = tuple(r for r in graph.results if r in over)
    needed = upstream(graph.eqns, of_all_sets)
    of_sets = tuple(e.out for e in sums if e.out in needed)
    by_column = tuple(r for r in graph.results if r not in (*by_row, *numbers, *of_all_sets))
    by_column = tuple(dict.fromkeys((*by_column, *(v for v in handed if M not in v.type.axes), *of_sets)))
    finish = extract(graph, graph.name, (*(e.out for e in sums), *narrow), by_column) if by_column else None
    given = (*graph.params, *handed, *(m.eqn.out for m in maxima))
    end = extract(graph, graph.name, given, numbers) if numbers else None
    for part in filter(None, (finish, end)):
        _check_narrow(graph, part)
    over_sets = extract(graph, graph.name, (*narrow, *of_sets), of_all_sets) if of_all_sets else None
    handed, of_sets = (tuple(v for v in values if v not in graph.results) for values in (handed, of_sets))
    return Parts(rows, sums, finish, end, handed, maxima, over_sets, of_sets)


def _handed(graph: Graph, late: set[Value], results: tuple[Value, ...]) -> tuple[Value, ...]:
    """The values that earlier kernels store for the reductions of vectors, and for what depends on them.

    Values that depend on inputs alone, and on no reduction, are computed again.
    """
    levels, needed = depths(graph), upstream(graph.eqns, results)
    of_columns = downstream(graph.eqns, [e.out for e in graph.eqns if is_column_fold(e)])
    read = {a for e in graph.eqns if e.out in late and e.out in needed for a in e.args}
    early = [e.out for e in graph.eqns if e.out in read and e.out not in late]
    return tuple(
        v for v in early if (v.type.axes == (M,) and levels[v] > 0) or (v.type.axes == (D,) and v in of_columns)
    )


def _kind(eqn: Eqn) -> str:
    return "sum" if eqn.op in SUMS else "maximum"


def _over_rows(graph: Graph, values: Iterable[Value]) -> Eqn | None:
    """A reduction over the rows that ``values`` depend on, if there is one."""
    needed = upstream(graph.eqns, values)
    folds = (e for e in graph.eqns if is_column_fold(e) or (is_number_fold(e) and e.axis is M))
    return next((e for e in folds if e.out in needed), None)


def _check(graph: Graph) -> None:
    """LowerError for results and reductions over rows that no kernel computes."""
    for value in graph.results:
        if value in graph.params:
            raise LowerError(f"graph @{graph.name}: the result '{value}' is an input; leave it out, the caller has it.")
        if M in value.type.axes and (over := _over_rows(graph, [value])):
            raise LowerError(
                f"graph @{graph.name}: the row result '{value}' depends on a {_kind(over)} over rows; that takes two "
                f"graphs, one for the {_kind(over)} and one for the result."
            )
    for eqn in graph.eqns:
        if is_column_fold(eqn) and (over := _over_rows(graph, eqn.args)):
            plural = {"sum": "sums", "maximum": "maxima"}[_kind(over)]
            raise LowerError(f"graph @{graph.name}: '{eqn.out}' is a {_kind(eqn)} over rows of {plural} over rows.")
        if (is_segment_sum(eqn) or is_join(eqn)) and M not in eqn.out.type.axes:
            raise LowerError(
                f"graph @{graph.name}: '{eqn.out}' reduces over D a value that has no rows; pass it as an input."
            )
    _check_segments(graph)


def _check_rows(graph: Graph, rows: Graph, late: set[Value]) -> None:
    """LowerError for rows that need a reduction of a vector."""
    for eqn in graph.eqns:
        wide = is_row_fold(eqn) or (M in eqn.out.type.axes and len(eqn.out.type.axes) > 1)
        if eqn.out not in late or not (wide or eqn in rows.eqns):
            continue
        if over := _over_rows(graph, [eqn.out]):
            raise LowerError(
                f"graph @{graph.name}: '{eqn.out}' takes whole rows and depends on '{over.out}', a {_kind(over)} over "
                f"rows; that takes two graphs, one for '{over.out}' and one for what depends on it."
            )
        needed = upstream(graph.eqns, [eqn.out])
        number = next(e.out for e in graph.eqns if is_number_fold(e) and e.out in needed)
        raise LowerError(
            f"graph @{graph.name}: '{number}' reduces over D a value that has no rows, and rows depend on it; pass it "
            "as an input."
        )


def _check_narrow(graph: Graph, part: Graph) -> None:
    """LowerError for values of a part without rows that vary along S."""
    for eqn in part.eqns:
        if is_over_segments(eqn.out):
            raise LowerError(
                f"graph @{graph.name}: '{eqn.out}' varies along S, and a result without rows needs it; such results "
                "are elementwise in column sums and numbers."
            )


def _check_segments(graph: Graph) -> None:
    """LowerError for sums over S that no reduction of a row comes before."""
    levels = depths(graph)
    for eqn in graph.eqns:
        if is_join(eqn) and levels[eqn.out] == 0:
            raise LowerError(
                f"graph @{graph.name}: '{eqn.out}' adds over S values that depend on no sum of segments; pass it as an "
                "input."
            )


def column_graph(parts: Parts, graph: Graph, apart: bool) -> tuple[Graph, tuple[Value, ...]]:
    """The graph of a kernel that only adds columns, and the per-row values that it takes from the row kernel.

    Where an operand of a column sum depends on row sums, the [M] values computed from them become parameters. The
    numbers of blocks are folded, and heads rotated, again, unless no warp has whole blocks of one row, ``apart``:
    LowerError, as for values along segments.
    """
    levels, producer = depths(graph), graph.producers()
    operands = tuple(dict.fromkeys(a for e in parts.sums for a in e.args))
    taken, waiting = set[Value](), [*operands]
    while waiting:
        value = waiting.pop()
        if value.type.axes == (M,) and levels[value] > 0:
            taken.add(value)
        elif value in producer:
            waiting += producer[value].args
    handed = tuple(e.out for e in graph.eqns if e.out in taken)
    columns = extract(graph, graph.name, (*graph.params, *handed), operands)
    for eqn in columns.eqns:
        met = apart and (is_block_fold(eqn) or eqn.op == "rotate")
        if is_over_segments(eqn.out) or met:
            shorter = "another form, which takes shorter rows, or " * met
            raise LowerError(
                f"graph @{graph.name}: '{eqn.out}' varies along {eqn.out.type.along(D)}, and a sum over rows needs it; "
                f"with form=multipass, that takes {shorter}two graphs, one for the values and one for their sum."
            )
    return columns, handed
