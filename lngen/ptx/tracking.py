"""What an access leaves behind: who touched what, races, flags handed over, traffic."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx.lanes import WARP, Lanes
from lngen.ptx.memory import WORD, Buffer
from lngen.ptx.memory_opcodes import order
from lngen.ptx.ordering import Semantics
from lngen.ptx.parser import Entry, Instruction
from lngen.ptx.scratch import NOBODY, Scratch
from lngen.ptx.values import DTYPES

if TYPE_CHECKING:
    from lngen.ptx.batch import Batch


def parts_of(space: str, address: Array, lanes: Lanes) -> list[tuple[str, Array, Lanes, Array | None]]:
    """An access by the memory it goes to: addresses there, lanes, and their positions (None: all)."""
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


SPACES = {"global", "shared", "local", "const", "param"}


@lru_cache(maxsize=64)
def narrowest(entry: Entry, space: str) -> int:
    """The bytes by which races are told apart in a memory: of its narrowest access, ``WORD`` at most."""
    found = [WORD]
    for i in entry.instructions:
        op, *parts = i.opcode.split(".")
        spaces = [p.partition("::")[0] for p in parts]
        if op in ("ld", "st") and (space in spaces or SPACES.isdisjoint(spaces)):
            vec = next((int(p[1]) for p in parts if p in ("v2", "v4")), 1)
            found.append(DTYPES[parts[-1]].itemsize * vec)
    return min(found)


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


def observed(batch: Batch, space: str, address: Array, lanes: Array, how: Semantics) -> None:
    """A strong read."""
    if batch.order is not None:
        for lane, place in zip(lanes.tolist(), flags(batch, space, address, lanes), strict=True):
            batch.order.observed(place, lane, how)


def published(batch: Batch, space: str, address: Array, lanes: Array, how: Semantics) -> None:
    """A strong write."""
    if batch.order is not None:
        for lane, place in zip(lanes.tolist(), flags(batch, space, address, lanes), strict=True):
            batch.order.published(place, lane, how, False)


def scope(i: Instruction) -> int | None:
    """The level of its scope, for accesses that may meet others of their kind; None for a weak one."""
    how = order(i.opcode)
    return None if how is None else how.level


def note_global(batch: Batch, i: Instruction, buffer: Buffer, at: Array, who: Array, count: int, how: str) -> None:
    """Races of an access to global memory with others of the batch, and with copies that are under way."""
    places, unit = batch.places(buffer)
    start = at.astype(np.int64) - buffer.base
    batch.flights.look(batch, i, buffer, start, who, count, how)
    for n in range(max(1, count // unit)):
        rival = places.note(start // unit + n, who, batch.clock, how, scope(i))
        bad = np.flatnonzero(rival != NOBODY)
        if not bad.size:
            continue
        verb, other = ("read", "writes") if how == "read" else ("write", "touches")
        place = buffer.where(int(at[bad[0]]) + n * unit, unit)
        first = int(rival[bad[0]])
        if first >= batch.total:
            text = f"A {verb} of {place}, which an asynchronous copy {other}, not waited for."
            batch.report("async-read", text, i, who[bad], at[bad])
            continue
        text = f"A {verb} of {place}, which thread {first % batch.width} of block {int(batch.block_of[first])} {other} "
        batch.report("global-race", text + "with nothing that orders them.", i, who[bad], at[bad])


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


def shared_race(batch: Batch, i: Instruction, scratch: Scratch, at: Array, who: Array, rival: int, how: str) -> None:
    """The finding for accesses at those places that ``rival`` touches, too."""
    address = at % scratch.room
    verb = "reads" if how == "read" else "writes"
    where = scratch.where(int(address[0]), scratch.unit)
    if rival >= batch.total:
        text = f"A thread {verb} {where}, which an asynchronous copy writes, not waited for."
        batch.report("async-read", text, i, who, address)
        return
    block = "its block" if batch.block_of[rival] == batch.block_of[who[0]] else f"block {int(batch.block_of[rival])}"
    text = f"A thread {verb} {where}, which thread {rival % batch.width} of {block} "
    text += f"{'writes' if how == 'read' else 'accesses'} with no barrier between."
    batch.report("shared-race", text, i, who, address)


def sectors(address: Array, who: Array, count: int) -> int:
    """32-byte sectors touched, counted once a warp; those of a bulk copy."""
    if count > 32:
        last = address + address.dtype.type(count - 1)
        return int((last // np.uint64(32) - address // np.uint64(32)).sum()) + len(address)
    first = (address // np.uint64(32)).astype(np.int64)
    key = first + (who // WARP << 44)
    steps = np.diff(key)
    if (steps >= 0).all():
        return int(np.count_nonzero(steps)) + 1
    return int(np.unique(key).size)
