"""The threads of a batch that execute an instruction."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from lngen.ir.numerics import Array

WARP = 32


class Lanes:
    """A set of threads of a batch; ``array`` is None if it holds all of them."""

    def __init__(self, array: Array | None, total: int, count: int | None = None) -> None:
        self.total = total
        self.count = total if array is None else int(np.count_nonzero(array)) if count is None else count
        self.array = None if self.count == total else array

    @cached_property
    def index(self) -> Array:
        """Their numbers, ascending."""
        return np.arange(self.total) if self.array is None else np.flatnonzero(self.array)

    @cached_property
    def mask(self) -> Array:
        """One bool per thread."""
        return np.ones(self.total, np.bool_) if self.array is None else self.array

    @cached_property
    def warps(self) -> int:
        """Warps with at least one of these threads."""
        if self.array is None:
            return self.total // WARP
        return int(np.count_nonzero(self.array.reshape(-1, WARP).any(axis=1)))

    def narrow(self, wanted: Any) -> Lanes:
        """The threads for which ``wanted``, an array or one bool, is true."""
        if np.ndim(wanted) == 0:
            return self if wanted else Lanes(np.zeros(self.total, np.bool_), self.total, 0)
        array = wanted if self.array is None else wanted & self.array
        count = int(np.count_nonzero(array))
        return self if count == self.count else Lanes(array, self.total, count)

    def without(self, other: Lanes) -> Lanes:
        """The threads that are not in ``other``, a subset."""
        return Lanes(self.mask & ~other.mask, self.total, self.count - other.count)

    def union(self, other: Lanes) -> Lanes:
        """The union of two sets that have no thread in common."""
        return Lanes(self.mask | other.mask, self.total, self.count + other.count)

    def bits(self) -> Array:
        """One u32 per warp; bit i is set if thread i of the warp belongs to the set."""
        packed = np.packbits(self.mask.reshape(-1, WARP), axis=1, bitorder="little")
        return np.asarray(packed.view("<u4")[:, 0])
