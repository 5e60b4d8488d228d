"""The ops that choose one of their operands, or a number near one: exact but where an error moves the choice."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lngen.check.real_number import Array, Meaning, Real, Sizes
from lngen.ir import Eqn


def _maximum(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    a, b = args
    return Real(np.maximum(a.value, b.value), np.maximum(a.error, b.error))


def _minimum(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    a, b = args
    return Real(np.minimum(a.value, b.value), np.maximum(a.error, b.error))


def _clamp(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    return Real(np.clip(args[0].value, eqn.number_attr("low"), eqn.number_attr("high")), args[0].error)


def _rint(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    value, error = np.rint(args[0].value), args[0].error
    return Real(value, np.maximum(np.rint(args[0].value + error) - value, value - np.rint(args[0].value - error)))


def _where_gt(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    a, b, c, d = args
    first = a.value > b.value
    doubtful = (np.abs(a.value - b.value) <= a.error + b.error) & (a.error + b.error > 0)
    other = np.abs(c.value - d.value) + np.maximum(c.error, d.error)
    return Real(np.where(first, c.value, d.value), np.where(doubtful, other, np.where(first, c.error, d.error)))


def _relu(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    return Real(np.maximum(args[0].value, 0.0), args[0].error)


def _select(chosen: Callable[[Array, Array], Array]) -> Meaning:
    """c where the comparison of a and b holds, else 0."""

    def select(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
        a, b, c = args
        doubtful = (np.abs(a.value - b.value) <= a.error + b.error) & (a.error + b.error > 0)
        value = np.where(chosen(a.value, b.value), c.value, 0.0)
        return Real(value, np.where(doubtful, c.most, np.where(value == 0, 0.0, c.error)))

    return select


CHOICES: dict[str, Meaning] = {
    "maximum": _maximum,
    "relu": _relu,
    "minimum": _minimum,
    "clamp": _clamp,
    "abs": lambda eqn, sizes, args: Real(np.abs(args[0].value), args[0].error),
    "rint": _rint,
    "where_gt": _where_gt,
    "select_gt": _select(np.greater),
    "select_eq": _select(np.equal),
}
