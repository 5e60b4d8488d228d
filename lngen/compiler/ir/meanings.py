"""What ops mean in NumPy and in CUDA, where the row of the op table has no room for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from lngen.compiler.ir import sums
from lngen.compiler.ir.axes import WIDE, D, Lengths, M, along
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array
from lngen.compiler.ir.types import F32, Attrs, Eqn
from lngen.dtypes import DType

# The value, in an array ``out`` that is no operand, or in one of its own.
NumpyMeaning = Callable[[tuple[Array, ...], Eqn, Lengths, Array | None], Array]
Fold = sums.ColumnSum | sums.ColumnMax
CudaMeaning = Callable[[tuple[str, ...], Eqn], str]


def each(function: Callable[..., Any]) -> NumpyMeaning:
    """The NumPy meaning that is a function of the operands alone, ``function(*args, out=out)``, as ufuncs are."""
    return lambda args, eqn, size, out: np.asarray(function(*args, out=out))


def cuda_text(template: str) -> CudaMeaning:
    """The C expression of a template; see ``lngen.compiler.ir.ops.op``."""

    def text(args: tuple[str, ...], eqn: Eqn) -> str:
        dtype = eqn.out.type.dtype
        return template.format(*args, f="f" if dtype is F32 else "", zero=literal(0.0, dtype))

    return text


def ctype(dtype: DType) -> str:
    """The C type of an element."""
    return dtype.ctype


def literal(value: float, dtype: DType) -> str:
    """A constant as C text that reads back to the same bits."""
    with np.errstate(over="ignore"):  # a constant beyond the largest number rounds to infinity
        v = NUMPY_DTYPE[dtype].type(value)
    bits = f"0x{np.array(v).view(np.uint32 if dtype is F32 else np.uint64):x}"
    if not np.isfinite(v):
        return f"__int_as_float({bits})" if dtype is F32 else f"__longlong_as_double({bits})"
    return f"{v!s}f" if dtype is F32 else str(v)  # the shortest digits that parse back to v


def cuda_cast(args: tuple[str, ...], eqn: Eqn) -> str:
    """The conversion of the device headers, or the operand itself."""
    to, given = eqn.out.type.dtype, eqn.args[0].type.dtype
    return args[0] if to is given else f"{to}_from_{given}({args[0]})"


def number(value: float, eqn: Eqn) -> Array:
    """A number of no axes, rounded to the dtype of its equation."""
    return np.array([[value]], NUMPY_DTYPE[eqn.out.type.dtype])


def size(args: tuple[Array, ...], eqn: Eqn, at: Lengths, out: Array | None) -> Array:
    """The length of an axis, or the elements of it that each element of another has."""
    axis, per = eqn.axis, eqn.per
    if per is None or not per.of_order:
        return number(at[axis] if per is None else at.per(axis, per), eqn)
    return sums.segment_sizes(at[D], _segment(eqn, at), eqn.out.type.dtype)[None, :]


def counted(args: tuple[Array, ...], eqn: Eqn, at: Lengths, out: Array | None) -> Array:
    """The places along an axis."""
    places = at.places(eqn.axis).astype(NUMPY_DTYPE[eqn.out.type.dtype])
    return places[:, None] if eqn.axis.root is M else places[None, :]


def expanded(args: tuple[Array, ...], eqn: Eqn, at: Lengths, out: Array | None) -> Array:
    """The operand, repeated along the equation's axis."""
    (x,), axis = args, eqn.axis
    place, has = WIDE.index(axis.root), along(eqn.args[0].type.axes, axis.root)
    if has is not None:
        return np.take(x, at.positions(axis, has), axis=place)
    shape = list(x.shape)
    shape[place] = len(at.places(axis))
    return np.ascontiguousarray(np.broadcast_to(x, shape))


def _segment(eqn: Eqn, at: Lengths) -> int:
    return eqn.int_attr("segment") if "segment" in dict(eqn.attrs) else at[D]


def reduced_sum(args: tuple[Array, ...], eqn: Eqn, at: Lengths, out: Array | None) -> Array:
    """The sum of an operand, or of the products of two, in the order that the attributes spell."""
    axis, to = eqn.axis, eqn.to
    terms = args if len(args) == 1 or args[0].shape == args[1].shape else np.broadcast_arrays(*args)
    if to is not None and to.period and to.each == 1:
        return _over_heads(terms, eqn, to.period)
    if to is not None and not to.of_order:
        return _grouped(terms, eqn, at, lambda each: _one_sum(each, eqn, at.per(axis, to)))
    if to is not None:
        return sums.segment_sums(*terms, **_row_order(eqn.attrs, at[D]))
    if axis.of_order:
        return np.asarray(sums.interleaved_sum(terms[0], _order(eqn.attrs).get("interleave", 1))[..., None])
    return _one_sum(terms, eqn, at[axis])


def _grouped(terms: Sequence[Array], eqn: Eqn, at: Lengths, reduce: Callable[[list[Array]], Array]) -> Array:
    """What ``reduce`` makes of the elements of each element of ``to``."""
    assert eqn.to is not None
    place = WIDE.index(eqn.axis.root)
    each = [reduce([np.take(t, g, axis=place) for t in terms]) for g in at.groups(eqn.axis, eqn.to)]
    return np.concatenate(each, axis=place) if each else np.take(terms[0], [], axis=place)  # of no rows


def _over_heads(terms: Sequence[Array], eqn: Eqn, period: int) -> Array:
    """The sum of what repeats along rows: as that of the rows of a column, which here are the heads."""
    rows = terms[0].shape[0]
    heads = [np.moveaxis(t.reshape(rows, -1, period), 1, 0).reshape(-1, rows * period) for t in terms]
    return sums.column_sum(*heads, **_order(eqn.attrs)).reshape(rows, period)


def _one_sum(terms: Sequence[Array], eqn: Eqn, count: int) -> Array:
    """The sum of all ``count`` elements of rows, or of columns."""
    if eqn.axis.root is D:
        interleave = _order(eqn.attrs).get("interleave", 1)
        return np.asarray(sums.row_sum(*terms, **_row_order(eqn.attrs, count), interleave=interleave)[..., None])
    of_set = "stretch" in dict(eqn.attrs)
    return (sums.set_sum if of_set else sums.column_sum)(*terms, **_order(eqn.attrs))[None, :]


def fold_of_rows(eqn: Eqn, rows: int) -> Fold:
    """The sum or the maximum of an equation over all ``rows``, to which their blocks are added in turn."""
    return sums.ColumnMax() if eqn.op == "reduce_max" else sums.ColumnSum(rows, **_order(eqn.attrs))


def _row_order(attrs: Attrs, count: int) -> dict[str, Any]:
    return {"chunk": 1, "segment": count} | {k: n for k, n in _order(attrs).items() if k != "interleave"}


@cache
def _order(attrs: Attrs) -> dict[str, Any]:
    """The attributes of a sum that are its order."""
    return {k: n for k, n in attrs if isinstance(n, int)}


def reduced_max(args: tuple[Array, ...], eqn: Eqn, at: Lengths, out: Array | None) -> Array:
    """The largest element along the equation's axis, or of those that belong to one of ``to``."""
    place, x = WIDE.index(eqn.axis.root), args[0]
    largest = sums.column_max if eqn.axis.root is M else sums.row_max
    if eqn.to is None:
        return np.expand_dims(largest(x), place)
    return _grouped([x], eqn, at, lambda each: np.expand_dims(largest(*each), place))
