"""Global memory: one buffer per tensor, gaps between buffers, and shadow bytes that record writes and their writers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lngen.ir.numerics import Array

GAP = 1 << 16
START = 1 << 33
POISON = 0xFE
WORD = 4  # bytes of a unit of race detection, unless a kernel has narrower accesses
MANY = -1
VIEWS = {n: np.dtype(t) for n, t in {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}.items()}

Report = Callable[[str, str, Array, Array], None]  # kind, message, lanes, addresses


class Buffer:
    """A tensor's bytes: ``size`` of them, in rows of ``used`` bytes every ``pitch``."""

    def __init__(
        self, name: str, role: str, size: int, item: int, pitch: int = 0, used: int = 0, shift: int = 0
    ) -> None:
        self.name, self.role, self.size, self.item = name, role, size, item
        self.pitch, self.used = (pitch, used) if pitch > used else (0, 0)
        self.shift = shift  # bytes from an aligned address to the first element
        self.base = 0
        room = -(-(size + shift) // 16) * 16 + 16
        self.data = np.full(room, POISON, np.uint8)
        self.tracked = role in ("output", "workspace")
        self.written = np.zeros(room, np.uint8) if self.tracked else None
        self.begin()

    def begin(self, narrow: int = WORD) -> None:
        """Starts a launch with accesses of at least ``narrow`` bytes: no byte has been touched."""
        self.unit = min(self.item, narrow) if narrow < WORD else self.item
        units = self.data.size // self.unit if self.tracked else 0
        self.writer = np.zeros(units, np.int32)
        self.reader = np.zeros(units, np.int32)

    def forget(self) -> None:
        """Marks all bytes as not written."""
        assert self.written is not None
        self.data[:], self.written[:] = POISON, 0

    def zero(self) -> None:
        """Marks all bytes as written, and sets them to zero."""
        assert self.written is not None
        self.data[:], self.written[:] = 0, 1

    @property
    def start(self) -> int:
        """Address of the first element."""
        return self.base + self.shift

    def inside(self, address: Array, count: int) -> Array:
        """True where ``count`` bytes from ``address`` are elements."""
        at = address.astype(np.int64) - self.start
        found = (at >= 0) & (at + count <= self.size)
        if self.pitch:
            found &= at % self.pitch + count <= self.used
        return np.asarray(found)

    def where(self, address: int, count: int) -> str:
        """The description of an address in findings."""
        at = address - self.start
        gap = self.pitch and 0 <= at < self.size
        room = f"between the rows of '{self.name}' (row stride {self.pitch} bytes, rows of {self.used})" if gap else (
            f"'{self.name}', which has {self.size} bytes"
        )  # fmt: skip
        return f"bytes {at} to {at + count - 1} of {room}" if not gap else f"bytes {at} to {at + count - 1}, {room}"


class GlobalMemory:
    """All buffers of a run."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._bases: list[int] = []
        self._next = START

    def add(self, buffer: Buffer) -> Buffer:
        """Place a buffer at an address aligned to 256 bytes, far from the others."""
        buffer.base = self._next
        self._next += -(-(buffer.data.size + GAP) // 256) * 256
        self.buffers.append(buffer)
        self._bases.append(buffer.base)
        return buffer

    def begin(self, narrow: int) -> None:
        """Starts a launch with accesses of at least ``narrow`` bytes."""
        for buffer in self.buffers:
            buffer.begin(narrow)

    def nearest(self, address: int) -> Buffer:
        """The buffer at or next to an address."""
        return min(
            self.buffers, key=lambda b: max(b.start - address, address - (b.start + b.size - 1), 0 if b.pitch else -1)
        )

    def parts(
        self, address: Array, lanes: Array, count: int, what: str, report: Report
    ) -> Iterator[tuple[Buffer, Array | None]]:
        """The buffers of an access, with its positions in ``address`` (None: all); other positions are reported."""
        if not address.size:
            return
        low, high = int(address.min()), int(address.max())
        n = bisect_right(self._bases, low) - 1
        if n >= 0:
            b = self.buffers[n]
            at = low - b.start
            if at >= 0 and high - b.start + count <= b.size and not b.pitch:
                yield b, None
                return
        owner = np.searchsorted(np.array(self._bases, np.uint64), address, side="right") - 1
        for number in np.unique(owner):
            mine = np.flatnonzero(owner == number)
            found = np.zeros(mine.size, np.bool_)
            if number >= 0:
                found = self.buffers[number].inside(address[mine], count)
            if not found.all():
                bad = mine[~found]
                first = int(address[bad[0]])
                place = self.nearest(first).where(first, count)
                report("out-of-bounds", f"{what} {place}.", lanes[bad], address[bad])
            if found.any():
                yield self.buffers[number], mine[found]


def gather(buffer: Buffer, address: Array, width: int, vec: int, aligned: bool) -> tuple[Sequence[Array], bool]:
    """The elements read, and whether all of their bytes are written."""
    count = width * vec
    at = address.astype(np.int64) - buffer.base
    if aligned:
        index = at // count
        raw = buffer.data.view(VIEWS[count])[index]
        known = True
        if buffer.written is not None:
            marks = np.ascontiguousarray(buffer.written.view(VIEWS[count])[index]).view(np.uint8)
            known = bool(marks.all())
    else:
        spread = at[:, None] + np.arange(count)
        raw = buffer.data[spread]
        known = buffer.written is None or bool(buffer.written[spread].all())
    columns = np.ascontiguousarray(raw).view(VIEWS[width]).reshape(-1, vec)
    return (columns[:, 0],) if vec == 1 else tuple(np.ascontiguousarray(columns.T)), known


def scatter(buffer: Buffer, address: Array, values: Sequence[Array], aligned: bool) -> None:
    """Store one element of each of ``values``, next to each other, at every address."""
    width, vec = values[0].dtype.itemsize, len(values)
    count = width * vec
    at = address.astype(np.int64) - buffer.base
    raw = np.ascontiguousarray(np.stack(values, axis=1) if vec > 1 else values[0][:, None])
    if aligned:
        index = at // count
        buffer.data.view(VIEWS[count])[index] = raw.view(VIEWS[count])[:, 0]
        if buffer.written is not None:
            ones = np.ones(count, np.uint8).view(VIEWS[count])[0]
            buffer.written.view(VIEWS[count])[index] = ones
    else:
        spread = at[:, None] + np.arange(count)
        buffer.data[spread] = raw.view(np.uint8).reshape(-1, count)
        if buffer.written is not None:
            buffer.written[spread] = 1


def unknown(buffer: Buffer, address: Array, count: int) -> Array:
    """Positions in ``address`` where a byte was never written."""
    assert buffer.written is not None
    spread = address.astype(np.int64)[:, None] - buffer.base + np.arange(count)
    return np.flatnonzero(~buffer.written[spread].all(axis=1))


def read_races(buffer: Buffer, address: Array, count: int, block: Array, constant: bool) -> Array:
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


def write_races(buffer: Buffer, address: Array, count: int, block: Array) -> Array:
    """Positions that another block reads or writes in this launch; records the writers."""
    units = _units(buffer, address, count)
    me = block[:, None]
    writer, reader = buffer.writer[units], buffer.reader[units]
    buffer.writer[units] = np.broadcast_to(me, units.shape)
    bad = ((writer != 0) & (writer != me)) | ((reader != 0) & (reader != me)) | (buffer.writer[units] != me)
    return np.flatnonzero(bad.any(axis=1))


def _units(buffer: Buffer, address: Array, count: int) -> Array:
    first = (address.astype(np.int64) - buffer.base) // buffer.unit
    return np.asarray(first[:, None] + np.arange(max(1, count // buffer.unit)))
