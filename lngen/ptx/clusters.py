"""Clusters: who belongs to one, addresses of another block's shared memory, the cluster barrier.

PTX ISA, Parallel Synchronization and Communication Instructions: barrier.cluster. Arrivals release unless they are
relaxed; then they hand over what a fence for the cluster has released before. A wait always acquires.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lngen.errors import PtxError
from lngen.ir.numerics import Array
from lngen.ptx.lanes import Lanes
from lngen.ptx.parser import Instruction
from lngen.ptx.program import Program, Step, unknown, write
from lngen.ptx.remote import Remote
from lngen.ptx.values import UNSIGNED, Value

if TYPE_CHECKING:
    from lngen.ptx.batch import Batch

BARRIERS = tuple(
    f"barrier.cluster.{what}{aligned}"
    for what in ("arrive", "arrive.release", "arrive.relaxed", "wait", "wait.acquire")
    for aligned in ("", ".aligned")
)
SHIFT = 24  # a shared::cluster address: the rank plus one of a block, then where in its shared memory


def order(grid: tuple[int, int], shape: tuple[int, ...]) -> tuple[Array, int]:
    """The blocks of a grid, cluster after cluster, each in the order of its ranks; and the blocks of a cluster."""
    x, y, z = (*shape, 1, 1, 1)[:3]
    if grid[0] % x or grid[1] % y or z != 1:
        raise PtxError(f"A grid of whole clusters of {x} x {y} blocks is expected, got {grid}.")
    number = np.arange(grid[0] * grid[1])
    column, row = number % grid[0], number // grid[0]
    cluster, rank = row // y * (grid[0] // x) + column // x, row % y * x + column % x
    return np.lexsort((rank, cluster)), x * y


class Clusters:
    """Of a batch: its ``blocks`` come cluster after cluster, each in the order of its ranks."""

    def __init__(self, grid: tuple[int, int], shape: tuple[int, ...], blocks: Array) -> None:
        self.x, self.y = (*shape, 1, 1)[:2]
        self.grid = grid
        self.column, self.row = blocks % grid[0], blocks // grid[0]
        self.size = self.x * self.y
        number = np.arange(len(blocks))
        self.of, self.rank = number // self.size, number % self.size
        self.remote = Remote()

    def resolve(self, address: Array, slot: Array) -> tuple[Array, Array]:
        """Addresses in a block's own shared memory, and which block's; those of no block stay as they are."""
        rank = (address.astype(np.int64) >> SHIFT) - 1
        far = (rank >= 0) & (rank < self.size)
        inner = np.where(far, address & address.dtype.type((1 << SHIFT) - 1), address)
        owner = self.of[slot] * self.size + np.where(far, rank, self.rank[slot])
        return inner, np.asarray(owner)

    def special(self, name: str, slot_of: Array) -> Value:
        """%cluster_ctaid.x and its like."""
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


def mapa_step(program: Program, i: Instruction) -> Step:
    """mapa.shared::cluster.u32: the address of the same place in the block of that rank."""
    if i.opcode not in ("mapa.shared::cluster.u32", "mapa.u64", "mapa.shared::cluster.u64") or len(i.operands) != 3:
        raise unknown(i)
    dtype = UNSIGNED[8 if i.opcode.endswith("64") else 4]
    (a, read), (rank, as_u4) = program.source(i.operands[1], dtype, i), program.source(i.operands[2], UNSIGNED[4], i)
    slot, convert = program.target(i.operands[0], dtype, i)

    def step(batch: Batch, lanes: Lanes) -> None:
        address = batch.R[a] if read is None else read(batch.R[a])
        number = batch.R[rank] if as_u4 is None else as_u4(batch.R[rank])
        found = address + (number.astype(dtype) + dtype.type(1) << dtype.type(SHIFT))
        size = batch.clusters.size if batch.clusters is not None else 1
        bad = lanes.index[np.broadcast_to(number, batch.total)[lanes.index] >= size]
        if bad.size:
            batch.report("out-of-bounds", f"mapa names a block that the cluster of {size} has not.", i, bad)
        write(batch, slot, convert(found) if convert else found, lanes)

    return step


def check(i: Instruction) -> None:
    """PtxError for a cluster barrier instruction the executor does not know."""
    if i.opcode not in BARRIERS or i.operands:
        raise unknown(i)


def come(batch: Batch, i: Instruction, pc: int, lanes: Lanes) -> None:
    """``lanes`` come to barrier.cluster.arrive or .wait."""
    if i.opcode.startswith("barrier.cluster.arrive"):
        again = lanes.index[batch.arrived[lanes.index]]
        if again.size:
            batch.report("divergent-barrier", "A thread arrives twice with no wait between.", i, again)
        batch.arrived[lanes.index] = True
        if batch.order is not None:
            batch.order.hand(lanes.index, "relaxed" in i.opcode)
            batch.arrived_at[lanes.index] = batch.order.now
        batch.touched()
        batch.push(pc + 1, lanes)
        return
    early = lanes.index[~batch.arrived[lanes.index]]
    if early.size:
        batch.report("divergent-barrier", "A thread waits for the cluster without having arrived.", i, early)
    batch.met.append((pc, lanes))


def release(batch: Batch) -> bool:
    """Let the clusters go all of whose threads have arrived; False if there are none."""
    if not batch.met:
        return False
    alive = batch.alive.mask
    number = batch.clusters.of if batch.clusters is not None else np.arange(batch.slots)
    cluster = number[batch.slot_of]
    missing = np.bincount(cluster[alive & ~batch.arrived], minlength=int(number.max()) + 1) > 0
    met, batch.met = batch.met, []
    waiting = np.zeros(batch.total, np.bool_)
    for _, lanes in met:
        waiting |= lanes.mask
    late = np.bincount(cluster[alive & ~waiting], minlength=len(missing)) > 0
    # All have arrived; those that do not wait yet are let past when they come: they keep their arrival.
    go = waiting & ~missing[cluster]
    if (late & ~missing).any():
        go &= ~late[cluster]
    if not go.any():
        batch.met = met
        return False
    lanes_ = np.flatnonzero(go)
    if batch.order is not None:
        batch.order.take(lanes_, cluster[lanes_])
    batch.arrived[lanes_] = False
    batch.met_at[lanes_] = batch.arrived_at[lanes_]
    for pc, lanes in met:
        free = lanes.narrow(go)
        batch.push(pc + 1, free)
        if free.count < lanes.count:
            batch.met.append((pc, lanes.without(free)))
    return True


def deadlock(batch: Batch) -> None:
    """Findings about threads that wait for their cluster for ever."""
    for pc, lanes in batch.met:
        i = batch.program.entry.instructions[pc]
        batch.report("deadlock", f"{lanes.count} threads wait for ever for their cluster.", i, lanes.index)
