"""Argument sets: the arrays with which the cases of a task are launched."""

from __future__ import annotations

from collections.abc import Sequence

from lngen.bench.cases import Case, Tensors
from lngen.bench.engines import Engine
from lngen.bench.floor import value_bytes
from lngen.bench.formulas import parts, wide_results
from lngen.bench.tasks import LATENCY, Task
from lngen.check.inputs import positive_inputs
from lngen.errors import LngenError
from lngen.ir import WIDE, Graph, M, Value

MEAN = 0.5  # of inputs; of cotangents it is 0, because a sum of others over the rows would overflow in f16


def values_of(task: Task) -> dict[str, Value]:
    """What a set holds, by name: all inputs and results of the task's graphs, and the inputs of its forward graph."""
    graphs = [task.specs[0].with_direction("fwd").forward(), *(spec.graph() for spec in task.specs)]
    inputs = [v for graph in graphs for v in graph.params]
    return {v.name: v for v in (*inputs, *(v for graph in graphs[1:] for v in graph.results))}


def set_bytes(task: Task) -> int:
    """The bytes of one set."""
    return sum(value_bytes(v, task.rows, task.d) for v in values_of(task).values())


def make_cases(task: Task, count: int, engine: Engine) -> list[Case]:
    """A case per spec of the task over the same ``count`` sets; LngenError for a latency of a graph without a chain.

    The sets hold equal values in different memory. The sets of a latency are links of a chain, see ``_links``.
    """
    graphs = [spec.graph() for spec in task.specs]
    first, chain = _first_set(task, engine), ""
    if task.kind == LATENCY:
        chain = _chain(task, graphs[0])
        sets = _links(first, chain, graphs[0].results[0].name, count)
    else:
        sets = [first, *(_another(first, graphs, engine) for _ in range(count - 1))]
    pairs = zip(task.specs, graphs, strict=True)
    return [Case(spec, task.rows, graph, engine, sets, chain) for spec, graph in pairs]


def _chain(task: Task, graph: Graph) -> str:
    """The first input that the main result can take the place of."""
    main = graph.results[0]
    found = next((p.name for p in graph.params if p.type == main.type and main.type.axes == WIDE), "")
    if not found:
        raise LngenError(
            f"a latency is that of a chain, in which a call reads the main result of the one before; {task.spec} has "
            f"no input of the type of '{main.name}', {main.type}: leave --latency out."
        )
    return found


def poison(case: Case, index: int) -> None:
    """Fill the results of a set with values that no kernel computes."""
    for name in case.outputs:
        case.engine.poison(case.sets[index][name])


def _first_set(task: Task, engine: Engine) -> Tensors:
    """Normal inputs, the statistics that a backward takes from forward, and memory for the results."""
    spec = task.specs[0].with_direction("fwd")
    given, made = ({v.name for v in values} for values in (spec.forward().params, spec.forward().results))
    inputs = {v.name for s in task.specs for v in s.graph().params}
    positive = positive_inputs(spec)
    first: Tensors = {}
    for seed, (name, value) in enumerate(values_of(task).items()):
        shape, dtype = value.type.shape(task.rows, task.d), value.type.dtype
        if name in given or name in inputs - made:
            mean = MEAN if name in given else 0.0
            first[name] = engine.normal(shape, dtype, mean, seed, positive=name in positive)
        else:
            first[name] = engine.empty(shape, dtype)
    saved = {name: value for name, value in values_of(task).items() if name in inputs & made}
    for rows in parts(spec, task.rows) if saved else []:
        found = wide_results(spec, engine, first, rows)
        for name, value in saved.items():
            part = first[name][rows] if M in value.type.axes else first[name][...]
            part[...] = found[name].reshape(part.shape)
    return first


def _another(first: Tensors, graphs: Sequence[Graph], engine: Engine) -> Tensors:
    """The same inputs in different memory, and memory for results."""
    params = {v.name for graph in graphs for v in graph.params}  # a forward's statistics are its backward's inputs
    room = {v.name for graph in graphs for v in graph.results} - params
    return {name: engine.alike(array) if name in room else engine.clone(array) for name, array in first.items()}


def _links(first: Tensors, into: str, out: str, count: int) -> list[Tensors]:
    """Two sets in turn, the main result of each an input of the other, so that no launch can overtake another."""
    other = {**first, into: first[out], out: first[into]}
    return [other if i % 2 else first for i in range(count)]
