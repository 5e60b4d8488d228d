"""The loops over rows that compute a graph: what each computes for a block of rows, and what comes before it.

Rows are independent until an equation joins them. So a loop goes as far as it can with each block of rows: it adds
them to the sums over all rows, and what reads these sums is for the next loop. A graph keeps what is found once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lngen.compiler.ir.axes import Axis, M
from lngen.compiler.ir.places import once, unequal
from lngen.compiler.ir.types import FOLDS, Eqn, Graph, Type, Value


class Step(NamedTuple):
    """An equation on values that have numbers.

    unequal   the operands that have another axis than it works along, as ``places.unequal`` says them
    buffer    that of the block that holds the value; None for values without rows, folds, and what is kept
    """

    eqn: Eqn
    args: tuple[int, ...]
    out: int
    unequal: tuple[tuple[int, int, Axis, Axis], ...]
    buffer: int | None


class RowLoop(NamedTuple):
    """One loop over blocks of rows; values are their numbers.

    before    what has no rows, which is computed first
    rows      what is computed for each block, in order
    folds     the sums and maxima over all rows among it, to which each block is added
    read      the values with rows, complete before the loop, of which a block reads its own
    kept      the values with rows that are complete after it: results, and what later loops read
    buffers   the arrays for the other values of a block, by their types: a value has one of them until the last
              equation that reads it
    """

    before: tuple[Step, ...]
    rows: tuple[Step, ...]
    folds: Mapping[int, Eqn]
    read: tuple[int, ...]
    kept: Mapping[int, Type]
    buffers: tuple[Type, ...]


@once
def numbers(graph: Graph) -> Mapping[Value, int]:
    """The number of each value, parameters first."""
    return {v: n for n, v in enumerate(graph.values().values())}


@once
def row_loops(graph: Graph) -> tuple[RowLoop, ...]:
    """The loops over rows, in order."""
    known = dict.fromkeys(graph.params, 0)  # the first loop that can read a value
    for eqn in graph.eqns:
        known[eqn.out] = max((known[a] for a in eqn.args), default=0) + _joins_rows(eqn)
    eqns = defaultdict[int, list[Eqn]](list)
    for eqn in graph.eqns:
        eqns[known[eqn.out] - _is_fold(eqn)].append(eqn)
    count = 1 + max(known.values(), default=0)
    read = [{a for e in eqns[n] for a in e.args} for n in range(count)]
    return tuple(_row_loop(graph, eqns[n], set(graph.results).union(*read[n + 1 :])) for n in range(count))


def _joins_rows(eqn: Eqn) -> bool:
    return M not in eqn.out.type.axes and any(M in a.type.axes for a in eqn.args)


def _is_fold(eqn: Eqn) -> bool:
    """True for a sum or a maximum over all rows."""
    return eqn.op in FOLDS and eqn.axis is M and eqn.to is None and _joins_rows(eqn)


def _row_loop(graph: Graph, eqns: Sequence[Eqn], wanted: set[Value]) -> RowLoop:
    """The loop that computes ``eqns``, of which later ones want values."""
    number = numbers(graph)
    rows = [e for e in eqns if M in e.out.type.axes or _is_fold(e)]
    own = {e.out for e in rows}
    kept = [e.out for e in rows if e.out in wanted and M in e.out.type.axes]
    buffers, place = _buffers(rows, kept)
    steps = [Step(e, tuple(number[a] for a in e.args), number[e.out], unequal(e), place.get(e.out)) for e in (*eqns,)]
    return RowLoop(
        tuple(s for s in steps if s.eqn.out not in own),
        tuple(s for s in steps if s.eqn.out in own),
        {number[e.out]: e for e in rows if _is_fold(e)},
        tuple({number[a]: None for e in rows for a in e.args if M in a.type.axes and a not in own}),
        {number[v]: v.type for v in kept},
        buffers,
    )


def _buffers(rows: Sequence[Eqn], kept: Sequence[Value]) -> tuple[tuple[Type, ...], dict[Value, int]]:
    """The buffers of a block, and which one each value has."""
    last = {a: e for e in rows for a in (*e.args, e.out)}
    free, types, place = defaultdict[Type, list[int]](list), list[Type](), dict[Value, int]()
    for eqn in rows:
        typ = eqn.out.type
        if not _is_fold(eqn) and eqn.out not in kept:
            if not free[typ]:
                free[typ].append(len(types))
                types.append(typ)
            place[eqn.out] = free[typ].pop()
        for value in {*eqn.args, eqn.out} & place.keys():
            if last[value] is eqn:
                free[value.type].append(place[value])
    return tuple(types), place
