"""What the arrays of a call have to be: dtype, shape, strides, device, and which of them may share memory.

All of it is checked before any GPU work. Inputs may share memory. A result may take the place of exactly one input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from lngen.errors import ArrayError
from lngen.ir import WIDE, Axis, DType, Value
from lngen.ir.numerics import Array
from lngen.lower import Distance
from lngen.passes import accumulated
from lngen.runtime.arrays import Layout
from lngen.runtime.two_distances import AGAIN, fits


def leading(value: Value, shape: Sequence[int], d: int) -> tuple[int, ...]:
    """The dimensions that count rows: all but the last of an array [..., D], all of one with a number per row."""
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


def check_rows(value: Value, layout: Layout) -> None:
    """ArrayError if a row is not contiguous."""
    _, shape, strides, _ = layout
    if math.prod(shape) and Axis.D in value.type.axes and shape[-1] > 1 and strides[-1] != 1:
        raise ArrayError(
            f"'{value.name}' is expected to have contiguous rows (last stride 1), got strides {tuple(strides)} in "
            "elements; call .contiguous() or ascontiguousarray first."
        )


def row_stride(value: Value, layout: Layout, *, written: bool) -> int:
    """Elements from one row to the next; ArrayError if rows are not evenly spaced or a row is not contiguous."""
    _, shape, strides, _ = layout
    if math.prod(shape) == 0:
        return shape[-1]
    check_rows(value, layout)
    outer = [(n, s) for n, s in zip(shape, strides, strict=True)][: -1 if Axis.D in value.type.axes else None]
    stride = _one_stride(value, [(n, s) for n, s in outer if n > 1], layout)
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


def _one_stride(value: Value, dims: list[tuple[int, int]], layout: Layout) -> int | None:
    """The stride of the flattened outer dimensions, None if there is at most one row."""
    for (_, outer), (n, inner) in pairwise(dims):
        if outer != n * inner:
            two = value.type.axes == WIDE and fits(layout)
            raise ArrayError(
                f"'{value.name}' is expected to have rows at one distance, got strides {tuple(layout[2])} in elements; "
                f"{AGAIN}{', or compile with strides=2, for rows at two distances' if two else ''}."
            )
    return dims[-1][1] if dims else None


# ---- memory that arrays share ----

# Two arrays of a call by number, of which the first is written, and two bounds: the arrays may share memory if the
# first address minus the second, in bytes, lies between the bounds, both excluded.
Near = tuple[int, int, int, int]


@dataclass(frozen=True)
class Extent:
    """The memory of an array of at most three dimensions, relative to its address; strides and size are in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, value: Value, rows: int, d: int, stride: Distance, inner: int = 1) -> Extent:
        """The extent of ``value`` for ``rows`` rows, ``stride`` elements from one to the next if it is [M, D].

        Of rows at two distances, ``inner`` are side by side, and ``rows`` is a multiple of that.
        """
        size = value.type.dtype.size
        if isinstance(stride, tuple):
            return cls((rows // inner, inner, d), (stride[0] * size, stride[1] * size, size), size)
        strides = (stride * size, size) if value.type.axes == WIDE else (size,) * len(value.type.axes)
        return cls(value.type.shape(rows, d), strides, size)

    @property
    def reach(self) -> tuple[int, int]:
        """The first byte, and the byte after the last, relative to the address."""
        ends = [(n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)]
        return sum(e for e in ends if e < 0), sum(e for e in ends if e > 0) + self.size

    def at(self, address: int) -> Array:
        """An array at the address for NumPy to analyse, not to read: it may be on a GPU."""
        place = {"data": (address, False), "typestr": f"|V{self.size}", "shape": self.shape, "strides": self.strides}
        return np.asarray(_Interface(place | {"version": 3}))


class _Interface:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def near(extents: Sequence[Extent | None], inputs: int) -> tuple[Near, ...]:
    """Pairs of each result with each input and each earlier result; a result that is None is a new array."""
    found = []
    for i, result in enumerate(extents[inputs:], inputs):
        for j, other in enumerate(extents[:i]):
            if result is None or other is None or 0 in result.shape or 0 in other.shape:
                continue
            (first, last), (others_first, others_last) = result.reach, other.reach
            found.append((i, j, others_first - last, others_last - first))
    return tuple(found)


def replaced(values: Sequence[Value], arrays: Sequence[Array | None], inputs: int, again: str = "") -> tuple[str, ...]:
    """Names of the inputs of which a result takes the exact place; ArrayError if a result shares memory otherwise.

    The first ``inputs`` values are the inputs. A result that is None is a new array. ``again`` is the part of a
    schedule that reads inputs after results are stored; with it, no result may take an input's place. A result that is
    added to an input may always take the place of that input, whose name is not returned.
    """
    found = []
    for i, result in enumerate(arrays[inputs:], inputs):
        for j, other in enumerate(arrays[:i]):
            if result is None or other is None or not np.shares_memory(result, other):
                continue
            what, with_what = values[i].name, values[j].name
            if j >= inputs:
                raise ArrayError(
                    f"'{what}' and '{with_what}' are both written to, but share memory; pass one array each."
                )
            added = with_what == accumulated(what)
            if added and _same_place(result, other):
                continue
            if not (values[i].type.axes == values[j].type.axes == WIDE and _same_place(result, other)):
                raise ArrayError(
                    f"'{what}' is written to, but shares memory with '{with_what}'; pass an array of its own, or "
                    "exactly an [M, D] input of its layout and element size."
                )
            if again:
                raise ArrayError(
                    f"'{what}' takes the place of '{with_what}', which kernels with {again} read again after they have "
                    "written to it; pass an array of its own, or compile with another schedule."
                )
            found.append(with_what)
    return tuple(found)


def _same_place(a: Array, b: Array) -> bool:
    """True if all elements have the same addresses."""
    if (a.ctypes.data, a.shape, a.itemsize) != (b.ctypes.data, b.shape, b.itemsize):
        return False
    return all(n == 1 or s == t for n, s, t in zip(a.shape, a.strides, b.strides, strict=True))
