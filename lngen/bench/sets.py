"""Argument sets: the arrays with which the cases of a task are launched."""

from __future__ import annotations

from collections.abc import Sequence

from lngen.bench.cases import Case, Tensors
from lngen.bench.engines import Engine
from lngen.bench.formulas import normalised, steps
from lngen.bench.tasks import CHAINS, LATENCY, Task
from lngen.errors import LngenError
from lngen.ir import Graph

MEAN = 0.5
MEANS = {"dy": 0.0}  # its sum over the rows would overflow in f16
GRAPHS = ("layernorm", "rmsnorm")


def make_cases(task: Task, count: int, engine: Engine) -> list[Case]:
    """A case per spec of the task over the same ``count`` sets; LngenError for an unknown graph.

    The sets hold equal values in different memory. The sets of a latency are links of a chain, see ``_links``.
    """
    if task.graph not in GRAPHS:
        raise LngenError(f"lngen bench knows {' and '.join(GRAPHS)}, not {task.graph}.")
    graphs = [spec.graph() for spec in task.specs]
    first = _first_set(task, graphs, engine)
    if task.kind == LATENCY:
        chain = CHAINS[task.direction]
        sets = _links(first, chain, graphs[0].results[0].name, count)
    else:
        chain = ""
        sets = [first, *(_another(first, task, graphs, engine) for _ in range(count - 1))]
    pairs = zip(task.specs, graphs, strict=True)
    return [Case(spec, task.rows, graph, engine, sets, chain) for spec, graph in pairs]


def poison(case: Case, index: int) -> None:
    """Fill the results of a set with values that no kernel computes."""
    for name in case.outputs:
        case.engine.poison(case.sets[index][name])


def _first_set(task: Task, graphs: Sequence[Graph], engine: Engine) -> Tensors:
    """Normal inputs, their statistics, and memory for the results."""
    first: Tensors = {}
    params = {v.name: v for graph in graphs for v in graph.params}
    for seed, value in enumerate(params.values()):
        mean = MEANS.get(value.name, MEAN)
        first[value.name] = engine.normal(value.type.shape(task.rows, task.d), value.type.dtype, mean, seed)
    for value in (v for graph in graphs for v in graph.results):
        if value.name not in first:
            first[value.name] = engine.empty(value.type.shape(task.rows, task.d), value.type.dtype)
    for rows in steps(task.rows, task.d):
        _, mean, rstd = normalised(task.specs[0], engine.wide(first["x"][rows]))
        for name, values in {"mean": mean, "rstd": rstd}.items():
            if name in first:
                first[name][rows] = values.reshape(-1)
    return first


def _another(first: Tensors, task: Task, graphs: Sequence[Graph], engine: Engine) -> Tensors:
    """The same inputs in different memory, and memory for results."""
    params = {v.name for graph in graphs for v in graph.params}  # a forward's statistics are its backward's inputs
    room = {
        v.name: engine.empty(v.type.shape(task.rows, task.d), v.type.dtype)
        for v in (v for graph in graphs for v in graph.results)
        if v.name not in params
    }
    return {name: room[name] if name in room else engine.clone(array) for name, array in first.items()}


def _links(first: Tensors, into: str, out: str, count: int) -> list[Tensors]:
    """Two sets in turn, the main result of each an input of the other, so that no launch can overtake another."""
    other = {**first, into: first[out], out: first[into]}
    return [other if i % 2 else first for i in range(count)]
