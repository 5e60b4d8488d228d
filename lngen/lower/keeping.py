"""Values that a kernel keeps in registers from one loop over a row to a later one, because they are long to compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lngen.ir import F32, WIDE, D, Eqn, Graph, Value
from lngen.passes import upstream

LONG = 16  # equations per element that are not worth a register: a function has more, the arithmetic of a norm has less
MOST_KEPT = 2  # values at a time, each of which takes a register per element


Kept = Mapping[int, tuple[Value, ...]]


def kept_by(here: Mapping[int, Iterable[Value]], later: Mapping[int, Iterable[Value]], graph: Graph) -> Kept:
    """For each phase, the values that its reductions compute and leave in registers.

    ``here``: the operands of the reductions that end each phase. ``later``: all that the loops of a phase need. A value
    is kept if later phases would otherwise compute at least LONG equations again, the one first that saves most.
    """
    found: dict[int, tuple[Value, ...]] = {}
    for number in sorted(here):
        wanted = [v for n, values in later.items() if n > number for v in values]
        earlier = [v for values in found.values() for v in values]
        found[number] = tuple(_worth(graph, list(here[number]), wanted, earlier))
    return found


def _worth(graph: Graph, here: Sequence[Value], later: Sequence[Value], kept: Sequence[Value]) -> list[Value]:
    found: list[Value] = []
    computed = _computed(graph, here, kept)
    again = _again(graph, computed, later, kept)
    while len(again) >= LONG and len(found) < MOST_KEPT:
        values = [v for v in again if v.type.axes == WIDE and v.type.dtype is F32]
        if not values:
            break
        left = {v: len(_again(graph, computed, later, [*kept, *found, v])) for v in values}
        best = min(values, key=lambda v: left[v])
        if len(again) - left[best] < LONG:
            break
        found.append(best)
        again = _again(graph, computed, later, [*kept, *found])
    return found


def _computed(graph: Graph, wanted: Iterable[Value], kept: Iterable[Value]) -> list[Value]:
    """The values that a loop computes for each element, in their order."""
    wide = _elementwise(graph, kept)
    needed = upstream(wide, wanted)
    return [e.out for e in wide if e.out in needed]


def _again(graph: Graph, computed: list[Value], later: Iterable[Value], kept: Iterable[Value]) -> list[Value]:
    """Those of the values ``computed`` that later loops compute again."""
    needed = {*_computed(graph, later, kept)}
    return [v for v in computed if v in needed]


def _elementwise(graph: Graph, kept: Iterable[Value]) -> list[Eqn]:
    held = {*kept}
    return [e for e in graph.eqns if D in e.out.type.axes and e.out not in held]
