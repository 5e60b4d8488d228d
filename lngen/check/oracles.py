"""Two oracles that share nothing with lngen: closed forms, and central differences of a forward.

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
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]


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


def directional(
    fn: Callable[..., Array],
    inputs: Mapping[str, Array],
    wrt: str,
    direction: Array,
    h: float,
    *,
    dy: Array,
) -> float:
    """The derivative of ``sum(dy * fn(**inputs))`` along ``direction`` in the input ``wrt``; forward only.

    Fourth-order central differences, ``(8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12h``: truncation is O(h^4),
    so h can stay near 1e-3, where rounding, O(u |x| / h), is small even at a mean of 1e4 standard deviations.
    """

    def at(step: float) -> Array:
        return fn(**{**inputs, wrt: inputs[wrt] + step * direction})

    difference = 8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))
    return float((dy * difference).sum() / (12 * h))


def differences(fn: Callable[..., Array], inputs: Mapping[str, Array], wrt: str, h: float, *, dy: Array) -> Array:
    """The whole gradient in ``wrt``, one ``directional`` per element: for small arrays."""
    gradient = np.zeros_like(inputs[wrt])
    for index in np.ndindex(gradient.shape):
        direction = np.zeros_like(gradient)
        direction[index] = 1
        gradient[index] = directional(fn, inputs, wrt, direction, h, dy=dy)
    return gradient
