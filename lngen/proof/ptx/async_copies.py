"""Copies of threads that complete later: cp.async of up to 16 bytes, and how all such copies start and complete."""

from __future__ import annotations

import re
from functools import partial

import numpy as np

from lngen.compiler.ir.numerics import Array
from lngen.proof.ptx.accesses import load_global, look, place
from lngen.proof.ptx.batch import MBARRIER, Batch, Copy, Memory, ThreadCopies
from lngen.proof.ptx.clusters import note_remote
from lngen.proof.ptx.memory import POISON, Allocation, Scratch
from lngen.proof.ptx.ordering import NOBODY
from lngen.proof.ptx.parser import Instruction
from lngen.proof.ptx.program import UNSIGNED, Lanes, Program, Step, immediate, unknown

_ASYNC = re.compile(r"cp\.async\.c[ag]\.shared(?:::cta)?\.global(?:\.L2::(?:64|128|256)B)?")
_COMMIT = {"cp.async.commit_group": False, "cp.async.bulk.commit_group": True}  # True: of bulk copies
_WAIT_BULK = {"cp.async.bulk.wait_group": False, "cp.async.bulk.wait_group.read": True}  # True: they only read


def copy_step(program: Program, i: Instruction) -> Step:
    """The step of an instruction that begins with cp."""
    if _ASYNC.fullmatch(i.opcode):
        return _async(program, i)
    if i.opcode in _COMMIT and not i.operands:
        bulk = _COMMIT[i.opcode]
        return lambda batch, lanes: batch.flights.commit(bulk, lanes.index)
    if i.opcode == "cp.async.wait_all" and not i.operands:
        return partial(_wait, None)
    if (i.opcode == "cp.async.wait_group" or i.opcode in _WAIT_BULK) and [o.kind for o in i.operands] == ["imm"]:
        keep = int(immediate(i.operands[0].text, UNSIGNED[4]))
        return partial(_wait_bulk, keep, _WAIT_BULK[i.opcode]) if i.opcode in _WAIT_BULK else partial(_wait, keep)
    raise unknown(i)


def _wait_bulk(keep: int, reading: bool, batch: Batch, lanes: Lanes) -> None:
    for lane in lanes.index.tolist():
        wait(batch, "bulk", lane, keep, reading)


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
        if who.size:
            _start(batch, ThreadCopies(i, who, data, at, batch.flights.committed[who]))

    return step


def _start(batch: Batch, copies: ThreadCopies) -> None:
    """The copies of one instruction start: all at once, if no other copy or mbarrier has their bytes."""
    if _alone(batch, copies):
        _begin(batch, copies)
    else:
        for n in range(len(copies.at)):
            _begin(batch, copies.part(np.array([n])))
    batch.flights.of_threads.append(copies)


def _begin(batch: Batch, copies: ThreadCopies) -> None:
    shared, spread = batch.shared, copies.spread
    look(batch, copies.instruction, shared, copies.at, copies.lanes, spread.shape[1], "write")
    _report(batch, _raced(batch, copies))
    batch.flights.marks("to", shared)[spread] += 1
    shared.data[spread] = POISON
    shared.written[spread] = 1
    _loading(batch, copies, 1)


def _alone(batch: Batch, copies: ThreadCopies) -> bool:
    if len(np.unique(copies.at)) < len(copies.at) or batch.opaque[copies.spread // MBARRIER].any():
        return False
    return not any(batch.flights.marks(how, batch.shared)[copies.spread].any() for how in ("to", "from"))


def _wait(keep: int | None, batch: Batch, lanes: Lanes) -> None:
    """All but the last ``keep`` groups of each thread complete (None: all)."""
    flights, done, left = batch.flights, list[ThreadCopies](), list[ThreadCopies]()
    for copies in flights.of_threads:
        ready = lanes.mask[copies.lanes]
        if keep is not None:
            ready = ready & (copies.group < flights.committed[copies.lanes] - keep)
        done += [copies.part(ready)] if ready.any() else []
        left += [copies.part(~ready)] if not ready.all() else []
    flights.of_threads = left
    marks = flights.marks("to", batch.shared) if done else np.zeros(0)
    if not any((marks[copies.spread] > 1).any() for copies in done):
        _complete(batch, done)
        return
    for lane in lanes.index.tolist():  # the order counts where copies overlap
        for copies in done:
            own = copies.part(copies.lanes == lane)
            if own.lanes.size:
                _complete(batch, [own])


def _complete(batch: Batch, done: list[ThreadCopies]) -> None:
    """Copies that do not overlap arrive; the findings are in the order of the threads."""
    found = list[_Race]()
    for copies in done:
        batch.shared.data[copies.spread] = copies.data
        batch.flights.marks("to", batch.shared)[copies.spread] -= 1
        _loading(batch, copies, -1)
        found += _raced(batch, copies)
        batch.touched()
    _report(batch, sorted(found, key=lambda race: race[0]))


def _loading(batch: Batch, copies: ThreadCopies, sign: int) -> None:
    blocks, counts = np.unique(copies.at // batch.shared.room, return_counts=True)
    for block, count in zip(blocks.tolist(), counts.tolist(), strict=True):
        batch.loading(block, sign * count * copies.data.shape[1])


_Race = tuple[int, str, Instruction]  # a thread, what it does, and where


def _raced(batch: Batch, copies: ThreadCopies) -> list[_Race]:
    """The first of the copies that races with another access; records all of them, as writes."""
    places, unit = batch.places(batch.shared)
    words = copies.spread[:, ::unit] // unit
    rival = places.note(words.reshape(-1), np.repeat(copies.lanes, words.shape[1]), batch.clock, "write")
    bad = np.flatnonzero(rival != NOBODY)
    if not bad.size:
        return []
    text = _race_text(batch, batch.shared, int(words.flat[bad[0]]) * unit, unit, int(rival[bad[0]]), "write")
    return [(int(copies.lanes[bad[0] // words.shape[1]]), text, copies.instruction)]


def _report(batch: Batch, found: list[_Race]) -> None:
    for lane, text, i in found:
        batch.report("shared-race", text, i, np.array([lane]))


def _race_text(batch: Batch, memory: Memory, at: int, count: int, rival: int, how: str) -> str:
    return f"A copy that {how}s {memory.named(at, count)}, which thread {rival % batch.width} touches without order."


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
        batch.loading(copy.at // copy.to.room, sign * len(copy.data))


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
        kind = "global-race" if isinstance(memory, Allocation) else "shared-race"
        text = _race_text(batch, memory, int(words[bad[0]]) * unit, unit, int(rival[bad[0]]), how)
        batch.report(kind, text, copy.instruction, np.array([copy.lane]))
