"""Cases about numbers: how the values of the inputs affect the errors of the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lngen.compiler.ir import WIDE, DType
from lngen.compiler.ir.numerics import Array, round_to
from lngen.proof.check import oracles
from lngen.proof.check.conform.implementations import FailedError, Found, RaisedError
from lngen.proof.check.conform.suites import Calls, GraphSuite, Inputs, SkippedError, Suite, changed
from lngen.proof.check.differences import ALLOWED, along, gradient_excess
from lngen.proof.check.inputs import differing
from lngen.proof.check.oracles import Expected

SMALL = (3, 17)  # the formulas do not depend on the size
CONSTANTS = (0.0, 1.0, 3.3, -0.1, 7.0)
RANDOM_CONSTANTS = 64


def ordinary(suite: Calls, *, m: int | None = None, d: int | None = None) -> Found:
    """The closed form, at the given size."""
    return suite.accuracy(suite.inputs(m, d))


def large_mean(suite: Calls, *, ratio: float) -> Found:
    """Rows whose mean is ``ratio`` standard deviations."""
    dtype = suite.dtype
    if 2 * dtype.roundoff * ratio > 1:
        raise SkippedError(f"{dtype} cannot hold such rows: its numbers are more than a standard deviation apart")
    return suite.accuracy(suite.inputs(mean=ratio))


def spread(suite: Calls, *, std: float) -> Found:
    """Rows with a mean of zero and the given standard deviation."""
    return suite.accuracy(suite.inputs(mean=0.0, std=std))


def huge(suite: Suite) -> Found:
    """Numbers as large as the sum of their squares allows."""
    std = min(suite.contract.dtype.largest / 6, _room(suite))
    inputs = suite.inputs(mean=0.0)
    return suite.accuracy(changed(inputs, x=np.clip(inputs["x"].astype(np.float64), -6, 6) * std))


def overflow(suite: Suite) -> Found:
    """Rows whose squares overflow, beside ordinary ones: right, or NaN, or beta, 0 without one (rstd is 0)."""
    dtype = suite.contract.dtype
    std = 1e300 if dtype == "f64" else 1e30
    if dtype.largest / 6 <= _room(suite):
        raise SkippedError(f"the squares of {dtype} do not overflow {suite.contract.compute}")
    inputs = {n: a for n, a in suite.inputs(mean=0.0).items() if n != "dy"}
    x = inputs["x"].astype(np.float64)
    x[1] *= std
    inputs = changed(inputs, x=x)
    want, y = suite.contract.expected(inputs)["y"], suite.results(inputs)["y"]
    rest = np.arange(len(x)) != 1
    if (worst := _rows_excess(suite, inputs, y, rest)) > 1:
        raise FailedError(f"the ordinary rows beside it are wrong: {worst:.2g} of the bound", {"y": worst})
    with np.errstate(all="ignore"):
        error = np.abs(y[1].astype(np.float64) - want.value[1])
    if bool((error <= want.allowed[1]).all()):
        return Found("right")
    name, beta = ("beta", inputs["beta"].astype(y.dtype)) if "beta" in inputs else ("0", np.zeros_like(y[1]))
    if not bool((np.isnan(y[1]) | (y[1] == beta)).all()):
        raise FailedError(f"neither right, nor {name}, nor NaN", {"y": float(np.nan_to_num(error, nan=np.inf).max())})
    return Found("the squares overflow: y is " + ("NaN" if bool(np.isnan(y[1]).any()) else name))


def _room(suite: Suite) -> float:
    """A standard deviation whose squares, in the compute dtype, can be added over a row."""
    return float(np.sqrt(suite.contract.compute.largest / suite.d) / 8)


def _rows_excess(suite: Suite, inputs: Inputs, y: Array, rows: Array) -> float:
    return suite.contract.expected({**inputs, "x": inputs["x"][rows]})["y"].excess(y[rows])


def weights_zero(suite: Calls) -> Found:
    """Every third number of each weight is 0, every third 1e-6: this shows a division by it."""

    def sparse(weight: Array) -> Array:
        weight[0::3], weight[1::3] = 0.0, 1e-6
        return weight

    return _weights(suite, sparse)


def weights_negative(suite: Calls) -> Found:
    """Every number of each weight below zero."""
    return _weights(suite, lambda weight: -np.abs(weight) - 0.1)


def _weights(suite: Calls, change: Callable[[Array], Array]) -> Found:
    suite.need_weights()
    inputs = suite.inputs()
    return suite.accuracy(changed(inputs, **{n: change(inputs[n].astype(np.float64)) for n in suite.weights}))


def subnormal_x(suite: Suite) -> Found:
    """Every x below the smallest normal number of its dtype."""
    inputs = suite.inputs(mean=0.0)
    tiny = suite.contract.dtype.normal
    return suite.accuracy(changed(inputs, x=np.clip(inputs["x"].astype(np.float64), -6, 6) * tiny / 8))


def subnormal_y(suite: Suite) -> Found:
    """gamma and beta, and with them y, below the smallest normal number: a flush to zero is detected."""
    suite.need_weights()
    inputs = {n: a for n, a in suite.inputs().items() if n != "dy"}
    small = max(suite.contract.dtype_of(n).normal for n in ("y", "gamma")) / 16
    small = max(small, 64 * suite.contract.weight.floor)
    new = {n: inputs[n].astype(np.float64) * small for n in ("gamma", "beta") if n in inputs}
    return suite.accuracy(changed(inputs, **new))


def nan_row(suite: Calls) -> Found:
    """One NaN in the first [M, D] input: every other row keeps its bits; a norm's own row is NaN in y and dx."""
    return _poisoned(suite, np.nan)


def inf_row(suite: Calls) -> Found:
    """One infinity: every other row keeps its bits; NaN in a norm's own row (for LayerNorm in all of it)."""
    return _poisoned(suite, np.inf)


def _poisoned(suite: Calls, value: float) -> Found:
    suite.need_rows()
    clean, given = suite.inputs(), suite.matrices[0]
    row, column = 1, suite.d // 2
    x = clean[given].astype(np.float64)
    x[row, column] = value
    want, got = suite.results(clean), suite.results(changed(clean, **{given: x}))
    others = np.arange(len(x)) != row
    for name in [n for n in suite.rowwise if n in got]:
        if spilled := differing(got[name][others], want[name][others]):
            raise FailedError(f"{name}: {spilled} elements of other rows changed", {name: float(spilled)})
        if isinstance(suite, Suite):
            _shown(suite, name, got[name][row], column, value)
    return Found("its row alone")


def _shown(suite: Suite, name: str, row: Array, column: int, value: float) -> None:
    """FailedError unless ``value`` shows in the norm's own row."""
    whole = np.isnan(value) or suite.contract.norm == "layernorm"
    finite = int(np.isfinite(row).sum())
    if whole and finite:
        raise FailedError(f"{name}: {finite} of {suite.d} elements of the row are finite", {name: float(finite)})
    if not whole and not np.isnan(row[column]):
        raise FailedError(f"{name}: {row[column]} where x is {value}")


def constant_rows(suite: Suite) -> Found:
    """x = c, for five numbers and 64 random ones: LayerNorm gives beta, and dx is finite although the variance is 0.

    The mean of such a row is rounded, so y may differ from beta by the bound of that row, not by that of all rows.
    """
    if suite.contract.eps == 0:
        raise SkippedError("eps is 0: a constant row has no result")
    numbers = np.array([*CONSTANTS, *np.random.default_rng(suite.d).uniform(-1000, 1000, RANDOM_CONSTANTS)])
    inputs = suite.inputs(m=len(numbers))
    inputs = changed(inputs, x=np.broadcast_to(numbers[:, None], (len(numbers), suite.d)))
    results = suite.results(inputs)
    found = suite.judged(inputs, results)
    if suite.contract.norm != "layernorm":
        return found
    weights = {n: a for n, a in inputs.items() if n in ("gamma", "beta")}
    alone = [suite.contract.expected({"x": inputs["x"][r : r + 1], **weights})["y"] for r in range(len(numbers))]
    worst = max(want.excess(results["y"][r : r + 1]) for r, want in enumerate(alone))
    if worst > 1:
        raise FailedError(f"y {worst:.2g} of the bound of its row", {"y": worst})
    beta = (inputs["beta"] if "beta" in inputs else np.zeros(suite.d)).astype(results["y"].dtype)
    exact = int((results["y"] == beta).all(axis=1).sum())
    off = float(np.abs(results["y"].astype(np.float64) - beta.astype(np.float64)).max(initial=0.0))
    detail = f"y = beta exactly in {exact} of {len(numbers)}, off by {off:.2g} at most; {found.detail}"
    return Found(detail, {**found.measured, "y": worst})


def shift_invariance(suite: Suite) -> Found:
    """x + 8, where both are exact in every dtype: the same y within both bounds."""
    suite.need_layernorm("RMSNorm is not invariant under a shift")
    inputs = {n: a for n, a in suite.inputs(mean=0.0).items() if n != "dy"}
    x = np.clip(np.round(inputs["x"].astype(np.float64) * 8), -32, 32) / 8
    near, far = changed(inputs, x=x), changed(inputs, x=x + 8)
    allowed = suite.contract.expected(near)["y"].allowed + suite.contract.expected(far)["y"].allowed
    difference = suite.results(near)["y"].astype(np.float64) - suite.results(far)["y"].astype(np.float64)
    return _ratio(np.abs(difference) / allowed, "of both bounds")


def dx_sums_to_zero(suite: Suite) -> Found:
    """The sum of dx over a row is zero up to rounding."""
    suite.need_layernorm("RMSNorm's dx does not sum to 0")
    suite.need("dx")
    inputs = suite.inputs()
    total = np.abs(suite.results(inputs)["dx"].astype(np.float64).sum(axis=1))
    return _ratio(total / suite.contract.expected(inputs)["dx"].allowed.sum(axis=1), "of the bound")


def _ratio(ratio: Array, unit: str) -> Found:
    worst = float(np.nan_to_num(ratio, nan=np.inf).max())
    if worst > 1:
        raise FailedError(f"{worst:.2g} {unit}", {"worst": worst})
    return Found(f"{worst:.2g} {unit}", {"worst": worst})


def ulps(suite: Suite) -> Found:
    """Errors of y and dx against the correctly rounded result, in units of the last place."""
    inputs = suite.inputs()
    want, results = suite.contract.expected(inputs), suite.results(inputs)
    parts, worst = [], 0.0
    measured: dict[str, float] = {}
    for name in [n for n in ("y", "dx") if n in results]:
        off = in_ulps(want[name], results[name], suite.contract.dtype_of(name))
        parts.append(f"{name} max {off.largest:.3g} (allowed there {off.allowed:.3g}), mean {off.mean:.2g} ulp")
        excess = want[name].excess(results[name])
        measured |= {f"{name}_max_ulp": off.largest, f"{name}_mean_ulp": off.mean, f"{name}_of_bound": excess}
        worst = max(worst, excess)
    if worst > 1:
        raise FailedError("; ".join(parts), measured)
    return Found("; ".join(parts), measured)


@dataclass(frozen=True)
class Ulps:
    """Errors in units of the last place; ``allowed``: the bound at the element with the largest."""

    largest: float
    mean: float
    allowed: float


def in_ulps(want: Expected, got: Array, dtype: DType) -> Ulps:
    """The distances of ``got`` from the correctly rounded result."""
    rounded = round_to(want.value.astype(np.float64), dtype).astype(want.value.dtype)
    step = np.ldexp(rounded.dtype.type(dtype.roundoff), np.frexp(rounded)[1])  # between neighbours at each value
    unit = np.maximum(step, dtype.least)
    off = np.abs(got.astype(want.value.dtype) - rounded) / unit
    off = np.where(np.isfinite(off), off, np.inf)
    worst = np.unravel_index(int(off.argmax()), off.shape)
    return Ulps(float(off.max()), float(off.mean()), float((want.allowed / unit)[worst]))


def directions(suite: Suite) -> Found:
    """Backward along random directions against differences: of its own forward in f64, else of the closed form."""
    if not suite.target.gradients:
        suite.need("dx")
    wide = suite.wide()
    inputs = wide.inputs(*SMALL)
    try:
        own = wide.raw(inputs).results["y"].dtype == np.float64
        wide.accuracy({n: a for n, a in inputs.items() if n != "dy"})
    except (FailedError, RaisedError):
        own = False
    return _own_differences(wide, inputs) if own else _closed_differences(suite)


def _own_differences(wide: Suite, inputs: Inputs) -> Found:
    gradients = wide.results(inputs)
    measured: dict[str, float] = {}
    rng = np.random.default_rng(11)
    given = {n: a for n, a in inputs.items() if n != "dy"}
    for name in [n for n in wide.target.gradients if n[1:] in inputs]:
        found = along(rng, lambda **at: wide.results(at)["y"], given, name[1:], gradients[name], inputs["dy"])
        measured[name] = _of(found.error, ALLOWED * found.size)
    return _verdict(measured, "of its own forward in f64")


def _closed_differences(suite: Suite) -> Found:
    inputs = suite.inputs(m=3)
    want, gradients = suite.contract.expected(inputs), suite.results(inputs)
    measured: dict[str, float] = {}
    rng = np.random.default_rng(11)
    exact = {n: a.astype(np.float64) for n, a in inputs.items()}
    dy, eps = exact.pop("dy"), suite.contract.eps
    forward = oracles.layernorm_forward if suite.contract.norm == "layernorm" else oracles.rmsnorm_forward
    for name in [n for n in suite.target.gradients if n[1:] in inputs]:
        gradient = gradients[name].astype(np.float64)
        found = along(rng, lambda **at: forward(**at, eps=eps)[0], exact, name[1:], gradient, dy)
        allowed = float((np.abs(found.direction) * want[name].allowed).sum()) + ALLOWED * found.size
        measured[name] = _of(found.error, allowed)
    return _verdict(measured, f"of the closed form; {suite.contract.dtype} only")


def _of(error: float, allowed: float) -> float:
    ratio = error / max(allowed, 1e-300)
    return ratio if np.isfinite(ratio) else float("inf")


def _verdict(measured: dict[str, float], whose: str) -> Found:
    detail = f"{', '.join(f'{n} {v:.2g}' for n, v in measured.items())} of what is allowed ({whose})"
    if max(measured.values(), default=0.0) > 1:
        raise FailedError(detail, measured)
    return Found(detail, measured)


def graph_directions(suite: GraphSuite) -> Found:
    """The derived gradients against differences of the graph, both in float64."""
    if not suite.target.gradients:
        raise SkippedError("no gradients: the spec is a forward")
    return _verdict(gradient_excess(suite.spec), "of the graph in f64")


def graph_constant_rows(suite: GraphSuite) -> Found:
    """The elements of a row are equal in each [M, D] input, and positive where they have to be."""
    inputs = suite.inputs(m=len(CONSTANTS))
    shape = inputs[suite.matrices[0]].shape  # sets of rows may take more
    rows = np.broadcast_to(np.resize(np.array(CONSTANTS), shape[0])[:, None], shape)
    given = [p.name for p in suite.forward.params if p.type.axes == WIDE]
    return suite.accuracy(changed(inputs, **{n: np.abs(rows) + 0.25 if n in suite.positive else rows for n in given}))
