"""Where the values of a graph stand: what depends on what, and the phase of a row in which each can be computed.

A phase ends with reductions over D: what depends on them can only be computed after all threads of a row have met. A
graph keeps what is found once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import TypeVar

from lngen.compiler.ir.axes import WIDE, Axis, axes_union
from lngen.compiler.ir.types import (
    Eqn,
    Graph,
    Value,
    is_join,
    is_number_fold,
    is_over_segments,
    is_row_fold,
    is_segment_sum,
)

Found = TypeVar("Found")


def once(find: Callable[[Graph], Found]) -> Callable[[Graph], Found]:
    """``find``, of which a graph keeps the result."""
    name = f"_{find.__name__}"

    @wraps(find)
    def found(graph: Graph) -> Found:
        kept = vars(graph)
        if name not in kept:
            kept[name] = find(graph)
        result: Found = kept[name]
        return result

    return found


# ---- what depends on what ----


def upstream(eqns: Iterable[Eqn], wanted: Iterable[Value]) -> set[Value]:
    """``wanted`` and all values in ``eqns`` that they depend on."""
    live = set(wanted)
    for eqn in reversed(tuple(eqns)):
        if eqn.out in live:
            live.update(eqn.args)
    return live


def downstream(eqns: Iterable[Eqn], given: Iterable[Value]) -> set[Value]:
    """``given`` and all values in ``eqns`` that depend on them."""
    moved = set(given)
    for eqn in eqns:
        if any(a in moved for a in eqn.args):
            moved.add(eqn.out)
    return moved


def extract(graph: Graph, name: str, params: tuple[Value, ...], results: tuple[Value, ...]) -> Graph:
    """The part of ``graph`` that computes ``results`` from ``params``, which may be values computed in it."""
    eqns = tuple(e for e in graph.eqns if e.out not in params)
    live = upstream(eqns, results)
    kept = tuple(p for p in params if p in live), tuple(e for e in eqns if e.out in live)
    return Graph(name, *kept, results, graph.attrs)


def unequal(eqn: Eqn) -> tuple[tuple[int, int, Axis, Axis], ...]:
    """The operands that have another axis of a base than the equation works along: operand, place, its axis, the other.

    The place is 0 for M, 1 for D.
    """
    if all(axis.base is None for a in eqn.args for axis in a.type.axes):
        return ()
    along_all = axes_union(*(a.type.axes for a in eqn.args))
    return tuple(
        (n, WIDE.index(axis.root), axis, wanted)
        for n, arg in enumerate(eqn.args)
        for axis in arg.type.axes
        for wanted in along_all
        if wanted.root is axis.root and wanted is not axis and not axis.of_table
    )


# ---- phases ----


@dataclass(frozen=True)
class Folds:
    """The end of a phase.

    reductions   the reductions over D, of rows or of segments, by the threads of a row
    exchanged    the reductions whose numbers of all segments every block of the row gets
    joined       the sums over S of these numbers
    """

    reductions: tuple[Eqn, ...] = ()
    exchanged: tuple[Eqn, ...] = ()
    joined: tuple[Eqn, ...] = ()


@once
def folds(graph: Graph) -> tuple[Folds, ...]:
    """The reductions over D and the sums over S, phase by phase."""
    levels = depths(graph)

    def phase(number: int) -> Folds:
        reductions = tuple(e for e in graph.eqns if is_row_fold(e) and levels[e.out] == number)
        joined = tuple(e for e in graph.eqns if is_join(e) and levels[e.out] == number)
        read = segment_sums_of(graph, joined)
        exchanged = [e for e in graph.eqns if e in read or (e in reductions and not is_segment_sum(e))]
        return Folds(reductions, tuple(exchanged), joined)

    phases = (phase(n) for n in range(1, max(levels.values(), default=0) + 1))
    return tuple(p for p in phases if p != Folds())  # reductions of vectors end phases of another kernel


def segment_sums_of(graph: Graph, joined: Iterable[Eqn]) -> tuple[Eqn, ...]:
    """The sums of segments that the sums over S ``joined`` read, through equations over S."""
    needed = {a for e in joined for a in e.args}
    for eqn in reversed(graph.eqns):
        if eqn.out in needed and not is_segment_sum(eqn):
            needed.update(a for a in eqn.args if is_over_segments(a))
    return tuple(e for e in graph.eqns if is_segment_sum(e) and e.out in needed)


@once
def depths(graph: Graph) -> Mapping[Value, int]:
    """The phase of each value: the number of reductions that must be finished one after the other before it.

    A reduction over D, of rows or of segments, ends a phase, and so does one of a whole vector. A sum over S ends none:
    blocks exchange the sums of their segments when they have all of them, so its phase is that of the last sum in the
    exchange.
    """
    rounds, last = _rounds(graph), dict[int, int]()
    while True:
        levels = dict.fromkeys(graph.params, 0)
        for eqn in graph.eqns:
            level = operand_depth(eqn, levels) + (is_row_fold(eqn) or is_number_fold(eqn))
            levels[eqn.out] = max(level, last.get(rounds[eqn.out] - 1, 0)) if is_join(eqn) else level
        found = _exchanges(graph, levels)
        if found == last:
            return levels
        last = found


def _exchanges(graph: Graph, levels: Mapping[Value, int]) -> dict[int, int]:
    """The phase that each exchange of sums of segments follows: that of the last of these sums."""
    rounds, last = _rounds(graph), dict[int, int]()
    for eqn in segment_sums_of(graph, [e for e in graph.eqns if is_join(e)]):
        last[rounds[eqn.out]] = max(last.get(rounds[eqn.out], 0), levels[eqn.out])
    return last


@once
def _rounds(graph: Graph) -> dict[Value, int]:
    """For each value the number of exchanges of sums of segments that must be finished one after the other before it.

    A block knows the sums of its own segments, and what depends on them alone, before their exchange. A sum over S
    follows the exchange of the sums that it reads.
    """
    # The latest round of the sums of segments that a value depends on, -1 without any.
    rounds, latest = dict.fromkeys(graph.params, 0), dict.fromkeys(graph.params, -1)
    for eqn in graph.eqns:
        own = max((rounds[a] for a in eqn.args), default=0)
        read = max((latest[a] for a in eqn.args), default=-1)
        latest[eqn.out] = own if is_segment_sum(eqn) else read
        rounds[eqn.out] = max(own, read + 1) if is_join(eqn) else own
    return rounds


def operand_depth(eqn: Eqn, levels: Mapping[Value, int]) -> int:
    """The phase that can compute ``eqn``, or sum it: the largest depth of its operands."""
    return max((levels[a] for a in eqn.args), default=0)
