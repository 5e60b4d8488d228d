"""Arrays of a call that share memory: inputs may share it, and a result may overwrite exactly one input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lngen.errors import ArrayError
from lngen.ir import WIDE, Value
from lngen.ir.numerics import Array
from lngen.passes import accumulated

# Two arrays of a call by number, the first one written, and the differences between the first and the second address,
# in bytes, between which, both excluded, the arrays may overlap.
Near = tuple[int, int, int, int]


@dataclass(frozen=True)
class Extent:
    """The memory of an array of ``shape``, two dimensions at most, relative to its address; strides in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, value: Value, rows: int, d: int, stride: int) -> Extent:
        """The extent of ``value`` for ``rows`` rows, ``stride`` elements from one to the next if it is [M, D]."""
        size = value.type.dtype.size
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
    """Every result, None if it is a new array, with every input and every earlier result."""
    found = []
    for i, result in enumerate(extents[inputs:], inputs):
        for j, other in enumerate(extents[:i]):
            if result is None or other is None or 0 in result.shape or 0 in other.shape:
                continue
            (first, last), (others_first, others_last) = result.reach, other.reach
            found.append((i, j, others_first - last, others_last - first))
    return tuple(found)


def replaced(values: Sequence[Value], arrays: Sequence[Array | None], inputs: int, again: str = "") -> tuple[str, ...]:
    """Names of the inputs that a result overwrites exactly; ArrayError for a result that shares memory otherwise.

    The first ``inputs`` values are the inputs; a result that is None is a new array. ``again`` is the part of a
    schedule that reads inputs after results are stored: then a result may not overwrite an input. A result that is
    added to an input may overwrite that input, which is not among the names.
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


def check_result(value: Value, array: Array) -> None:
    """ArrayError if a NumPy array cannot be written to, element by element."""
    if not array.flags.writeable:
        raise ArrayError(f"'{value.name}' is written to, but is read-only; pass an array that may be changed.")
    reach = array.itemsize
    for stride, n in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < reach and array.size:
            raise ArrayError(
                f"'{value.name}' is written to, but its elements share memory or interleave: strides "
                f"{array.strides} in bytes for shape {array.shape}; pass a contiguous array."
            )
        reach += (n - 1) * stride
