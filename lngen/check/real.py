"""A graph evaluated in real numbers, as exactly as float64 allows, with the error bound of its rounded evaluation.

The values share nothing with the interpreter: no cast rounds, and sums are NumPy's. Each value carries its bound
(running error analysis: Higham, Accuracy and Stability of Numerical Algorithms, section 3.3): the propagated errors of
the operands, to all orders, and half a unit in the last place of the value's own dtype. A sum over n terms adds the
errors of the terms and, for each rounding along the path of a term, a unit roundoff of the sum of their absolute values
(section 4.2); ``row_depth`` and ``column_depth`` bound the number of these roundings. The error of a selection whose
operands may be in either order is as large as the selected value. No number is assumed to overflow, no intermediate one
to be subnormal.

The signs of the errors are assumed independent. So the bound is larger than that of a derivation by hand, which uses
for example that the sum of a centred row vanishes; the error of a wrong formula exceeds both by far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lngen.check.oracles import column_depth, row_depth
from lngen.ir import WIDE, Axis, D, Eqn, Graph, M, S, Value, indexed_by_elements, segment_of
from lngen.ir.functions import ULPS

Array = NDArray[np.floating[Any]]
Sizes = Mapping[Axis, int]

PLACES = {M: 0, D: 1, S: 1}  # S is in the place of D: an equation has values along one of them, or combines both


@dataclass(frozen=True)
class Real:
    """Numbers over the axes [M, D] or [M, S], of length 1 along absent axes.

    ``error``: the error bound of a rounded evaluation.
    """

    value: Array
    error: Array

    @property
    def most(self) -> Array:
        """The largest absolute value that the rounded number may have."""
        return np.abs(self.value) + self.error


Meaning = Callable[[Eqn, Sizes, tuple[Real, ...]], Real]


def evaluate(graph: Graph, inputs: Mapping[str, Array], errors: Mapping[str, Array] | None = None) -> dict[str, Real]:
    """Every result of ``graph`` by name, in the shape of its axes, for inputs by name.

    ``errors``: elementwise errors of inputs; inputs that are not named are exact.
    """
    sizes: dict[Axis, int] = {}
    values: dict[Value, Real] = {}
    for p in graph.params:
        sizes |= dict(zip(p.type.axes, inputs[p.name].shape, strict=True))
    for p in graph.params:
        value = _spread(p, inputs[p.name])
        error = _spread(p, errors[p.name]) if errors and p.name in errors else np.zeros_like(value)
        values[p] = Real(value, error)
    segment = segment_of(graph, sizes.get(D, 1))
    with np.errstate(all="ignore"):
        for eqn in graph.eqns:
            args = zip((values[a] for a in eqn.args), indexed_by_elements(eqn), strict=True)
            along_d = tuple(_of_elements(a, sizes[D], segment) if met else a for a, met in args)
            values[eqn.out] = MEANINGS[eqn.op](eqn, sizes, along_d)
    return {r.name: Real(_gather(r, values[r].value, sizes), _gather(r, values[r].error, sizes)) for r in graph.results}


def _spread(value: Value, array: Array) -> Array:
    return array.astype(np.float64)[tuple(slice(None) if a in value.type.axes else None for a in WIDE)]


def _of_elements(number: Real, d: int, segment: int) -> Real:
    """Repeats the number of each segment for its elements."""
    value, error = (
        np.repeat(np.broadcast_to(n, number.value.shape), segment, axis=1)[:, :d] for n in (number.value, number.error)
    )
    return Real(value, error)


def _gather(value: Value, array: Array, sizes: Sizes) -> Array:
    full = np.broadcast_to(array, [sizes[a] if a in value.type.axes else 1 for a in WIDE])
    return np.array(full[tuple(slice(None) if a in value.type.axes else 0 for a in WIDE)], order="C")


# ---- rounding ----


def rounded(eqn: Eqn, real: Real, times: float | Array = 1.0) -> Real:
    """A result that is rounded ``times`` times to the equation's dtype."""
    dtype = eqn.out.type.dtype
    return Real(real.value, real.error + times * dtype.roundoff * real.most + dtype.floor)


def _exact(meaning: Callable[..., Real]) -> Meaning:
    """An op of its operands alone whose result is not rounded."""
    return lambda eqn, sizes, args: meaning(*args)


def _once(meaning: Callable[..., Real]) -> Meaning:
    """An op of its operands alone whose result is rounded once."""
    return lambda eqn, sizes, args: rounded(eqn, meaning(*args))


def _known(value: Array) -> Real:
    return Real(value, np.zeros_like(value))


def _cast(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    widens = eqn.out.type.dtype.roundoff <= eqn.args[0].type.dtype.roundoff
    return args[0] if widens else rounded(eqn, args[0])


# ---- arithmetic ----


def _plus(a: Real, b: Real) -> Real:
    return Real(a.value + b.value, a.error + b.error)


def _minus(a: Real, b: Real) -> Real:
    return Real(a.value - b.value, a.error + b.error)


def _product(a: Real, b: Real) -> Real:
    return Real(a.value * b.value, a.error * np.abs(b.value) + b.error * np.abs(a.value) + a.error * b.error)


def _quotient(a: Real, b: Real) -> Real:
    """Its error is infinite where the divisor may be zero within its error."""
    value, least = a.value / b.value, np.abs(b.value) - b.error
    unknown = np.where(b.error > 0, np.inf, 0.0)
    return Real(value, np.where(least > 0, (a.error + np.abs(value) * b.error) / least, unknown))


def _root(a: Real) -> Real:
    value = np.sqrt(a.value)
    above = np.sqrt(a.value + a.error) - value
    return Real(value, np.maximum(above, value - np.sqrt(np.maximum(a.value - a.error, 0))))


def _reciprocal_root(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    return rounded(eqn, _quotient(_known(np.ones((1, 1))), rounded(eqn, _root(*args))))


# ---- functions ----

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


def _function(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    """What an error of the argument may change, and the bound in ``ULPS``: a unit is at most two roundoffs."""
    f, x, error = FUNCTIONS[eqn.op], args[0].value, args[0].error
    value = f(x)
    if eqn.op in ("gelu", "gelu_tanh", "silu"):
        moved = STEEPEST * error
    else:  # monotone
        moved = np.fmax(f(x + error) - value, value - f(x - error))
    ulps = ULPS[eqn.op] + (3 * np.abs(gelu_argument(x)) if eqn.op == "gelu_tanh" else np.zeros_like(x))
    return rounded(eqn, Real(value, np.where(error > 0, moved, 0.0)), 2 * ulps)


# ---- choices: exact but where an error moves the choice ----


def _clamp(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    return Real(np.clip(args[0].value, eqn.number_attr("low"), eqn.number_attr("high")), args[0].error)


def _rint(a: Real) -> Real:
    value = np.rint(a.value)
    return Real(value, np.maximum(np.rint(a.value + a.error) - value, value - np.rint(a.value - a.error)))


def _doubtful(a: Real, b: Real) -> Array:
    """True where a and b may be in either order."""
    error = a.error + b.error
    return np.asarray((np.abs(a.value - b.value) <= error) & (error > 0))


def _where_gt(a: Real, b: Real, c: Real, d: Real) -> Real:
    first = a.value > b.value
    other = np.abs(c.value - d.value) + np.maximum(c.error, d.error)
    chosen = np.where(first, c.error, d.error)
    return Real(np.where(first, c.value, d.value), np.where(_doubtful(a, b), other, chosen))


def _select(chosen: Callable[[Array, Array], Array]) -> Meaning:
    """c where the comparison of a and b holds, else 0."""

    def select(a: Real, b: Real, c: Real) -> Real:
        value = np.where(chosen(a.value, b.value), c.value, 0.0)
        return Real(value, np.where(_doubtful(a, b), c.most, np.where(value == 0, 0.0, c.error)))

    return _exact(select)


# ---- reductions ----


def _depth(eqn: Eqn, sizes: Sizes, terms: int) -> int:
    """The largest number of roundings along the path of a term, in a sum of ``terms``."""
    if eqn.axis is D:
        return row_depth(sizes[D])
    if eqn.axis is S:
        return terms - 1
    return column_depth(sizes[eqn.axis], sizes.get(D, 1))


def _sum(eqn: Eqn, sizes: Sizes, terms: Real) -> Real:
    """The sum over the equation's axis, rounded as often as the depth."""
    place = PLACES[eqn.axis]
    shape = list(terms.value.shape)
    shape[place] = sizes.get(eqn.axis, shape[place])
    value, error, most = (
        np.broadcast_to(n, shape).sum(axis=place, keepdims=True) for n in (terms.value, terms.error, terms.most)
    )
    return Real(value, error + (_depth(eqn, sizes, shape[place]) + 1) * eqn.out.type.dtype.roundoff * most)


def _reduce_mean(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    total, n = _sum(eqn, sizes, args[0]), sizes[eqn.axis]
    return rounded(eqn, Real(total.value / n, total.error / n))


def _segment_sums(eqn: Eqn, sizes: Sizes, terms: Real) -> Real:
    """The sum over each segment, rounded as often as a row of its length."""
    segment = _segment(eqn, sizes)
    starts = range(0, sizes[D], segment)
    shape = terms.value.shape[0], sizes[D]
    value, error, most = (
        np.add.reduceat(np.broadcast_to(n, shape), starts, axis=1) for n in (terms.value, terms.error, terms.most)
    )
    depth = row_depth(min(segment, sizes[D]))
    return Real(value, error + (depth + 1) * eqn.out.type.dtype.roundoff * most)


def _segment_size(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    starts = np.arange(0, sizes[D], _segment(eqn, sizes), dtype=np.float64)
    value = np.minimum(_segment(eqn, sizes), sizes[D] - starts)[None, :]
    return rounded(eqn, _known(value))


def _segment(eqn: Eqn, sizes: Sizes) -> int:
    return eqn.int_attr("segment") if "segment" in dict(eqn.attrs) else sizes[D]


def _reduce_max(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    """Of no rows: -inf, exactly."""
    place = PLACES[eqn.axis]
    largest = args[0].value.max(axis=place, keepdims=True, initial=-np.inf)
    return Real(largest, args[0].error.max(axis=place, keepdims=True, initial=0.0))


MEANINGS: dict[str, Meaning] = {
    "const": lambda eqn, sizes, args: rounded(eqn, _known(np.full((1, 1), eqn.value, np.float64))),
    "size": lambda eqn, sizes, args: rounded(eqn, _known(np.full((1, 1), float(sizes[eqn.axis])))),
    "cast": _cast,
    "expand": _exact(lambda a: a),
    "detach": _exact(lambda a: a),
    "neg": _exact(lambda a: Real(-a.value, a.error)),
    "add": _once(_plus),
    "sub": _once(_minus),
    "mul": _once(_product),
    "div": _once(_quotient),
    "fma": _once(lambda a, b, c: _plus(_product(a, b), c)),
    "sqrt": _once(_root),
    "rsqrt": _reciprocal_root,
    **dict.fromkeys(FUNCTIONS, _function),
    "maximum": _exact(lambda a, b: Real(np.maximum(a.value, b.value), np.maximum(a.error, b.error))),
    "minimum": _exact(lambda a, b: Real(np.minimum(a.value, b.value), np.maximum(a.error, b.error))),
    "relu": _exact(lambda a: Real(np.maximum(a.value, 0.0), a.error)),
    "abs": _exact(lambda a: Real(np.abs(a.value), a.error)),
    "clamp": _clamp,
    "rint": _exact(_rint),
    "where_gt": _exact(_where_gt),
    "select_gt": _select(np.greater),
    "select_eq": _select(np.equal),
    "reduce_sum": lambda eqn, sizes, args: _sum(eqn, sizes, args[0]),
    "reduce_dot": lambda eqn, sizes, args: _sum(eqn, sizes, _product(*args)),
    "reduce_mean": _reduce_mean,
    "reduce_max": _reduce_max,
    "segment_sum": lambda eqn, sizes, args: _segment_sums(eqn, sizes, args[0]),
    "segment_dot": lambda eqn, sizes, args: _segment_sums(eqn, sizes, _product(*args)),
    "segment_size": _segment_size,
}
