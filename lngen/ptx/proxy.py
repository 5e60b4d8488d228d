"""Proxies: a bulk copy may read or overwrite the results of ordinary stores only after a fence.proxy.async."""

from __future__ import annotations

import numpy as np

from lngen.ptx.analysis import PROXY_SPACES
from lngen.ptx.batch import Batch
from lngen.ptx.memory import Buffer
from lngen.ptx.parser import Instruction
from lngen.ptx.scratch import NOBODY, Scratch


def fenced_spaces(i: Instruction) -> tuple[str, ...]:
    """The memories that a fence.proxy.async applies to."""
    return ("shared",) if ".shared::" in i.opcode else ("global",) if ".global" in i.opcode else PROXY_SPACES


def check(
    batch: Batch, i: Instruction, memory: Scratch | Buffer, at: int, count: int, lane: int, does: str = "reads"
) -> None:
    """A finding if a bulk copy of ``lane`` reads or overwrites a thread's store without a fence between them."""
    order = batch.order
    if order is None or not order.columns.proxies:
        return
    places, unit = (memory.races, memory.unit) if isinstance(memory, Scratch) else batch.places(memory)
    words = np.arange(at // unit, -(-(at + count) // unit))
    for races in (places.plain, *places.strong.values()):
        writer, time = races.last(words)
        mine = np.flatnonzero((writer != NOBODY) & (writer < batch.total))
        space = "shared" if isinstance(memory, Scratch) else "global"
        bad = mine[~order.separated_by_proxy_fence(space, writer[mine], time[mine], lane)]
        if bad.size:
            at = int(words[bad[0]]) * unit
            where = memory.where(at % memory.room if isinstance(memory, Scratch) else at + memory.base, unit)
            text = f"A bulk copy {does} {where}, which thread {int(writer[bad[0]]) % batch.width} wrote without "
            batch.report("proxy", text + "a fence.proxy.async before the copy.", i, np.array([lane]))
            return
