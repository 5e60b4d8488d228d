"""ld and st: addresses checked, data moved, races and traffic noted."""

from __future__ import annotations

from typing import Any

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx.batch import Batch
from lngen.ptx.defined import ever_read
from lngen.ptx.dependent import check as early
from lngen.ptx.lanes import Lanes
from lngen.ptx.memory import Buffer, gather, read_races, scatter, write_races
from lngen.ptx.memory import unknown as unwritten
from lngen.ptx.memory_opcodes import access
from lngen.ptx.parser import Instruction, Operand
from lngen.ptx.program import Program, Step, unknown, write
from lngen.ptx.scratch import Scratch
from lngen.ptx.tracking import note_global, note_shared, observed, parts_of, published
from lngen.ptx.values import DT, DTYPES, UNSIGNED, Value


def access_step(program: Program, i: Instruction) -> Step:
    """The step of a load or store."""
    form = access(i.opcode)
    if form is None or len(i.operands) != 2 + form.policy:
        raise unknown(i)
    if form.policy:
        program.source(i.operands[2], UNSIGNED[8], i)
    to, source = i.operands[:2] if form.op == "ld" else i.operands[1::-1]
    if source.kind != "mem":
        raise unknown(i)
    vec, dtype = form.vec, DTYPES[form.kind]
    names = to.items if to.kind == "vec" else (to,)
    if len(names) != vec:
        raise unknown(i, f"has {len(names)} elements, expected {vec}")
    if form.space == "param":
        return _parameter(program, i, dtype, source)
    base, offset = base_slot(program, i, source.text), source.offset
    width = dtype.itemsize
    if width * vec > 16:
        raise unknown(i, "moves more than 16 bytes")
    unsigned, extended = UNSIGNED[width], dtype if dtype.kind == "i" else UNSIGNED[width]
    space, how = form.space, form.how
    if form.op == "ld":
        targets = [program.target(o, extended, i) for o in names]
        wanted = [n for n, o in enumerate(names) if o.text in ever_read(program.entry)]

        def load(batch: Batch, lanes: Lanes) -> None:
            address = address_of(batch, base, offset, lanes)
            values = load_from(batch, i, lanes, space, address, width, vec, form.constant, wanted)
            if how is not None:
                observed(batch, space, address, lanes.index, how)
            for (slot, convert), value in zip(targets, values, strict=True):
                value = value.view(extended)
                write(batch, slot, convert(value) if convert else value, lanes)

        return load
    sources = [program.source(o, unsigned, i) for o in names]

    def store(batch: Batch, lanes: Lanes) -> None:
        address = address_of(batch, base, offset, lanes)
        values = [spread(batch.R[s] if a is None else a(batch.R[s]), lanes) for s, a in sources]
        if how is not None:
            published(batch, space, address, lanes.index, how)
        store_to(batch, i, lanes, space, address, values)

    return store


def _parameter(program: Program, i: Instruction, dtype: DT, source: Operand) -> Step:
    """A load of a parameter, or of a part of one."""
    name, offset, kinds = source.text, source.offset, dict(program.entry.params)
    if name not in kinds:
        raise unknown(i, f"reads the parameter '{name}', which is not declared")
    size, width = DTYPES[kinds[name]].itemsize, dtype.itemsize
    if not 0 <= offset <= size - width or offset % width:
        raise unknown(i, f"reads {width} bytes from byte {offset} of the parameter '{name}', which has {size}")
    if i.operands[0].kind == "vec":
        raise unknown(i, "reads several elements of a parameter")
    kind = dtype if dtype.kind == "i" else UNSIGNED[width]
    slot, convert = program.target(i.operands[0], kind, i)

    def load(batch: Batch, lanes: Lanes) -> None:
        value = np.uint64(batch.arguments[name] >> 8 * offset).astype(UNSIGNED[width]).view(kind)
        write(batch, slot, convert(value) if convert else value, lanes)

    return load


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


def load_from(
    batch: Batch,
    i: Instruction,
    lanes: Lanes,
    space: str,
    address: Array,
    width: int,
    vec: int,
    constant: bool,
    wanted: list[int],
) -> list[Array]:
    """The elements every thread of the batch reads from a memory."""
    results: list[Array] = []
    for name, inner, who, _ in parts_of(space, address, lanes):
        if name == "global":
            values = load_global(batch, i, who, inner, width, vec, constant)
        else:
            values = load_scratch(batch, i, who, name, inner, width, vec, wanted)
        results = [np.where(who.mask, v, r) for v, r in zip(values, results, strict=True)] if results else values
    return results


def store_to(batch: Batch, i: Instruction, lanes: Lanes, space: str, address: Array, values: list[Array]) -> None:
    """Writes the elements of those lanes to a memory."""
    for name, inner, who, part in parts_of(space, address, lanes):
        mine = values if part is None else [v[part] for v in values]
        (store_global(batch, i, who, inner, mine) if name == "global" else
         store_scratch(batch, i, who, name, inner, mine))  # fmt: skip


def _blank(lanes: Lanes, width: int, vec: int) -> list[Array]:
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
            results = _blank(lanes, width, vec)
        for result, value in zip(results, values, strict=True):
            result[mine] = value
    return results if results is not None else _blank(lanes, width, vec)


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
        batch.clusters.remote.check_begun(batch, i, who, slot)
        if direct:
            batch.clusters.remote.note(batch, i, who, slot)
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


def _own(i: Instruction) -> bool:
    form = access(i.opcode)
    return form is not None and form.own


def load_scratch(
    batch: Batch, i: Instruction, lanes: Lanes, space: str, address: Array, width: int, vec: int, wanted: list[int]
) -> list[Array]:
    """As ``load_global``, from shared or local memory; gaps that a compiler filled are not ``wanted``."""
    scratch = batch.scratch(space)
    at, who, part = place(batch, i, lanes, scratch, address, width * vec, own=_own(i))
    batch.flights.look(batch, i, scratch, at, who, width * vec, "read")
    values, known = scratch.read(at, width, vec, wanted)
    if not known.all():
        bad = np.flatnonzero(~known)
        where = scratch.where(int(at[bad[0]] % scratch.room), width * vec)
        batch.report("uninitialised", f"A read of {where}, which nothing wrote.", i, who[bad], at[bad] % scratch.room)
    note_shared(batch, i, scratch, at, who, width * vec, "read")
    if part is None and lanes.array is None:
        return list(values)
    results = _blank(lanes, width, vec)
    for result, value in zip(results, values, strict=True):
        result[who] = value
    return results


def store_scratch(batch: Batch, i: Instruction, lanes: Lanes, space: str, address: Array, values: list[Array]) -> None:
    """As ``store_global``, to shared or local memory."""
    scratch = batch.scratch(space)
    width, vec = values[0].dtype.itemsize, len(values)
    at, who, part = place(batch, i, lanes, scratch, address, width * vec, own=_own(i))
    batch.touched()
    batch.flights.look(batch, i, scratch, at, who, width * vec, "write")
    scratch.write(at, values if part is None else [v[part] for v in values])
    note_shared(batch, i, scratch, at, who, width * vec, "write")
