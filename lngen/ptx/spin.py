"""Spin loops: a thread pauses after each round, so that the threads it waits for advance."""

from __future__ import annotations

import numpy as np

from lngen.ptx.batch import Batch
from lngen.ptx.lanes import Lanes
from lngen.ptx.mbarrier import arrive

ROUNDS = 256  # without a change, after which spinning threads count as deadlocked


def waves(batch: Batch) -> list[Lanes]:
    """The threads that start together, last first: the next start when the others can only wait.

    Of blocks that may wait for each other the last starts late; with a seed, random ones start in three waves.
    """
    if batch.order is None or batch.slots < 2 or (batch.order.cluster_only and batch.clusters is None):
        return [batch.alive]
    wave = np.arange(batch.slots) == batch.slots - 1
    if batch.launch.order:
        wave = np.random.default_rng(batch.launch.order).integers(0, 3, batch.slots)
    found = [batch.alive.narrow(wave[batch.slot_of] == n) for n in np.unique(wave)]
    return found[::-1]


def rest(batch: Batch, pc: int, lanes: Lanes) -> None:
    """``lanes`` took the jump at ``pc``: they continue when no other thread can."""
    batch.yielded[pc] = lanes.union(batch.yielded[pc]) if pc in batch.yielded else lanes


def again(batch: Batch, most: int) -> bool:
    """Another round for the paused threads; False after ``most`` rounds without a change."""
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
        batch.report("deadlock", "A thread waits for ever in a loop for a value that no thread writes.", i, lanes.index)
