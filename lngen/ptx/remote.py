"""Shared memory of another block of the cluster, which has to be there.

CUDA C++ Programming Guide, Distributed Shared Memory: a block accesses another's after that has begun, and none ends
while somebody may still access its own. A cluster barrier says both, a relaxed one the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx.parser import Instruction

if TYPE_CHECKING:
    from lngen.ptx.batch import Batch


@dataclass
class Remote:
    """Of a batch: the last time each thread (or agent) accessed the shared memory of another block."""

    last: dict[tuple[int, int], tuple[int, Instruction, int]] = field(default_factory=dict)

    def note(self, batch: Batch, i: Instruction, who: Array, owner: Array, agent: int = -1) -> None:
        """``who`` access the memory of the blocks ``owner`` (by place in the batch) now, or ``agent`` for them."""
        far = np.flatnonzero(batch.slot_of[who] != owner)
        now = batch.clock.moment
        for lane, slot in zip(who[far].tolist(), owner[far].tolist(), strict=True):
            self.last[slot, lane if agent < 0 else agent] = now, i, lane

    def check_begun(self, batch: Batch, i: Instruction, who: Array, owner: Array) -> None:
        """Findings for accesses to blocks (by place in the batch) of which nothing says that they have begun."""
        far = np.flatnonzero((batch.slot_of[who] != owner) & (batch.met_at[who] == 0))
        if batch.order is None or not far.size:
            return
        columns = batch.order.column[: batch.total].reshape(batch.slots, batch.width)[owner[far]]
        heard = batch.order.rows.table[batch.order.seen.of[who[far]][:, None], columns].any(axis=1)
        if not heard.all():
            early = far[~heard]
            block = int(batch.block_of[owner[early[0]] * batch.width])
            text = f"An access to the shared memory of block {block}, which may not have begun: nothing orders the two."
            batch.report("early-remote", text, i, who[early])

    def check(self, batch: Batch) -> None:
        """All threads have ended: findings for accesses that no thread of the block they go to came after."""
        if not self.last or batch.order is None:
            return
        for slot in sorted({slot for slot, _ in self.last}):
            row = batch.order.row(np.flatnonzero((batch.slot_of == slot) & (batch.thread < batch.launch.block)))
            for (other, actor), (when, i, lane) in self.last.items():
                if other == slot and row[batch.order.column[actor]] <= when:
                    block = int(batch.block_of[slot * batch.width])
                    text = f"Block {block} may end before this access to its shared memory: nothing orders the two."
                    batch.report("early-exit", text, i, np.array([lane]))
