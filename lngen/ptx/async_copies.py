"""Copies of threads that complete later: cp.async of up to 16 bytes, and how all such copies start and complete."""

from __future__ import annotations

import re
from functools import partial

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx.accesses import load_global, look, place
from lngen.ptx.batch import Batch, Copy, Memory
from lngen.ptx.clusters import note_remote
from lngen.ptx.memory import POISON, Allocation, Scratch
from lngen.ptx.ordering import NOBODY
from lngen.ptx.parser import Instruction
from lngen.ptx.program import UNSIGNED, Lanes, Program, Step, immediate, unknown

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
    to, source = (program.address(o, i) for o in i.operands[:2])
    size = program.reader(i.operands[3], UNSIGNED[4], i) if len(i.operands) == 4 else None

    def step(batch: Batch, lanes: Lanes) -> None:
        sizes = np.full(lanes.count, count) if size is None else np.minimum(lanes.each(size(batch.R)), count)
        data = _fetch(batch, i, lanes, source(batch.R, lanes), sizes, count)
        at, who, part = place(batch, i, lanes, batch.shared, to(batch.R, lanes), count, own=True)
        data = data if part is None else data[part]
        for lane, where, row in zip(who.tolist(), at.tolist(), data, strict=True):
            begin(batch, Copy(i, lane, lane, row, batch.shared, where), "async", lane)

    return step


def _fetch(batch: Batch, i: Instruction, lanes: Lanes, address: Array, sizes: Array, count: int) -> Array:
    """The bytes that each lane copies; zeros where it copies fewer than ``count``."""
    data = np.zeros((lanes.count, count), np.uint8)
    for size in np.unique(sizes).tolist():
        mine = np.flatnonzero(sizes == size)
        some = Lanes.of(lanes.index[mine], lanes.total)
        if size == count:
            columns = load_global(batch, i, some, address[mine], 4, count // 4, False)
            whole = np.stack([c[some.index] for c in columns], axis=1)
            data[mine] = np.ascontiguousarray(whole).view(np.uint8)
            continue
        for n in range(size):
            byte = load_global(batch, i, some, address[mine] + address.dtype.type(n), 1, 1, False)[0]
            data[mine, n] = byte[some.index]
    return data


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
        note_remote(batch, copy.instruction, np.array([copy.lane]), owner, copy.writer)
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


def noted(batch: Batch, copy: Copy, memory: Memory, at: int, who: int, how: str, quiet: bool = False) -> None:
    """Races of a copy; ``quiet``: the copy is recorded without a finding."""
    if isinstance(memory, Allocation) and not memory.tracked:
        return
    places, unit = batch.places(memory)
    words = np.arange(at // unit, -(-(at + len(copy.data)) // unit))
    if quiet:
        places.plain.wrote(words, who, batch.clock.moment)
        return
    rival = places.note(words, np.full(len(words), who), batch.clock, how)
    bad = np.flatnonzero(rival != NOBODY)
    if bad.size:
        place = memory.named(int(words[bad[0]]) * unit, unit)
        kind = "global-race" if isinstance(memory, Allocation) else "shared-race"
        text = f"A copy that {how}s {place}, which thread {int(rival[bad[0]]) % batch.width} touches without order."
        batch.report(kind, text, copy.instruction, np.array([copy.lane]))
