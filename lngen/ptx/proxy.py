"""Two ways to memory: what ordinary stores wrote, bulk copies see, and write over, after a fence.proxy.async."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from lngen.ptx.memory import Buffer
from lngen.ptx.parser import Entry, Instruction
from lngen.ptx.scratch import NOBODY, Scratch

if TYPE_CHECKING:
    from lngen.ptx.batch import Batch

SPACES = ("shared", "global")


@lru_cache(maxsize=64)
def proxies(entry: Entry) -> tuple[str, ...]:
    """The memories of which fences matter: there are copies that read or write them."""
    return SPACES if any(i.opcode.startswith("cp.async.bulk.") for i in entry.instructions) else ()


def fenced(i: Instruction) -> tuple[str, ...]:
    """The memories a fence.proxy.async is for."""
    return ("shared",) if ".shared::" in i.opcode else ("global",) if ".global" in i.opcode else SPACES


def check(
    batch: Batch, i: Instruction, memory: Scratch | Buffer, at: int, count: int, lane: int, does: str = "reads"
) -> None:
    """A finding if a bulk copy that ``lane`` issues reads or overwrites what a thread wrote, no fence between."""
    order = batch.order
    if order is None or not order.proxies:
        return
    places, unit = (memory.races, memory.unit) if isinstance(memory, Scratch) else batch.places(memory)
    words = np.arange(at // unit, -(-(at + count) // unit))
    for races in (places.plain, *places.strong.values()):
        writer, time = races.last(words)
        mine = np.flatnonzero((writer != NOBODY) & (writer < batch.total))
        space = "shared" if isinstance(memory, Scratch) else "global"
        bad = mine[~order.fenced(space, writer[mine], time[mine], lane)]
        if bad.size:
            at = int(words[bad[0]]) * unit
            where = memory.where(at % memory.room if isinstance(memory, Scratch) else at + memory.base, unit)
            text = f"A bulk copy {does} {where}, which thread {int(writer[bad[0]]) % batch.width} wrote with no "
            batch.report("proxy", text + "fence.proxy.async between.", i, np.array([lane]))
            return
