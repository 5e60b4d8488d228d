"""Vector clocks. A column is a thing that can be waited for.

Threads with equal clocks share a row of a table. A flag carries the clock of its release.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lngen.compiler.ir.numerics import Array
from lngen.proof.ptx.opcodes import LEVELS

AGENTS = 64  # columns for writes of copies that no thread performs
MAX_GROUP = 32  # threads of a column: a warp
MOST_ENTRIES = 1 << 25  # of a table of clocks


@dataclass(frozen=True)
class Columns:
    """The columns of a clock, from the first to the last:

    threads     one for each thread, or for each ``group`` of neighbours
    agents      AGENTS columns for writes of copies that no thread performs
    wait        one that is not zero after griddepcontrol.wait
    proxies     for every space, a copy of the columns above: the times before a fence.proxy.async
    elsewhere   if fences are ``restricted`` to shared memory, a copy of the first columns: the times for all other
                memory
    """

    threads: int
    proxy_spaces: tuple[str, ...] = ()
    restricted: bool = False

    @property
    def wait(self) -> int:
        """The column of griddepcontrol.wait."""
        return self.threads + AGENTS

    @property
    def per_copy(self) -> int:
        """The columns that each copy repeats."""
        return self.wait + 1

    @cached_property
    def proxies(self) -> dict[str, int]:
        """Where the copy of each space begins."""
        return {space: (n + 1) * self.per_copy for n, space in enumerate(self.proxy_spaces)}

    @cached_property
    def elsewhere(self) -> int:
        """Where the columns for memory that is not shared begin: the first ones, unless fences are restricted."""
        return self.per_copy * (1 + len(self.proxy_spaces)) if self.restricted else 0

    @cached_property
    def memories(self) -> tuple[int, ...]:
        """Where the columns of shared memory and of all other memory begin, if they are not the same."""
        return (0, self.elsewhere) if self.restricted else (0,)

    @property
    def total(self) -> int:
        """The columns of a clock."""
        return self.per_copy * (1 + len(self.proxy_spaces) + self.restricted)

    def proxy(self, space: str) -> slice:
        """The copy of a space."""
        return slice(self.proxies[space], self.proxies[space] + self.per_copy)


def threads_per_column(blocks: int, members: int) -> int:
    """The neighbours that share a column, so few that the table of clocks has room.

    The threads of a block pass the same barriers, so most of the time they share a row of the table: it has about one
    for each block, and at least as many are free.
    """
    group = 1
    while 2 * blocks * (members // group) > MOST_ENTRIES and group < MAX_GROUP:
        group *= 2
    return group


class ThreadClocks:
    """A clock per thread: a row of the table, and a time in the thread's own column that may be later than the row's.

    Kept apart, the times of the threads themselves do not make their rows different.
    """

    def __init__(self, total: int) -> None:
        self.row = np.zeros(total, np.int32)
        self.own_time = np.zeros(total, np.int32)


class ClockTable:
    """Vector clocks as rows of times, by number; row 0 is all zeros.

    A row never changes; the number of an unused row is used again.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.rows = np.zeros((16, columns), np.int32)
        self._holders: list[ThreadClocks] = []
        self._free = list(range(15, 0, -1))

    def thread_clocks(self, total: int) -> ThreadClocks:
        """Clocks of threads, whose rows the table keeps."""
        self._holders.append(ThreadClocks(total))
        return self._holders[-1]

    def add(self, rows: Array) -> Array:
        """The numbers of new rows, which must be held before the next call."""
        count = len(rows)
        if len(self._free) < count:
            self._collect(count)
        numbers = np.array([self._free.pop() for _ in range(count)], np.int32)
        self.rows[numbers] = rows
        return numbers

    def _collect(self, count: int) -> None:
        """Frees the rows that nothing holds; then at least half of the table is free, and ``count`` rows are."""
        used = np.zeros(len(self.rows), np.bool_)
        used[0] = True
        for holder in self._holders:
            used[holder.row] = True
        kept = int(np.count_nonzero(used))
        if kept + count > len(self.rows) // 2:
            grown = np.zeros((2 * (kept + count), self.columns), np.int32)
            grown[: len(used)][used] = self.rows[used]
            self.rows, used = grown, np.append(used, np.zeros(len(grown) - len(used), np.bool_))
        self._free = np.flatnonzero(~used)[::-1].tolist()

    def joined(self, of: Array, group: Array, count: int) -> Array:
        """For each of ``count`` nonempty groups, the maximum of the rows with the numbers ``of`` its members."""
        size = len(self.rows)
        pairs = np.unique(group.astype(np.int64) * size + of)
        numbers, owner = pairs % size, pairs // size
        if len(pairs) == count:
            return np.asarray(self.rows[numbers])
        begins = np.searchsorted(owner, np.arange(count))
        return np.asarray(np.maximum.reduceat(self.rows[numbers], begins, axis=0))

    def join(self, clocks: ThreadClocks, lanes: Array, clock: Array) -> None:
        """Raises the clocks of ``lanes`` to ``clock`` where it is later."""
        numbers, which = np.unique(clocks.row[lanes], return_inverse=True)
        before = self.rows[numbers]
        changed = np.flatnonzero((before < clock).any(axis=1))
        if changed.size:
            numbers[changed] = self.add(np.maximum(before[changed], clock))
            clocks.row[lanes] = numbers[which]


Releases = dict[tuple[int, int], Array]  # by level of the scope and block of a release: the clock of its thread


class ReleasedClocks:
    """The clocks that one value of a flag releases. They never change: another value has clocks of its own."""

    def __init__(self, clocks: Releases) -> None:
        self.clocks = clocks

    @cached_property
    def gpu_scope(self) -> Array | None:
        """The clock released to every thread of the grid."""
        clocks = [clock for (level, _), clock in self.clocks.items() if level >= LEVELS["gpu"]]
        return np.max(clocks, axis=0) if clocks else None


# Relaxed reads of a thread, which acquire at its next fence: what was read, by identity, and the level of the scope.
PendingAcquires = dict[int, tuple[ReleasedClocks, int]]
