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

from collections.abc import Mapping

import numpy as np

from lngen.check import real_functions
from lngen.check.real_choices import CHOICES
from lngen.check.real_number import Array, Meaning, Real, Sizes, rounded
from lngen.check.tolerances import ROUNDOFF, column_depth, row_depth
from lngen.ir import WIDE, Axis, D, Eqn, Graph, M, S, Value, indexed_by_elements, segment_of

PLACES = {M: 0, D: 1, S: 1}  # S is in the place of D: an equation has values along one of them, or combines both


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


# ---- operations ----


def _const(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    return rounded(eqn, np.full((1, 1), eqn.value, np.float64), np.zeros((1, 1)))


def _size(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    return rounded(eqn, np.full((1, 1), float(sizes[eqn.axis])), np.zeros((1, 1)))


def _cast(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    widens = ROUNDOFF[eqn.out.type.dtype] <= ROUNDOFF[eqn.args[0].type.dtype]
    return args[0] if widens else rounded(eqn, args[0].value, args[0].error)


def _neg(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    return Real(-args[0].value, args[0].error)


def _add(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    a, b = args
    return rounded(eqn, a.value + b.value, a.error + b.error)


def _sub(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    a, b = args
    return rounded(eqn, a.value - b.value, a.error + b.error)


def _product(a: Real, b: Real) -> Real:
    """Not rounded."""
    return Real(a.value * b.value, a.error * np.abs(b.value) + b.error * np.abs(a.value) + a.error * b.error)


def _mul(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    product = _product(*args)
    return rounded(eqn, product.value, product.error)


def _fma(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    product = _product(args[0], args[1])
    return rounded(eqn, product.value + args[2].value, product.error + args[2].error)


def _quotient(a: Real, b: Real) -> Real:
    """The quotient before rounding. Its error is infinite where the divisor may be zero within its error."""
    value, least = a.value / b.value, np.abs(b.value) - b.error
    unknown = np.where(b.error > 0, np.inf, 0.0)
    return Real(value, np.where(least > 0, (a.error + np.abs(value) * b.error) / least, unknown))


def _div(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    quotient = _quotient(*args)
    return rounded(eqn, quotient.value, quotient.error)


def _root(a: Real) -> Real:
    value = np.sqrt(a.value)
    above = np.sqrt(a.value + a.error) - value
    return Real(value, np.maximum(above, value - np.sqrt(np.maximum(a.value - a.error, 0))))


def _sqrt(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    root = _root(args[0])
    return rounded(eqn, root.value, root.error)


def _rsqrt(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    root = _sqrt(eqn, sizes, args)
    quotient = _quotient(Real(np.ones((1, 1)), np.zeros((1, 1))), root)
    return rounded(eqn, quotient.value, quotient.error)


def _function(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    return rounded(eqn, *real_functions.propagated(eqn.op, args[0].value, args[0].error))


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
    return Real(value, error + (_depth(eqn, sizes, shape[place]) + 1) * ROUNDOFF[eqn.out.type.dtype] * most)


def _reduce_sum(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    return _sum(eqn, sizes, args[0])


def _reduce_dot(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    return _sum(eqn, sizes, _product(*args))


def _reduce_mean(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    total, n = _sum(eqn, sizes, args[0]), sizes[eqn.axis]
    return rounded(eqn, total.value / n, total.error / n)


def _segment_sum(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    return _segment_sums(eqn, sizes, args[0])


def _segment_dot(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    return _segment_sums(eqn, sizes, _product(*args))


def _segment_sums(eqn: Eqn, sizes: Sizes, terms: Real) -> Real:
    """The sum over each segment, rounded as often as a row of its length."""
    segment = _segment(eqn, sizes)
    starts = range(0, sizes[D], segment)
    shape = terms.value.shape[0], sizes[D]
    value, error, most = (
        np.add.reduceat(np.broadcast_to(n, shape), starts, axis=1) for n in (terms.value, terms.error, terms.most)
    )
    depth = row_depth(min(segment, sizes[D]))
    return Real(value, error + (depth + 1) * ROUNDOFF[eqn.out.type.dtype] * most)


def _segment_size(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    starts = np.arange(0, sizes[D], _segment(eqn, sizes), dtype=np.float64)
    value = np.minimum(_segment(eqn, sizes), sizes[D] - starts)[None, :]
    return rounded(eqn, value, np.zeros_like(value))


def _segment(eqn: Eqn, sizes: Sizes) -> int:
    return eqn.int_attr("segment") if "segment" in dict(eqn.attrs) else sizes[D]


def _reduce_max(eqn: Eqn, sizes: Sizes, args: tuple[Real, ...]) -> Real:
    """Of no rows: -inf, exactly."""
    place = PLACES[eqn.axis]
    largest = args[0].value.max(axis=place, keepdims=True, initial=-np.inf)
    return Real(largest, args[0].error.max(axis=place, keepdims=True, initial=0.0))


MEANINGS: dict[str, Meaning] = CHOICES | {
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
    "detach": lambda eqn, sizes, args: args[0],
    **dict.fromkeys(real_functions.FUNCTIONS, _function),
    "sqrt": _sqrt,
    "rsqrt": _rsqrt,
    "reduce_mean": _reduce_mean,
    "reduce_sum": _reduce_sum,
    "reduce_dot": _reduce_dot,
    "segment_sum": _segment_sum,
    "segment_dot": _segment_dot,
    "segment_size": _segment_size,
    "reduce_max": _reduce_max,
}
