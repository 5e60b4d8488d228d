"""Asynchronous copies start and complete, and accesses that conflict with those in flight are findings."""

from __future__ import annotations

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx import opaque, remote
from lngen.ptx.batch import Batch
from lngen.ptx.in_flight import Copy, Memory
from lngen.ptx.memory import POISON, Buffer
from lngen.ptx.parser import Instruction
from lngen.ptx.scratch import NOBODY, Scratch


def look(batch: Batch, i: Instruction, memory: Memory, at: Array, who: Array, count: int, how: str) -> None:
    """A finding if a byte from the positions ``at`` is in flight, or belongs to an mbarrier."""
    if memory is batch.shared:
        opaque.check(batch, i, at, who, count, how)
    if not batch.flights.busy or not at.size:
        return
    spread = at.astype(np.int64)[:, None] + np.arange(count)
    bad = np.flatnonzero((batch.flights.marks("to", memory)[spread] > 0).any(axis=1))
    text = f"which an asynchronous copy {'writes' if how == 'read' else 'also writes'} that no thread waits for."
    if not bad.size and how == "write":
        bad = np.flatnonzero((batch.flights.marks("from", memory)[spread] > 0).any(axis=1))
        text = "which an asynchronous copy still reads."
    if bad.size:
        where = named(memory, int(at[bad[0]]), count)
        batch.report("async-read", f"A {how} of {where}, {text}", i, who[bad], at[bad])


def begin(batch: Batch, copy: Copy, kind: str, key: int) -> None:
    """``copy`` starts; it completes together with the other copies under ``kind`` and ``key``."""
    who, at = np.array([copy.lane]), np.array([copy.at])
    look(batch, copy.instruction, copy.to, at, who, len(copy.data), "write")
    noted(batch, copy, copy.to, copy.at, copy.lane, "write")
    end = copy.at + len(copy.data)
    batch.flights.marks("to", copy.to)[copy.at : end] += 1
    copy.to.data[copy.at : end] = POISON
    assert copy.to.written is not None
    copy.to.written[copy.at : end] = 1
    if copy.source is not None:
        batch.flights.marks("from", copy.source)[copy.start : copy.start + len(copy.data)] += 1
    if kind == "barrier" and batch.order is not None:
        batch.order.tick(copy.lane)
        copy.visible = batch.order.clock(who) if copy.releases else None
    _count(batch, copy, 1)
    copy.group = batch.flights.commits.get((kind, key), 0)
    batch.flights.copies.setdefault((kind, key), []).append(copy)


def _count(batch: Batch, copy: Copy, sign: int) -> None:
    if isinstance(copy.to, Scratch) and ".global" in copy.instruction.opcode:
        block = copy.at // copy.to.room
        batch.flights.loading[block] = batch.flights.loading.get(block, 0) + sign * len(copy.data)
        most, kernel = batch.launch.traffic.in_flight, batch.launch.kernel
        most[kernel] = max(most[kernel], batch.flights.loading[block])


def wait(batch: Batch, kind: str, key: int, keep: int | None, reading: bool = False) -> None:
    """All but the last ``keep`` groups complete (None: all); ``reading``: they complete their reads alone."""
    last = batch.flights.commits.get((kind, key), 0) - (keep or 0)
    left = []
    for copy in batch.flights.copies.get((kind, key), []):
        if keep is not None and copy.group >= last:
            left.append(copy)
            continue
        _has_read(batch, copy)
        if reading:
            left.append(copy)
        else:
            _arrive(batch, copy)
    batch.flights.copies[kind, key] = left


def _has_read(batch: Batch, copy: Copy) -> None:
    if copy.source is not None:
        batch.flights.marks("from", copy.source)[copy.start : copy.start + len(copy.data)] -= 1
        noted(batch, copy, copy.source, copy.start, copy.lane, "read")
        copy.source = None


def _arrive(batch: Batch, copy: Copy) -> None:
    end = copy.at + len(copy.data)
    copy.to.data[copy.at : end] = copy.data
    batch.flights.marks("to", copy.to)[copy.at : end] -= 1
    _count(batch, copy, -1)
    noted(batch, copy, copy.to, copy.at, copy.writer, "write", quiet=copy.writer != copy.lane)
    if batch.clusters is not None and isinstance(copy.to, Scratch):
        owner = np.array([copy.at // copy.to.room])
        remote.note(batch, copy.instruction, np.array([copy.lane]), owner, copy.writer)
    batch.touched()


def finish(batch: Batch) -> None:
    """The launch ends: stores must have read their source."""
    for (kind, _), copies in batch.flights.copies.items():
        for copy in copies:
            if kind == "bulk" and copy.source is not None:
                text = "The block ends while this copy may still read its shared memory: no wait follows the copy."
                batch.report("async-read", text, copy.instruction, np.array([copy.lane]))
            if kind == "bulk":
                copy.to.data[copy.at : copy.at + len(copy.data)] = copy.data


def named(memory: Memory, at: int, count: int) -> str:
    """A place in words."""
    if isinstance(memory, Buffer):
        return memory.where(at + memory.base, count)
    return memory.where(at % memory.room, count)


def noted(batch: Batch, copy: Copy, memory: Memory, at: int, who: int, how: str, quiet: bool = False) -> None:
    """Races of a copy; ``quiet``: the copy is recorded without a finding."""
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
        text = f"A copy that {how}s {place}, which thread {int(rival[bad[0]]) % batch.width} touches without order."
        batch.report(kind, text, copy.instruction, np.array([copy.lane]))
