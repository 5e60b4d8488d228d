"""Copies that have begun and not arrived: what they will write, what they read, and who may touch neither."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx import opaque
from lngen.ptx.memory import POISON, Buffer
from lngen.ptx.parser import Instruction
from lngen.ptx.scratch import NOBODY, Scratch

if TYPE_CHECKING:
    from lngen.ptx.batch import Batch

Memory = Scratch | Buffer


@dataclass
class Copy:
    """One copy of one thread: its bytes, where from (if from a memory that may change) and where to."""

    instruction: Instruction
    lane: int
    writer: int  # the thread, or the agent of a barrier, that counts as having written
    data: Array
    to: Memory
    at: int
    source: Memory | None = None
    start: int = 0
    group: int = 0
    hands_over: bool = False  # those that wait for the barrier it completes on learn what its thread had seen
    seen: Array | None = None


@dataclass
class Flights:
    """Of a batch: copies by thread and kind, and how many copies every byte takes part in."""

    copies: dict[tuple[str, int], list[Copy]] = field(default_factory=dict)
    commits: dict[tuple[str, int], int] = field(default_factory=dict)
    loading: dict[int, int] = field(default_factory=dict)  # bytes on their way from global memory, by block
    _marks: dict[tuple[str, int], Array] = field(default_factory=dict)

    def marks(self, how: str, memory: Memory) -> Array:
        """Copies that write ("to") or read ("from") each byte."""
        key = how, id(memory)
        if key not in self._marks:
            self._marks[key] = np.zeros(len(memory.data), np.int16)
        return self._marks[key]

    def look(self, batch: Batch, i: Instruction, memory: Memory, at: Array, who: Array, count: int, how: str) -> None:
        """A finding if a byte from the positions ``at`` is in flight, or of an mbarrier."""
        if memory is batch.shared:
            opaque.check(batch, i, at, who, count, how)
        if not self._marks or not at.size:
            return
        spread = at.astype(np.int64)[:, None] + np.arange(count)
        bad = np.flatnonzero((self.marks("to", memory)[spread] > 0).any(axis=1))
        text = f"which an asynchronous copy {'writes' if how == 'read' else 'also writes'} that nobody has waited for."
        if not bad.size and how == "write":
            bad = np.flatnonzero((self.marks("from", memory)[spread] > 0).any(axis=1))
            text = "which an asynchronous copy still reads."
        if bad.size:
            where = named(memory, int(at[bad[0]]), count)
            batch.report("async-read", f"A {how} of {where}, {text}", i, who[bad], at[bad])

    def begin(self, batch: Batch, copy: Copy, kind: str, key: int) -> None:
        """``copy`` starts; it ends with the others under ``kind`` and ``key``."""
        who, at = np.array([copy.lane]), np.array([copy.at])
        self.look(batch, copy.instruction, copy.to, at, who, len(copy.data), "write")
        noted(batch, copy, copy.to, copy.at, copy.lane, "write")
        end = copy.at + len(copy.data)
        self.marks("to", copy.to)[copy.at : end] += 1
        copy.to.data[copy.at : end] = POISON
        assert copy.to.written is not None
        copy.to.written[copy.at : end] = 1
        if copy.source is not None:
            self.marks("from", copy.source)[copy.start : copy.start + len(copy.data)] += 1
        if kind == "barrier" and batch.order is not None:
            batch.order.tick(copy.lane)
            copy.seen = batch.order.row(who) if copy.hands_over else None
        self._count(batch, copy, 1)
        copy.group = self.commits.get((kind, key), 0)
        self.copies.setdefault((kind, key), []).append(copy)

    def _count(self, batch: Batch, copy: Copy, sign: int) -> None:
        if isinstance(copy.to, Scratch) and ".global" in copy.instruction.opcode:
            block = copy.at // copy.to.room
            self.loading[block] = self.loading.get(block, 0) + sign * len(copy.data)
            most, kernel = batch.launch.traffic.in_flight, batch.launch.kernel
            most[kernel] = max(most[kernel], self.loading[block])

    def commit(self, kind: str, lanes: Array) -> None:
        """The copies so far are a group of their thread."""
        for lane in lanes.tolist():
            self.commits[kind, lane] = self.commits.get((kind, lane), 0) + 1

    def wait(self, batch: Batch, kind: str, key: int, keep: int | None, reading: bool = False) -> None:
        """All but the last ``keep`` groups arrive (None: everything does); ``reading``: they have read, no more."""
        last = self.commits.get((kind, key), 0) - (keep or 0)
        left = []
        for copy in self.copies.get((kind, key), []):
            if keep is not None and copy.group >= last:
                left.append(copy)
                continue
            self._has_read(batch, copy)
            if reading:
                left.append(copy)
            else:
                self._arrive(batch, copy)
        self.copies[kind, key] = left

    def _has_read(self, batch: Batch, copy: Copy) -> None:
        if copy.source is not None:
            self.marks("from", copy.source)[copy.start : copy.start + len(copy.data)] -= 1
            noted(batch, copy, copy.source, copy.start, copy.lane, "read")
            copy.source = None

    def _arrive(self, batch: Batch, copy: Copy) -> None:
        end = copy.at + len(copy.data)
        copy.to.data[copy.at : end] = copy.data
        self.marks("to", copy.to)[copy.at : end] -= 1
        self._count(batch, copy, -1)
        noted(batch, copy, copy.to, copy.at, copy.writer, "write", quiet=copy.writer != copy.lane)
        if batch.clusters is not None and isinstance(copy.to, Scratch):
            owner = np.array([copy.at // copy.to.room])
            batch.clusters.remote.note(batch, copy.instruction, np.array([copy.lane]), owner, copy.writer)
        batch.touched()

    def finish(self, batch: Batch) -> None:
        """The launch ends: stores must have read what they store."""
        for (kind, _), copies in self.copies.items():
            for copy in copies:
                if kind == "bulk" and copy.source is not None:
                    text = "The block ends while this copy may still read its shared memory: no wait comes after it."
                    batch.report("async-read", text, copy.instruction, np.array([copy.lane]))
                if kind == "bulk":
                    copy.to.data[copy.at : copy.at + len(copy.data)] = copy.data


def named(memory: Memory, at: int, count: int) -> str:
    """A place in words."""
    if isinstance(memory, Buffer):
        return memory.where(at + memory.base, count)
    return memory.where(at % memory.room, count)


def noted(batch: Batch, copy: Copy, memory: Memory, at: int, who: int, how: str, quiet: bool = False) -> None:
    """Races of a copy; ``quiet``: it is only noted."""
    if isinstance(memory, Buffer):
        if not memory.tracked:
            return
        places, unit = batch.places(memory)
    else:
        places, unit = memory.races, memory.unit
    words = np.arange(at // unit, -(-(at + len(copy.data)) // unit))
    lanes = np.full(len(words), who)
    if quiet:
        places.plain.wrote(words, who, batch.clock.moment)
        return
    rival = places.note(words, lanes, batch.clock, how)
    bad = np.flatnonzero(rival != NOBODY)
    if bad.size:
        place = named(memory, int(words[bad[0]]) * unit, unit)
        kind = "global-race" if isinstance(memory, Buffer) else "shared-race"
        text = f"A copy that {how}s {place}, which thread {int(rival[bad[0]]) % batch.width} touches unordered."
        batch.report(kind, text, copy.instruction, np.array([copy.lane]))
