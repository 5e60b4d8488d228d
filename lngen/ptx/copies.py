"""cp.async and cp.async.bulk, their groups and waits."""

from __future__ import annotations

import re
from functools import partial

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx import proxy
from lngen.ptx.access import address_of, base_slot, load_global, place, spread
from lngen.ptx.batch import Batch
from lngen.ptx.dependent import check as early
from lngen.ptx.flights import Copy, noted
from lngen.ptx.lanes import Lanes
from lngen.ptx.memory import Buffer, read_races, write_races
from lngen.ptx.ordering import AGENTS
from lngen.ptx.parser import Instruction, Operand
from lngen.ptx.program import Program, Step, unknown
from lngen.ptx.values import UNSIGNED, immediate

_ASYNC = re.compile(r"cp\.async\.c[ag]\.shared(?:::cta)?\.global(?:\.L2::(?:64|128|256)B)?")
_LOAD = re.compile(
    r"cp\.async\.bulk\.shared::(?:cluster|cta)\.global\.mbarrier::complete_tx::bytes(?P<h>\.L2::cache_hint)?"
)
_STORE = re.compile(r"cp\.async\.bulk\.global\.shared::cta\.bulk_group(?P<h>\.L2::cache_hint)?")
_COMMIT = {"cp.async.commit_group": "async", "cp.async.bulk.commit_group": "bulk"}
_WAIT = {
    "cp.async.wait_group": ("async", False), "cp.async.bulk.wait_group": ("bulk", False),
    "cp.async.bulk.wait_group.read": ("bulk", True),
}  # fmt: skip


def copy_step(program: Program, i: Instruction) -> Step:
    """The step of an instruction that begins with cp."""
    if _ASYNC.fullmatch(i.opcode):
        return _async(program, i)
    for pattern, count in ((_LOAD, 4), (_STORE, 3)):
        if (m := pattern.fullmatch(i.opcode)) and len(i.operands) == count + bool(m["h"]):
            return _bulk(program, i, pattern is _LOAD)
    if i.opcode in _COMMIT and not i.operands:
        kind = _COMMIT[i.opcode]
        return lambda batch, lanes: batch.flights.commit(kind, lanes.index)
    if i.opcode == "cp.async.wait_all" and not i.operands:
        return partial(_wait, "async", None, False)
    if i.opcode in _WAIT and len(i.operands) == 1 and i.operands[0].kind == "imm":
        kind, reading = _WAIT[i.opcode]
        return partial(_wait, kind, int(immediate(i.operands[0].text, UNSIGNED[4])), reading)
    raise unknown(i)


def _wait(kind: str, keep: int | None, reading: bool, batch: Batch, lanes: Lanes) -> None:
    for lane in lanes.index.tolist():
        batch.flights.wait(batch, kind, lane, keep, reading)


def memory_operand(program: Program, i: Instruction, o: Operand) -> tuple[int, int]:
    """Slot and offset of an address."""
    if o.kind != "mem":
        raise unknown(i)
    return base_slot(program, i, o.text), o.offset


def _async(program: Program, i: Instruction) -> Step:
    if not 3 <= len(i.operands) <= 4 or i.operands[2].kind != "imm" or i.operands[2].text not in ("4", "8", "16"):
        raise unknown(i)
    count = int(i.operands[2].text)
    if count != 16 and ".cg" in i.opcode:
        raise unknown(i, "copies 16 bytes only")
    to, source = memory_operand(program, i, i.operands[0]), memory_operand(program, i, i.operands[1])
    size = program.source(i.operands[3], UNSIGNED[4], i) if len(i.operands) == 4 else None

    def step(batch: Batch, lanes: Lanes) -> None:
        address = address_of(batch, *source, lanes)
        sizes = np.full(lanes.count, count)
        if size is not None:
            value = batch.R[size[0]] if size[1] is None else size[1](batch.R[size[0]])
            sizes = np.minimum(spread(value, lanes), count)
        data = _fetch(batch, i, lanes, address, sizes, count)
        at, who, part = place(batch, i, lanes, batch.shared, address_of(batch, *to, lanes), count)
        data = data if part is None else data[part]
        for lane, where, row in zip(who.tolist(), at.tolist(), data, strict=True):
            batch.flights.begin(batch, Copy(i, lane, lane, row, batch.shared, where), "async", lane)

    return step


def _fetch(batch: Batch, i: Instruction, lanes: Lanes, address: Array, sizes: Array, count: int) -> Array:
    """The bytes each lane copies; zeros where it copies fewer than ``count``."""
    data = np.zeros((lanes.count, count), np.uint8)
    for size in np.unique(sizes).tolist():
        mine = np.flatnonzero(sizes == size)
        chosen = np.zeros(lanes.total, np.bool_)
        chosen[lanes.index[mine]] = True
        some = Lanes(chosen, lanes.total)
        if size == count:
            columns = load_global(batch, i, some, address[mine], 4, count // 4, False)
            whole = np.stack([c[some.index] for c in columns], axis=1)
            data[mine] = np.ascontiguousarray(whole).view(np.uint8)
            continue
        for n in range(size):
            byte = load_global(batch, i, some, address[mine] + address.dtype.type(n), 1, 1, False)[0]
            data[mine, n] = byte[some.index]
    return data


def _bulk(program: Program, i: Instruction, loads: bool) -> Step:
    to, source = (memory_operand(program, i, o) for o in i.operands[:2])
    size = program.source(i.operands[2], UNSIGNED[4], i)
    barrier = memory_operand(program, i, i.operands[3]) if loads else None
    if ".L2::cache_hint" in i.opcode:
        program.source(i.operands[-1], UNSIGNED[8], i)

    def step(batch: Batch, lanes: Lanes) -> None:
        value = batch.R[size[0]] if size[1] is None else size[1](batch.R[size[0]])
        sizes, far = spread(value, lanes), address_of(batch, *(source if loads else to), lanes)
        near = address_of(batch, *(to if loads else source), lanes)
        place_of = address_of(batch, *barrier, lanes) if barrier else near
        for n, lane in enumerate(lanes.index.tolist()):
            one, part = single(lane, lanes.total), slice(n, n + 1)
            if _fits(batch, i, one, far[part], near[part], int(sizes[n])):
                if loads:
                    _load(batch, i, one, far[part], near[part], int(sizes[n]), place_of[part])
                else:
                    _store(batch, i, one, far[part], near[part], int(sizes[n]))

    return step


def single(lane: int, total: int) -> Lanes:
    """One thread."""
    mask = np.zeros(total, np.bool_)
    mask[lane] = True
    return Lanes(mask, total, 1)


def _fits(batch: Batch, i: Instruction, one: Lanes, far: Array, near: Array, size: int) -> bool:
    """True if there is something to copy and size and addresses are multiples of 16."""
    if size % 16 or int(far[0]) % 16 or int(near[0]) % 16:
        text = f"A bulk copy of {size} bytes, {int(far[0]):#x} and {int(near[0]):#x}: multiples of 16 are expected."
        batch.report("misaligned", text, i, one.index, far)
        return False
    return size > 0


def _load(batch: Batch, i: Instruction, one: Lanes, far: Array, near: Array, size: int, barrier: Array) -> None:
    """A copy to shared memory, which completes on a barrier."""
    shared, lane = batch.shared, int(one.index[0])
    at, who, _ = place(batch, i, one, shared, near, size, 16, direct=False)
    key, there, _ = place(batch, i, one, shared, barrier, 8, direct=False)
    if not who.size or not there.size or not same_block(batch, i, one, int(at[0]), int(key[0])):
        return
    for buffer, _ in batch.memory.parts(far, one.index, size, f"A bulk copy of {size} bytes:", batch.reporting(i)):
        early(batch, i, buffer, one.index, far)
        start = int(far[0]) - buffer.base
        agent = batch.total + int(key[0]) // 8 % AGENTS
        data = buffer.data[start : start + size].copy()
        copy = Copy(i, lane, agent, data, shared, int(at[0]), buffer if buffer.tracked else None, start)
        _checked(batch, copy, buffer, one, far)
        batch.flights.begin(batch, copy, "barrier", int(key[0]))
        batch.moved(buffer.name, "read", far, one.index, size)


def _store(batch: Batch, i: Instruction, one: Lanes, far: Array, near: Array, size: int) -> None:
    """A copy from shared memory, which belongs to a group of its thread."""
    shared, lane = batch.shared, int(one.index[0])
    at, who, _ = place(batch, i, one, shared, near, size, 16)
    if not who.size:
        return
    for buffer, _ in batch.memory.parts(far, one.index, size, f"A bulk copy of {size} bytes:", batch.reporting(i)):
        early(batch, i, buffer, one.index, far)
        start, begin = int(far[0]) - buffer.base, int(at[0])
        if not buffer.tracked:
            batch.report("out-of-bounds", f"A write to '{buffer.name}', which may only be read.", i, one.index, far)
            continue
        batch.flights.look(batch, i, shared, at, one.index, size, "read")
        if not shared.written[begin : begin + size].all():
            batch.report("uninitialised", "A bulk copy of shared memory which nothing wrote.", i, one.index, near)
        data = shared.data[begin : begin + size].copy()
        copy = Copy(i, lane, lane, data, buffer, start, shared, begin)
        proxy.check(batch, i, shared, begin, size, lane)
        noted(batch, copy, shared, begin, lane, "read")
        if not batch.whole and write_races(buffer, far, size, batch.party[one.index]).size:
            text = f"A bulk copy writes {buffer.where(int(far[0]), size)}, which another block of this launch touches."
            batch.report("global-race", text, i, one.index, far)
        batch.flights.begin(batch, copy, "bulk", lane)
        batch.moved(buffer.name, "written", far, one.index, size)


def same_block(batch: Batch, i: Instruction, one: Lanes, at: int, key: int) -> bool:
    """True if data and the barrier it completes on go to one block's shared memory."""
    if at // batch.shared.room == key // batch.shared.room:
        return True
    text = "An asynchronous copy goes to one block's shared memory and completes on an mbarrier of another's."
    batch.report("out-of-bounds", text, i, one.index)
    return False


def _checked(batch: Batch, copy: Copy, buffer: Buffer, one: Lanes, far: Array) -> None:
    """Findings about the source of a bulk load."""
    if buffer.written is None:
        return
    i, end = copy.instruction, copy.start + len(copy.data)
    batch.flights.look(batch, i, buffer, np.array([copy.start]), one.index, len(copy.data), "read")
    if not buffer.written[copy.start : end].all():
        batch.report("uninitialised", f"A bulk copy of '{buffer.name}' where nothing wrote.", i, one.index)
    proxy.check(batch, i, buffer, copy.start, len(copy.data), copy.lane)
    noted(batch, copy, buffer, copy.start, copy.lane, "read")
    if not batch.whole and read_races(buffer, far, len(copy.data), batch.party[one.index], False).size:
        text = f"A bulk copy reads {buffer.where(int(far[0]), len(copy.data))}, which another block of this launch "
        batch.report("global-race", text + "writes.", i, one.index, far)
