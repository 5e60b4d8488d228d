"""Blocks of a cluster: their barrier, and accesses to the shared memory of another block.

PTX ISA, Parallel Synchronization and Communication Instructions: barrier.cluster. An arrival releases unless it is
relaxed; a relaxed arrival hands over what an earlier fence of cluster scope released. A wait always acquires.

CUDA C++ Programming Guide, Distributed Shared Memory: a block may access another block's memory after that block has
started, and no block ends while its memory may still be accessed. A cluster barrier ensures both, a relaxed one the
first.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from lngen.compiler.ir.numerics import Array
from lngen.proof.ptx.batch import SHIFT, Batch
from lngen.proof.ptx.parser import Instruction
from lngen.proof.ptx.program import UNSIGNED, Jump, Lanes, Program, Step, unknown

_OPCODES = tuple(
    f"barrier.cluster.{what}{aligned}"
    for what in ("arrive", "arrive.release", "arrive.relaxed", "wait", "wait.acquire")
    for aligned in ("", ".aligned")
)


def mapa_step(program: Program, i: Instruction) -> Step:
    """mapa.shared::cluster.u32: the same address in the shared memory of the block of that rank."""
    if i.opcode not in ("mapa.shared::cluster.u32", "mapa.u64", "mapa.shared::cluster.u64") or len(i.operands) != 3:
        raise unknown(i)
    dtype = UNSIGNED[8 if i.opcode.endswith("64") else 4]
    address_of, rank_of = program.reader(i.operands[1], dtype, i), program.reader(i.operands[2], UNSIGNED[4], i)
    write = program.writer(i.operands[0], dtype, i)

    def step(batch: Batch, lanes: Lanes) -> None:
        number = rank_of(batch.R)
        found = address_of(batch.R) + (number.astype(dtype) + dtype.type(1) << dtype.type(SHIFT))
        size = batch.clusters.size if batch.clusters is not None else 1
        bad = lanes.index[lanes.each(number) >= size]
        if bad.size:
            batch.report("out-of-bounds", "mapa names a block that the cluster does not have.", i, bad)
        write(batch.R, found, lanes)

    return step


def barrier_jump(i: Instruction) -> Jump:
    """barrier.cluster.arrive or .wait; PtxError for an opcode that the executor does not know."""
    if i.opcode not in _OPCODES or i.operands:
        raise unknown(i)
    return partial(_come, i)


def _come(i: Instruction, batch: Batch, pc: int, lanes: Lanes) -> None:
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


def note_remote(batch: Batch, i: Instruction, who: Array, owner: Array, agent: int = -1) -> None:
    """``who``, or ``agent`` for them, access the memory of the blocks ``owner`` (by position in the batch) now."""
    assert batch.clusters is not None
    far = np.flatnonzero(batch.slot_of[who] != owner)
    now = batch.clock.moment
    for lane, slot in zip(who[far].tolist(), owner[far].tolist(), strict=True):
        batch.clusters.remote[slot, lane if agent < 0 else agent] = now, i, lane


def check_started(batch: Batch, i: Instruction, who: Array, owner: Array) -> None:
    """Findings for accesses to blocks (by position in the batch) that are not known to have started."""
    far = np.flatnonzero((batch.slot_of[who] != owner) & (batch.met_at[who] == 0))
    if batch.order is None or not far.size:
        return
    columns = batch.order.column[: batch.total].reshape(batch.slots, batch.width)[owner[far]]
    started = batch.order.visible_time(who[far][:, None], columns).any(axis=1)
    if not started.all():
        early = far[~started]
        block = int(batch.block_of[owner[early[0]] * batch.width])
        text = f"An access to the shared memory of block {block}, which may not have started."
        batch.report("early-remote", text, i, who[early])


def check_exits(batch: Batch) -> None:
    """At the end: findings for accesses to a block that no thread of the block is ordered after."""
    if batch.clusters is None or batch.order is None:
        return
    for slot in sorted({slot for slot, _ in batch.clusters.remote}):
        clock = batch.order.clock(np.flatnonzero((batch.slot_of == slot) & (batch.thread < batch.launch.block)))
        for (other, actor), (when, i, lane) in batch.clusters.remote.items():
            if other == slot and clock[batch.order.column[actor]] <= when:
                block = int(batch.block_of[slot * batch.width])
                text = f"Block {block} may end before this access to its shared memory: nothing orders the two."
                batch.report("early-exit", text, i, np.array([lane]))
