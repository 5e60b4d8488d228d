"""Arrays with their memory: a copy, here or on a GPU, keeps strides and offset from an aligned address."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lngen.ir.numerics import Array


@dataclass(frozen=True)
class Laid:
    """An array as a window on its memory; strides and offset in elements."""

    memory: Array
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def on(self, memory: Array) -> Array:
        """The same window on other memory of the same size and type."""
        size = memory.itemsize
        strides = tuple(s * size for s in self.strides)
        raw = memory.view(np.uint8)
        return np.ndarray(self.shape, memory.dtype, buffer=raw.data, offset=self.offset * size, strides=strides)


def laid(a: Array) -> Laid:
    """The window that ``a`` is on the array that owns its memory."""
    owner = a
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if a.size == 0 or not owner.flags.c_contiguous:
        whole = np.ascontiguousarray(a)
        return Laid(whole.reshape(-1), 0, a.shape, tuple(s // a.itemsize for s in whole.strides))
    start = int(a.__array_interface__["data"][0]) - int(owner.__array_interface__["data"][0])
    memory = owner.reshape(-1).view(np.uint8).view(a.dtype)
    return Laid(memory, start // a.itemsize, a.shape, tuple(s // a.itemsize for s in a.strides))


def clone(a: Array) -> Array:
    """A copy with the same layout; writing to it leaves ``a`` alone."""
    window = laid(a)
    return window.on(window.memory.copy())


def strided(a: Array) -> Array:
    """The same rows, with a gap of five elements between rows."""
    wide = np.zeros((a.shape[0], a.shape[1] + 5), a.dtype)
    wide[:, : a.shape[1]] = a
    return wide[:, : a.shape[1]]


def unaligned(a: Array) -> Array:
    """The same elements, one element after an aligned address."""
    memory = np.zeros(a.size + 1, a.dtype)
    memory[1:] = a.reshape(-1)
    return memory[1:].reshape(a.shape)


def transposed(a: Array) -> Array:
    """The same rows, stored column by column."""
    return np.ascontiguousarray(a.T).T
