"""The elements that stay in registers from one loop over a row to a later one, since they are long to compute."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from lngen.compiler.ir import F32, WIDE, Eqn, Value
from lngen.compiler.ir.places import upstream

LONG = 14  # equations per element that are not worth a register: a function has more, the arithmetic of a norm has less
MOST_KEPT = 2  # elements at a time, each of which takes a register


def kept_by(
    here: Mapping[int, Sequence[Value]], later: Mapping[int, Iterable[Value]], elements: Sequence[Eqn]
) -> Mapping[int, tuple[Value, ...]]:
    """For each phase, the elements that its reductions compute and leave in registers.

    ``here``: the operands of the reductions that end each phase. ``later``: all that the loops of a phase need. A value
    is kept if later phases would otherwise compute at least LONG equations again, the one first that saves most.
    """
    found: dict[int, tuple[Value, ...]] = {}
    for number in sorted(here):
        wanted = [v for n, values in later.items() if n > number for v in values]
        earlier = {v for values in found.values() for v in values}
        found[number] = tuple(_worth([e for e in elements if e.out not in earlier], here[number], wanted))
    return found


def _worth(elements: Sequence[Eqn], here: Sequence[Value], later: Sequence[Value]) -> list[Value]:
    found: list[Value] = []
    computed, turned = in_loop(elements, here), {e.out for e in elements if e.op == "rotate"}
    while len(found) < MOST_KEPT:
        saves = saved([e for e in elements if e.out not in found], later, {*computed})
        values = [v for v in computed if v in saves and v.type.axes == WIDE and v.type.dtype is F32 and v not in turned]
        best = max(values, key=saves.__getitem__, default=None)
        if best is None or saves[best] < LONG:
            break
        found.append(best)
    return found


def in_loop(elements: Sequence[Eqn], wanted: Iterable[Value]) -> list[Value]:
    """The values that a loop computes for each element, in their order."""
    needed = upstream(elements, wanted)
    return [e.out for e in elements if e.out in needed]


def saved(eqns: Sequence[Eqn], wanted: Iterable[Value], counted: Collection[Value]) -> dict[Value, int]:
    """How many of the values ``counted`` need not be computed for ``wanted`` if one of ``eqns`` is given, by its value.

    They are those that are used through that value alone: its subtree in the tree of immediate dominators, from results
    to operands. Cooper, Harvey and Kennedy, A simple, fast dominance algorithm, 2001; one pass, as there are no cycles.
    """
    through: dict[Value, Value | None] = dict.fromkeys(wanted)  # the value through which all uses go; None for results
    depth, order = dict[Value | None, int]({None: 0}), list[Value]()
    for eqn in reversed(eqns):
        if eqn.out not in through:
            continue
        depth[eqn.out] = depth[through[eqn.out]] + 1
        order.append(eqn.out)
        for a in eqn.args:
            one: Value | None = eqn.out
            other = through.get(a, one)
            while one is not other:
                if depth[one] < depth[other]:
                    one, other = other, one
                assert one is not None
                one = through[one]
            through[a] = one
    saves = {v: int(v in counted) for v in order}
    for v in reversed(order):
        parent = through[v]
        if parent is not None:
            saves[parent] += saves[v]
    return {v: n for v, n in saves.items() if v in counted}
