"""Shared and local memory: bytes per block or thread, which of them are written, and races in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx.memory import POISON, VIEWS, WORD
from lngen.ptx.parser import Symbol
from lngen.ptx.values import DTYPES

NOBODY = -1
BARRIERS = 16  # of a block, by number: PTX ISA
STAMPS = 2 * BARRIERS  # of each time: one for every barrier passed then, the last for accesses


def layout(symbols: Sequence[Symbol], start: int) -> tuple[dict[str, int], int]:
    """The offset of each symbol, with a gap before each but the first, and the bytes of all.

    Dynamic symbols follow the others, all at one offset, whatever their size.
    """
    places, at = {}, start
    for symbol in (s for s in symbols if not s.dynamic):
        at = -(-at // max(16, symbol.align)) * max(16, symbol.align)
        places[symbol.name] = at
        at += size_of(symbol) + 256
    last = [s for s in symbols if s.dynamic]
    if last:
        widest = max(16, *(s.align for s in last))
        at = -(-at // widest) * widest
        places |= {s.name: at for s in last}
    return places, -(-at // 16) * 16


def size_of(symbol: Symbol) -> int:
    """The bytes of a symbol; 0 for a dynamic one."""
    return symbol.count * DTYPES[symbol.element].itemsize


class Scratch:
    """The bytes of every block (shared) or thread (local) of a batch; races in units of ``unit`` bytes."""

    def __init__(
        self, name: str, symbols: Sequence[Symbol], owner: Array, parts: int, dynamic: int = 0, unit: int = WORD
    ) -> None:
        self.name, self.owner, self.unit = name, owner, unit
        symbols = [s for s in symbols if s.space == name]
        self.places, self.room = layout(symbols, 0)
        self.sizes = [(self.places[s.name], dynamic if s.dynamic else size_of(s), s.name) for s in symbols]
        if any(s.dynamic for s in symbols):
            self.room += -(-dynamic // 16) * 16 + 256
        self.data = np.full(parts * self.room, POISON, np.uint8)
        self.written = np.zeros(parts * self.room, np.uint8)
        self.races: Any = Races(parts * self.room // unit) if name == "shared" else None

    def inside(self, address: Array, count: int) -> Array:
        """True where ``count`` bytes from ``address`` belong to one symbol."""
        found = np.zeros(address.shape, np.bool_)
        for start, size, _ in self.sizes:
            found |= (address >= start) & (address + count <= start + size)
        return found

    def where(self, address: int, count: int) -> str:
        """The description of an address in findings."""
        if not self.sizes:
            return f"address {address} of {self.name} memory, of which the kernel has none"
        start, size, symbol = max((s for s in self.sizes if s[0] <= address), default=self.sizes[0])
        at = address - start if address - start < 1 << 31 else address - start - (1 << 32)
        return f"bytes {at} to {at + count - 1} of {self.name} memory '{symbol}', which has {size} bytes"

    def read(self, at: Array, width: int, vec: int, wanted: list[int]) -> tuple[Sequence[Array], Array]:
        """Elements at byte positions of ``data``, and True where every byte of those ``wanted`` is written."""
        spread = at[:, None] + np.arange(0, width * vec, width)
        index = spread // width
        columns = self.data.view(VIEWS[width])[index]
        full = VIEWS[width].type(int.from_bytes(b"\x01" * width, "little"))
        known = (self.written.view(VIEWS[width])[index[:, wanted]] == full).all(axis=1)
        return tuple(np.ascontiguousarray(columns.T)), known

    def write(self, at: Array, values: Sequence[Array]) -> None:
        """Store one element of each of ``values``, next to each other."""
        width = values[0].dtype.itemsize
        full = VIEWS[width].type(int.from_bytes(b"\x01" * width, "little"))
        for i, value in enumerate(values):
            index = at // width + i
            self.data.view(VIEWS[width])[index] = value
            self.written.view(VIEWS[width])[index] = full


class Times(Protocol):
    """The order between accesses."""

    @property
    def moment(self) -> int:
        """The time of an access made now."""

    def ordered(self, earlier: Array, time: Array, later: Array) -> Array:
        """True where ``later`` follows an access of ``earlier`` at ``time``."""


class Clock:
    """The times at which each thread last passed the block barrier and a named barrier.

    ``now`` grows with every release; the stamp of a release is its time and its barrier, so two threads of a
    block with equal stamps passed the same barrier together.
    """

    def __init__(self, total: int) -> None:
        self.now = 0
        self.whole = np.zeros(total, np.int32)
        self.named = np.zeros(total, np.int32)

    def release(self) -> None:
        """Advances the time."""
        self.now += 1

    def barrier_passed(self, lanes: Array | slice, barrier: Array | int) -> None:
        """``lanes`` passed ``barrier`` now."""
        stamp = np.asarray(self.now * STAMPS + barrier + 1, np.int32)
        if np.ndim(barrier) == 0:
            (self.named if barrier else self.whole)[lanes] = stamp
            return
        lanes = np.asarray(lanes)
        self.whole[lanes[barrier == 0]] = self.now * STAMPS + 1
        self.named[lanes[barrier != 0]] = stamp[barrier != 0]

    @property
    def moment(self) -> int:
        """The time of an access made now: before every later release."""
        return self.now * STAMPS + STAMPS - 1

    def ordered(self, earlier: Array, time: Array, later: Array) -> Array:
        """True where ``later`` and ``earlier`` both passed a barrier after the access of ``earlier`` at ``time``."""
        whole, named = self.whole[later], self.named[later]
        return np.asarray(
            ((whole > time) & (self.whole[earlier] == whole)) | ((named > time) & (self.named[earlier] == named))
        )


class Races:
    """Per unit of memory: the last writer and its time, the last reader and its time, and whether there are others.

    Threads are stored plus one, so that the records of untouched memory remain untouched pages of zeros.
    """

    def __init__(self, words: int) -> None:
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

    def read(self, words: Array, lanes: Array, clock: Times) -> Array:
        """The thread whose write each read races with, NOBODY if none; records the reads."""
        rival = self._rivals(words, lanes, clock)
        before, when = self._reader[words] - 1, self._looked[words]
        other = (before != NOBODY) & (before != lanes)
        held = self._several[words] | other
        held &= ~clock.ordered(before, when, lanes)
        self._reader[words] = lanes + 1
        self._looked[words] = clock.moment
        self._several[words] = held
        self._several[words[held]] = True
        self._several[words[self._reader[words] - 1 != lanes]] = True
        return rival

    def write(self, words: Array, lanes: Array, clock: Times) -> Array:
        """The thread whose access each write races with, NOBODY if none; records the writes."""
        rival = self.peek(words, lanes, clock, "write")
        self._writer[words] = lanes + 1
        self._wrote[words] = clock.moment
        self._reader[words] = 0
        self._several[words] = False
        twice = self._writer[words] - 1
        return np.asarray(np.where((rival == NOBODY) & (twice != lanes), twice, rival))

    def note(self, words: Array, lanes: Array, clock: Times, how: str, level: int | None = None) -> Array:
        """``read`` or ``write``."""
        return (self.read if how == "read" else self.write)(words, lanes, clock)

    def peek(self, words: Array, lanes: Array, clock: Times, how: str) -> Array:
        """As ``note``, without a record."""
        rival = self._rivals(words, lanes, clock)
        if how == "read":
            return rival
        reader = self._reader[words] - 1
        other = (reader != NOBODY) & ((reader != lanes) | self._several[words])
        if other.any():
            other &= ~clock.ordered(reader, self._looked[words], lanes)
        return np.asarray(np.where((rival == NOBODY) & other, reader, rival))

    def _rivals(self, words: Array, lanes: Array, clock: Times) -> Array:
        writer = self._writer[words] - 1
        other = (writer != NOBODY) & (writer != lanes)
        if other.any():
            other &= ~clock.ordered(writer, self._wrote[words], lanes)
        return np.asarray(np.where(other, writer, NOBODY))
