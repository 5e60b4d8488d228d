"""Right answers with their bounds: the float64 closed forms of ``lngen.check``, in ulps and units of the bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lngen.check import oracles
from lngen.check.conform.contract import Contract
from lngen.check.tolerances import FLOOR, ROUNDOFF, bound, mean_over_std, scales
from lngen.ir import DType
from lngen.ir.numerics import Array, round_to


@dataclass(frozen=True)
class Judged:
    """A result's errors; ``excess`` in units of the bound, ``allowed_ulp`` the bound where ``max_ulp`` was met."""

    excess: float
    max_ulp: float
    mean_ulp: float
    allowed_ulp: float


@dataclass(frozen=True)
class Reference:
    """Results in float64 (longdouble for an f64 contract) and how far each element may be from them."""

    contract: Contract
    values: dict[str, Array]
    allowed: dict[str, Array]

    def excess(self, name: str, got: Array) -> float:
        """The largest error in units of what is allowed; infinite for NaN and inf."""
        if got.size == 0:
            return 0.0
        error = np.abs(got.astype(self.values[name].dtype) - self.values[name])
        with np.errstate(divide="ignore"):
            ratio = np.divide(error, self.allowed[name], out=np.zeros_like(error), where=error != 0)
        return float(np.where(np.isfinite(ratio), ratio, np.inf).max())

    def judge(self, name: str, got: Array) -> Judged:
        """All there is to say of one result."""
        if got.size == 0:
            return Judged(0.0, 0.0, 0.0, 0.0)
        dtype, want = self.contract.dtype_of(name), self.values[name]
        rounded = round_to(want.astype(np.float64), dtype).astype(want.dtype)
        unit = ulp(rounded, dtype)
        off = np.abs(got.astype(want.dtype) - rounded) / unit
        off = np.where(np.isfinite(off), off, np.inf)
        worst = np.unravel_index(int(off.argmax()), off.shape)
        return Judged(
            self.excess(name, got), float(off.max()), float(off.mean()), float((self.allowed[name] / unit)[worst])
        )


def ulp(values: Array, dtype: DType) -> Array:
    """The distance of neighbours at each value in ``dtype``."""
    exponent = np.frexp(values)[1]
    least = 2 * FLOOR[str(dtype)] or 2.0**-1074
    unit = np.ldexp(values.dtype.type(ROUNDOFF[str(dtype)]), exponent)
    return np.asarray(np.maximum(unit, least))


def reference(contract: Contract, inputs: Mapping[str, Array]) -> Reference:
    """What the inputs give: y, and with ``dy`` dx, dgamma and dbeta.

    An f64 result is measured in longdouble, which on some machines is no wider; the bound has room for both.
    """
    wide = np.longdouble if contract.compute is DType.F64 else np.float64
    x = inputs["x"].astype(wide)
    gamma, beta, dy = (inputs[n].astype(wide) if n in inputs else None for n in ("gamma", "beta", "dy"))
    layer = contract.norm == "layernorm"
    with np.errstate(all="ignore"):
        forward = oracles.layernorm_forward if layer else oracles.rmsnorm_forward
        values = {"y": forward(x, gamma, beta, contract.eps)[0]}  # type: ignore[arg-type]
        if dy is not None:
            backward = oracles.layernorm_backward if layer else oracles.rmsnorm_backward
            gradients = backward(dy, x, gamma, contract.eps)  # type: ignore[arg-type]
            values |= dict(zip(("dx", "dgamma", "dbeta"), gradients, strict=True))
        scale = scales(x, gamma, beta, dy, contract.eps, norm=contract.norm)  # type: ignore[arg-type]
        kappa = mean_over_std(x, contract.eps) if layer else 0.0  # type: ignore[arg-type]
    allowed: dict[str, Array] = {}
    rows, d = x.shape
    for name, value in values.items():
        stored = str(contract.dtype_of(name))
        limit = bound(name, stored, d, rows, kappa, str(contract.compute))  # type: ignore[arg-type]
        size = np.broadcast_to(scale[name], value.shape)  # type: ignore[index]
        floor = limit.floor or _half_of_least(value)
        allowed[name] = limit.rounding * np.abs(value) + limit.arithmetic * size + floor
    return Reference(contract, dict(values), allowed)


def _half_of_least(values: Array) -> Array:
    """Half of f64's smallest subnormal; where longdouble is no wider than f64, all of it."""
    half = np.ldexp(values.dtype.type(1), -1075)
    return np.asarray(half if half else np.ldexp(values.dtype.type(1), -1074))
