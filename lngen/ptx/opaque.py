"""Initialised mbarriers in shared memory: illegal accesses to them, and uses before their initialisation is visible.

PTX ISA, Parallel Synchronization and Communication Instructions: mbarrier. An initialised object is opaque until
mbarrier.inval: any access other than by mbarrier instructions, and a second mbarrier.init, is undefined.
"""

from __future__ import annotations

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx.batch import MBARRIER, Batch
from lngen.ptx.parser import Instruction
from lngen.ptx.races import shared_race
from lngen.ptx.release import LEVELS
from lngen.ptx.scratch import NOBODY


def check(batch: Batch, i: Instruction, at: Array, who: Array, count: int, how: str) -> None:
    """A finding for accesses to ``count`` bytes of shared memory at the positions ``at`` that overlap an mbarrier."""
    if not batch.mbarriers or not at.size:
        return
    if count <= MBARRIER:
        bad = np.flatnonzero(batch.opaque[at // MBARRIER])
    else:
        parts = (batch.opaque[a // MBARRIER : -(-(a + count) // MBARRIER)] for a in at.tolist())
        bad = np.flatnonzero([part.any() for part in parts])
    if bad.size:
        where = batch.shared.where(int(at[bad[0]]) % batch.shared.room, count)
        text = f"A {how} of {where}, which holds an mbarrier that nothing has invalidated."
        batch.report("mbarrier", text, i, who[bad], at[bad] % batch.shared.room)


def live(batch: Batch, key: int, alive: bool) -> None:
    """Records that an mbarrier at a position is initialised, or no longer is."""
    batch.opaque[key // MBARRIER] = alive
    batch.shared.written[key : key + MBARRIER] = alive


def used(batch: Batch, i: Instruction, key: int, who: Array, how: str) -> None:
    """Uses of a barrier must follow its initialisation: initialising is a weak write, using is a strong read."""
    level = LEVELS["sys"] if how == "read" else None
    rival = batch.shared.races.note(np.full(len(who), key // batch.shared.unit), who, batch.clock, how, level)
    bad = np.flatnonzero(rival != NOBODY)
    if bad.size and how == "read":
        bad = bad[~_released(batch, key, rival[bad])]
    if bad.size:
        shared_race(batch, i, batch.shared, np.full(bad.size, key), who[bad], int(rival[bad[0]]), how)


def _released(batch: Batch, key: int, rival: Array) -> Array:
    """True where ``rival`` initialised it, executed fence.mbarrier_init and then arrived at a cluster barrier.

    The whole cluster has passed that barrier, which may be relaxed.
    """
    barrier = batch.mbarriers[key]
    return np.asarray((rival == barrier.by) & (barrier.fenced > 0) & (barrier.fenced < batch.met_at[barrier.by]))


def fence(batch: Batch, lanes: Array) -> None:
    """fence.mbarrier_init: applies to the barriers that ``lanes`` initialised."""
    if batch.order is None:
        return
    batch.order.tick(lanes)
    for barrier in batch.mbarriers.values():
        if barrier.by in lanes and not barrier.fenced:
            barrier.fenced = batch.order.now


def reached(batch: Batch, i: Instruction, key: int, lane: int, bulk: bool) -> bool:
    """Checks the mbarrier at ``key``, on which a copy of ``lane`` completes; False if there is none.

    ``bulk``: the copy is not performed by a thread. PTX ISA, Memory Consistency Model: proxies. Most versions of the
    manual leave open through which proxy a bulk copy reaches its mbarrier, so fence.mbarrier_init or fence.proxy.async
    must follow the initialisation. st.async is ordered like a store of its thread.
    """
    who, barrier = np.array([lane]), batch.mbarriers.get(key)
    if barrier is None:
        batch.report("uninitialised", "A copy completes on an mbarrier that nothing has initialised.", i, who)
        return False
    used(batch, i, key, who, "read")
    if not bulk or barrier.fenced or batch.order is None:
        return True
    by, at = np.array([barrier.by]), np.array([barrier.initialised_at])
    if not batch.order.separated_by_proxy_fence("shared", by, at, lane).all():
        text = f"A bulk copy completes on an mbarrier that thread {barrier.by % batch.width} initialised, and neither "
        batch.report("proxy", text + "fence.mbarrier_init nor fence.proxy.async follows the initialisation.", i, who)
    return True
