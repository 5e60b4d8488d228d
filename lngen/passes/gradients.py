"""What becomes of gradients: equal ones are stored once, and some are added to arrays that exist."""

from __future__ import annotations

from dataclasses import replace

from lngen.ir import WIDE, Builder, Graph, Value
from lngen.passes.clean import dce, eqn_key


def share_results(graph: Graph) -> Graph:
    """Store results with rows and features that are the same value once.

    before:  %dx = cast %dx32 {to=bf16}                   after:  graph @f_bwd {dresidual=%dx} ...
             %dresidual = cast %dx32 {to=bf16}                    %dx = cast %dx32 {to=bf16}
             return %dx, %dresidual                               return %dx

    The attribute of the graph says which result stands for the one that is gone. Smaller results are not worth it:
    where a cotangent is absent, several of them may be zeros.
    """
    producer = graph.producers()
    first: dict[tuple[object, ...], Value] = {}
    same: dict[str, str] = {}
    for result in (r for r in graph.results if r.type.axes == WIDE):
        eqn = producer[result]
        kept = first.setdefault((eqn_key(eqn, eqn.args), result.type), result)
        if kept != result:
            same[result.name] = str(kept)
    if not same:
        return graph
    results = tuple(r for r in graph.results if r.name not in same)
    attrs = tuple(sorted({**dict(graph.attrs), **same}.items()))
    return dce(replace(graph, results=results, attrs=attrs))


def accumulated(name: str) -> str:
    """The input to which the result ``name`` is added, and which it may overwrite."""
    return f"{name}_in"


def accumulate(graph: Graph, names: tuple[str, ...]) -> Graph:
    """Add the results called ``names`` to inputs, as a caller would add them afterwards.

    before:  %dgamma = cast %dgamma32 {to=f32}            after:  graph @f_bwd(..., %dgamma_in: f32[D]) ...
                                                                  %dgamma_sum = cast %dgamma32 {to=f32}
                                                                  %dgamma = add %dgamma_in, %dgamma_sum
    """
    b = Builder(graph.name, params=graph.params, taken=graph.values())
    for eqn in graph.eqns:
        if eqn.out in graph.results and eqn.out.name in names:
            before = b.param(accumulated(eqn.out.name), eqn.out.type.dtype, *eqn.out.type.axes)
            total = b.emit(eqn.op, f"{eqn.out.name}_sum", eqn.args, **dict(eqn.attrs))
            b.eqns.append(replace(eqn, op="add", args=(before, total), attrs=()))
        else:
            b.eqns.append(eqn)
    return b.build(*graph.results, stage="accumulate")
