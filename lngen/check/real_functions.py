"""The functions of the IR in float64, with what an error of the argument and the rounded evaluation may do to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lngen.ir.functions import ULPS

Array = NDArray[np.floating[Any]]

_erf = np.frompyfunc(math.erf, 1, 1)
_erfc = np.frompyfunc(math.erfc, 1, 1)
STEEPEST = 1.13  # the largest slope of gelu (Hendrycks and Gimpel's curve at sqrt(2)), of its approximation and of silu
GELU = 2 * math.sqrt(2 / math.pi)


def erf(x: Array) -> Array:
    """The error function."""
    return np.asarray(_erf(x), np.float64)


def normal_cdf(x: Array) -> Array:
    """The cumulative distribution function of the normal distribution, exact in the negative tail as well."""
    return np.asarray(_erfc(-np.asarray(x) / math.sqrt(2)), np.float64) / 2


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x), without overflow."""
    power = np.exp(-np.abs(x))
    return np.asarray(np.where(x < 0, power, 1.0) / (1 + power))


def softplus(x: Array) -> Array:
    """log(1 + e^x), without overflow."""
    return np.asarray(np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))


def gelu_argument(x: Array) -> Array:
    """2 u for gelu_tanh(x) = x (1 + tanh(u)) / 2."""
    return GELU * (x + 0.044715 * x**3)


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "softplus": softplus,
    "erf": erf,
    "normal_cdf": normal_cdf,
    "gelu": lambda x: x * normal_cdf(x),
    "gelu_tanh": lambda x: x * sigmoid(gelu_argument(x)),
    "silu": lambda x: x * sigmoid(x),
}


def propagated(op: str, x: Array, error: Array) -> tuple[Array, Array, Array]:
    """The function of x, what an ``error`` of x may change, and the stated bound as a number of roundings.

    A unit in the last place is at most two unit roundoffs of the value.
    """
    f = FUNCTIONS[op]
    value = f(x)
    if op in ("gelu", "gelu_tanh", "silu"):
        moved = STEEPEST * error
    else:  # monotone
        moved = np.fmax(f(x + error) - value, value - f(x - error))
    ulps = ULPS[op] + (3 * np.abs(gelu_argument(x)) if op == "gelu_tanh" else np.zeros_like(x))
    return value, np.where(error > 0, moved, 0.0), 2 * ulps
