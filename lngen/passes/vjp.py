"""Reverse-mode derivation: from a forward graph to the graph of its vector-Jacobian product."""

from __future__ import annotations

from lngen.errors import DerivativeError
from lngen.ir import OPS, Axis, Builder, Graph, Value
from lngen.ir.ops import compute_dtype
from lngen.passes.edit import downstream, upstream


def vjp(graph: Graph, wrt: tuple[str, ...], of: str | None = None) -> Graph:
    """The graph of d(result)/d(inputs), contracted with the result's cotangent.

    For ``of`` (a result's name, by default the first) called y and ``wrt`` = (x, gamma):

        graph @f(%x, %gamma) -> (y, ...)    becomes    graph @f_bwd(%dy, %x, %gamma) -> (dx, dgamma)

    The forward equations come first, then one derivative row of the op table per equation, in reverse.
    A cotangent is kept in the compute dtype (f32, or f64 for f64 values) and rounded once, to the dtype
    of its input, at the end. Reverse accumulation as in Griewank and Walther, Evaluating Derivatives,
    2nd ed., section 3.2. DerivativeError if an input of ``wrt`` does not exist or does not matter.
    """
    result = graph.results[0] if of is None else next(r for r in graph.results if r.name == of)
    inputs = tuple(_input(graph, name) for name in wrt)
    b = Builder(graph.name.removesuffix("_fwd") + "_bwd", params=graph.params, eqns=graph.eqns)
    seed = b.param(f"d{result.name}", result.type.dtype, *result.type.axes)
    b.params.insert(0, b.params.pop())
    to = compute_dtype(seed.type.dtype)
    cotangents: dict[Value, Value] = {result: seed if to is seed.type.dtype else b.cast(f"{seed.name}32", seed, to=to)}
    wanted = downstream(graph.eqns, inputs)
    for eqn in reversed(graph.eqns):
        if eqn.out not in cotangents or eqn.out not in wanted:
            continue
        for arg, ct in zip(eqn.args, OPS[eqn.op].vjp(b, eqn, cotangents[eqn.out]), strict=True):
            if arg in wanted and ct is not None:
                ct = _sum_over(b, ct, tuple(a for a in ct.type.axes if a not in arg.type.axes))
                cotangents[arg] = b.add("ct", cotangents[arg], ct) if arg in cotangents else ct
    return b.build(*(_gradient(b, graph, p, cotangents) for p in inputs), stage="vjp")


def _input(graph: Graph, name: str) -> Value:
    for p in graph.params:
        if p.name == name:
            return p
    inputs = ", ".join(p.name for p in graph.params)
    raise DerivativeError(f"wrt={name}: graph @{graph.name} has no input '{name}'; its inputs are {inputs}.")


def _gradient(b: Builder, graph: Graph, param: Value, cotangents: dict[Value, Value]) -> Value:
    if param not in cotangents:
        raise DerivativeError(f"wrt={param.name}: the result of graph @{graph.name} does not depend on '{param.name}'.")
    ct = cotangents[param]
    for axis in param.type.axes:
        if axis not in ct.type.axes:
            ct = b.expand("ct", ct, axis=axis)
    return b.cast(f"d{param.name}", ct, to=param.type.dtype)


def _sum_over(b: Builder, ct: Value, axes: tuple[Axis, ...]) -> Value:
    for axis in axes:
        ct = b.reduce_sum("ct", ct, axis=axis)
    return ct


def save(graph: Graph, names: tuple[str, ...]) -> Graph:
    """Take the values called ``names`` from the forward run instead of computing them again.

    before:  graph @f_bwd(%dy, %x) ... %rstd = rsqrt %veps ...
    after:   graph @f_bwd(%dy, %x, %rstd) ...        (what only %rstd needed is gone)

    What is not saved is rematerialised: its forward equations stay. Parameters nothing uses go, too.
    """
    saved = tuple(e.out for e in graph.eqns if e.out.name in names)
    eqns = tuple(e for e in graph.eqns if e.out not in saved)
    live = upstream(eqns, graph.results)
    params = tuple(p for p in (*graph.params, *saved) if p in live)
    return Graph(graph.name, params, tuple(e for e in eqns if e.out in live), graph.results)
