"""The expected results of a norm: the closed forms, the scale of each error, and its bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lngen.check import oracles
from lngen.check.tolerances import Bound, NormName, Result, bound, mean_over_std, scales
from lngen.ir import DType
from lngen.ir.numerics import Array


@dataclass(frozen=True)
class Expected:
    """One result: its closed form, and how far a correct result may be from it."""

    value: oracles.Array
    scale: oracles.Array
    bound: Bound

    def excess(self, out: Array) -> float:
        """The largest error of ``out`` in units of the allowed one."""
        return self.bound.excess(out, self.value, self.scale)


def closed_form(
    norm: NormName,
    inputs: Mapping[str, Array],
    stored: Mapping[str, DType],
    eps: float,
    compute: DType,
    wide: type[np.floating[Any]] = np.float64,
) -> dict[str, Expected]:
    """The results that ``stored`` gives a dtype, for x and, where ``inputs`` have them, gamma, beta and dy.

    ``compute`` is the dtype a kernel computes in, ``wide`` that of the closed form: float64 or more.
    """
    given = {name: array.astype(wide) for name, array in inputs.items()}
    x, gamma, beta, dy = given["x"], *(given.get(name) for name in ("gamma", "beta", "dy"))
    values: dict[Result, oracles.Array] = {}
    if norm == "layernorm":
        values["y"], values["mean"], values["rstd"] = oracles.layernorm_forward(x, gamma, beta, eps)
        kappa, backward = mean_over_std(x, eps), oracles.layernorm_backward
    else:
        values["y"], values["rstd"] = oracles.rmsnorm_forward(x, gamma, beta, eps)
        kappa, backward = 0.0, oracles.rmsnorm_backward
    if dy is not None:
        values["dx"], values["dgamma"], values["dbeta"] = backward(dy, x, gamma, eps)
    scale = scales(x, gamma, beta, dy, eps, norm=norm)
    rows, d = x.shape
    return {
        name: Expected(value, scale[name], bound(name, stored[name], d, rows, kappa, compute))
        for name, value in values.items()
        if name in stored
    }
