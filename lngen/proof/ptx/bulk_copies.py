"""cp.async.bulk between global and shared memory or from block to block, and st.async to another block.

PTX ISA, Data Movement and Conversion Instructions: st.async. The completion on the mbarrier releases, with the scope of
the cluster, the store and the accesses that are visible to its thread. Memory Consistency Model, proxies: a bulk copy
may read or overwrite the results of ordinary stores only after a fence.proxy.async.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lngen.compiler.ir.numerics import Array
from lngen.proof.ptx.accesses import check_waited, look, place
from lngen.proof.ptx.async_copies import begin, noted
from lngen.proof.ptx.batch import SHIFT, Batch, Copy, Memory
from lngen.proof.ptx.mbarriers import reached
from lngen.proof.ptx.memory import POISON, Allocation
from lngen.proof.ptx.ordering import NOBODY
from lngen.proof.ptx.parser import Instruction
from lngen.proof.ptx.program import DTYPES, UNSIGNED, Lanes, Program, Step, unknown
from lngen.proof.ptx.races import read_races, write_races

_LOAD = re.compile(
    r"cp\.async\.bulk\.shared::(?:cluster|cta)\.global\.mbarrier::complete_tx::bytes(?P<multicast>\.multicast::cluster)?"
    r"(?P<hint>\.L2::cache_hint)?"
)
_ACROSS = re.compile(r"cp\.async\.bulk\.shared::cluster\.shared::cta\.mbarrier::complete_tx::bytes")
_STORE = re.compile(r"cp\.async\.bulk\.global\.shared::cta\.bulk_group(?P<hint>\.L2::cache_hint)?")


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


Start = Callable[[Batch, Instruction, One], None]  # of the copy of one thread


def bulk_step(program: Program, i: Instruction) -> Step | None:
    """The step of a bulk copy; None for another instruction."""
    for pattern, count, start in ((_LOAD, 4, _load), (_ACROSS, 4, _across), (_STORE, 3, _store)):
        if m := pattern.fullmatch(i.opcode):
            multicast, hint = (m.groupdict().get(name) is not None for name in ("multicast", "hint"))
            if len(i.operands) != count + multicast + hint:
                raise unknown(i)
            if hint:
                program.source(i.operands[-1], UNSIGNED[8], i)
            return _bulk(program, i, count == 4, multicast, start)
    return None


def _bulk(
    program: Program,
    i: Instruction,
    on_barrier: bool,
    multicast: bool,
    start: Callable[[Batch, Instruction, One], None],
) -> Step:
    addresses = [program.address(o, i) for o in (*i.operands[:2], i.operands[3 if on_barrier else 0])]
    size = program.reader(i.operands[2], UNSIGNED[4], i)
    mask = program.reader(i.operands[4], UNSIGNED[2], i) if multicast else None

    def step(batch: Batch, lanes: Lanes) -> None:
        sizes, places = lanes.each(size(batch.R)), [address(batch.R, lanes) for address in addresses]
        masks = None if mask is None else lanes.each(mask(batch.R))
        for n, lane in enumerate(lanes.index.tolist()):
            a, b, c = (p[n : n + 1] for p in places)
            for far in [0] if masks is None else _ranks(batch, i, int(masks[n]), lane):
                only = Lanes.of(np.array([lane]), lanes.total)
                one = One(only, a + a.dtype.type(far), b, c + c.dtype.type(far), int(sizes[n]))
                if _fits(batch, i, one):
                    start(batch, i, one)

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
    return (int(at[0]), int(key[0])) if reached(batch, i, int(key[0]), one.lane, bulk) else None


def _load(batch: Batch, i: Instruction, one: One) -> None:
    """A copy to shared memory, which completes on a barrier.

    Bytes around the block's own columns arrive as poison: a kernel that used them would have other results. So another
    block may change them without a race.
    """
    where, who, size = target(batch, i, one), one.lanes.index, one.size
    if where is None:
        return
    at, key = where
    _check_proxy(batch, i, batch.shared, at, size, one.lane, "writes over")
    for buffer, *_ in batch.buffers(i, one.source, who, size, f"A bulk copy of {size} bytes:"):
        check_waited(batch, i, buffer, who, one.source)
        start = int(one.source[0]) - buffer.base
        first, last = buffer.wanted(start, start + size)
        for low, high in ((start, first), (first, last), (last, start + size)):
            if low == high:
                continue
            data, source = buffer.data[low:high].copy(), buffer if buffer.tracked else None
            if low != first:
                data[:], source = POISON, None
            copy = Copy(i, one.lane, batch.agent(key), data, batch.shared, at + low - start, source, low)
            if low == first:
                _checked(batch, copy, buffer)
            begin(batch, copy, "barrier", key)
        batch.moved(buffer.name, "read", one.source, who, size)


def _across(batch: Batch, i: Instruction, one: One) -> None:
    """A copy to another block's shared memory, which completes on a barrier there."""
    where, shared = target(batch, i, one), batch.shared
    at, who, _ = place(batch, i, one.lanes, shared, one.source, one.size, 16, own=True)
    if where is None or not who.size:
        return
    data = _from_shared(batch, i, one, int(at[0]))
    copy = Copy(i, one.lane, batch.agent(where[1]), data, shared, where[0], shared, int(at[0]))
    begin(batch, copy, "barrier", where[1])


def _from_shared(batch: Batch, i: Instruction, one: One, begin: int) -> Array:
    """The bytes that a copy reads from shared memory, after the checks of those bytes."""
    shared, who, end = batch.shared, one.lanes.index, begin + one.size
    look(batch, i, shared, np.array([begin]), who, one.size, "read")
    if not shared.written[begin:end].all():
        batch.report("uninitialised", "A bulk copy of shared memory that nothing wrote.", i, who, one.source)
    _check_proxy(batch, i, shared, begin, one.size, one.lane)
    data = shared.data[begin:end].copy()
    noted(batch, Copy(i, one.lane, one.lane, data, shared, begin), shared, begin, one.lane, "read")
    return data


def _store(batch: Batch, i: Instruction, one: One) -> None:
    """A copy from shared memory, which belongs to a bulk group of its thread."""
    shared, size = batch.shared, one.size
    at, who, _ = place(batch, i, one.lanes, shared, one.source, size, 16, own=True)
    if not who.size:
        return
    for buffer, *_ in batch.buffers(i, one.to, who, size, f"A bulk copy of {size} bytes:"):
        check_waited(batch, i, buffer, who, one.to)
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


def _checked(batch: Batch, copy: Copy, buffer: Allocation) -> None:
    """Findings about the source of a bulk load."""
    if buffer.written is None:
        return
    i, who, size = copy.instruction, np.array([copy.lane]), len(copy.data)
    source = np.array([buffer.base + copy.start])
    look(batch, i, buffer, np.array([copy.start]), who, size, "read")
    if not buffer.written[copy.start : copy.start + size].all():
        batch.report("uninitialised", f"A bulk copy of bytes of '{buffer.name}' that nothing wrote.", i, who)
    _check_proxy(batch, i, buffer, copy.start, size, copy.lane)
    noted(batch, copy, buffer, copy.start, copy.lane, "read")
    if not batch.whole and read_races(buffer, source, size, batch.party[who], False).size:
        text = f"A bulk copy reads {buffer.where(int(source[0]), size)}, which another block of this launch writes."
        batch.report("global-race", text, i, who, source)


_FORM = re.compile(
    r"st\.async(?:\.weak)?(?:\.shared::cluster)?\.mbarrier::complete_tx::bytes(?:\.v(?P<v>[24]))?"
    r"\.(?P<t>[bus](?:32|64)|f32|f64)"
)


def async_store_step(program: Program, i: Instruction) -> Step:
    """The step of st.async."""
    m = _FORM.fullmatch(i.opcode)
    if m is None or len(i.operands) != 3:
        raise unknown(i)
    values = i.operands[1].items or (i.operands[1],)
    kind = UNSIGNED[DTYPES[m["t"]].itemsize]
    if len(values) != int(m["v"] or 1):
        raise unknown(i, f"has {len(values)} elements, expected {m['v'] or 1}")
    to, barrier = program.address(i.operands[0], i), program.address(i.operands[2], i)
    readers = [program.reader(o, kind, i) for o in values]
    size = kind.itemsize * len(values)

    def step(batch: Batch, lanes: Lanes) -> None:
        rows = np.stack([lanes.each(read(batch.R)) for read in readers], axis=1).view(np.uint8)
        there, keys = to(batch.R, lanes), barrier(batch.R, lanes)
        for n, lane in enumerate(lanes.index.tolist()):
            at, only = there[n : n + 1], Lanes.of(np.array([lane]), lanes.total)
            where = target(batch, i, One(only, at, at, keys[n : n + 1], size), size, False)
            if where is not None:
                copy = Copy(i, lane, batch.agent(where[1]), rows[n], batch.shared, where[0], releases=True)
                begin(batch, copy, "barrier", where[1])

    return step


_BULK_PREFETCH = "cp.async.bulk.prefetch.L2.global"


def bulk_prefetch(program: Program, i: Instruction) -> Step | None:
    """cp.async.bulk.prefetch.L2.global [address], size: a read of that many bytes; None for another opcode."""
    if i.opcode.removesuffix(".L2::cache_hint") != _BULK_PREFETCH:
        return None
    if len(i.operands) != 2 + i.opcode.endswith("cache_hint"):
        raise unknown(i)
    address_of, size_of = program.address(i.operands[0], i), program.reader(i.operands[1], UNSIGNED[4], i)

    def step(batch: Batch, lanes: Lanes) -> None:
        addresses = address_of(batch.R, lanes)
        for n, size in enumerate(lanes.each(size_of(batch.R)).tolist()):
            address, who = addresses[n : n + 1], lanes.index[n : n + 1]
            if size % 16 or int(address[0]) % 16:
                text = "A bulk prefetch: an address and a size that are multiples of 16 are expected."
                batch.report("misaligned", text, i, who, address)
            elif size:
                for buffer, *_ in batch.buffers(i, address, who, size, f"A bulk prefetch of {size} bytes:"):
                    batch.prefetched(buffer.name, 1)

    return step


def _check_proxy(
    batch: Batch, i: Instruction, memory: Memory, at: int, count: int, lane: int, does: str = "reads"
) -> None:
    """A finding if a bulk copy of ``lane`` reads or overwrites a thread's store without a fence between them."""
    order = batch.order
    if order is None or not order.columns.proxies:
        return
    places, unit = batch.places(memory)
    words = np.arange(at // unit, -(-(at + count) // unit))
    for races in (places.plain, *places.strong.values()):
        writer, time = races.last(words)
        mine = np.flatnonzero((writer != NOBODY) & (writer < batch.total))
        space = "global" if isinstance(memory, Allocation) else "shared"
        bad = mine[~order.separated_by_proxy_fence(space, writer[mine], time[mine], lane)]
        if bad.size:
            where = memory.named(int(words[bad[0]]) * unit, unit)
            text = f"A bulk copy {does} {where}, which thread {int(writer[bad[0]]) % batch.width} wrote without "
            batch.report("proxy", text + "a fence.proxy.async before the copy.", i, np.array([lane]))
            return
