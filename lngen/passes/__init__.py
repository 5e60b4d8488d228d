"""Passes: functions from Graph to Graph. ``PIPELINE`` is their order, each verified after it ran."""

from __future__ import annotations

from dataclasses import replace

from lngen.ir import ORDERS, Graph, verify
from lngen.passes.clean import cse, dce
from lngen.passes.decompose import decompose
from lngen.passes.fma import place_fma
from lngen.passes.order import order_sums
from lngen.passes.simplify import simplify
from lngen.passes.spread import place_spread
from lngen.passes.vjp import save, vjp

__all__ = [
    "Trace",
    "backward",
    "cse",
    "dce",
    "decompose",
    "finish",
    "order_sums",
    "place_fma",
    "place_spread",
    "save",
    "simplify",
    "vjp",
]

Trace = dict[str, Graph]


def backward(
    graph: Graph,
    wrt: tuple[str, ...],
    saved: tuple[str, ...],
    of: tuple[str, ...] | None = None,
    trace: Trace | None = None,
) -> Graph:
    """The backward graph of a forward graph: gradients of ``wrt``, given cotangents of ``of`` and the ``saved`` values.

    ``of`` are results of forward that it does not save for backward; by default it is all of these.
    """
    trace = {} if trace is None else trace
    outputs = replace(graph, results=tuple(r for r in graph.results if r.name not in saved))
    trace["vjp"] = graph = vjp(outputs, wrt, of)
    seeds = (p.name for p in graph.params if p not in outputs.params)
    trace["simplify"] = graph = verify(simplify(graph, *seeds), "simplify")
    trace["save"] = graph = verify(save(graph, saved), "save")
    return graph


def finish(
    graph: Graph, d: int, trace: Trace | None = None, blocks: int | None = None, order: str = ORDERS[0]
) -> Graph:
    """From a graph over any D to a graph that fixes every bit for rows of length ``d``.

    ``blocks`` and ``order`` as in ``order_sums``.
    """
    trace = {} if trace is None else trace
    trace["cse"] = graph = verify(cse(graph), "cse")
    trace["decompose"] = graph = verify(decompose(graph, d), "decompose")
    trace["place_fma"] = graph = verify(place_fma(graph), "place_fma")
    trace["place_spread"] = graph = verify(place_spread(graph, d, order), "place_spread")
    trace["order_sums"] = graph = verify(order_sums(graph, d, blocks, order), "order_sums")
    return graph
