"""The real-number meaning of ops, as exactly as float64 allows, with the error bound of their rounded evaluation.

It shares nothing with the NumPy meaning: no cast rounds, and sums are NumPy's. Each value carries its bound: the
propagated errors of the operands, to all orders, and half a unit in the last place of the value's own dtype. This is a
running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, section 3.3). A sum adds the errors of
its terms. Each rounding along the path of a term adds a unit roundoff of the sum of their absolute values (section
4.2); ``row_depth`` and ``column_depth`` bound the number of these roundings. The error of a selection whose operands
may be in either order is as large as the selected value. No number is assumed to overflow, no intermediate one to be
subnormal.

The signs of the errors are assumed independent. So the bound is larger than that of a derivation by hand, which uses
for example that the sum of a centred row vanishes; the error of a wrong formula exceeds both by far.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lngen.compiler.ir import numerics
from lngen.compiler.ir.axes import WIDE, D, Lengths
from lngen.compiler.ir.numerics import column_depth, row_depth
from lngen.compiler.ir.types import F64, Eqn
from lngen.dtypes import QUANTISED, DType

Array = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Real:
    """Numbers over an axis of M and one of D, of length 1 along absent ones.

    ``error``: the error bound of a rounded evaluation.
    """

    value: Array
    error: Array

    @property
    def most(self) -> Array:
        """The largest absolute value that the rounded number may have."""
        return np.abs(self.value) + self.error


@dataclass(frozen=True)
class Setting:
    """The lengths of axes; ``wide``: every value is rounded to float64, as here, not to its own dtype."""

    sizes: Lengths
    wide: bool = False

    def held(self, eqn: Eqn) -> DType:
        """The dtype to which the equation's result is rounded."""
        return F64 if self.wide else eqn.out.type.dtype


Meaning = Callable[[tuple[Real, ...], Eqn, Setting], Real]

# ---- rounding ----


def rounded(real: Real, to: DType, times: float | Array = 1.0) -> Real:
    """A result that is rounded ``times`` times to a dtype."""
    return Real(real.value, real.error + times * to.roundoff * real.most + to.floor)


def exact(meaning: Callable[..., Real]) -> Meaning:
    """An op of its operands alone whose result is not rounded."""
    return lambda args, eqn, at: meaning(*args)


def once(meaning: Callable[..., Real]) -> Meaning:
    """An op of its operands alone whose result is rounded once."""
    return lambda args, eqn, at: rounded(meaning(*args), at.held(eqn))


def of_bits(meaning: Callable[..., Array]) -> Meaning:
    """An op on the bits of f32: that of the numbers rounded to f32, with no bound."""

    def found(*args: Real) -> Real:
        value = meaning(*(a.value.astype(np.float32) for a in args)).astype(np.float64)
        return Real(value, np.full_like(value, np.inf))

    return exact(found)


def known(value: Array) -> Real:
    """Numbers without an error."""
    return Real(value, np.zeros_like(value))


def number(value: float, eqn: Eqn, at: Setting) -> Real:
    """A number of no axes, rounded to the dtype of its equation; an infinite one is exact."""
    found = known(np.full((1, 1), value, np.float64))
    return found if math.isinf(value) else rounded(found, at.held(eqn))


@exact
def same(a: Real) -> Real:
    """The operand."""
    return a


def expand(args: tuple[Real, ...], eqn: Eqn, at: Setting) -> Real:
    """The operand, an element of it for each element of a finer axis; along an absent axis it stays of length 1."""
    (a,), axis = args, eqn.axis
    has = eqn.args[0].type.along(axis.root)
    if has is None:
        return a
    positions, place = at.sizes.positions(axis, has), WIDE.index(axis.root)
    return Real(np.take(a.value, positions, axis=place), np.take(a.error, positions, axis=place))


def cast(args: tuple[Real, ...], eqn: Eqn, at: Setting) -> Real:
    """The operand, in the range of a dtype that saturates; a wide setting rounds nothing."""
    to, given = eqn.out.type.dtype, eqn.args[0].type.dtype
    if at.wide or 0 < given.digits <= to.digits:
        return args[0]
    if to is DType.I32:
        return Real(np.rint(args[0].value), np.where(args[0].error < 0.5, 0.0, args[0].error + 0.5))
    if to in QUANTISED:
        return rounded(Real(np.clip(args[0].value, -to.largest, to.largest), args[0].error), to)
    return rounded(args[0], to)


# ---- arithmetic ----


@exact
def neg(a: Real) -> Real:
    """-a."""
    return Real(-a.value, a.error)


def _total(a: Real, b: Real) -> Real:
    """a + b."""
    return Real(a.value + b.value, a.error + b.error)


@once
def sub(a: Real, b: Real) -> Real:
    """a - b."""
    return Real(a.value - b.value, a.error + b.error)


def _product(a: Real, b: Real) -> Real:
    """a * b."""
    return Real(a.value * b.value, a.error * np.abs(b.value) + b.error * np.abs(a.value) + a.error * b.error)


def _quotient(a: Real, b: Real) -> Real:
    """a / b; its error is infinite where the divisor may be zero within its error."""
    value, least = a.value / b.value, np.abs(b.value) - b.error
    unknown = np.where(b.error > 0, np.inf, 0.0)
    return Real(value, np.where(least > 0, (a.error + np.abs(value) * b.error) / least, unknown))


def _root(a: Real) -> Real:
    """The square root."""
    value = np.sqrt(a.value)
    above = np.sqrt(a.value + a.error) - value
    return Real(value, np.maximum(above, value - np.sqrt(np.maximum(a.value - a.error, 0))))


def rsqrt(args: tuple[Real, ...], eqn: Eqn, at: Setting) -> Real:
    """1 / sqrt(a), rounded twice."""
    to = at.held(eqn)
    return rounded(_quotient(known(np.ones((1, 1))), rounded(_root(*args), to)), to)


@once
def weighted(a: Real, b: Real) -> Real:
    """a * b, and 0 where a is 0."""
    product, dropped = _product(a, b), (a.value == 0) & (a.error == 0)
    return Real(np.where(dropped, 0.0, product.value), np.where(dropped, 0.0, product.error))


add, mul, div, sqrt = once(_total), once(_product), once(_quotient), once(_root)
fma = once(lambda a, b, c: _total(_product(a, b), c))


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


def decay(x: Array) -> Array:
    """e^x for x up to 88, e^88 above."""
    return np.asarray(np.exp(np.minimum(x, 88.0)))


def decay_ulps(x: Array) -> Array:
    """2.5, and all of a result that may be 0."""
    return np.where(decay(x) < 2.0**-126, 2.0**23, 2.5)


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x), without overflow."""
    power = np.exp(-np.abs(x))
    return np.asarray(np.where(x < 0, power, 1.0) / (1 + power))


def softplus(x: Array) -> Array:
    """log(1 + e^x), without overflow."""
    return np.asarray(np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))


def gelu(x: Array) -> Array:
    """x Phi(x)."""
    return np.asarray(x * normal_cdf(x))


def gelu_argument(x: Array) -> Array:
    """2 u for gelu_tanh(x) = x (1 + tanh(u)) / 2."""
    return np.asarray(GELU * (x + 0.044715 * x**3))


def gelu_tanh(x: Array) -> Array:
    """x (1 + tanh(u)) / 2."""
    return np.asarray(x * sigmoid(gelu_argument(x)))


def silu(x: Array) -> Array:
    """x sigmoid(x)."""
    return np.asarray(x * sigmoid(x))


def function(f: Callable[[Array], Array], ulps: float | Callable[[Array], Array]) -> Meaning:
    """What an error of the argument may change, and the function's own bound: a unit is at most two roundoffs."""

    def meaning(args: tuple[Real, ...], eqn: Eqn, at: Setting) -> Real:
        x, error = args[0].value, args[0].error
        value = f(x)
        if f in (gelu, gelu_tanh, silu):
            moved = STEEPEST * error
        else:  # monotone
            moved = np.fmax(f(x + error) - value, value - f(x - error))
        units = ulps(x) if callable(ulps) else ulps
        return rounded(Real(value, np.where(error > 0, moved, 0.0)), at.held(eqn), 2 * units)

    return meaning


# ---- choices: exact but where an error moves the choice ----


@exact
def maximum(a: Real, b: Real) -> Real:
    """The larger one; its error is that of a maximum of what either may be."""
    return _of_two(np.maximum, a, b)


@exact
def minimum(a: Real, b: Real) -> Real:
    """The smaller one, likewise."""
    return _of_two(np.minimum, a, b)


def _of_two(choose: Callable[[Array, Array], Array], a: Real, b: Real) -> Real:
    value = choose(a.value, b.value)
    most, least = choose(a.value + a.error, b.value + b.error), choose(a.value - a.error, b.value - b.error)
    return Real(value, np.where(np.isinf(value), 0.0, np.maximum(most - value, value - least)))


@exact
def abs_(a: Real) -> Real:
    """|a|."""
    return Real(np.abs(a.value), a.error)


@exact
def copysign(a: Real, b: Real) -> Real:
    """|a| with the sign of b, which may be the other one where b may be 0."""
    doubtful = (np.abs(b.value) <= b.error) & (b.error > 0)
    return Real(np.copysign(a.value, b.value), a.error + np.where(doubtful, 2 * np.abs(a.value), 0.0))


@exact
def relu(a: Real) -> Real:
    """max(a, 0)."""
    return Real(np.maximum(a.value, 0.0), a.error)


def clamp(args: tuple[Real, ...], eqn: Eqn, at: Setting) -> Real:
    """The operand between two numbers."""
    return Real(np.clip(args[0].value, eqn.number_attr("low"), eqn.number_attr("high")), args[0].error)


@exact
def rint(a: Real) -> Real:
    """The nearest whole number."""
    value = np.rint(a.value)
    return Real(value, np.maximum(np.rint(a.value + a.error) - value, value - np.rint(a.value - a.error)))


@exact
def where_gt(a: Real, b: Real, c: Real, d: Real) -> Real:
    """c where a > b, else d."""
    first = a.value > b.value
    other = np.abs(c.value - d.value) + np.maximum(c.error, d.error)
    chosen = np.where(first, c.error, d.error)
    return Real(np.where(first, c.value, d.value), np.where(_doubtful(a, b), other, chosen))


@exact
def select_gt(a: Real, b: Real, c: Real) -> Real:
    """c where a > b, else 0."""
    return _selected(a.value > b.value, _doubtful(a, b), c)


def select_eq(args: tuple[Real, ...], eqn: Eqn, at: Setting) -> Real:
    """c where a equals b, else 0. Numbers that are equal in float64 are the same number, such as a maximum."""
    a, b, c = args
    equal = np.asarray(a.value == b.value)
    return _selected(equal, _doubtful(a, b) & ~(at.wide & equal), c)


def take(args: tuple[Real, ...], eqn: Eqn, at: Setting) -> Real:
    """The element of each row at its index, else 0."""
    x, index = args
    return Real(*(numerics.take(np.asarray(part), index.value) for part in (x.value, x.error)))


def _selected(chosen: NDArray[np.bool_], doubtful: NDArray[np.bool_], c: Real) -> Real:
    value = np.where(chosen, c.value, 0.0)
    return Real(value, np.where(doubtful, c.most, np.where(value == 0, 0.0, c.error)))


def _doubtful(a: Real, b: Real) -> NDArray[np.bool_]:
    """True where a and b may be in either order."""
    error = a.error + b.error
    return np.asarray((np.abs(a.value - b.value) <= error) & (error > 0))


def rotate(args: tuple[Real, ...], eqn: Eqn, at: Setting) -> Real:
    """Features a quarter turn on, in their planes; exactly."""
    error = np.abs(numerics.turned(args[0].error, **numerics.planes(eqn.attrs)))
    return Real(numerics.turned(args[0].value, **numerics.planes(eqn.attrs)), error)


def gather(args: tuple[Real, ...], eqn: Eqn, at: Setting) -> Real:
    """The row of a table at the index of each row."""
    table, index = args
    return Real(*(numerics.gather(part, index.value) for part in (table.value, table.error)))


# ---- lengths and reductions ----


def size(args: tuple[Real, ...], eqn: Eqn, at: Setting) -> Real:
    """The length of an axis, or the elements of it that each element of another has."""
    per, sizes = eqn.per, at.sizes
    if per is None or not per.of_order:
        return number(sizes[eqn.axis] if per is None else sizes.per(eqn.axis, per), eqn, at)
    counts = np.bincount(sizes.positions(D, per)).astype(np.float64)
    return rounded(known(counts[None, :]), at.held(eqn))


def iota(args: tuple[Real, ...], eqn: Eqn, at: Setting) -> Real:
    """The places along an axis, exactly."""
    places = np.arange(at.sizes[eqn.axis], dtype=np.float64)
    return known(places[None, :] if eqn.axis.root is D else places[:, None])


def _groups(x: Array, eqn: Eqn, at: Setting) -> list[Array]:
    """The elements along the equation's axis, for each element of ``to``; all of them if it has none."""
    axis, to = eqn.axis, eqn.to
    place = WIDE.index(axis.root)
    shape = list(x.shape)
    shape[place] = at.sizes[axis]
    full = np.broadcast_to(x, shape)
    if to is None:
        return [full]
    if to.of_order:
        return np.split(full, range(at.sizes.segment, at.sizes[axis], at.sizes.segment), axis=place)
    return [np.take(full, group, axis=place) for group in at.sizes.groups(axis, to)]


def _each(reduce: Callable[[Array], Array], x: Array, eqn: Eqn, at: Setting) -> Array:
    """What ``reduce`` makes of each of the groups."""
    place, found = WIDE.index(eqn.axis.root), [*map(reduce, _groups(x, eqn, at))]
    return np.concatenate(found, axis=place) if found else np.take(x, [], axis=place)  # of no rows


def _depth(eqn: Eqn, at: Setting, terms: int) -> int:
    """The largest number of roundings along the path of a term, in a sum of ``terms``."""
    if eqn.axis.of_order or (eqn.to is not None and eqn.to.period):
        return terms - 1
    return row_depth(terms) if eqn.axis.root is D else column_depth(terms, at.sizes.get(D, 1))


def reduce_sum(args: tuple[Real, ...], eqn: Eqn, at: Setting) -> Real:
    """The sum of the operand, or of the products of two, rounded as often as the depth."""
    terms, place = args[0] if len(args) == 1 else _product(*args), WIDE.index(eqn.axis.root)

    def total(x: Array) -> Array:
        return _each(lambda group: group.sum(axis=place, keepdims=True), x, eqn, at)

    count = max((group.shape[place] for group in _groups(terms.value, eqn, at)), default=0)
    times = _depth(eqn, at, count) + 1
    return Real(total(terms.value), total(terms.error) + times * at.held(eqn).roundoff * total(terms.most))


def reduce_mean(args: tuple[Real, ...], eqn: Eqn, at: Setting) -> Real:
    """The sum over the length."""
    found, n = reduce_sum(args, eqn, at), at.sizes[eqn.axis] if eqn.to is None else at.sizes.per(eqn.axis, eqn.to)
    return rounded(Real(found.value / n, found.error / n), at.held(eqn))


def reduce_max(args: tuple[Real, ...], eqn: Eqn, at: Setting) -> Real:
    """The largest element; of no rows -inf, exactly."""
    place = WIDE.index(eqn.axis.root)

    def largest(x: Array, initial: float) -> Array:
        return _each(lambda group: group.max(axis=place, keepdims=True, initial=initial), x, eqn, at)

    return Real(largest(args[0].value, -np.inf), largest(args[0].error, 0.0))
