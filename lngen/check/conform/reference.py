"""Expected results with their bounds: the float64 closed forms of ``lngen.check``, in ulps and units of the bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lngen.check.conform.contract import Contract
from lngen.check.tolerances import closed_form, excess
from lngen.ir import DType
from lngen.ir.numerics import Array, round_to


@dataclass(frozen=True)
class Judged:
    """A result's errors; ``excess`` in units of the bound, ``allowed_ulp``: the bound at the element of ``max_ulp``."""

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
        """The largest error in units of the allowed one; infinite for NaN and inf."""
        return excess(got, self.values[name], self.allowed[name])

    def judge(self, name: str, got: Array) -> Judged:
        """All errors of one result."""
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
    """The distance between neighbours in ``dtype`` at each value."""
    exponent = np.frexp(values)[1]
    least = 2 * dtype.floor or 2.0**-1074
    unit = np.ldexp(values.dtype.type(dtype.roundoff), exponent)
    return np.asarray(np.maximum(unit, least))


def reference(contract: Contract, inputs: Mapping[str, Array]) -> Reference:
    """The expected results: y, and with ``dy`` dx, dgamma and dbeta.

    An f64 result is measured in longdouble, which on some machines is no wider; the bound has room for both.
    """
    names = ("y", "dx", "dgamma", "dbeta") if "dy" in inputs else ("y",)
    stored = {name: contract.dtype_of(name) for name in names}
    wide = np.longdouble if contract.compute is DType.F64 else np.float64
    with np.errstate(all="ignore"):
        expected = closed_form(contract.norm, inputs, stored, contract.eps, contract.compute, wide)
    values, allowed = ({name: getattr(e, part) for name, e in expected.items()} for part in ("value", "allowed"))
    return Reference(contract, values, allowed)
