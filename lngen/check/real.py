"""What any graph means in real numbers, as far as float64 has them, and how far its rounded evaluation may be off.

The values share nothing with the interpreter: no cast rounds, and sums are NumPy's. The bound of each value is carried
along with it (running error analysis: Higham, Accuracy and Stability of Numerical Algorithms, section 3.3): what an
operation makes of its operands' errors, to all orders, and half a unit in the last place of its own dtype. A sum over n
terms adds the errors of the terms and, for each rounding that a term meets, a unit roundoff of the sum of their sizes
(section 4.2); ``row_depth`` and ``column_depth`` say how many roundings that are. A selection whose operands may be
either way round is off by as much as what it selects. Numbers are taken as not overflowing, intermediate ones as not
subnormal.

Errors are taken as independent of each other's signs. So the bound is larger than that of a hand derivation, which
knows for example that the sum of a centred row vanishes; a wrong formula is off by far more than either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lngen.check.tolerances import FLOOR, ROUNDOFF, column_depth, row_depth
from lngen.ir import Axis, D, Eqn, Graph, Value

Array = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Real:
    """Numbers over the axes [M, D], of length 1 along those they lack, and how far a rounded evaluation may be off."""

    value: Array
    error: Array

    @property
    def most(self) -> Array:
        """The largest size that the rounded number may have."""
        return np.abs(self.value) + self.error


Sizes = Mapping[Axis, int]
Meaning = Callable[[Eqn, Sizes, tuple[Real, ...]], Real]
PLACES = {axis: place for place, axis in enumerate(Axis)}


def evaluate(graph: Graph, inputs: Mapping[str, Array], errors: Mapping[str, Array] | None = None) -> dict[str, Real]:
    """Every result of ``graph`` by name, in the shape of its axes, for inputs by name.

    ``errors``: how far inputs are from what they stand for, elementwise; those that are not named are exact.
    """
    sizes: dict[Axis, int] = {}
    values: dict[Value, Real] = {}
    for p in graph.params:
        sizes |= dict(zip(p.type.axes, inputs[p.name].shape, strict=True))
    for p in graph.params:
        value = _spread(p, inputs[p.name])
        error = _spread(p, errors[p.name]) if errors and p.name in errors else np.zeros_like(value)
        values[p] = Real(value, error)
    with np.errstate(all="ignore"):
        for eqn in graph.eqns:
            values[eqn.out] = MEANINGS[eqn.op](eqn, sizes, tuple(values[a] for a in eqn.args))
    return {r.name: Real(_gather(r, values[r].value, sizes), _gather(r, values[r].error, sizes)) for r in graph.results}


def _spread(value: Value, array: Array) -> Array:
    return array.astype(np.float64)[tuple(slice(None) if a in value.type.axes else None for a in Axis)]


def _gather(value: Value, array: Array, sizes: Sizes) -> Array:
    full = np.broadcast_to(array, [sizes[a] if a in value.type.axes else 1 for a in Axis])
    return np.ascontiguousarray(full[tuple(slice(None) if a in value.type.axes else 0 for a in Axis)])


# ---- operations ----


def _rounded(eqn: Eqn, value: Array, error: Array, times: float = 1.0) -> Real:
    """A result that is rounded to the equation's dtype ``times`` times."""
    dtype = eqn.out.type.dtype
    return Real(value, error + times * ROUNDOFF[dtype] * (np.abs(value) + error) + FLOOR[dtype])


def _const(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    return _rounded(eqn, np.full((1, 1), eqn.value, np.float64), np.zeros((1, 1)))


def _size(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    return _rounded(eqn, np.full((1, 1), float(sizes[eqn.axis])), np.zeros((1, 1)))


def _cast(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    widens = ROUNDOFF[eqn.out.type.dtype] <= ROUNDOFF[eqn.args[0].type.dtype]
    return args[0] if widens else _rounded(eqn, args[0].value, args[0].error)


def _neg(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    return Real(-args[0].value, args[0].error)


def _add(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    a, b = args
    return _rounded(eqn, a.value + b.value, a.error + b.error)


def _sub(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    a, b = args
    return _rounded(eqn, a.value - b.value, a.error + b.error)


def _product(a: Real, b: Real) -> Real:
    """Not rounded."""
    return Real(a.value * b.value, a.error * np.abs(b.value) + b.error * np.abs(a.value) + a.error * b.error)


def _mul(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    product = _product(*args)
    return _rounded(eqn, product.value, product.error)


def _fma(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    product = _product(args[0], args[1])
    return _rounded(eqn, product.value + args[2].value, product.error + args[2].error)


def _quotient(a: Real, b: Real) -> Real:
    """Not rounded. The error is infinite where the error of the divisor may make the divisor zero."""
    value, least = a.value / b.value, np.abs(b.value) - b.error
    unknown = np.where(b.error > 0, np.inf, 0.0)
    return Real(value, np.where(least > 0, (a.error + np.abs(value) * b.error) / least, unknown))


def _div(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    quotient = _quotient(*args)
    return _rounded(eqn, quotient.value, quotient.error)


def _root(a: Real) -> Real:
    value = np.sqrt(a.value)
    above = np.sqrt(a.value + a.error) - value
    return Real(value, np.maximum(above, value - np.sqrt(np.maximum(a.value - a.error, 0))))


def _sqrt(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    root = _root(args[0])
    return _rounded(eqn, root.value, root.error)


def _rsqrt(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    root = _sqrt(eqn, sizes, args)
    quotient = _quotient(Real(np.ones((1, 1)), np.zeros((1, 1))), root)
    return _rounded(eqn, quotient.value, quotient.error)


def _maximum(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    a, b = args
    return Real(np.maximum(a.value, b.value), np.maximum(a.error, b.error))


def _relu(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    return Real(np.maximum(args[0].value, 0.0), args[0].error)


def _select(chosen: Callable[[Array, Array], Array]) -> Meaning:
    """c where a and b compare so, else 0."""

    def select(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
        a, b, c = args
        doubtful = (np.abs(a.value - b.value) <= a.error + b.error) & (a.error + b.error > 0)
        value = np.where(chosen(a.value, b.value), c.value, 0.0)
        return Real(value, np.where(doubtful, c.most, np.where(value == 0, 0.0, c.error)))

    return select


# ---- reductions ----


def _depth(eqn: Eqn, sizes: Sizes) -> int:
    """How many roundings a term of the sum meets at most."""
    if eqn.axis is D:
        return row_depth(sizes[D])
    return column_depth(sizes[eqn.axis], sizes.get(D, 1))


def _sum(eqn: Eqn, sizes: Sizes, terms: Real) -> Real:
    """Over the equation's axis, rounded as often as the depth says."""
    place = PLACES[eqn.axis]
    shape = [sizes[a] if a is eqn.axis else terms.value.shape[p] for a, p in PLACES.items()]
    value, error, most = (
        np.broadcast_to(n, shape).sum(axis=place, keepdims=True) for n in (terms.value, terms.error, terms.most)
    )
    return Real(value, error + (_depth(eqn, sizes) + 1) * ROUNDOFF[eqn.out.type.dtype] * most)


def _reduce_sum(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    return _sum(eqn, sizes, args[0])


def _reduce_dot(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    return _sum(eqn, sizes, _product(*args))


def _reduce_mean(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    total, n = _sum(eqn, sizes, args[0]), sizes[eqn.axis]
    return _rounded(eqn, total.value / n, total.error / n)


def _segments(eqn: Eqn, sizes: Sizes) -> list[slice]:
    step = int(dict(eqn.attrs).get("segment", sizes[D]))  # type: ignore[arg-type]
    return [slice(start, start + step) for start in range(0, sizes[D], step)]


def _segment_mean(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    """The approximate mean of each segment, with the error of a computed sum times a rounded reciprocal."""
    parts = []
    for segment in _segments(eqn, sizes):
        part = Real(args[0].value[:, segment], args[0].error[:, segment])
        n = part.value.shape[1]
        total = _sum(eqn, {**sizes, D: n}, part)
        parts.append((np.repeat(total.value / n, n, axis=1), np.repeat(total.error / n, n, axis=1)))
    value, error = (np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
    return _rounded(eqn, value, error, times=2)  # the reciprocal of n is rounded, and the product


def _reduce_spread(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    """Of squares of distances from the mean, as if each were measured from the row's mean, with that mean's error."""
    mean = _reduce_mean(eqn, sizes, args)
    far = Real(args[0].value - mean.value, args[0].error + mean.error)
    far = _rounded(eqn, far.value, far.error, times=4)  # the two distances, their product, and its sum
    return _sum(eqn, sizes, _product(far, far))


def _reduce_max(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    place = PLACES[eqn.axis]
    return Real(args[0].value.max(axis=place, keepdims=True), args[0].error.max(axis=place, keepdims=True))


MEANINGS: dict[str, Meaning] = {
    "const": _const,
    "size": _size,
    "cast": _cast,
    "expand": lambda eqn, sizes, args: args[0],
    "neg": _neg,
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "fma": _fma,
    "maximum": _maximum,
    "relu": _relu,
    "select_gt": _select(np.greater),
    "select_eq": _select(np.equal),
    "sqrt": _sqrt,
    "rsqrt": _rsqrt,
    "reduce_mean": _reduce_mean,
    "reduce_sum": _reduce_sum,
    "reduce_dot": _reduce_dot,
    "segment_mean": _segment_mean,
    "reduce_spread": _reduce_spread,
    "reduce_max": _reduce_max,
}
