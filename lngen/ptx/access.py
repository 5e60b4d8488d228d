"""Accesses of threads: addresses checked, global memory read and written, races and traffic recorded."""

from __future__ import annotations

from typing import Any

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx import remote
from lngen.ptx.batch import Batch
from lngen.ptx.dependent import check as early
from lngen.ptx.lanes import Lanes
from lngen.ptx.memory import Buffer, gather, read_races, scatter, write_races
from lngen.ptx.memory import unknown as unwritten
from lngen.ptx.parser import Instruction
from lngen.ptx.program import Program, unknown
from lngen.ptx.scratch import Scratch
from lngen.ptx.tracking import note_global
from lngen.ptx.values import UNSIGNED, Value


def base_slot(program: Program, i: Instruction, text: str) -> int:
    """The slot of an address: a register, or a symbol or number that stands for one."""
    if text in program.entry.registers:
        return program.register(text, i)
    if text in program.symbols:
        return program.new(UNSIGNED[8], np.uint64(program.symbols[text]))
    raise unknown(i, f"has the address '{text}', which is neither a register nor a symbol")


def spread(value: Value, lanes: Lanes) -> Array:
    """The value of every lane of ``lanes``."""
    if np.ndim(value) == 0:
        return np.full(lanes.count, value)
    return np.asarray(value if lanes.array is None else value[lanes.index])


def address_of(batch: Batch, base: int, offset: int, lanes: Lanes) -> Array:
    value = spread(batch.R[base], lanes)
    if offset:
        mask = (1 << 8 * value.dtype.itemsize) - 1
        value = value + value.dtype.type(offset & mask)
    return value


def blank(lanes: Lanes, width: int, vec: int) -> list[Array]:
    """Elements that no thread has read: poison."""
    return [np.full(lanes.total, int.from_bytes(b"\xfe" * width, "little"), UNSIGNED[width]) for _ in range(vec)]


def misaligned(batch: Batch, i: Instruction, lanes: Lanes, address: Array, count: int, where: str) -> bool:
    """Reports lanes whose address is no multiple of the access; True if there are any."""
    if count == 1 or not int(np.bitwise_or.reduce(address)) & (count - 1):
        return False
    bad = np.flatnonzero(address & address.dtype.type(count - 1))
    at = int(address[bad[0]])
    batch.report(
        "misaligned", f"An access of {count} bytes at {where}, address {at:#x}, which is not a multiple of {count}.",
        i, lanes.index[bad], address[bad],
    )  # fmt: skip
    return True


def load_global(
    batch: Batch, i: Instruction, lanes: Lanes, address: Array, width: int, vec: int, constant: bool
) -> list[Array]:
    """The elements every thread of the batch reads; those of other threads are poison."""
    count, who = width * vec, lanes.index
    results: list[Array] | None = None
    what = f"A read of {count} bytes:"
    for buffer, part in batch.memory.parts(address, who, count, what, batch.reporting(i)):
        at, mine = (address, who) if part is None else (address[part], who[part])
        early(batch, i, buffer, mine, at)
        odd = misaligned(batch, i, lanes, at, count, f"'{buffer.name}'")
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
    batch: Batch, i: Instruction, buffer: Buffer, at: Array, who: Array, count: int, known: bool, constant: bool
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
    what = f"A write of {count} bytes:"
    for buffer, part in batch.memory.parts(address, who, count, what, batch.reporting(i)):
        at, mine = (address, who) if part is None else (address[part], who[part])
        mineral = values if part is None else [v[part] for v in values]
        if not buffer.tracked:
            text = f"A write to '{buffer.name}', which the kernel may only read."
            batch.report("out-of-bounds", text, i, mine, at)
            continue
        early(batch, i, buffer, mine, at)
        odd = misaligned(batch, i, lanes, at, count, f"'{buffer.name}'")
        batch.touched()
        scatter(buffer, at, mineral, not odd)
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
        remote.check_started(batch, i, who, slot)
        if direct:
            remote.note(batch, i, who, slot)
    inside = scratch.inside(address.astype(np.int64), count)
    if not inside.all():
        bad = np.flatnonzero(~inside)
        text = f"An access to {scratch.where(int(address[bad[0]]), count)}."
        batch.report("out-of-bounds", text, i, who[bad], address[bad])
    if misaligned(batch, i, lanes, address, align or count, f"{scratch.name} memory"):
        inside &= address & address.dtype.type((align or count) - 1) == 0
    at, part = address.astype(np.int64), None
    if not inside.all():
        part = np.flatnonzero(inside)
        at, who, slot = at[part], who[part], slot[part]
    return at + slot * scratch.room, who, part
