"""Findings for races in shared memory."""

from __future__ import annotations

from lngen.ir.numerics import Array
from lngen.ptx.batch import Batch
from lngen.ptx.parser import Instruction
from lngen.ptx.scratch import Scratch


def shared_race(batch: Batch, i: Instruction, scratch: Scratch, at: Array, who: Array, rival: int, how: str) -> None:
    """The finding for accesses to places that ``rival`` also touches."""
    address = at % scratch.room
    verb = "reads" if how == "read" else "writes"
    where = scratch.where(int(address[0]), scratch.unit)
    if rival >= batch.total:
        text = f"A thread {verb} {where}, which an asynchronous copy writes, without a wait."
        batch.report("async-read", text, i, who, address)
        return
    block = "its block" if batch.block_of[rival] == batch.block_of[who[0]] else f"block {int(batch.block_of[rival])}"
    text = f"A thread {verb} {where}, which thread {rival % batch.width} of {block} "
    text += f"{'writes' if how == 'read' else 'accesses'} without a barrier between."
    batch.report("shared-race", text, i, who, address)
