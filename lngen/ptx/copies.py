"""cp.async of up to 16 bytes; the groups and waits of these and of bulk copies."""

from __future__ import annotations

import re
from functools import partial

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx.access import address_of, load_global, place, spread
from lngen.ptx.batch import Batch
from lngen.ptx.bulk import bulk_step, memory_operand
from lngen.ptx.flights import begin, wait
from lngen.ptx.in_flight import Copy
from lngen.ptx.lanes import Lanes
from lngen.ptx.parser import Instruction
from lngen.ptx.program import Program, Step, unknown
from lngen.ptx.values import UNSIGNED, immediate

_ASYNC = re.compile(r"cp\.async\.c[ag]\.shared(?:::cta)?\.global(?:\.L2::(?:64|128|256)B)?")
_COMMIT = {"cp.async.commit_group": "async", "cp.async.bulk.commit_group": "bulk"}
_WAIT = {
    "cp.async.wait_group": ("async", False), "cp.async.bulk.wait_group": ("bulk", False),
    "cp.async.bulk.wait_group.read": ("bulk", True),
}  # fmt: skip


def copy_step(program: Program, i: Instruction) -> Step:
    """The step of an instruction that begins with cp."""
    if _ASYNC.fullmatch(i.opcode):
        return _async(program, i)
    if bulk := bulk_step(program, i):
        return bulk
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
        wait(batch, kind, lane, keep, reading)


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
        at, who, part = place(batch, i, lanes, batch.shared, address_of(batch, *to, lanes), count, own=True)
        data = data if part is None else data[part]
        for lane, where, row in zip(who.tolist(), at.tolist(), data, strict=True):
            begin(batch, Copy(i, lane, lane, row, batch.shared, where), "async", lane)

    return step


def _fetch(batch: Batch, i: Instruction, lanes: Lanes, address: Array, sizes: Array, count: int) -> Array:
    """The bytes that each lane copies; zeros where it copies fewer than ``count``."""
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
