"""Small tools of the passes: renaming uses, dead code, dependences up- and downstream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lngen.ir import Eqn, Graph, Value


def substitute(graph: Graph, new: dict[Value, Value]) -> Graph:
    """Every use of a key of ``new`` replaced by its value; definitions do not change."""
    if not new:
        return graph
    eqns = tuple(replace(e, args=tuple(new.get(a, a) for a in e.args)) for e in graph.eqns)
    return replace(graph, eqns=eqns, results=tuple(new.get(r, r) for r in graph.results))


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
