"""Tables of what threads have seen of each other: threads that know the same share a row."""

from __future__ import annotations

import numpy as np

from lngen.ir.numerics import Array


class Known:
    """Per thread a row of the table, and a time of its own that the row need not have yet."""

    def __init__(self, total: int) -> None:
        self.of = np.zeros(total, np.int32)
        self.own = np.zeros(total, np.int32)


class Rows:
    """Rows of times, by number; row 0 is all zeros. A row never changes; one that nobody has is used again."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.table = np.zeros((16, columns), np.int32)
        self.holders: list[Known] = []
        self._free = list(range(15, 0, -1))

    def holder(self, total: int) -> Known:
        """Threads with rows of this table."""
        self.holders.append(Known(total))
        return self.holders[-1]

    def add(self, rows: Array) -> Array:
        """The numbers of new rows: to be held before the next call."""
        count = len(rows)
        if len(self._free) < count:
            self._collect(count)
        numbers = np.array([self._free.pop() for _ in range(count)], np.int32)
        self.table[numbers] = rows
        return numbers

    def _collect(self, count: int) -> None:
        used = np.zeros(len(self.table), np.bool_)
        used[0] = True
        for holder in self.holders:
            used[holder.of] = True
        kept = int(np.count_nonzero(used))
        if kept + count > len(self.table) // 2:
            more = 2 * (kept + count) - len(self.table)
            self.table = np.concatenate([self.table, np.zeros((more, self.columns), np.int32)])
            used = np.concatenate([used, np.zeros(more, np.bool_)])
        self._free = np.flatnonzero(~used)[::-1].tolist()

    def groups(self, of: Array, group: Array, count: int) -> Array:
        """For each of ``count`` groups, none of them empty, the maximum of its members' rows."""
        size = len(self.table)
        pairs = np.unique(group.astype(np.int64) * size + of)
        numbers, owner = pairs % size, pairs // size
        if len(pairs) == count:
            return np.asarray(self.table[numbers])
        begins = np.searchsorted(owner, np.arange(count))
        return np.asarray(np.maximum.reduceat(self.table[numbers], begins, axis=0))

    def add_to(self, known: Known, lanes: Array, row: Array) -> None:
        """``lanes`` now know what ``row`` says, too."""
        numbers, which = np.unique(known.of[lanes], return_inverse=True)
        before = self.table[numbers]
        after = np.maximum(before, row)
        changed = np.flatnonzero((after != before).any(axis=1))
        if changed.size:
            numbers[changed] = self.add(after[changed])
            known.of[lanes] = numbers[which]
