"""The float64 results that a provider's results must match before it is timed.

For layernorm and rmsnorm they are closed formulas, for any other graph those of ``lngen.bench.reference``. The bounds
are loose because peers round their statistics and partial sums to 16 bits. ``lngen check`` is strict.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from lngen.bench.cases import Case, Tensors
from lngen.bench.engines import Array, Engine
from lngen.bench.reference import graph_results
from lngen.errors import LngenError
from lngen.ir import DType, M, independent_rows
from lngen.passes import accumulated
from lngen.spec import Spec

CHUNK = 1 << 24  # elements for which intermediate values are computed at a time
BOUNDS = {DType.F16: 1e-2, DType.BF16: 2e-2, DType.F32: 1e-3, DType.F64: 1e-6}


def steps(rows: int, d: int) -> Iterator[slice]:
    """The rows in chunks of about ``CHUNK`` elements."""
    step = max(1, CHUNK // d)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def has_formulas(spec: Spec) -> bool:
    """True for lngen's layernorm and rmsnorm."""
    return spec.builtin and spec.definition.name in ("layernorm", "rmsnorm")


def parts(spec: Spec, rows: int) -> Iterator[slice]:
    """Rows whose results can be computed apart from others': all rows, if an equation of the graph joins them."""
    apart = has_formulas(spec) or independent_rows(spec.with_direction("fwd").forward())
    return steps(rows, spec.d) if apart else iter([slice(0, rows)])


def wide_results(spec: Spec, engine: Engine, inputs: Tensors, rows: slice) -> Tensors:
    """The spec's results for some rows in float64; of a result without rows, the part that these rows contribute."""
    return (_formulas if has_formulas(spec) else graph_results)(spec, engine, inputs, rows)


def normalised(spec: Spec, x: Array) -> tuple[Array, Array, Array]:
    """xhat, mean and rstd of float64 rows."""
    mean = x.mean(axis=1, keepdims=True) if spec.definition.name == "layernorm" else 0.0 * x[:, :1]
    centred = x - mean
    rstd = ((centred * centred).mean(axis=1, keepdims=True) + spec.eps) ** -0.5
    return centred * rstd, mean, rstd


def expected(case: Case, index: int = 0) -> Tensors:
    """The results of a set in float64, computed once for all providers, because all sets hold equal values."""
    engine, results = case.engine, case.graph.results
    want = {v.name: engine.empty(v.type.shape(case.rows, case.spec.d), DType.F64) for v in results}
    sums = [v.name for v in results if M not in v.type.axes]
    for name in sums:
        want[name][...] = 0.0
    for rows in parts(case.spec, case.rows):
        for name, values in wide_results(case.spec, engine, case.sets[index], rows).items():
            if name in sums:
                want[name] += values.reshape(want[name].shape)
            elif name in want:
                want[name][rows] = values.reshape(want[name][rows].shape)
    for name in (f"d{n}" for n in case.spec.accumulate):
        want[name] += engine.wide(case.sets[index][accumulated(name)])
    return want


def complaint(case: Case, want: Tensors, results: Mapping[str, Array]) -> str:
    """The reason why results are wrong, or an empty text; LngenError if the main result is missing."""
    if case.outputs[0] not in results:
        raise LngenError(f"'{case.outputs[0]}' is missing among the results.")
    dtypes = {v.name: v.type.dtype for v in case.graph.results}
    for name, error in errors(case, want, results).items():
        if not error <= BOUNDS[dtypes[name]]:  # a NaN fails
            return f"{name} is off by {error:.1e} of its size"
    return ""


def errors(case: Case, want: Tensors, results: Mapping[str, Array]) -> dict[str, float]:
    """By result: the larger of the relative errors in the 2-norm and in the maximum norm, against float64."""
    wide = case.engine.wide
    found = {}
    for name in (n for n in case.outputs if n in results):
        tally, ideal = _Tally(), want[name]
        got = results[name].reshape(ideal.shape)
        for part in steps(case.rows, case.spec.d) if len(ideal.shape) == 2 else [...]:
            tally.add(wide(got[part]), ideal[part])
        found[name] = tally.error
    return found


class _Tally:
    """Sums and maxima of an error and of its reference."""

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
    """The larger value; a NaN if there is one."""
    return a if a > b or math.isnan(a) else b


def _formulas(spec: Spec, engine: Engine, inputs: Tensors, rows: slice) -> Tensors:
    """Results for some rows; dgamma and dbeta are the parts of the sum that these rows contribute."""
    wide = engine.wide
    xhat, mean, rstd = normalised(spec, wide(inputs["x"][rows]))
    gamma = wide(inputs["gamma"]) if "gamma" in inputs else 1.0
    if spec.direction == "fwd":
        beta = wide(inputs["beta"]) if "beta" in inputs else 0.0
        return {"y": xhat * gamma + beta, "mean": mean, "rstd": rstd}
    dy = wide(inputs["dy"][rows])
    g = dy * gamma
    shift = g.mean(axis=1, keepdims=True) if spec.definition.name == "layernorm" else 0.0
    dx = rstd * (g - shift - xhat * (g * xhat).mean(axis=1, keepdims=True))
    return {"dx": dx, "dgamma": (dy * xhat).sum(axis=0), "dbeta": dy.sum(axis=0)}
