"""Threads that wait in a loop for what others write: they rest once a round, so that the others go on."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from lngen.ptx.lanes import Lanes
from lngen.ptx.memory_opcodes import access
from lngen.ptx.parser import Entry, Instruction

if TYPE_CHECKING:
    from lngen.ptx.batch import Batch

ROUNDS = 256  # without a change after which threads that spin are taken to do so for ever
ARRIVES = tuple(f"{b}.arrive" for b in ("bar", "bar.cta", "barrier", "barrier.cta"))
_TOGETHER = (
    "atom", "red", "fence", "membar", "mbarrier", "cp", "mapa", "vote", "activemask", "nanosleep", "griddepcontrol",
)  # fmt: skip


@lru_cache(maxsize=64)
def ordered(entry: Entry) -> bool:
    """True if threads may wait for each other in other ways than at barriers of their block."""
    if entry.cluster:
        return True
    for i in entry.instructions:
        if (
            i.opcode.split(".", 1)[0] in _TOGETHER
            or i.opcode.startswith(("bar.warp", "barrier.cluster", "st.async", "elect", *ARRIVES))
            or flag(i)
        ):
            return True
    return False


@lru_cache(maxsize=64)
def resident(entry: Entry) -> bool:
    """True if a block may hand something to, or wait for, one of another cluster: all then run side by side."""
    for i in entry.instructions:
        if ".shared" not in i.opcode and (i.opcode.startswith(("atom", "red")) or flag(i)):
            return True
    return False


def flag(i: Instruction) -> bool:
    """True for a strong load or store."""
    form = access(i.opcode)
    return form is not None and form.how is not None


@lru_cache(maxsize=64)
def spins(entry: Entry) -> dict[int, int]:
    """Jumps back over something that may wait, and where they go."""
    found, code = {}, entry.instructions
    for at, i in enumerate(code):
        to = entry.labels.get(i.operands[0].text, at + 1) if i.opcode.startswith("bra") else at + 1
        if to <= at and any(_waits(j) for j in code[to:at]):
            found[at] = to
    return found


def _waits(i: Instruction) -> bool:
    return i.opcode.startswith(("atom", "mbarrier.try_wait", "mbarrier.test_wait", "nanosleep")) or (
        i.opcode.startswith("ld.") and flag(i)
    )


def waves(batch: Batch) -> list[Lanes]:
    """The threads that begin together, last first: the next begin when the others can only wait.

    Of blocks that may wait for each other the last comes late; with a seed, random ones in three waves.
    """
    if batch.order is None or batch.slots < 2 or (batch.order.near and batch.clusters is None):
        return [batch.alive]
    wave = np.arange(batch.slots) == batch.slots - 1
    if batch.launch.order:
        wave = np.random.default_rng(batch.launch.order).integers(0, 3, batch.slots)
    found = [batch.alive.narrow(wave[batch.slot_of] == n) for n in np.unique(wave)]
    return found[::-1]


def rest(batch: Batch, pc: int, lanes: Lanes) -> None:
    """``lanes`` took the jump at ``pc``: they go on when nobody else can."""
    batch.yielded[pc] = lanes.union(batch.yielded[pc]) if pc in batch.yielded else lanes


def again(batch: Batch, most: int) -> bool:
    """Another round for the threads that rest; False after ``most`` in vain."""
    from lngen.ptx.mbarrier import arrive

    if batch.progress != batch.last:
        batch.last, batch.rounds = batch.progress, 0
    elif arrive(batch):
        batch.rounds = 0
    batch.rounds += 1
    if batch.rounds > most:
        return False
    resting, batch.yielded = batch.yielded, {}
    for pc, lanes in resting.items():
        batch.push(batch.spins[pc], lanes)
    return True


def deadlock(batch: Batch) -> None:
    """Findings about loops that never end."""
    for pc, lanes in batch.yielded.items():
        i = batch.program.entry.instructions[pc]
        batch.report("deadlock", "A thread waits for ever in a loop for what nobody writes.", i, lanes.index)
