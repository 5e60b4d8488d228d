"""The oracle of LayerNorm and RMSNorm: closed forms, and how far a correct kernel may be from them.

The closed forms share nothing with the rest of lngen; the bounds are derived, not tuned.

All in float64 or wider, on arrays ``[M, D]`` (rows, features), ``gamma`` and ``beta`` ``[D]``; statistics are ``[M]``.

The mathematics, with g = dy * gamma and every mean taken over a row (Ba, Kiros & Hinton 2016 for LayerNorm,
Zhang & Sennrich 2019 for RMSNorm; the backward is the usual derivation by hand, whose Jacobian is r * P)::

    mean = mean(x)
    r = 1 / sqrt(mean((x - mean)^2) + eps)
    xhat = (x - mean) * r
    y = gamma * xhat + beta
    P(g) = g - mean(g) - xhat * mean(g * xhat)
    dx = r * P(g)
    dgamma = sum_M dy * xhat
    dbeta = sum_M dy

RMSNorm is the same without the mean: mean := 0, and P(g) = g - xhat * mean(g * xhat).

Every bound is elementwise and has two parts::

    |out - ref|  <=  rounding * |ref|  +  arithmetic * scale  +  floor

``rounding`` is the unit roundoff of the stored dtype, ``floor`` half its smallest subnormal; ``scale`` (from
``scales``) is a bound on the intermediate numbers, from sums of absolute values, so that nothing is divided by a
result that happens to be zero (the mean of a centred row, dx at D = 1 or 2). Inputs are assumed exact, no number is
assumed to overflow and no intermediate one to be subnormal.

Derivation, to first order, for a compute type of unit roundoff u. A sum in which each term passes at most n
roundings is off by at most n u sum|terms| (Higham, Accuracy and Stability, section 4.2). Let d be the depth
of a row sum and c of a column sum, r = rstd, kappa = |mean| r ("mean over std", with eps inside the std; 0
for RMSNorm, which has no mean to subtract).

- mean:   d additions and a division: (d + 1) u mean|x|, and mean|x| r <= sqrt(mean x^2) r <= 1 + kappa.
- shift:  the centred row is off by that error, e, the same for the whole row. In units of the normalised row,
          E = e r = (d + 1) u (1 + kappa). This is the price of a large mean, paid by any algorithm that
          keeps its mean in the compute type: kappa = 1e4 in f32 leaves two to three digits.
- rstd:   the computed row is xc - e with mean(xc) = 0, so the variance is off by e^2 (second order, but kappa
          may be large) and (d + 4) u (subtract twice, square, sum, divide). eps rounded and added: 2 u.
          The root halves all that; sqrt and division round: 2 u. Together rho = (d + 10) u / 2 + E^2 / 2.
          In rows of many segments each is measured from its own mean, whose error is e_i, not from the row's, off_i
          away: n (mean_i - mean)^2 is off by 2 n |off_i| e_i, which add up to 2 e D times the root mean square of
          off_i, at most the std (Cauchy and Schwarz): rho is E more. With segments of independent elements off_i is
          the hundredth part of the std, and so is the actual error.
- xhat:   E + (rho + 2 u) |xhat|.
- y:      gamma times that, a product and a sum: (E + rho + 4 u) (|gamma| (1 + |xhat|) + |beta|).
- dx:     with G = sqrt(mean g^2) >= mean|g|, |mean(g xhat)|: mean(g) is off by (d + 2) u G, mean(g xhat) by
          ((d + 5) u + E + rho) G; xhat * mean(g xhat) by G (E + |xhat| ((d + 8) u + E + 2 rho)); two
          subtractions 2 u and the product with r, rho + u, on r (|g| + G (1 + |xhat|)). All below
          (E + 3 rho + (d + 11) u) r (|g| + G (1 + |xhat|)).
- dgamma: sum|dy| times the error of xhat, a product and the sum: (E + rho + (c + 3) u) sum |dy| (1 + |xhat|).
- dbeta:  c u sum|dy|.

``SLACK`` covers second-order terms and other correct orders of the same operations (r^3 (x - mean) for
r^2 xhat).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lngen.compiler.ir import F32, DType
from lngen.compiler.ir.numerics import column_depth, row_depth

Array = NDArray[np.floating[Any]]
ResultName = Literal["y", "mean", "rstd", "dx", "dgamma", "dbeta"]
NormName = Literal["layernorm", "rmsnorm"]
NORMS: tuple[NormName, ...] = ("layernorm", "rmsnorm")

SLACK = 2.0
FEW_SEGMENTS = 8192  # elements of four bytes; longer rows have many segments


# ---- closed forms ----


def row_mean(a: Array) -> Array:
    """``[M, D] -> [M, 1]``."""
    return np.asarray(a.mean(axis=1, keepdims=True))


def _affine(xhat: Array, gamma: Array | None, beta: Array | None) -> Array:
    y = xhat if gamma is None else gamma * xhat
    return y if beta is None else y + beta


def layernorm_forward(
    x: Array, gamma: Array | None = None, beta: Array | None = None, eps: float = 1e-5
) -> tuple[Array, Array, Array]:
    """``y [M, D], mean [M], rstd [M]``; the variance is centred, biased (divided by D)."""
    mean = row_mean(x)
    rstd = 1 / np.sqrt(row_mean((x - mean) ** 2) + eps)
    return _affine((x - mean) * rstd, gamma, beta), mean[:, 0], rstd[:, 0]


def rmsnorm_forward(
    x: Array, gamma: Array | None = None, beta: Array | None = None, eps: float = 1e-5
) -> tuple[Array, Array]:
    """``y [M, D], rstd [M]``."""
    rstd = 1 / np.sqrt(row_mean(x**2) + eps)
    return _affine(x * rstd, gamma, beta), rstd[:, 0]


def layernorm_backward(
    dy: Array, x: Array, gamma: Array | None = None, eps: float = 1e-5
) -> tuple[Array, Array, Array]:
    """``dx [M, D], dgamma [D], dbeta [D]``; without gamma, dgamma is its value at gamma = 1."""
    xhat, _, rstd = layernorm_forward(x, eps=eps)
    g = dy if gamma is None else dy * gamma
    dx = rstd[:, None] * (g - row_mean(g) - xhat * row_mean(g * xhat))
    return dx, (dy * xhat).sum(axis=0), dy.sum(axis=0)


def rmsnorm_backward(dy: Array, x: Array, gamma: Array | None = None, eps: float = 1e-5) -> tuple[Array, Array, Array]:
    """``dx [M, D], dgamma [D], dbeta [D]``; without gamma, dgamma is its value at gamma = 1."""
    xhat, rstd = rmsnorm_forward(x, eps=eps)
    g = dy if gamma is None else dy * gamma
    dx = rstd[:, None] * (g - xhat * row_mean(g * xhat))
    return dx, (dy * xhat).sum(axis=0), dy.sum(axis=0)


# ---- bounds ----


@dataclass(frozen=True)
class Terms:
    """How often each error of the derivation enters a result."""

    shift: int = 0  # E
    rstd: int = 0  # rho
    row: int = 0  # d u
    column: int = 0  # c u
    ops: int = 0  # u


TOLERANCE: dict[ResultName, Terms] = {
    "y": Terms(shift=1, rstd=1, ops=4),
    "mean": Terms(row=1, ops=1),
    "rstd": Terms(rstd=1),
    "dx": Terms(shift=1, rstd=3, row=1, ops=11),
    "dgamma": Terms(shift=1, rstd=1, column=1, ops=3),
    "dbeta": Terms(column=1),
}


@dataclass(frozen=True)
class Bound:
    """``|out - ref| <= rounding * |ref| + arithmetic * scale + floor``, elementwise."""

    rounding: float
    arithmetic: float
    floor: float

    def allowed(self, ref: Array, scale: Array) -> Array:
        """The allowed distance of each element from ``ref``."""
        return self.rounding * np.abs(ref) + self.arithmetic * scale + self.floor

    def excess(self, out: Any, ref: Array, scale: Array) -> float:
        """The largest error, in units of the allowed one."""
        return excess(out, ref, self.allowed(ref, scale))


def excess(out: Any, ref: Array, allowed: Array) -> float:
    """The largest error, in units of ``allowed``: <= 1 if correct, infinite for NaN and inf."""
    error = np.abs(np.asarray(out).astype(ref.dtype) - ref)
    with np.errstate(divide="ignore"):
        ratio = np.divide(error, allowed, out=np.zeros_like(error), where=error != 0)
    return float(np.where(np.isfinite(ratio), ratio, np.inf).max(initial=0.0))


def bound(result: ResultName, dtype: DType, D: int, M: int, mean_over_std: float = 0.0, compute: DType = F32) -> Bound:
    """The bound for ``result``, computed in ``compute`` and stored as ``dtype``; derived above."""
    u, d = compute.roundoff, row_depth(D)
    shift = (d + 1) * u * (1 + mean_over_std)
    rstd = (d + 10) * u / 2 + shift**2 / 2 + shift * (D > FEW_SEGMENTS)
    n = TOLERANCE[result]
    arithmetic = n.shift * shift + n.rstd * rstd + (n.row * d + n.column * column_depth(M, D) + n.ops) * u
    stored = dtype.roundoff if dtype.roundoff > u else 0.0
    return Bound(rounding=stored, arithmetic=SLACK * arithmetic, floor=dtype.floor)


def mean_over_std(x: Array, eps: float = 1e-5) -> float:
    """The largest |mean| * rstd of any row of ``x [M, D]``."""
    _, mean, rstd = layernorm_forward(x, eps=eps)
    return float(np.abs(mean * rstd).max(initial=0.0))


def scales(
    x: Array,
    gamma: Array | None = None,
    beta: Array | None = None,
    dy: Array | None = None,
    eps: float = 1e-5,
    *,
    norm: NormName = "layernorm",
) -> dict[ResultName, Array]:
    """The scale of a result's arithmetic error, in the result's shape; gradients only with ``dy``."""
    xhat, *_, rstd = layernorm_forward(x, eps=eps) if norm == "layernorm" else rmsnorm_forward(x, eps=eps)
    size, weight = 1 + np.abs(xhat), np.ones(x.shape[1]) if gamma is None else np.abs(gamma)
    y = weight * size + (0.0 if beta is None else np.abs(beta))
    found: dict[ResultName, Array] = {"y": y, "mean": row_mean(np.abs(x))[:, 0], "rstd": rstd}
    if dy is not None:
        g = np.abs(dy) * weight
        found["dx"] = rstd[:, None] * (g + np.sqrt(row_mean(g**2)) * size)
        found["dgamma"] = (np.abs(dy) * size).sum(axis=0)
        found["dbeta"] = np.abs(dy).sum(axis=0)
    return found


@dataclass(frozen=True)
class Expected:
    """One result: its closed form, and how far each element of a correct result may be from it."""

    value: Array
    allowed: Array

    def excess(self, out: Any) -> float:
        """The largest error of ``out`` in units of the allowed one."""
        return excess(out, self.value, self.allowed)


def closed_form(
    norm: NormName,
    inputs: Mapping[str, Any],
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
    values: dict[ResultName, Array] = {}
    if norm == "layernorm":
        values["y"], values["mean"], values["rstd"] = layernorm_forward(x, gamma, beta, eps)
        kappa, backward = mean_over_std(x, eps), layernorm_backward
    else:
        values["y"], values["rstd"] = rmsnorm_forward(x, gamma, beta, eps)
        kappa, backward = 0.0, rmsnorm_backward
    if dy is not None:
        values["dx"], values["dgamma"], values["dbeta"] = backward(dy, x, gamma, eps)
    scale = scales(x, gamma, beta, dy, eps, norm=norm)
    rows, d = x.shape
    found = {}
    for name, value in values.items():
        if name in stored:
            limit = bound(name, stored[name], d, rows, kappa, compute)
            floor = 0.0 if limit.floor else _half_of_least(value)
            found[str(name)] = Expected(value, limit.allowed(value, scale[name]) + floor)
    return found


def _half_of_least(values: Array) -> Array:
    """Half of f64's smallest subnormal; where ``values`` are no wider than f64, all of it."""
    half = np.ldexp(values.dtype.type(1), -1075)
    return np.asarray(half if half else np.ldexp(values.dtype.type(1), -1074))
