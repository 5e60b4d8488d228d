"""Global, shared and local memory: bytes, gaps between them, and shadow bytes that record what is written."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lngen.compiler.ir.numerics import Array
from lngen.proof.ptx.parser import Symbol
from lngen.proof.ptx.program import DTYPES

GAP = 1 << 16
START = 1 << 33
POISON = 0xFE
WORD = 4  # bytes of a unit of race detection, unless a kernel has narrower accesses
VIEWS = {n: np.dtype(t) for n, t in {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}.items()}


class Rows:
    """Where the rows of a tensor begin in its buffer, and the bytes of a row.

    ``pitches``: bytes from a row to the next; of rows at two distances, from one of ``inner`` rows to the next, before
    the distance of these ``inner`` rows from those after them.
    """

    def __init__(self, count: int, used: int, pitches: tuple[int, ...], inner: int = 1) -> None:
        self.used, self.pitches = used, pitches
        row = np.arange(count, dtype=np.int64)
        starts = row * pitches[0] if len(pitches) == 1 else row // inner * pitches[1] + row % inner * pitches[0]
        self.starts, self.ordered = starts, np.sort(starts)

    @property
    def apart(self) -> bool:
        """True if there are bytes between two rows; not, if rows overlap."""
        steps = np.diff(self.ordered)
        return bool((steps > self.used).any() and (steps >= self.used).all())

    def inside(self, at: Array, count: int) -> Array:
        """True where ``count`` bytes from ``at`` are of one row."""
        row = np.maximum(np.searchsorted(self.ordered, at, side="right") - 1, 0)
        return np.asarray(at + count <= self.ordered[row] + self.used)

    def __str__(self) -> str:
        two = f", and {self.pitches[1]} bytes from outer row to outer row" if len(self.pitches) > 1 else ""
        return f"row stride {self.pitches[0]} bytes{two}, rows of {self.used}"


class Allocation:
    """A tensor's bytes: ``size`` of them, all of them elements, or those of ``rows`` alone.

    ``over``: bytes that exist, as many multiples of 16 as the buffer needs; all of them count as written. ``edges``:
    where what a block copies of a row begins and ends, in order, if copies have neighbours of it at both ends.
    """

    def __init__(
        self,
        name: str,
        role: str,
        size: int,
        item: int,
        rows: Rows | None = None,
        shift: int = 0,
        over: Array | None = None,
    ) -> None:
        self.name, self.role, self.size, self.item = name, role, size, item
        self.rows = rows if rows is not None and rows.apart else None
        self.shift = shift  # bytes from an aligned address to the first element
        self.base = 0
        room = -(-(size + shift) // 16) * 16 + 16
        self.data = np.full(room, POISON, np.uint8) if over is None else over
        self.tracked = role in ("output", "workspace")
        self.written = np.full(self.data.size, over is not None, np.uint8) if self.tracked else None
        self.edges = np.zeros(0, np.int64)
        self.begin()

    def begin(self, narrow: int = WORD) -> None:
        """Starts a launch with accesses of at least ``narrow`` bytes: no byte has been touched."""
        self.unit = min(self.item, narrow) if narrow < WORD else self.item
        units = self.data.size // self.unit if self.tracked else 0
        self.writer = np.zeros(units, np.int32)
        self.reader = np.zeros(units, np.int32)

    def fill(self, content: Array) -> None:
        """Writes the elements of an array, from the first byte on."""
        self.data[: content.nbytes] = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
        if self.written is not None:
            self.written[: content.nbytes] = 1

    def wanted(self, start: int, end: int) -> tuple[int, int]:
        """Where the bytes begin and end that a copy of units of 16 bytes is made for; the others are neighbours."""
        inside = self.edges[np.searchsorted(self.edges, start) : np.searchsorted(self.edges, end, side="right")]
        if not inside.size:
            return start, end
        first, last = int(inside[0]), int(inside[-1])
        return first if first < start + 16 else start, last if max(first, end - 16) < last else end

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
        if self.rows:
            found &= self.rows.inside(at, count)
        return np.asarray(found)

    def where(self, address: int, count: int) -> str:
        """The description of an address in findings."""
        at = address - self.start
        if self.rows and 0 <= at < self.size and not self.rows.inside(np.array([at]), count)[0]:
            return f"bytes {at} to {at + count - 1}, between the rows of '{self.name}' ({self.rows})"
        return f"bytes {at} to {at + count - 1} of '{self.name}', which has {self.size} bytes"

    def named(self, at: int, count: int) -> str:
        """As ``where``, of a position in ``data``."""
        return self.where(at + self.base, count)


class GlobalMemory:
    """All buffers of a run, in the order of their addresses, the first of which is ``start``."""

    def __init__(self, start: int = START) -> None:
        self.buffers: list[Allocation] = []
        self._starts: list[int] = []
        self._next = start

    def add(self, buffer: Allocation, base: int | None = None) -> Allocation:
        """Place a buffer at ``base``, a multiple of 16, else at an address aligned to 256, far from the others."""
        buffer.base = self._next if base is None else base
        if base is None:
            self._next += -(-(buffer.data.size + GAP) // 256) * 256
        place = bisect_right(self._starts, buffer.start)
        self.buffers.insert(place, buffer)
        self._starts.insert(place, buffer.start)
        return buffer

    def remove(self, buffer: Allocation) -> None:
        """Accesses to a buffer are out of bounds from now on."""
        place = self.buffers.index(buffer, bisect_left(self._starts, buffer.start))
        del self.buffers[place], self._starts[place]

    def begin(self, narrow: int) -> None:
        """Starts a launch with accesses of at least ``narrow`` bytes."""
        for buffer in self.buffers:
            buffer.begin(narrow)

    def nearest(self, address: int, count: int) -> str:
        """Where an address is in the buffer at it or next to it."""
        if not self.buffers:
            return f"{count} bytes from {address:#x}, where no memory is"
        return min(
            self.buffers, key=lambda b: max(b.start - address, address - (b.start + b.size - 1), 0 if b.rows else -1)
        ).where(address, count)

    def parts(self, address: Array, count: int) -> Iterator[tuple[Allocation | None, Any, str]]:
        """The buffers of an access, with its positions in ``address`` (None: all).

        Where there are none the buffer is None, and a text says which is the nearest.
        """
        if not address.size:
            return
        low, high = int(address.min()), int(address.max())
        n = bisect_right(self._starts, low) - 1
        if n >= 0:
            b = self.buffers[n]
            at = low - b.start
            if at >= 0 and high - b.start + count <= b.size and not b.rows:
                yield b, None, ""
                return
        owner = np.searchsorted(np.array(self._starts, np.uint64), address, side="right") - 1
        for number in np.unique(owner):
            mine = np.flatnonzero(owner == number)
            found = np.zeros(mine.size, np.bool_)
            if number >= 0:
                found = self.buffers[number].inside(address[mine], count)
            if not found.all():
                bad = mine[~found]
                first = int(address[bad[0]])
                yield None, bad, self.nearest(first, count)
            if found.any():
                yield self.buffers[number], mine[found], ""


def gather(buffer: Allocation, address: Array, width: int, vec: int, aligned: bool) -> tuple[Sequence[Array], bool]:
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


def scatter(buffer: Allocation, address: Array, values: Sequence[Array], aligned: bool) -> None:
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


def unwritten(buffer: Allocation, address: Array, count: int) -> Array:
    """Positions in ``address`` where a byte was never written."""
    assert buffer.written is not None
    spread = address.astype(np.int64)[:, None] - buffer.base + np.arange(count)
    return np.flatnonzero(~buffer.written[spread].all(axis=1))


def layout(symbols: Sequence[Symbol]) -> tuple[dict[str, int], int]:
    """The offset of each symbol, with a gap before each but the first, and the bytes of all.

    Dynamic symbols follow the others, all at one offset, whatever their size.
    """
    places, at = dict[str, int](), 0
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
        self.places, self.room = layout(symbols)
        self.sizes = [(self.places[s.name], dynamic if s.dynamic else size_of(s), s.name) for s in symbols]
        if any(s.dynamic for s in symbols):
            self.room += -(-dynamic // 16) * 16 + 256
        self.data = np.full(parts * self.room, POISON, np.uint8)
        self.written = np.zeros(parts * self.room, np.uint8)

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

    def named(self, at: int, count: int) -> str:
        """As ``where``, of a position in ``data``."""
        return self.where(at % self.room, count)

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
