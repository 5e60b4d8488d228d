"""Random inputs for checks: nothing at zero, nothing at one, nothing symmetric that would hide a wrong formula."""

from __future__ import annotations

import numpy as np

from lngen.interpret import interpret
from lngen.ir import Axis, Graph, Value
from lngen.ir.numerics import NUMPY_DTYPE, Array, round_to
from lngen.spec import Spec


def random_inputs(spec: Spec, rows: int, seed: int = 0, mean: float = 0.5) -> dict[str, Array]:
    """Inputs of the spec's graph by name; what backward takes from forward is computed by forward."""
    rng = np.random.default_rng([seed, rows, spec.d])
    forward = spec.with_direction("fwd").graph()
    inputs = {p.name: _draw(rng, p, rows, spec.d, mean) for p in forward.params}
    if spec.direction == "fwd":
        return inputs
    graph = spec.graph()
    missing = [p for p in graph.params if p.name not in inputs]
    if any(p.name.startswith("d") is False for p in missing):
        inputs |= {n: v for n, v in interpret(forward, inputs).items() if n != forward.results[0].name}
    inputs |= {p.name: _draw(rng, p, rows, spec.d, 0.3) for p in missing if p.name not in inputs}
    return {p.name: inputs[p.name] for p in graph.params}


def _draw(rng: np.random.Generator, value: Value, rows: int, d: int, mean: float) -> Array:
    shape = [{Axis.M: rows, Axis.D: d}[a] for a in value.type.axes]
    return round_to(rng.normal(mean, 1.0, shape).astype(np.float32), value.type.dtype)


def poisoned(graph: Graph, rows: int, d: int) -> dict[str, Array]:
    """Results filled with a NaN that no kernel computes, so that an element never written is seen."""
    out = {}
    for r in graph.results:
        shape = [{Axis.M: rows, Axis.D: d}[a] for a in r.type.axes]
        a = np.empty(shape, NUMPY_DTYPE[r.type.dtype])
        a.view(np.uint8).fill(0xFE)
        out[r.name] = a
    return out
