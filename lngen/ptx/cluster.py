"""Clusters of a batch: the order of their blocks, and addresses of another block's shared memory."""

from __future__ import annotations

import numpy as np

from lngen.errors import PtxError
from lngen.ir.numerics import Array
from lngen.ptx.parser import Instruction
from lngen.ptx.values import Value

SHIFT = 24  # a shared::cluster address: a block's rank plus one, then the offset in its shared memory


def order(grid: tuple[int, int], shape: tuple[int, ...]) -> tuple[Array, int]:
    """The blocks of a grid, cluster after cluster, each in the order of its ranks; and the blocks per cluster."""
    x, y, z = (*shape, 1, 1, 1)[:3]
    if grid[0] % x or grid[1] % y or z != 1:
        raise PtxError(f"A grid of whole clusters of {x} x {y} blocks is expected, got {grid}.")
    number = np.arange(grid[0] * grid[1])
    column, row = number % grid[0], number // grid[0]
    cluster, rank = row // y * (grid[0] // x) + column // x, row % y * x + column % x
    return np.lexsort((rank, cluster)), x * y


class Clusters:
    """Of a batch: its ``blocks`` are ordered cluster after cluster, each in the order of its ranks."""

    def __init__(self, grid: tuple[int, int], shape: tuple[int, ...], blocks: Array) -> None:
        self.x, self.y = (*shape, 1, 1)[:2]
        self.grid = grid
        self.column, self.row = blocks % grid[0], blocks // grid[0]
        self.size = self.x * self.y
        number = np.arange(len(blocks))
        self.of, self.rank = number // self.size, number % self.size
        # The last time at which each thread (or agent) accessed the shared memory of another block (by position).
        self.remote: dict[tuple[int, int], tuple[int, Instruction, int]] = {}

    def resolve(self, address: Array, slot: Array) -> tuple[Array, Array]:
        """Addresses relative to the shared memory of a block, and that block; others do not change."""
        rank = (address.astype(np.int64) >> SHIFT) - 1
        far = (rank >= 0) & (rank < self.size)
        inner = np.where(far, address & address.dtype.type((1 << SHIFT) - 1), address)
        owner = self.of[slot] * self.size + np.where(far, rank, self.rank[slot])
        return inner, np.asarray(owner)

    def special(self, name: str, slot_of: Array) -> Value:
        """%cluster_ctaid.x and similar special registers."""
        base, _, axis = name.partition(".")
        u4, n = np.uint32, "xyz".find(axis)
        shape, at = (self.x, self.y, 1), (self.column, self.row, np.zeros_like(self.row))
        match base:
            case "cluster_ctaid":
                return (at[n] % shape[n]).astype(u4)[slot_of]
            case "cluster_nctaid":
                return u4(shape[n])
            case "clusterid":
                return (at[n] // shape[n]).astype(u4)[slot_of]
            case "nclusterid":
                return u4((*self.grid, 1)[n] // shape[n])
            case "cluster_ctarank":
                return self.rank.astype(u4)[slot_of]
            case _:
                return u4(self.size)
