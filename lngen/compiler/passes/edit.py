"""Small tools of the passes: renamed uses, dead code, equal equations."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from lngen.compiler.ir import Eqn, Graph, Value
from lngen.compiler.ir.places import upstream


def substitute(graph: Graph, new: dict[Value, Value]) -> Graph:
    """Every use of a key of ``new`` replaced by its value; definitions do not change."""
    if not new:
        return graph
    eqns = tuple(replace(e, args=tuple(new.get(a, a) for a in e.args)) for e in graph.eqns)
    return replace(graph, eqns=eqns, results=tuple(new.get(r, r) for r in graph.results))


def dce(graph: Graph) -> Graph:
    """Drop every equation that no result needs; parameters are kept, because they are the signature.

    before:  %a = mul %x, %x        after:  %y = add %x, %x
             %y = add %x, %x                return %y
             return %y
    """
    live = upstream(graph.eqns, graph.results)
    return replace(graph, eqns=tuple(e for e in graph.eqns if e.out in live))


def cse(graph: Graph, named: Container[Value] = ()) -> Graph:
    """Keep the first of two equations that compute the same value; it keeps its name.

    before:  %a = mul %x, %y        after:  %a = mul %x, %y
             %b = mul %y, %x                %c = add %a, %a
             %c = add %a, %b

    add and mul of swapped operands are the same value: IEEE addition and multiplication commute. If only the second
    value is one of ``named``, the first equation gets its name.
    """
    first: dict[tuple[object, ...], Value] = {}
    same: dict[Value, Value] = {}
    called: dict[Value, Value] = {}
    for eqn in graph.eqns:
        args = tuple(same.get(a, a) for a in eqn.args)
        kept = first.setdefault(eqn_key(eqn, args), eqn.out)
        if kept != eqn.out and eqn.out not in graph.results:
            same[eqn.out] = kept
            if eqn.out in named and kept not in named:
                called.setdefault(kept, eqn.out)
    kept_eqns = tuple(replace(e, out=called.get(e.out, e.out)) for e in graph.eqns if e.out not in same)
    same = {v: called.get(kept, kept) for v, kept in same.items()}
    return dce(substitute(replace(graph, eqns=kept_eqns), called | same))


def share_constants(graph: Graph) -> Graph:
    """Keep one of equal constants, where the first stands, with the shortest of their names.

    before:  %one_1 = const {value=1.0}        after:  %one = const {value=1.0}
             %a     = div %one_1, %x                   %a   = div %one, %x
             %one   = const {value=1.0}                %b   = div %one, %y
             %b     = div %one, %y
    """
    alike: dict[tuple[object, ...], list[Value]] = {}
    for eqn in graph.eqns:
        if eqn.op == "const" and eqn.out not in graph.results:
            alike.setdefault(eqn_key(eqn, ()), []).append(eqn.out)
    kept = {v: min(values, key=lambda one: (len(one.name), one.name)) for values in alike.values() for v in values}
    later = {v for values in alike.values() for v in values[1:]}
    eqns = tuple(replace(e, out=kept.get(e.out, e.out)) for e in graph.eqns if e.out not in later)
    return substitute(replace(graph, eqns=eqns), kept)


def eqn_key(eqn: Eqn, args: tuple[Value, ...]) -> tuple[object, ...]:
    """Equal for equations that compute the same value; ``args`` are the operands, of equal values the first."""
    if eqn.op in ("add", "mul"):
        args = tuple(sorted(args, key=lambda a: a.name))
    # repr distinguishes -0.0 from 0.0, which compare equal.
    return eqn.op, args, tuple((k, repr(v)) for k, v in eqn.attrs)
