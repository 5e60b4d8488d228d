"""bar.sync: which threads wait, which barriers are complete, and findings about both.

PTX ISA, Parallel Synchronization and Communication Instructions: bar, barrier. A warp arrives when all of its threads
that have not ended arrive. A thread count is a multiple of the warp size, and all threads give the same count.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lngen.compiler.ir.numerics import Array
from lngen.proof.ptx.batch import Batch, Came, Wait
from lngen.proof.ptx.ordering import BARRIERS
from lngen.proof.ptx.parser import Instruction
from lngen.proof.ptx.program import UNSIGNED, WARP, Jump, Lanes, Program, unknown

OPCODES = tuple(f"{base}.{op}" for base in ("bar", "bar.cta") for op in ("sync", "arrive"))
OPCODES += tuple(
    f"{base}.{op}" for base in ("barrier", "barrier.cta") for op in ("sync", "sync.aligned", "arrive", "arrive.aligned")
)


def barrier_jump(program: Program, i: Instruction) -> Jump:
    """bar.sync or bar.arrive; PtxError for an opcode that the executor does not know."""
    if i.opcode not in OPCODES or not 1 + (".arrive" in i.opcode) <= len(i.operands) <= 2:
        raise unknown(i)
    identity, *counts = (program.reader(o, UNSIGNED[4], i) for o in i.operands)

    def jump(batch: Batch, pc: int, lanes: Lanes) -> None:
        _arrive(batch, i, pc, lanes, _number(identity(batch.R)), _number(counts[0](batch.R)) if counts else 0)

    return jump


def _number(value: Any) -> Any:
    return int(value) if np.ndim(value) == 0 else value.astype(np.int64)


def _arrive(batch: Batch, i: Instruction, pc: int, lanes: Lanes, identity: Any, expected: Any) -> None:
    batch.launch.traffic.barriers[batch.launch.kernel] += lanes.warps
    _check_count(batch, i, lanes.index, expected)
    if ".arrive" not in i.opcode:
        batch.waiting.append(Wait(pc, i, identity, expected, lanes))
        return
    _come(batch, lanes.index, identity, expected)
    batch.touched()
    batch.push(pc + 1, lanes)


def _come(batch: Batch, who: Array, identity: Any, expected: Any) -> None:
    """``who`` arrive and do not wait."""
    names, counts = (np.broadcast_to(n[who] if np.ndim(n) else n, who.shape) for n in (identity, expected))
    keys = batch.slot_of[who] * BARRIERS + names % BARRIERS
    assert batch.order is not None
    batch.order.tick(who)
    for key in np.unique(keys).tolist():
        mine = keys == key
        came = batch.came.setdefault(key, Came(int(counts[mine][0])))
        came.lanes.append(who[mine])
        came.visible.append(batch.order.clock(who[mine]))
        if _went_on(batch, key) >= int(counts[mine][0]):  # all have arrived, none waits
            del batch.came[key]


def release(batch: Batch) -> bool:
    """Release every barrier that is complete; False if none is."""
    waits = batch.waiting
    if len(waits) == 1 and np.ndim(waits[0].identity) == 0 and not np.ndim(waits[0].expected):
        w = waits[0]
        if w.lanes.count == batch.total and w.expected in (0, batch.launch.block) and batch.width == batch.launch.block:
            batch.clock.release()
            batch.clock.barrier_passed(slice(None), w.identity)
            batch.waiting = []
            batch.push(w.pc + 1, w.lanes)
            return True
    return _release(batch)


def _release(batch: Batch) -> bool:
    keys, expected, wait_of = _tables(batch)
    lanes = np.flatnonzero(wait_of >= 0)
    arrived, wanted = _arrived(batch, keys, expected, lanes)
    gone = batch.launch.block - np.bincount(batch.slot_of[batch.alive.index], minlength=batch.slots)
    present = arrived + np.where(wanted == 0, np.repeat(gone, BARRIERS), 0)
    need = np.where(wanted == 0, batch.launch.block, wanted)
    ready = (arrived > 0) & (present >= need)
    if not ready.any():
        return False
    go = lanes[ready[keys[lanes]]]
    _complain(batch, keys, wait_of, go, arrived, present, need)
    _complain_of_counts(batch, keys, expected, wait_of, go)
    batch.clock.release()
    batch.clock.barrier_passed(go, keys[go] % BARRIERS)
    for key in [k for k in batch.came if ready[k]]:
        assert batch.order is not None
        batch.order.acquire(go[keys[go] == key], np.max(batch.came.pop(key).visible, axis=0))
    leaving = np.zeros(batch.total, np.bool_)
    leaving[go] = True
    waits, batch.waiting = batch.waiting, []
    for w in waits:
        free = w.lanes.narrow(leaving)
        batch.push(w.pc + 1, free)
        if free.count < w.lanes.count:
            batch.waiting.append(Wait(w.pc, w.instruction, w.identity, w.expected, w.lanes.without(free)))
    return True


def _arrived(batch: Batch, keys: Array, expected: Array, lanes: Array) -> tuple[Array, Array]:
    """Threads that have arrived at each barrier, waiting or not; and how many threads the barrier expects.

    A barrier with a thread count counts whole warps; a barrier of the whole block counts threads.
    """
    size = batch.slots * BARRIERS
    wanted = np.zeros(size, np.int64)
    wanted[keys[lanes]] = expected[lanes]
    found = np.where(wanted, _whole(batch, lanes, keys[lanes]), np.bincount(keys[lanes], minlength=size))
    for key in batch.came:
        found[key] += _went_on(batch, key)
    return found, wanted


def _went_on(batch: Batch, key: int) -> int:
    """Threads, of whole warps, that have arrived at a barrier and do not wait."""
    who = np.concatenate(batch.came[key].lanes)
    return int(_whole(batch, who, np.full(len(who), key))[key])


def _whole(batch: Batch, lanes: Array, keys: Array) -> Array:
    """For each key the threads of complete warps: all of a warp's threads that have not ended are among ``lanes``."""
    size, warps = batch.slots * BARRIERS, batch.total // WARP
    there = np.bincount(batch.alive.index // WARP, minlength=warps)
    pairs, here = np.unique(keys.astype(np.int64) * warps + lanes // WARP, return_counts=True)
    alive = there[pairs % warps]
    times = here // np.where(alive, alive, here)  # a warp may have arrived twice
    return WARP * np.bincount(pairs // warps, times, size).astype(np.int64)


def _check_count(batch: Batch, i: Instruction, who: Array, expected: Any) -> None:
    """A finding for a thread count that is no multiple of the warp size."""
    counts = np.broadcast_to(expected[who] if np.ndim(expected) else expected, who.shape)
    wrong = np.flatnonzero(counts % WARP)
    if wrong.size:
        text = f"A barrier that waits for {int(counts[wrong[0]])} threads: a multiple of {WARP} is expected."
        batch.report("barrier-count", text, i, who[wrong])


def _tables(batch: Batch) -> tuple[Array, Array, Array]:
    """Per lane: block slot and barrier as one key, threads expected (0: the whole block), index of its wait or -1."""
    keys = np.zeros(batch.total, np.int64)
    expected = np.zeros(batch.total, np.int64)
    wait_of = np.full(batch.total, -1)
    for n, w in enumerate(batch.waiting):
        at = w.lanes.index
        identity = w.identity if np.ndim(w.identity) == 0 else w.identity[at]
        _known(batch, w, at, identity)
        keys[at] = batch.slot_of[at] * BARRIERS + identity % BARRIERS
        expected[at] = w.expected if np.ndim(w.expected) == 0 else w.expected[at]
        wait_of[at] = n
    return keys, expected, wait_of


def _known(batch: Batch, w: Wait, at: Array, identity: Any) -> None:
    """A finding for a barrier number that no block has."""
    numbers = np.broadcast_to(identity, at.shape)
    wrong = np.flatnonzero((numbers < 0) | (numbers >= BARRIERS))
    if wrong.size:
        text = f"Barrier {int(numbers[wrong[0]])} does not exist; a block has {BARRIERS}, 0 to {BARRIERS - 1}."
        batch.report("no-such-barrier", text, w.instruction, at[wrong])


def _complain(
    batch: Batch, keys: Array, wait_of: Array, go: Array, arrived: Array, present: Array, need: Array
) -> None:
    """Findings about barriers that are released in spite of a defect, as a GPU would."""
    for n, w in enumerate(batch.waiting):
        mine = go[wait_of[go] == n]
        short = mine[arrived[keys[mine]] < need[keys[mine]]]
        if short.size:
            count = int(arrived[keys[short[0]]])
            text = f"Only {count} of the {int(need[keys[short[0]]])} threads of the block arrive at this barrier;  "
            batch.report("divergent-barrier", text + "the others have ended.", w.instruction, short)
        many = mine[present[keys[mine]] > need[keys[mine]]]
        if many.size:
            count, wanted = int(present[keys[many[0]]]), int(need[keys[many[0]]])
            text = f"{count} threads arrive at a barrier that waits for {wanted}."
            batch.report("divergent-barrier", text, w.instruction, many)
    places = np.array([_place(w) for w in batch.waiting])[wait_of[go]]
    first = np.full(batch.slots * BARRIERS, -1, np.int64)
    first[keys[go][::-1]] = places[::-1]
    elsewhere = go[first[keys[go]] != places]
    if elsewhere.size:
        w = batch.waiting[int(wait_of[elsewhere[0]])]
        other = go[(keys[go] == keys[elsewhere[0]]) & (wait_of[go] != wait_of[elsewhere[0]])]
        line = batch.waiting[int(wait_of[other[0]])].instruction.line
        text = f"Threads of one block wait at different barrier instructions: this one and PTX line {line}."
        batch.report("divergent-barrier", text, w.instruction, elsewhere)


def _complain_of_counts(batch: Batch, keys: Array, expected: Array, wait_of: Array, go: Array) -> None:
    """Findings about threads that wait at one barrier with different thread counts."""
    first = np.full(batch.slots * BARRIERS, -1, np.int64)
    first[keys[go][::-1]] = expected[go][::-1]
    for key, came in batch.came.items():
        first[key] = came.expected
    other = go[first[keys[go]] != expected[go]]
    if other.size:
        counts = sorted({int(expected[other[0]]), int(first[keys[other[0]]])})
        text = f"Threads wait at one barrier, some with a count of {counts[0] or 'none'}, some of {counts[1]}."
        batch.report("barrier-count", text, batch.waiting[int(wait_of[other[0]])].instruction, other)


def _place(w: Wait) -> int:
    """The same number for all copies that the compiler made of one barrier."""
    loc = w.instruction.loc
    return w.pc if not loc.line else -1 - ((loc.file * 100003 + loc.line) * 100003 + loc.inlined_at)


def deadlock(batch: Batch) -> None:
    """Findings about the barriers at which threads wait for ever."""
    keys, expected, wait_of = _tables(batch)
    lanes = np.flatnonzero(wait_of >= 0)
    arrived = _arrived(batch, keys, expected, lanes)[0]
    for n, w in enumerate(batch.waiting):
        mine = np.flatnonzero(wait_of == n)
        if not mine.size:
            continue
        key = int(keys[mine[0]])
        wanted = int(expected[mine[0]]) or batch.launch.block
        text = f"{int(arrived[key])} threads wait for ever at barrier {key % BARRIERS}, which waits for {wanted}."
        batch.report("deadlock", text, w.instruction, mine)
