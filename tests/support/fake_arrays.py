"""A library of arrays in memory of a fake GPU: a layout, with strides in elements, and an address."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fake_driver import FakeDriver
from lngen.compiler.ir.numerics import Array
from lngen.dtypes import READ
from lngen.launch.arrays import Layout
from lngen.launch.signature import contiguous

NUMPY = {t.value: np.dtype(t.numpy()) for t in READ}


@dataclass(frozen=True)
class FakeArray:
    """``strides`` in elements."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    device: int = 0


class FakeArrays:
    """What lngen asks of a library of arrays. ``made``: the new arrays; ``stream_of``: the current stream."""

    def __init__(self, allocate: Callable[[int], int]) -> None:
        self.allocate, self.made = allocate, list[FakeArray]()
        self.stream_of: Callable[[], int] = lambda: 0

    def array(self, dtype: str, *shape: int, strides: Sequence[int] = (), address: int | None = None) -> FakeArray:
        """An array at ``address``, or in memory of its own, all of that of its first dimension."""
        strides = tuple(strides) or contiguous(shape)
        size = NUMPY[dtype].itemsize * max(math.prod(shape), shape[0] * strides[0] if shape else 0)
        return FakeArray(dtype, shape, strides, self.allocate(size) if address is None else address)

    def view(self, array: FakeArray, *, written: bool) -> FakeArray:
        return array

    def describe(self, given: Sequence[FakeArray]) -> tuple[list[int], list[Layout]]:
        return [a.address for a in given], [(a.dtype, a.shape, a.strides, a.device) for a in given]

    def in_elements(self, layout: Layout) -> Layout:
        return layout

    def dtype(self, own: str) -> str:
        return own

    def stream(self, device: int) -> int:
        return self.stream_of()

    def maker(
        self, shape: Sequence[int], dtype: str, device: int, strides: Sequence[int] = ()
    ) -> Callable[[], FakeArray]:
        def make() -> FakeArray:
            self.made.append(self.array(str(dtype), *shape, strides=strides))
            return self.made[-1]

        return make


class ArraysOf(FakeArrays):
    """Those in memory of a driver's first GPU, which can be read."""

    def __init__(self, gpu: FakeDriver) -> None:
        self._memories = gpu.memories
        super().__init__(lambda size: gpu.memories.allocate(0, size) if size else 0)

    def of_call(self, host: Any, name: str) -> FakeArray:
        """An array of a call (launchers.py)."""
        laid = host.memory.laid[name]
        return FakeArray(laid.dtype, laid.shape, laid.strides, host.address(name))

    def put(self, content: Array) -> FakeArray:
        """A new array with that content."""
        name = next(name for name, dtype in NUMPY.items() if dtype == content.dtype)
        array = self.array(name, *content.shape)
        self._memories.put(array.address, content.tobytes())
        return array

    def read(self, array: FakeArray) -> Array:
        """The content of a new array; what lies behind the rows of columns has to be zero."""
        dtype, steps = NUMPY[array.dtype], (array.shape[:1], array.strides[:1])
        size = dtype.itemsize * math.prod((*steps[0], *steps[1]))
        whole = np.frombuffer(self._memories.content(array.address, size), dtype)
        found = np.ndarray(array.shape, dtype, whole, strides=[dtype.itemsize * step for step in array.strides])
        assert np.count_nonzero(whole) == np.count_nonzero(found)
        return found
