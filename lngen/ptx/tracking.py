"""The effects of an access on the records: last accesses, races, flags, traffic."""

from __future__ import annotations

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx.batch import Batch
from lngen.ptx.flights import look
from lngen.ptx.lanes import Lanes
from lngen.ptx.memory import Buffer
from lngen.ptx.memory_opcodes import order
from lngen.ptx.parser import Instruction
from lngen.ptx.races import shared_race
from lngen.ptx.release import Semantics
from lngen.ptx.scratch import NOBODY, Scratch


def parts_of(space: str, address: Array, lanes: Lanes) -> list[tuple[str, Array, Lanes, Array | None]]:
    """An access by the memories it goes to: addresses, lanes, and their positions (None: all)."""
    if space != "generic":
        return [("global" if space == "const" else space, address, lanes, None)]
    window, found = address >> np.uint64(40), []
    for number, name in enumerate(("global", "shared", "local")):
        at = np.flatnonzero(window == number if number else (window != 1) & (window != 2))
        if at.size:
            chosen = np.zeros(lanes.total, np.bool_)
            chosen[lanes.index[at]] = True
            inner = address[at] - np.uint64(number << 40)
            found.append((name, inner, Lanes(chosen, lanes.total), at if at.size < len(address) else None))
    return found


def flags(batch: Batch, space: str, address: Array, lanes: Array) -> list[int]:
    """One number per place in memory that may hold a flag."""
    whole = Lanes(np.isin(np.arange(batch.total), lanes), batch.total)
    found = np.zeros(len(lanes), np.int64)
    for name, inner, who, part in parts_of(space, address, whole):
        at = inner.astype(np.int64)
        if name == "shared":
            slot = batch.slot_of[who.index]
            if batch.clusters is not None:
                inner, slot = batch.clusters.resolve(inner, slot)
            at = -1 - (inner.astype(np.int64) + slot * batch.shared.room)
        found[slice(None) if part is None else part] = at
    return [int(n) for n in found]


def flag_read(batch: Batch, space: str, address: Array, lanes: Array, how: Semantics) -> None:
    """A strong read."""
    if batch.order is not None:
        for lane, flag in zip(lanes.tolist(), flags(batch, space, address, lanes), strict=True):
            batch.order.flag_read(flag, lane, how)


def flag_written(batch: Batch, space: str, address: Array, lanes: Array, how: Semantics) -> None:
    """A strong write."""
    if batch.order is not None:
        for lane, flag in zip(lanes.tolist(), flags(batch, space, address, lanes), strict=True):
            batch.order.flag_written(flag, lane, how, False)


def scope(i: Instruction) -> int | None:
    """The level of its scope for a strong access; None for a weak one."""
    how = order(i.opcode)
    return None if how is None else how.level


def note_global(batch: Batch, i: Instruction, buffer: Buffer, at: Array, who: Array, count: int, how: str) -> None:
    """Races of an access to global memory with others of the batch, and with copies in flight."""
    places, unit = batch.places(buffer)
    start = at.astype(np.int64) - buffer.base
    look(batch, i, buffer, start, who, count, how)
    for n in range(max(1, count // unit)):
        rival = places.note(start // unit + n, who, batch.clock, how, scope(i))
        bad = np.flatnonzero(rival != NOBODY)
        if not bad.size:
            continue
        verb, other = ("read", "writes") if how == "read" else ("write", "touches")
        place = buffer.where(int(at[bad[0]]) + n * unit, unit)
        first = int(rival[bad[0]])
        if first >= batch.total:
            text = f"A {verb} of {place}, which an asynchronous copy {other}, without a wait."
            batch.report("async-read", text, i, who[bad], at[bad])
            continue
        text = f"A {verb} of {place}, which thread {first % batch.width} of block {int(batch.block_of[first])} {other}"
        batch.report("global-race", text + ", and nothing orders the two.", i, who[bad], at[bad])


def note_shared(batch: Batch, i: Instruction, scratch: Scratch, at: Array, who: Array, count: int, how: str) -> None:
    """Races and traffic of an access to shared memory."""
    if scratch.races is None or not at.size:
        return
    level = scope(i) if batch.order is not None else None
    unit = scratch.unit
    for n in range(max(1, count // unit)):
        rival = scratch.races.note(at // unit + n, who, batch.clock, how, level)
        bad = np.flatnonzero(rival != NOBODY)
        if bad.size:
            shared_race(batch, i, scratch, at[bad], who[bad], int(rival[bad[0]]), how)
    batch.moved_shared("read" if how == "read" else "written", at % scratch.room, who, count)
