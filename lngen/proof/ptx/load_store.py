"""ld and st in whatever memory their addresses are; cache policies and prefetches, which change no value."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from lngen.compiler.ir.numerics import Array
from lngen.proof.ptx.accesses import (
    blank,
    flag_read,
    flag_written,
    load_global,
    look,
    note_shared,
    parts_of,
    picked,
    place,
    store_global,
)
from lngen.proof.ptx.batch import Batch
from lngen.proof.ptx.opcodes import Access, access, ever_read
from lngen.proof.ptx.parser import Instruction, Operand
from lngen.proof.ptx.program import DT, DTYPES, UNSIGNED, Address, Lanes, Program, Step, unknown


def access_step(program: Program, i: Instruction) -> Step:
    """The step of a load or store."""
    form = access(i.opcode)
    if form is None or len(i.operands) != 2 + form.policy:
        raise unknown(i)
    if form.policy:
        program.source(i.operands[2], UNSIGNED[8], i)  # any policy is as good as another
    to, source = i.operands[:2] if form.op == "ld" else i.operands[1::-1]
    if source.kind != "mem":
        raise unknown(i)
    names = to.items if to.kind == "vec" else (to,)
    if len(names) != form.vec:
        raise unknown(i, f"has {len(names)} elements, expected {form.vec}")
    if form.space == "param":
        return _parameter(program, i, DTYPES[form.kind], source)
    address = program.address(source, i)
    if DTYPES[form.kind].itemsize * form.vec > 16:
        raise unknown(i, "moves more than 16 bytes")
    return (_load if form.op == "ld" else _store)(program, i, form, names, address)


def _load(program: Program, i: Instruction, form: Access, names: Sequence[Operand], address_of: Address) -> Step:
    """The step of a load into the registers ``names``."""
    dtype = DTYPES[form.kind]
    extended = dtype if dtype.kind == "i" else UNSIGNED[dtype.itemsize]
    writers = [program.writer(o, extended, i) for o in names]
    wanted = [n for n, o in enumerate(names) if o.text in ever_read(program.entry)]

    def load(batch: Batch, lanes: Lanes) -> None:
        address = address_of(batch.R, lanes)
        values: list[Array] = []
        for name, inner, who, _ in parts_of(form.space, address, lanes):
            if name == "global":
                found = load_global(batch, i, who, inner, dtype.itemsize, form.vec, form.constant)
            else:
                found = _load_scratch(batch, i, who, name, form, inner, dtype.itemsize, wanted)
            values = [np.where(who.mask, f, v) for f, v in zip(found, values, strict=True)] if values else found
        if form.how is not None:
            flag_read(batch, form.space, address, lanes.index, form.how)
        for write, value in zip(writers, values, strict=True):
            write(batch.R, value.view(extended), lanes)

    return load


def _store(program: Program, i: Instruction, form: Access, names: Sequence[Operand], address_of: Address) -> Step:
    """The step of a store of the operands ``names``."""
    readers = [program.reader(o, UNSIGNED[DTYPES[form.kind].itemsize], i) for o in names]

    def store(batch: Batch, lanes: Lanes) -> None:
        address = address_of(batch.R, lanes)
        values = [lanes.each(read(batch.R)) for read in readers]
        if form.how is not None:
            flag_written(batch, form.space, address, lanes.index, form.how)
        for name, inner, who, part in parts_of(form.space, address, lanes):
            if name == "global":
                store_global(batch, i, who, inner, picked(values, part))
            else:
                _store_scratch(batch, i, who, name, form, inner, picked(values, part))

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
    write = program.writer(i.operands[0], kind, i)

    def load(batch: Batch, lanes: Lanes) -> None:
        value = np.uint64(batch.arguments[name] >> 8 * offset).astype(UNSIGNED[width]).view(kind)
        write(batch.R, value, lanes)

    return load


def _load_scratch(
    batch: Batch, i: Instruction, lanes: Lanes, space: str, form: Access, address: Array, width: int, wanted: list[int]
) -> list[Array]:
    """As ``load_global``, from shared or local memory; gaps that a compiler filled are not ``wanted``."""
    scratch = batch.scratch(space)
    at, who, part = place(batch, i, lanes, scratch, address, width * form.vec, own=form.own)
    look(batch, i, scratch, at, who, width * form.vec, "read")
    values, known = scratch.read(at, width, form.vec, wanted)
    if not known.all():
        bad = np.flatnonzero(~known)
        where = scratch.where(int(at[bad[0]] % scratch.room), width * form.vec)
        batch.report("uninitialised", f"A read of {where}, which nothing wrote.", i, who[bad], at[bad] % scratch.room)
    note_shared(batch, i, scratch, at, who, width * form.vec, "read")
    if part is None and lanes.array is None:
        return list(values)
    results = blank(lanes, width, form.vec)
    for result, value in zip(results, values, strict=True):
        result[who] = value
    return results


def _store_scratch(
    batch: Batch, i: Instruction, lanes: Lanes, space: str, form: Access, address: Array, values: list[Array]
) -> None:
    """As ``store_global``, to shared or local memory."""
    scratch = batch.scratch(space)
    width, vec = values[0].dtype.itemsize, len(values)
    at, who, part = place(batch, i, lanes, scratch, address, width * vec, own=form.own)
    batch.touched()
    look(batch, i, scratch, at, who, width * vec, "write")
    scratch.write(at, picked(values, part))
    note_shared(batch, i, scratch, at, who, width * vec, "write")


_POLICY = re.compile(
    r"createpolicy\.fractional\.(?P<first>L2::evict_(?:last|normal|first|unchanged))"
    r"(?:\.(?P<second>L2::evict_(?:first|unchanged)))?\.b64"
)
_PREFETCH = re.compile(r"prefetch\.(?P<to>(?:global\.)?L[12]|global\.L2::evict_(?:last|normal))|prefetchu\.L1")
POLICY = 0x12F0000000000000  # any number: hints are passed on and not interpreted


def policy_step(program: Program, i: Instruction) -> Step:
    """createpolicy.fractional: a 64-bit policy for other instructions."""
    if not _POLICY.fullmatch(i.opcode) or not 1 <= len(i.operands) <= 2:
        raise unknown(i)
    if len(i.operands) == 2:
        program.source(i.operands[1], DTYPES["f32"], i)
    write = program.writer(i.operands[0], UNSIGNED[8], i)
    return lambda batch, lanes: write(batch.R, np.uint64(POLICY), lanes)


def prefetch_step(program: Program, i: Instruction) -> Step:
    """prefetch: changes nothing a kernel can observe, so it may precede any wait; counted and checked for bounds."""
    if not _PREFETCH.fullmatch(i.opcode) or len(i.operands) != 1:
        raise unknown(i)
    address_of = program.address(i.operands[0], i)

    def step(batch: Batch, lanes: Lanes) -> None:
        for buffer, _, who, _ in batch.buffers(i, address_of(batch.R, lanes), lanes.index, 1, "A prefetch:"):
            batch.prefetched(buffer.name, who.size)

    return step
