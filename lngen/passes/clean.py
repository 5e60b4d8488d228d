"""Common subexpressions and dead code."""

from __future__ import annotations

from dataclasses import replace

from lngen.ir import Eqn, Graph, Value
from lngen.passes.edit import substitute, upstream


def dce(graph: Graph) -> Graph:
    """Drop every equation that no result needs; parameters are kept, because they are the signature.

    before:  %a = mul %x, %x        after:  %y = add %x, %x
             %y = add %x, %x                return %y
             return %y
    """
    live = upstream(graph.eqns, graph.results)
    return replace(graph, eqns=tuple(e for e in graph.eqns if e.out in live))


def cse(graph: Graph) -> Graph:
    """Keep the first of two equations that compute the same value; it keeps its name.

    before:  %a = mul %x, %y        after:  %a = mul %x, %y
             %b = mul %y, %x                %c = add %a, %a
             %c = add %a, %b

    add and mul of swapped operands are the same value: IEEE addition and multiplication commute.
    """
    first: dict[tuple[object, ...], Value] = {}
    same: dict[Value, Value] = {}
    for eqn in graph.eqns:
        args = tuple(same.get(a, a) for a in eqn.args)
        key = eqn_key(eqn, args)
        if key in first and eqn.out not in graph.results:
            same[eqn.out] = first[key]
        else:
            first.setdefault(key, eqn.out)
    return dce(substitute(graph, same))


def eqn_key(eqn: Eqn, args: tuple[Value, ...]) -> tuple[object, ...]:
    """Equal for equations that compute the same value; ``args`` are the operands, of equal values the first."""
    if eqn.op in ("add", "mul"):
        args = tuple(sorted(args, key=lambda a: a.name))
    # repr distinguishes -0.0 from 0.0, which compare equal.
    return eqn.op, args, tuple((k, repr(v)) for k, v in eqn.attrs)
