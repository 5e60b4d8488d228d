"""Accesses of threads to memory, each checked: bounds, alignment, bytes nothing wrote, races, copies in flight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lngen.compiler.ir.numerics import Array
from lngen.proof.ptx.batch import MBARRIER, Batch, Memory
from lngen.proof.ptx.clusters import check_started, note_remote
from lngen.proof.ptx.memory import WORD, Allocation, Scratch, gather, scatter, unwritten
from lngen.proof.ptx.opcodes import Semantics, semantics
from lngen.proof.ptx.ordering import NOBODY
from lngen.proof.ptx.parser import Instruction
from lngen.proof.ptx.program import UNSIGNED, Lanes
from lngen.proof.ptx.races import read_races, write_races


def blank(lanes: Lanes, width: int, vec: int) -> list[Array]:
    """Elements that no thread has read: poison."""
    return [np.full(lanes.total, int.from_bytes(b"\xfe" * width, "little"), UNSIGNED[width]) for _ in range(vec)]


def picked(values: list[Array], part: Array | None) -> list[Array]:
    """The elements at some positions (None: all)."""
    return values if part is None else [v[part] for v in values]


def misaligned(batch: Batch, i: Instruction, who: Array, address: Array, count: int, where: str) -> bool:
    """Reports threads whose address is no multiple of the access; True if there are any."""
    if count == 1 or not int(np.bitwise_or.reduce(address)) & (count - 1):
        return False
    bad = np.flatnonzero(address & address.dtype.type(count - 1))
    at = int(address[bad[0]])
    batch.report(
        "misaligned", f"An access of {count} bytes at {where}, address {at:#x}, which is not a multiple of {count}.",
        i, who[bad], address[bad],
    )  # fmt: skip
    return True


def load_global(
    batch: Batch, i: Instruction, lanes: Lanes, address: Array, width: int, vec: int, constant: bool
) -> list[Array]:
    """The elements every thread of the batch reads; those of other threads are poison."""
    count, who = width * vec, lanes.index
    results: list[Array] | None = None
    for buffer, at, mine, part in batch.buffers(i, address, who, count, f"A read of {count} bytes:"):
        check_waited(batch, i, buffer, mine, at)
        odd = misaligned(batch, i, mine, at, count, f"'{buffer.name}'")
        values, known = gather(buffer, at, width, vec, not odd)
        if buffer.tracked:
            _check_read(batch, i, buffer, at, mine, count, known, constant)
        batch.moved(buffer.name, "read", at, mine, count)
        if part is None and lanes.array is None:
            return list(values)
        if results is None:
            results = blank(lanes, width, vec)
        for result, value in zip(results, values, strict=True):
            result[mine] = value
    return results if results is not None else blank(lanes, width, vec)


def _check_read(
    batch: Batch, i: Instruction, buffer: Allocation, at: Array, who: Array, count: int, known: bool, constant: bool
) -> None:
    if not known:
        bad = unwritten(buffer, at, count)
        text = f"A read of {buffer.where(int(at[bad[0]]), count)}, which nothing wrote."
        batch.report("uninitialised", text, i, who[bad], at[bad])
    note_global(batch, i, buffer, at, who, count, "read")
    if batch.order is not None and batch.whole:
        return
    bad = read_races(buffer, at, count, batch.party[who], constant)
    if bad.size:
        writer = "this launch" if constant else "another block of this launch"
        text = f"A read of {buffer.where(int(at[bad[0]]), count)}, which {writer} writes."
        batch.report("global-race", text, i, who[bad], at[bad])


def store_global(batch: Batch, i: Instruction, lanes: Lanes, address: Array, values: list[Array]) -> None:
    """Writes the elements of those lanes."""
    count, who = values[0].dtype.itemsize * len(values), lanes.index
    for buffer, at, mine, part in batch.buffers(i, address, who, count, f"A write of {count} bytes:"):
        if not buffer.tracked:
            text = f"A write to '{buffer.name}', which the kernel may only read."
            batch.report("out-of-bounds", text, i, mine, at)
            continue
        check_waited(batch, i, buffer, mine, at)
        odd = misaligned(batch, i, mine, at, count, f"'{buffer.name}'")
        batch.touched()
        scatter(buffer, at, picked(values, part), not odd)
        batch.moved(buffer.name, "written", at, mine, count)
        note_global(batch, i, buffer, at, mine, count, "write")
        if batch.order is not None and batch.whole:
            continue
        bad = write_races(buffer, at, count, batch.party[mine])
        if bad.size:
            text = f"A write of {buffer.where(int(at[bad[0]]), count)}, which another block of this launch touches."
            batch.report("global-race", text, i, mine[bad], at[bad])


def place(
    batch: Batch,
    i: Instruction,
    lanes: Lanes,
    scratch: Scratch,
    address: Array,
    count: int,
    align: int = 0,
    direct: bool = True,
    own: bool = False,
) -> tuple[Any, ...]:
    """Positions in a scratch's data, the lanes that have one, and their positions in ``lanes``.

    ``direct``: the threads access them themselves and now; ``own``: only their block's memory.
    """
    who = lanes.index
    slot = scratch.owner[who]
    if batch.clusters is not None and scratch.name == "shared" and not own:
        address, slot = batch.clusters.resolve(address, slot)
        check_started(batch, i, who, slot)
        if direct:
            note_remote(batch, i, who, slot)
    inside = scratch.inside(address.astype(np.int64), count)
    if not inside.all():
        bad = np.flatnonzero(~inside)
        text = f"An access to {scratch.where(int(address[bad[0]]), count)}."
        batch.report("out-of-bounds", text, i, who[bad], address[bad])
    if misaligned(batch, i, who, address, align or count, f"{scratch.name} memory"):
        inside &= address & address.dtype.type((align or count) - 1) == 0
    at, part = address.astype(np.int64), None
    if not inside.all():
        part = np.flatnonzero(inside)
        at, who, slot = at[part], who[part], slot[part]
    return at + slot * scratch.room, who, part


def check_waited(batch: Batch, i: Instruction, buffer: Allocation, who: Array, address: Array) -> None:
    """A finding for threads that precede every wait; constants of the module need no wait."""
    if not batch.dependent or buffer.role == "constant":
        return
    early = np.ones(len(who), np.bool_) if batch.order is None else ~batch.order.has_waited(who)
    if early.any():
        text = f"A global access before griddepcontrol.wait, to '{buffer.name}'."
        batch.report("early-access", text, i, who[early], address[early])


def look(batch: Batch, i: Instruction, memory: Memory, at: Array, who: Array, count: int, how: str) -> None:
    """A finding if a byte from the positions ``at`` is in flight, or belongs to an mbarrier."""
    if memory is batch.shared:
        _check_opaque(batch, i, at, who, count, how)
    if not batch.flights.busy or not at.size:
        return
    bad = _marked(batch.flights.marks("to", memory), at, count)
    text = f"which an asynchronous copy {'writes' if how == 'read' else 'also writes'} that no thread waits for."
    if not bad.size and how == "write":
        bad = _marked(batch.flights.marks("from", memory), at, count)
        text = "which an asynchronous copy still reads."
    if bad.size:
        batch.report("async-read", f"A {how} of {memory.named(int(at[bad[0]]), count)}, {text}", i, who[bad], at[bad])


def _marked(marks: Array, at: Array, count: int) -> Array:
    """The positions of accesses to ``count`` bytes at ``at`` of which one is marked."""
    first, each = at.astype(np.int64), 1
    if count % WORD == 0 and not (first % WORD).any():
        marks, first, each = marks.view(np.int64), first // WORD, WORD  # four marks at a time
    return np.flatnonzero(marks[np.arange(count // each)[:, None] + first].any(axis=0))


def _check_opaque(batch: Batch, i: Instruction, at: Array, who: Array, count: int, how: str) -> None:
    """A finding for accesses to ``count`` bytes of shared memory at the positions ``at`` that overlap an mbarrier."""
    if not batch.mbarriers or not at.size:
        return
    held = np.flatnonzero(batch.opaque)
    first, end = at // MBARRIER, (at + (count - 1)) // MBARRIER + 1
    bad = np.flatnonzero(np.searchsorted(held, first) < np.searchsorted(held, end))
    if bad.size:
        text = f"A {how} of {batch.shared.named(int(at[bad[0]]), count)}, "
        text += "which holds an mbarrier that nothing has invalidated."
        batch.report("mbarrier", text, i, who[bad], at[bad] % batch.shared.room)


def parts_of(space: str, address: Array, lanes: Lanes) -> list[tuple[str, Array, Lanes, Array | None]]:
    """An access by the memories it goes to: addresses, lanes, and their positions (None: all)."""
    if space != "generic":
        return [("global" if space == "const" else space, address, lanes, None)]
    window, found = address >> np.uint64(40), []
    for number, name in enumerate(("global", "shared", "local")):
        at = np.flatnonzero(window == number if number else (window != 1) & (window != 2))
        if at.size:
            some = Lanes.of(lanes.index[at], lanes.total)
            found.append((name, address[at] - np.uint64(number << 40), some, at if at.size < len(address) else None))
    return found


def flags(batch: Batch, space: str, address: Array, lanes: Array) -> list[int]:
    """One number per place in memory that may hold a flag."""
    found = np.zeros(len(lanes), np.int64)
    for name, inner, who, part in parts_of(space, address, Lanes.of(lanes, batch.total)):
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


def note_global(batch: Batch, i: Instruction, buffer: Allocation, at: Array, who: Array, count: int, how: str) -> None:
    """Races of an access to global memory with others of the batch, and with copies in flight."""
    start = at.astype(np.int64) - buffer.base
    look(batch, i, buffer, start, who, count, how)
    for n, bad, rival in _races(batch, i, buffer, start, who, count, how):
        verb, other = ("read", "writes") if how == "read" else ("write", "touches")
        text = f"A {verb} of {buffer.named(int(start[bad[0]]) + n, min(WORD, buffer.unit))}, which "
        if rival >= batch.total:
            batch.report("async-read", f"{text}an asynchronous copy {other}, without a wait.", i, who[bad], at[bad])
            continue
        text += f"thread {rival % batch.width} of block {int(batch.block_of[rival])} {other}"
        batch.report("global-race", f"{text}, and nothing orders the two.", i, who[bad], at[bad])


def note_shared(batch: Batch, i: Instruction, scratch: Scratch, at: Array, who: Array, count: int, how: str) -> None:
    """Races and traffic of an access to shared memory."""
    if scratch is not batch.shared or not at.size:
        return
    for _, bad, rival in _races(batch, i, scratch, at, who, count, how):
        report_shared_race(batch, i, at[bad], who[bad], rival, how)
    batch.moved_shared("read" if how == "read" else "written", at % scratch.room, who, count)


def _races(
    batch: Batch, i: Instruction, memory: Memory, at: Array, who: Array, count: int, how: str
) -> Iterator[tuple[int, Array, int]]:
    """Races of an access: the first byte of a unit in it, the accesses that race there, and the first one's rival."""
    places, unit = batch.places(memory)
    strong, units = semantics(i.opcode), max(1, count // unit)
    words, lanes = np.arange(units)[:, None] + at // unit, np.tile(who, units)
    rival = places.note(words.ravel(), lanes, batch.clock, how, strong.level if strong else None)
    if (rival == NOBODY).all():
        return
    for n, rivals in enumerate(rival.reshape(units, -1)):
        bad = np.flatnonzero(rivals != NOBODY)
        if bad.size:
            yield n * unit, bad, int(rivals[bad[0]])


def report_shared_race(batch: Batch, i: Instruction, at: Array, who: Array, rival: int, how: str) -> None:
    """The finding for accesses to positions in shared memory that ``rival`` also touches."""
    address = at % batch.shared.room
    text = f"A thread {'reads' if how == 'read' else 'writes'} {batch.shared.named(int(at[0]), batch.shared.unit)}, "
    if rival >= batch.total:
        batch.report("async-read", f"{text}which an asynchronous copy writes, without a wait.", i, who, address)
        return
    block = "its block" if batch.block_of[rival] == batch.block_of[who[0]] else f"block {int(batch.block_of[rival])}"
    text += f"which thread {rival % batch.width} of {block} {'writes' if how == 'read' else 'accesses'}"
    batch.report("shared-race", f"{text} without a barrier between.", i, who, address)
