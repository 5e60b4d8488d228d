"""What ops mean in NumPy and in CUDA, where the row of the op table has no room for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lngen.compiler.ir import numerics
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array
from lngen.compiler.ir.types import F32, WIDE, Axis, Eqn
from lngen.dtypes import DType

NumpyMeaning = Callable[[tuple[Array, ...], Eqn, Mapping[Axis, int]], Array]
CudaMeaning = Callable[[tuple[str, ...], Eqn], str]


def each(function: Callable[..., Any]) -> NumpyMeaning:
    """The NumPy meaning that is a function of the operands alone."""
    return lambda args, eqn, size: np.asarray(function(*args))


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
    return np.full((1, 1), value, NUMPY_DTYPE[eqn.out.type.dtype])


def expanded(args: tuple[Array, ...], eqn: Eqn, size: Mapping[Axis, int]) -> Array:
    """The operand, repeated along the equation's axis."""
    shape = list(args[0].shape)
    shape[WIDE.index(eqn.axis)] = size[eqn.axis]
    return np.ascontiguousarray(np.broadcast_to(args[0], shape))


def reduced_sum(args: tuple[Array, ...], eqn: Eqn, size: Mapping[Axis, int]) -> Array:
    """The sum of an operand, or of the products of two, in the order that the attributes spell."""
    attrs: dict[str, Any] = dict(eqn.attrs)
    terms, interleave = np.broadcast_arrays(*args), attrs.get("interleave", 1)
    if eqn.axis is Axis.D:
        return np.asarray(numerics.row_sum(*terms, **_row_order(eqn, size), interleave=interleave)[..., None])
    if eqn.axis is Axis.S:
        return np.asarray(numerics.interleaved_sum(terms[0], interleave)[..., None])
    order = {k: attrs.get(k, 1) for k in ("groups", "blocks", "interleave")}
    return numerics.column_sum(*terms, **order)[None, :]


def _row_order(eqn: Eqn, size: Mapping[Axis, int]) -> dict[str, Any]:
    attrs = dict(eqn.attrs)
    return {"chunk": attrs.get("chunk", 1), "segment": attrs.get("segment", size[Axis.D]), "run": attrs.get("run")}


def segment_sums(args: tuple[Array, ...], eqn: Eqn, size: Mapping[Axis, int]) -> Array:
    """The sum of an operand, or of the products of two, over each segment."""
    return numerics.segment_sums(*np.broadcast_arrays(*args), **_row_order(eqn, size))


def segment_sizes(args: tuple[Array, ...], eqn: Eqn, size: Mapping[Axis, int]) -> Array:
    """The number of elements of each segment."""
    segment = _row_order(eqn, size)["segment"]
    return numerics.segment_sizes(size[Axis.D], segment, eqn.out.type.dtype)[None, :]


def reduced_max(args: tuple[Array, ...], eqn: Eqn, size: Mapping[Axis, int]) -> Array:
    """The largest element along the equation's axis."""
    over_rows = eqn.axis is Axis.M
    return numerics.column_max(args[0])[None, :] if over_rows else numerics.row_max(args[0])[..., None]
