"""Records of the accesses to a memory, and the accesses that race with them."""

from __future__ import annotations

import numpy as np

from lngen.compiler.ir.numerics import Array
from lngen.proof.ptx.memory import Allocation
from lngen.proof.ptx.ordering import NOBODY, Clock, VectorClock


class Races:
    """Per unit of memory: the last writer and its time, the last reader and its time, and whether there are others.

    Threads are stored plus one, so that the records of untouched memory remain untouched pages of zeros.
    """

    def __init__(self, words: int, shared: bool) -> None:
        self._shared = shared
        self._writer = np.zeros(words, np.int32)
        self._wrote = np.zeros(words, np.int32)
        self._reader = np.zeros(words, np.int32)
        self._looked = np.zeros(words, np.int32)
        self._several = np.zeros(words, np.bool_)

    def last(self, words: Array) -> tuple[Array, Array]:
        """The last writer of each word, NOBODY if there is none, and the time."""
        return self._writer[words] - 1, self._wrote[words]

    def wrote(self, words: Array, who: int, when: int) -> None:
        """Record a write without a check."""
        self._writer[words], self._wrote[words] = who + 1, when

    def read(self, words: Array, lanes: Array, clock: Clock) -> Array:
        """The thread whose write each read races with, NOBODY if none; records the reads."""
        rival = self._rivals(words, lanes, clock)
        before, when = self._reader[words] - 1, self._looked[words]
        other = (before != NOBODY) & (before != lanes)
        held = self._several[words] | other
        held &= ~clock.ordered(before, when, lanes, self._shared)
        self._reader[words] = lanes + 1
        self._looked[words] = clock.moment
        self._several[words] = held
        self._several[words[held]] = True
        self._several[words[self._reader[words] - 1 != lanes]] = True
        return rival

    def write(self, words: Array, lanes: Array, clock: Clock) -> Array:
        """The thread whose access each write races with, NOBODY if none; records the writes."""
        rival = self.peek(words, lanes, clock, "write")
        self._writer[words] = lanes + 1
        self._wrote[words] = clock.moment
        self._reader[words] = 0
        self._several[words] = False
        twice = self._writer[words] - 1
        return np.asarray(np.where((rival == NOBODY) & (twice != lanes), twice, rival))

    def note(self, words: Array, lanes: Array, clock: Clock, how: str) -> Array:
        """``read`` or ``write``."""
        return (self.read if how == "read" else self.write)(words, lanes, clock)

    def peek(self, words: Array, lanes: Array, clock: Clock, how: str) -> Array:
        """As ``note``, without a record."""
        rival = self._rivals(words, lanes, clock)
        if how == "read":
            return rival
        reader = self._reader[words] - 1
        other = (reader != NOBODY) & ((reader != lanes) | self._several[words])
        if other.any():
            other &= ~clock.ordered(reader, self._looked[words], lanes, self._shared)
        return np.asarray(np.where((rival == NOBODY) & other, reader, rival))

    def _rivals(self, words: Array, lanes: Array, clock: Clock) -> Array:
        writer = self._writer[words] - 1
        other = (writer != NOBODY) & (writer != lanes)
        if other.any():
            other &= ~clock.ordered(writer, self._wrote[words], lanes, self._shared)
        return np.asarray(np.where(other, writer, NOBODY))


class Places:
    """Races in a launch with atomics: strong accesses race with weak accesses and not with each other.

    PTX ISA, Memory Consistency Model: morally strong operations. Two accesses are morally strong if both are strong
    and the scope of each includes the thread of the other.
    """

    def __init__(self, words: int, shared: bool) -> None:
        self.words, self.shared = words, shared
        self.plain = Races(words, shared)
        self.strong: dict[int, Races] = {}  # by the level of the scope

    def note(self, words: Array, lanes: Array, clock: Clock, how: str, level: int | None = None) -> Array:
        """The thread that each access races with, or NOBODY; records the accesses. ``level``: scope of strong ones."""
        if level is None:
            rival = self.plain.note(words, lanes, clock, how)
            for races in self.strong.values():
                rival = np.where(rival == NOBODY, races.peek(words, lanes, clock, how), rival)
            return np.asarray(rival)
        assert isinstance(clock, VectorClock)
        rival = self.plain.peek(words, lanes, clock, how)
        if level not in self.strong:
            self.strong[level] = Races(self.words, self.shared)
        for other, races in self.strong.items():
            found = (races.note if other == level else races.peek)(words, lanes, clock, how)
            out_of_scope = (found != NOBODY) & ~clock.in_scope(found, lanes, min(level, other))
            rival = np.where((rival == NOBODY) & out_of_scope, found, rival)
        return np.asarray(rival)


MANY = -1


def read_races(buffer: Allocation, address: Array, count: int, block: Array, constant: bool) -> Array:
    """Positions that another block writes in this launch (``constant``: any block); records the readers."""
    units = _units(buffer, address, count)
    writer = buffer.writer[units]
    me = block[:, None]
    bad = (writer != 0) if constant else (writer != 0) & (writer != me)
    reader = buffer.reader[units]
    buffer.reader[units] = np.where((reader == 0) | (reader == me), me, MANY)
    after = buffer.reader[units]
    if (after != me).any():
        buffer.reader[units[(after != me)]] = MANY
    return np.flatnonzero(bad.any(axis=1))


def write_races(buffer: Allocation, address: Array, count: int, block: Array) -> Array:
    """Positions that another block reads or writes in this launch; records the writers."""
    units = _units(buffer, address, count)
    me = block[:, None]
    writer, reader = buffer.writer[units], buffer.reader[units]
    buffer.writer[units] = np.broadcast_to(me, units.shape)
    bad = ((writer != 0) & (writer != me)) | ((reader != 0) & (reader != me)) | (buffer.writer[units] != me)
    return np.flatnonzero(bad.any(axis=1))


def _units(buffer: Allocation, address: Array, count: int) -> Array:
    first = (address.astype(np.int64) - buffer.base) // buffer.unit
    return np.asarray(first[:, None] + np.arange(max(1, count // buffer.unit)))
