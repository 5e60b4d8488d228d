"""Tables of vector clocks; threads with equal clocks share a row of the table."""

from __future__ import annotations

import numpy as np

from lngen.ir.numerics import Array


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
            more = 2 * (kept + count) - len(self.rows)
            self.rows = np.concatenate([self.rows, np.zeros((more, self.columns), np.int32)])
            used = np.concatenate([used, np.zeros(more, np.bool_)])
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
        after = np.maximum(before, clock)
        changed = np.flatnonzero((after != before).any(axis=1))
        if changed.size:
            numbers[changed] = self.add(after[changed])
            clocks.row[lanes] = numbers[which]
