"""Passes: functions from Graph to Graph. ``backward`` and ``finish`` run them in order and verify each result."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from lngen.compiler.ir import DEFAULT_EPS, FUNCTIONS, ORDERS, D, DType, Graph, derived_axes, verify
from lngen.compiler.passes.decompose import decompose, place_fma
from lngen.compiler.passes.edit import cse, dce, share_constants
from lngen.compiler.passes.exchange import accumulate, accumulated, rebuilt, save, share_results
from lngen.compiler.passes.gradient_scales import quantise
from lngen.compiler.passes.instance import positive_inputs
from lngen.compiler.passes.order import ColumnOrder, RowOrder, SetOrder, order_sums, orders, rule_of, suited_cluster
from lngen.compiler.passes.set_sums import by_sets
from lngen.compiler.passes.simplify import simplify
from lngen.compiler.passes.validate import defined, validate
from lngen.compiler.passes.variance import compensate, place_spread
from lngen.compiler.passes.vjp import NONE, constants, vjp
from lngen.errors import SpecError


class Trace(dict[str, Graph]):
    """The graph after every pass, by the pass' name; ``raw``: the derivative as it is defined, to compare them with."""

    raw: Graph


def backward(
    graph: Graph,
    wrt: tuple[str, ...],
    saved: tuple[str, ...],
    of: tuple[str, ...] | None = None,
    trace: Trace | None = None,
    stored: Mapping[str, DType] = NONE,
    demanded: Collection[str] = (),
    eps: float = DEFAULT_EPS,
    positive: Collection[str] = (),
) -> Graph:
    """The backward graph of a forward graph: gradients of ``wrt``, given cotangents of ``of`` and the ``saved`` values.

    ``of`` are results of forward; by default those that it does not save for backward. ``stored`` are the dtypes of
    gradients that differ from those of their inputs. ``demanded`` as in ``save``, ``eps`` and ``positive`` as in
    ``constants``. DerivativeError as of ``vjp`` and ``constants``.
    """
    trace = Trace() if trace is None else trace
    of = tuple(r.name for r in graph.results if r.name not in saved) if of is None else of
    # A number per row that forward saves is an output only if it has a cotangent.
    outputs = tuple(r for r in graph.results if r.type.along(D) or r.name in of or r.name not in saved)
    constant, kept = constants(graph, wrt, of, eps, positive), replace(graph, results=outputs)
    trace["vjp"] = derived = vjp(kept, wrt, of, stored, constant)
    plain = not constant and all(e.op != "detach" for e in graph.eqns)
    trace.raw = derived if plain else defined(kept, wrt, of)
    seeds = (p.name for p in derived.params if p not in graph.params)
    trace["simplify"] = derived = verify(simplify(derived, *seeds), "simplify")
    trace["save"] = derived = verify(by_sets(save(derived, graph, saved, demanded)), "save")
    return derived


def finish(
    graph: Graph,
    d: int,
    trace: Trace | None = None,
    blocks: int | None = None,
    order: str = ORDERS[0],
    functions: str = FUNCTIONS[0],
    dx: tuple[DType, str] | None = None,
    stretch: int | None = None,
) -> Graph:
    """From a graph over any D to a graph that fixes every bit for rows of length ``d``.

    ``blocks``, ``order`` and ``stretch`` as in ``order_sums``, ``functions`` as in ``decompose``, ``dx``: dtype and
    scales of dx.
    """
    trace = Trace() if trace is None else trace
    trace["cse"] = graph = verify(cse(graph), "cse")
    if dx is not None:
        trace["quantise"] = graph = quantise(graph, "dx", *dx)
    _check_axes(graph, d)
    trace["decompose"] = graph = verify(decompose(graph, d, functions), "decompose")
    trace["place_fma"] = graph = verify(place_fma(graph), "place_fma")
    trace["place_spread"] = graph = verify(place_spread(graph, d, order), "place_spread")
    trace["compensate"] = graph = verify(share_constants(compensate(graph, d)), "compensate")
    graph = order_sums(graph, d, blocks, order, stretch)
    if functions != FUNCTIONS[0]:
        graph = replace(graph, attrs=tuple(sorted((*graph.attrs, ("functions", functions)))))
    trace["order_sums"] = verify(graph, "order_sums")
    return graph


def _check_axes(graph: Graph, d: int) -> None:
    """SpecError for rows that a derived axis does not divide, or ``rotate`` has not whole heads of."""
    for axis in derived_axes(graph):
        if axis.base is D and isinstance(axis.number, int) and d % axis.number:
            raise SpecError(
                f"graph @{graph.name}: D is expected to be a multiple of {axis.number} for {axis}, got d={d}."
            )
    for head in (e.int_attr("head") for e in graph.eqns if e.op == "rotate"):
        if d % head:
            raise SpecError(
                f"graph @{graph.name}: D is expected to be a multiple of head={head} for rotate, got d={d}."
            )
