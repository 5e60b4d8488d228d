"""The cluster barrier, and addresses in another block of the cluster.

PTX ISA, Parallel Synchronization and Communication Instructions: barrier.cluster. An arrival releases unless it is
relaxed; a relaxed arrival hands over what an earlier fence of cluster scope released. A wait always acquires.
"""

from __future__ import annotations

import numpy as np

from lngen.ptx.batch import Batch
from lngen.ptx.cluster import SHIFT
from lngen.ptx.lanes import Lanes
from lngen.ptx.parser import Instruction
from lngen.ptx.program import Program, Step, unknown
from lngen.ptx.steps import write
from lngen.ptx.values import UNSIGNED

BARRIERS = tuple(
    f"barrier.cluster.{what}{aligned}"
    for what in ("arrive", "arrive.release", "arrive.relaxed", "wait", "wait.acquire")
    for aligned in ("", ".aligned")
)


def mapa_step(program: Program, i: Instruction) -> Step:
    """mapa.shared::cluster.u32: the same address in the shared memory of the block of that rank."""
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
            batch.report("out-of-bounds", "mapa names a block that the cluster does not have.", i, bad)
        write(batch, slot, convert(found) if convert else found, lanes)

    return step


def check(i: Instruction) -> None:
    """PtxError for a cluster barrier instruction the executor does not know."""
    if i.opcode not in BARRIERS or i.operands:
        raise unknown(i)


def come(batch: Batch, i: Instruction, pc: int, lanes: Lanes) -> None:
    """``lanes`` reach barrier.cluster.arrive or .wait."""
    if i.opcode.startswith("barrier.cluster.arrive"):
        again = lanes.index[batch.arrived[lanes.index]]
        if again.size:
            batch.report("divergent-barrier", "A thread arrives twice without a wait between.", i, again)
        batch.arrived[lanes.index] = True
        if batch.order is not None:
            batch.order.cluster_arrive(lanes.index, "relaxed" in i.opcode)
            batch.arrived_at[lanes.index] = batch.order.now
        batch.touched()
        batch.push(pc + 1, lanes)
        return
    early = lanes.index[~batch.arrived[lanes.index]]
    if early.size:
        batch.report("divergent-barrier", "A thread waits for the cluster without having arrived.", i, early)
    batch.met.append((pc, lanes))


def release(batch: Batch) -> bool:
    """Release the clusters of which all threads have arrived; False if there are none."""
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
    # All have arrived. Threads that do not wait yet keep their arrival, with which their wait passes at once.
    go = waiting & ~missing[cluster]
    if (late & ~missing).any():
        go &= ~late[cluster]
    if not go.any():
        batch.met = met
        return False
    lanes_ = np.flatnonzero(go)
    if batch.order is not None:
        batch.order.cluster_wait(lanes_, cluster[lanes_])
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
