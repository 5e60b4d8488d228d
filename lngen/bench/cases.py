"""A case: a spec at a number of rows, its argument sets, and the float64 formulas its results must match."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lngen.bench.engines import Array, Engine
from lngen.errors import LngenError
from lngen.ir import DType, Graph
from lngen.spec import Spec

Tensors = dict[str, Array]

CHUNK = 1 << 24  # elements that are float64 at a time
MEAN = 0.5
# Loose on purpose: peers round their statistics and partial sums to 16 bits. lngen check is the strict one.
BOUNDS = {DType.F16: 1e-2, DType.BF16: 2e-2, DType.F32: 1e-3, DType.F64: 1e-6}
GRAPHS = ("layernorm", "rmsnorm")


@dataclass(frozen=True)
class Case:
    """What a provider prepares itself for."""

    spec: Spec
    rows: int
    graph: Graph
    engine: Engine
    sets: Sequence[Tensors]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the graph's inputs."""
        return tuple(v.name for v in self.graph.params)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the graph's results, the largest first."""
        return tuple(v.name for v in self.graph.results)


def make_case(spec: Spec, rows: int, count: int, engine: Engine) -> Case:
    """A case with ``count`` sets of equal values in different memory; LngenError for an unknown graph."""
    if spec.definition.name not in GRAPHS:
        raise LngenError(f"lngen bench knows {' and '.join(GRAPHS)}, not {spec.definition.name}.")
    graph = spec.graph()
    first: Tensors = {}
    for seed, value in enumerate(graph.params):
        first[value.name] = engine.normal(value.type.shape(rows, spec.d), value.type.dtype, MEAN, seed)
    for start in range(0, rows, _step(spec)):
        stop = start + _step(spec)
        _, mean, rstd = _normalised(spec, engine.wide(first["x"][start:stop]))
        for name, values in {"mean": mean, "rstd": rstd}.items():
            if name in first:
                first[name][start:stop] = values.reshape(-1)
    for value in graph.results:
        first[value.name] = engine.empty(value.type.shape(rows, spec.d), value.type.dtype)
    others = [{name: engine.clone(a) for name, a in first.items()} for _ in range(count - 1)]
    return Case(spec, rows, graph, engine, [first, *others])


def poison(case: Case, index: int) -> None:
    """Make what is in the results of a set useless."""
    for name in case.outputs:
        case.engine.poison(case.sets[index][name])


def complaint(case: Case, index: int, results: Mapping[str, Array]) -> str:
    """Why the results of a set are wrong, or an empty text; LngenError if the main result is missing."""
    if case.outputs[0] not in results:
        raise LngenError(f"'{case.outputs[0]}' is missing among the results.")
    dtypes = {v.name: v.type.dtype for v in case.graph.results}
    for name, error in errors(case, index, results).items():
        if not error <= BOUNDS[dtypes[name]]:  # a NaN is no pass
            return f"{name} is off by {error:.1e} of its size"
    return ""


def errors(case: Case, index: int, results: Mapping[str, Array]) -> dict[str, float]:
    """By result: the larger of the relative errors in the 2-norm and in the maximum norm, against float64."""
    engine, inputs = case.engine, case.sets[index]
    tallies = {name: _Tally() for name in case.outputs if name in results}
    columns: Tensors = {}
    for start in range(0, case.rows, _step(case.spec)):
        stop = start + _step(case.spec)
        for name, want in _reference(case, inputs, start, stop).items():
            if name in ("dgamma", "dbeta"):
                columns[name] = columns[name] + want if name in columns else want
            elif name in tallies:
                tallies[name].add(engine.wide(results[name][start:stop]).reshape(want.shape), want)
    for name, want in columns.items():
        if name in tallies:
            tallies[name].add(engine.wide(results[name]).reshape(want.shape), want)
    return {name: tally.error for name, tally in tallies.items()}


class _Tally:
    """Sums and maxima of an error and of what it is relative to."""

    def __init__(self) -> None:
        self._squares, self._peaks = [0.0, 0.0], [0.0, 0.0]

    def add(self, got: Array, want: Array) -> None:
        for i, values in enumerate((got - want, want)):
            self._squares[i] += float((values * values).sum())
            self._peaks[i] = _larger(float(abs(values).max()), self._peaks[i])

    @property
    def error(self) -> float:
        tiny = 1e-30
        norm = math.sqrt(self._squares[0]) / max(math.sqrt(self._squares[1]), tiny)
        return _larger(norm, self._peaks[0] / max(self._peaks[1], tiny))


def _larger(a: float, b: float) -> float:
    """The larger; a NaN if there is one."""
    return a if a > b or math.isnan(a) else b


def _step(spec: Spec) -> int:
    return max(1, CHUNK // spec.d)


def _normalised(spec: Spec, x: Array) -> tuple[Array, Array, Array]:
    """xhat, mean and rstd of float64 rows."""
    mean = x.mean(axis=1, keepdims=True) if spec.definition.name == "layernorm" else 0.0 * x[:, :1]
    centred = x - mean
    rstd = ((centred * centred).mean(axis=1, keepdims=True) + spec.eps) ** -0.5
    return centred * rstd, mean, rstd


def _reference(case: Case, inputs: Tensors, start: int, stop: int) -> Tensors:
    """Results for some rows in float64, dgamma and dbeta as their share of the sum over all rows."""
    spec, wide = case.spec, case.engine.wide
    xhat, mean, rstd = _normalised(spec, wide(inputs["x"][start:stop]))
    gamma = wide(inputs["gamma"]) if "gamma" in inputs else 1.0
    if spec.direction == "fwd":
        beta = wide(inputs["beta"]) if "beta" in inputs else 0.0
        return {"y": xhat * gamma + beta, "mean": mean, "rstd": rstd}
    dy = wide(inputs["dy"][start:stop])
    g = dy * gamma
    shift = g.mean(axis=1, keepdims=True) if spec.definition.name == "layernorm" else 0.0
    dx = rstd * (g - shift - xhat * (g * xhat).mean(axis=1, keepdims=True))
    return {"dx": dx, "dgamma": (dy * xhat).sum(axis=0), "dbeta": dy.sum(axis=0)}
