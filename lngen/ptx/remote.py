"""Accesses to the shared memory of another block of the cluster, which has to be running.

CUDA C++ Programming Guide, Distributed Shared Memory: a block may access another block's memory after that block has
started, and no block ends while its memory may still be accessed. A cluster barrier ensures both, a relaxed one the
first.
"""

from __future__ import annotations

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx.batch import Batch
from lngen.ptx.parser import Instruction


def note(batch: Batch, i: Instruction, who: Array, owner: Array, agent: int = -1) -> None:
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


def check(batch: Batch) -> None:
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
