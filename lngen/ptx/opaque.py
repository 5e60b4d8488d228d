"""Where mbarriers lie: who may touch them, and who may use them when.

PTX ISA, Parallel Synchronization and Communication Instructions: mbarrier. What is initialised stays opaque until
mbarrier.inval: any other access than by mbarrier instructions, another mbarrier.init, too, is undefined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx.ordering import LEVELS
from lngen.ptx.parser import Instruction
from lngen.ptx.scratch import NOBODY
from lngen.ptx.tracking import shared_race

if TYPE_CHECKING:
    from lngen.ptx.batch import Batch

SIZE = 8


def check(batch: Batch, i: Instruction, at: Array, who: Array, count: int, how: str) -> None:
    """A finding for accesses to ``count`` bytes of shared memory from the positions ``at`` where an mbarrier lives."""
    if not batch.mbarriers or not at.size:
        return
    if count <= SIZE:
        bad = np.flatnonzero(batch.opaque[at // SIZE])
    else:
        pieces = (batch.opaque[a // SIZE : -(-(a + count) // SIZE)] for a in at.tolist())
        bad = np.flatnonzero([piece.any() for piece in pieces])
    if bad.size:
        where = batch.shared.where(int(at[bad[0]]) % batch.shared.room, count)
        text = f"A {how} of {where}, where an mbarrier lives that nothing has invalidated."
        batch.report("mbarrier", text, i, who[bad], at[bad] % batch.shared.room)


def live(batch: Batch, key: int, alive: bool) -> None:
    """An mbarrier begins or ends to live at a position."""
    batch.opaque[key // SIZE] = alive
    batch.shared.written[key : key + SIZE] = alive


def used(batch: Batch, i: Instruction, key: int, who: Array, how: str) -> None:
    """Whoever uses a barrier comes after its initialisation: that is a weak write, using it a strong read."""
    level = LEVELS["sys"] if how == "read" else None
    rival = batch.shared.races.note(np.full(len(who), key // batch.shared.unit), who, batch.clock, how, level)
    bad = np.flatnonzero(rival != NOBODY)
    if bad.size and how == "read":
        bad = bad[~_released(batch, key, rival[bad])]
    if bad.size:
        shared_race(batch, i, batch.shared, np.full(bad.size, key), who[bad], int(rival[bad[0]]), how)


def _released(batch: Batch, key: int, rival: Array) -> Array:
    """True where ``rival`` initialised it, and after that came to a cluster barrier, with fence.mbarrier_init between.

    The whole cluster has passed that barrier, which may be a relaxed one.
    """
    barrier = batch.mbarriers[key]
    return np.asarray((rival == barrier.by) & (barrier.fenced > 0) & (barrier.fenced < batch.met_at[barrier.by]))


def fence(batch: Batch, lanes: Array) -> None:
    """fence.mbarrier_init: what ``lanes`` have initialised."""
    if batch.order is None:
        return
    batch.order.tick(lanes)
    for barrier in batch.mbarriers.values():
        if barrier.by in lanes and not barrier.fenced:
            barrier.fenced = batch.order.now


def reached(batch: Batch, i: Instruction, key: int, lane: int, bulk: bool) -> bool:
    """A copy that ``lane`` issues completes on the mbarrier at ``key``; False if there is none.

    ``bulk``: the copy is no thread's. PTX ISA, Memory Consistency Model: proxies. Most versions of the manual leave it
    open through which proxy such a copy reaches its mbarrier: the initialisation has to be fenced, which is done by
    fence.mbarrier_init or fence.proxy.async. What st.async stores comes behind it as what threads store does.
    """
    who, barrier = np.array([lane]), batch.mbarriers.get(key)
    if barrier is None:
        batch.report("uninitialised", "A copy completes on an mbarrier that nothing has initialised.", i, who)
        return False
    used(batch, i, key, who, "read")
    if not bulk or barrier.fenced or batch.order is None:
        return True
    if not batch.order.fenced("shared", np.array([barrier.by]), np.array([barrier.begun]), lane).all():
        text = f"A bulk copy completes on an mbarrier that thread {barrier.by % batch.width} initialised with neither "
        batch.report("proxy", text + "fence.mbarrier_init nor fence.proxy.async behind.", i, who)
    return True
