"""cp.async.bulk: between global memory and shared memory, or from one block's shared memory to another's."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx import opaque, proxy
from lngen.ptx.access import address_of, base_slot, place, spread
from lngen.ptx.batch import Batch
from lngen.ptx.cluster import SHIFT
from lngen.ptx.columns import AGENTS
from lngen.ptx.dependent import check as early
from lngen.ptx.flights import begin, look, noted
from lngen.ptx.in_flight import Copy
from lngen.ptx.lanes import Lanes
from lngen.ptx.memory import Buffer, read_races, write_races
from lngen.ptx.parser import Instruction, Operand
from lngen.ptx.program import Program, Step, unknown
from lngen.ptx.values import UNSIGNED

_LOAD = re.compile(
    r"cp\.async\.bulk\.shared::(?:cluster|cta)\.global\.mbarrier::complete_tx::bytes(?P<m>\.multicast::cluster)?"
    r"(?P<h>\.L2::cache_hint)?"
)
_ACROSS = re.compile(r"cp\.async\.bulk\.shared::cluster\.shared::cta\.mbarrier::complete_tx::bytes")
_STORE = re.compile(r"cp\.async\.bulk\.global\.shared::cta\.bulk_group(?P<h>\.L2::cache_hint)?")


@dataclass(frozen=True)
class One:
    """The copy of one thread: addresses (also of the barrier, which a store lacks) and bytes."""

    lanes: Lanes
    to: Array
    source: Array
    barrier: Array
    size: int

    @property
    def lane(self) -> int:
        """The thread."""
        return int(self.lanes.index[0])


def memory_operand(program: Program, i: Instruction, o: Operand) -> tuple[int, int]:
    """Slot and offset of an address."""
    if o.kind != "mem":
        raise unknown(i)
    return base_slot(program, i, o.text), o.offset


def bulk_step(program: Program, i: Instruction) -> Step | None:
    """The step of a bulk copy; None for another instruction."""
    for pattern, count in ((_LOAD, 4), (_ACROSS, 4), (_STORE, 3)):
        if m := pattern.fullmatch(i.opcode):
            groups = m.groupdict()
            if len(i.operands) != count + bool(groups.get("h")) + bool(groups.get("m")):
                raise unknown(i)
            return _bulk(program, i, pattern is _STORE, pattern is _LOAD, bool(groups.get("m")))
    return None


def _bulk(program: Program, i: Instruction, stores: bool, loads: bool, multicast: bool) -> Step:
    to, source = (memory_operand(program, i, o) for o in i.operands[:2])
    size = program.source(i.operands[2], UNSIGNED[4], i)
    barrier = to if stores else memory_operand(program, i, i.operands[3])
    mask = program.source(i.operands[4], UNSIGNED[2], i) if multicast else None
    if ".L2::cache_hint" in i.opcode:
        program.source(i.operands[-1], UNSIGNED[8], i)
    begin = _store if stores else _load if loads else _across

    def step(batch: Batch, lanes: Lanes) -> None:
        sizes = spread(batch.R[size[0]] if size[1] is None else size[1](batch.R[size[0]]), lanes)
        places = [address_of(batch, *of, lanes) for of in (to, source, barrier)]
        masks = None
        if mask is not None:
            masks = spread(batch.R[mask[0]] if mask[1] is None else mask[1](batch.R[mask[0]]), lanes)
        for n, lane in enumerate(lanes.index.tolist()):
            a, b, c = (p[n : n + 1] for p in places)
            for far in [0] if masks is None else _ranks(batch, i, int(masks[n]), lane):
                one = One(single(lane, lanes.total), a + a.dtype.type(far), b, c + c.dtype.type(far), int(sizes[n]))
                if _fits(batch, i, one):
                    begin(batch, i, one)

    return step


def _ranks(batch: Batch, i: Instruction, mask: int, lane: int) -> list[int]:
    """Offsets from this block's shared memory to that of each block that a mask names."""
    size = batch.clusters.size if batch.clusters is not None else 1
    if mask >> size:
        text = f"The mask {mask:#x} names a block that the cluster of {size} blocks does not have."
        batch.report("out-of-bounds", text, i, np.array([lane]))
    if batch.clusters is None:
        return [0]
    return [r + 1 << SHIFT for r in range(size) if mask >> r & 1]


def single(lane: int, total: int) -> Lanes:
    """One thread."""
    mask = np.zeros(total, np.bool_)
    mask[lane] = True
    return Lanes(mask, total, 1)


def _fits(batch: Batch, i: Instruction, one: One) -> bool:
    """True if the copy is not empty and its size and addresses are multiples of 16."""
    to, source = int(one.to[0]), int(one.source[0])
    if one.size % 16 or to % 16 or source % 16:
        text = f"A bulk copy of {one.size} bytes, to {to:#x} from {source:#x}: multiples of 16 are expected."
        batch.report("misaligned", text, i, one.lanes.index, one.to)
        return False
    return one.size > 0


def target(batch: Batch, i: Instruction, one: One, align: int = 16, bulk: bool = True) -> tuple[int, int] | None:
    """Destination and barrier in shared memory, both in one block's; None if there is a finding."""
    shared = batch.shared
    own = ".bulk.shared::cta." in i.opcode
    at, who, _ = place(batch, i, one.lanes, shared, one.to, one.size, align, direct=False, own=own)
    key, there, _ = place(batch, i, one.lanes, shared, one.barrier, 8, direct=False, own=own)
    if not who.size or not there.size:
        return None
    if int(at[0]) // shared.room != int(key[0]) // shared.room:
        text = "An asynchronous copy goes to one block's shared memory and completes on an mbarrier of another's."
        batch.report("out-of-bounds", text, i, one.lanes.index)
        return None
    return (int(at[0]), int(key[0])) if opaque.reached(batch, i, int(key[0]), one.lane, bulk) else None


def agent(batch: Batch, key: int) -> int:
    """The agent that counts as the writer of the copies that complete on a barrier."""
    return batch.total + key // 8 % AGENTS


def _load(batch: Batch, i: Instruction, one: One) -> None:
    """A copy to shared memory, which completes on a barrier."""
    where, who, size = target(batch, i, one), one.lanes.index, one.size
    if where is None:
        return
    at, key = where
    proxy.check(batch, i, batch.shared, at, size, one.lane, "writes over")
    what = f"A bulk copy of {size} bytes:"
    for buffer, _ in batch.memory.parts(one.source, who, size, what, batch.reporting(i)):
        early(batch, i, buffer, who, one.source)
        start = int(one.source[0]) - buffer.base
        data, source = buffer.data[start : start + size].copy(), buffer if buffer.tracked else None
        copy = Copy(i, one.lane, agent(batch, key), data, batch.shared, at, source, start)
        _checked(batch, copy, buffer, one)
        begin(batch, copy, "barrier", key)
        batch.moved(buffer.name, "read", one.source, who, size)


def _across(batch: Batch, i: Instruction, one: One) -> None:
    """A copy to another block's shared memory, which completes on a barrier there."""
    where, shared = target(batch, i, one), batch.shared
    at, who, _ = place(batch, i, one.lanes, shared, one.source, one.size, 16, own=True)
    if where is None or not who.size:
        return
    data = _from_shared(batch, i, one, int(at[0]))
    copy = Copy(i, one.lane, agent(batch, where[1]), data, shared, where[0], shared, int(at[0]))
    begin(batch, copy, "barrier", where[1])


def _from_shared(batch: Batch, i: Instruction, one: One, begin: int) -> Array:
    """The bytes that a copy reads from shared memory, after the checks of those bytes."""
    shared, who, end = batch.shared, one.lanes.index, begin + one.size
    look(batch, i, shared, np.array([begin]), who, one.size, "read")
    if not shared.written[begin:end].all():
        batch.report("uninitialised", "A bulk copy of shared memory that nothing wrote.", i, who, one.source)
    proxy.check(batch, i, shared, begin, one.size, one.lane)
    data = shared.data[begin:end].copy()
    noted(batch, Copy(i, one.lane, one.lane, data, shared, begin), shared, begin, one.lane, "read")
    return data


def _store(batch: Batch, i: Instruction, one: One) -> None:
    """A copy from shared memory, which belongs to a bulk group of its thread."""
    shared, size = batch.shared, one.size
    at, who, _ = place(batch, i, one.lanes, shared, one.source, size, 16, own=True)
    if not who.size:
        return
    what = f"A bulk copy of {size} bytes:"
    for buffer, _ in batch.memory.parts(one.to, who, size, what, batch.reporting(i)):
        early(batch, i, buffer, who, one.to)
        if not buffer.tracked:
            batch.report("out-of-bounds", f"A write to '{buffer.name}', which may only be read.", i, who, one.to)
            continue
        data = _from_shared(batch, i, one, int(at[0]))
        copy = Copy(i, one.lane, one.lane, data, buffer, int(one.to[0]) - buffer.base, shared, int(at[0]))
        if not batch.whole and write_races(buffer, one.to, size, batch.party[who]).size:
            text = f"A bulk copy writes {buffer.where(int(one.to[0]), size)}, which another block of this launch "
            batch.report("global-race", text + "touches.", i, who, one.to)
        begin(batch, copy, "bulk", one.lane)
        batch.moved(buffer.name, "written", one.to, who, size)


def _checked(batch: Batch, copy: Copy, buffer: Buffer, one: One) -> None:
    """Findings about the source of a bulk load."""
    if buffer.written is None:
        return
    i, who, size = copy.instruction, one.lanes.index, one.size
    look(batch, i, buffer, np.array([copy.start]), who, size, "read")
    if not buffer.written[copy.start : copy.start + size].all():
        batch.report("uninitialised", f"A bulk copy of bytes of '{buffer.name}' that nothing wrote.", i, who)
    proxy.check(batch, i, buffer, copy.start, size, copy.lane)
    noted(batch, copy, buffer, copy.start, copy.lane, "read")
    if not batch.whole and read_races(buffer, one.source, size, batch.party[who], False).size:
        text = f"A bulk copy reads {buffer.where(int(one.source[0]), size)}, which another block of this launch writes."
        batch.report("global-race", text, i, who, one.source)
