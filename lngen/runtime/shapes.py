"""Checks of the arrays of a call, before any GPU work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from lngen.errors import ArrayError
from lngen.ir import Axis, DType, Value
from lngen.runtime.arrays import Layout


def leading(value: Value, shape: Sequence[int], d: int) -> tuple[int, ...]:
    """The leading shape of an array: all dimensions but the last of [..., D], all of an array with a number per row."""
    if Axis.D not in value.type.axes:
        return tuple(shape)
    if len(shape) < 1 or shape[-1] != d:
        raise ArrayError(f"'{value.name}' is expected to have shape (..., {d}), the spec's D last, got {tuple(shape)}.")
    return tuple(shape[:-1])


def check_layout(value: Value, layout: Layout, dtype: DType | None, rows: tuple[int, ...], d: int, device: int) -> None:
    """ArrayError if an array does not have the dtype, shape or device that ``value`` requires."""
    own, shape, _, where = layout
    if dtype is not value.type.dtype:
        raise ArrayError(
            f"'{value.name}' is expected to be {value.type.dtype}, got {own}; cast it, or compile for its dtype."
        )
    if tuple(shape) != (expected := value.type.shape(rows, d)):
        raise ArrayError(f"'{value.name}' is expected to have shape {expected}, got {tuple(shape)}.")
    if where < 0:
        raise ArrayError(
            f"'{value.name}' is expected on {'a GPU' if device < 0 else f'GPU {device}'}, but lies on the CPU; move it "
            "there, or pass NumPy arrays."
        )
    if where != device:
        raise ArrayError(f"'{value.name}' is expected on GPU {device}, where other arrays lie, got GPU {where}.")


def row_stride(value: Value, layout: Layout, *, written: bool) -> int:
    """Elements from one row to the next; ArrayError if rows are not evenly spaced or a row is not contiguous."""
    _, shape, strides, _ = layout
    if math.prod(shape) == 0:
        return shape[-1]
    if Axis.D in value.type.axes and shape[-1] > 1 and strides[-1] != 1:
        raise ArrayError(
            f"'{value.name}' is expected to have contiguous rows (last stride 1), got strides {tuple(strides)} in "
            "elements; call .contiguous() or ascontiguousarray first."
        )
    outer = [(n, s) for n, s in zip(shape, strides, strict=True)][: -1 if Axis.D in value.type.axes else None]
    stride = _one_stride(value, [(n, s) for n, s in outer if n > 1], tuple(strides))
    if stride is None:
        return shape[-1] if Axis.D in value.type.axes else 1
    least = shape[-1] if Axis.D in value.type.axes else 1
    if written and abs(stride) < least:
        raise ArrayError(
            f"'{value.name}' is written to, but its rows overlap: row stride {stride}, row length {least}."
        )
    if Axis.D not in value.type.axes and stride != 1:
        raise ArrayError(f"'{value.name}' is expected to be contiguous, got strides {tuple(strides)} in elements.")
    return stride


def _one_stride(value: Value, dims: list[tuple[int, int]], strides: tuple[int, ...]) -> int | None:
    """The stride of the flattened outer dimensions, None if there is at most one row."""
    for (_, outer), (n, inner) in pairwise(dims):
        if outer != n * inner:
            raise ArrayError(
                f"'{value.name}' is expected to have rows at one distance, got strides {strides} in elements; "
                "call .contiguous() or ascontiguousarray first."
            )
    return dims[-1][1] if dims else None
