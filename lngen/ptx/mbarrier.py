"""mbarrier: arrivals, bytes expected and arrived, phases."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx.access import address_of, place, spread
from lngen.ptx.batch import Batch
from lngen.ptx.copies import memory_operand
from lngen.ptx.lanes import Lanes
from lngen.ptx.ordering import AGENTS
from lngen.ptx.parser import Instruction
from lngen.ptx.program import Program, Step, unknown, write
from lngen.ptx.scratch import NOBODY
from lngen.ptx.tracking import shared_race
from lngen.ptx.values import BOOL, UNSIGNED

_FORM = re.compile(
    r"mbarrier\.(?P<op>init|inval|arrive\.expect_tx|arrive|expect_tx|(?:try|test)_wait\.parity|(?:try|test)_wait)"
    r"(?:\.(?:release|acquire|relaxed))?(?:\.(?:cta|cluster))?\.shared(?:::cta|::cluster)?\.b64"
)


@dataclass
class Barrier:
    """One in shared memory: arrivals a phase needs and still lacks, bytes it lacks, phases completed."""

    count: int
    pending: int
    bytes: int = 0
    phase: int = 0
    coming: Array | None = None  # what those that arrived in this phase had seen
    done: Array | None = None  # what those of the last complete phase had
    polled: set[tuple[int, int]] = field(default_factory=set)  # threads that have been sent back once, and the phase


def barrier_step(program: Program, i: Instruction) -> Step:
    """The step of an mbarrier instruction."""
    m = _FORM.fullmatch(i.opcode)
    if m is None:
        raise unknown(i)
    op, has_result = m["op"], m["op"].startswith(("arrive", "try", "test"))
    rest = i.operands[has_result:]
    if not rest or len(rest) > 3:
        raise unknown(i)
    base = memory_operand(program, i, rest[0])
    waits = "wait" in op
    wide = UNSIGNED[8 if waits and "parity" not in op else 4]
    extra = program.source(rest[1], wide, i) if len(rest) > 1 else None
    result = BOOL if waits else UNSIGNED[8]
    target = program.target(i.operands[0], result, i) if has_result else None

    def step(batch: Batch, lanes: Lanes) -> None:
        value = np.ones(lanes.count, np.int64)
        if extra is not None:
            value = spread(batch.R[extra[0]] if extra[1] is None else extra[1](batch.R[extra[0]]), lanes)
        at, who, part = place(batch, i, lanes, batch.shared, address_of(batch, *base, lanes), 8)
        value = value if part is None else value[part]
        found = np.zeros(batch.total, result)
        for lane, key, number in zip(who.tolist(), at.tolist(), value.tolist(), strict=True):
            found[lane] = _one(batch, i, op, lane, key, number)
        if target is not None:
            slot, convert = target
            write(batch, slot, convert(found) if convert else found, lanes)

    return step


def _one(batch: Batch, i: Instruction, op: str, lane: int, key: int, number: int) -> int:
    who = np.array([lane])
    if op == "init":
        batch.mbarriers[key] = Barrier(number, number)
        batch.shared.written[key : key + 8] = 1
        _touch(batch, i, key, lane, "write")
        batch.touched()
        return 0
    barrier: Barrier | None = batch.mbarriers.get(key)
    if barrier is None:
        batch.report("uninitialised", "An mbarrier is used that nothing has initialised.", i, who)
        return 1
    if op == "inval":
        del batch.mbarriers[key]
        return 0
    _touch(batch, i, key, lane, "read")
    if "wait" in op:
        complete = (barrier.phase & 1) != number & 1 if "parity" in op else barrier.phase > number
        if complete and _too_early(batch, barrier, lane):
            return 0
        if complete and barrier.done is not None and batch.order is not None:
            np.maximum(batch.order.seen[lane], barrier.done, out=batch.order.seen[lane])
        return 1 if complete else 0
    if op.endswith("expect_tx"):
        barrier.bytes += number
    state = barrier.phase
    if op.startswith("arrive"):
        times = number if op == "arrive" else 1
        if times > barrier.pending:
            text = f"An mbarrier gets more arrivals in a phase than the {barrier.count} it was initialised with."
            batch.report("divergent-barrier", text, i, who)
        barrier.pending -= times
        _hand_over(batch, barrier, lane)
    completed(batch, barrier, key)
    batch.touched()
    return state


def _too_early(batch: Batch, barrier: Barrier, lane: int) -> bool:
    """True once a phase for a thread that cannot know yet that it is complete: it might have come sooner."""
    if barrier.done is None or batch.order is None or (barrier.done <= batch.order.seen[lane]).all():
        return False
    if (lane, barrier.phase) in barrier.polled:
        return False
    barrier.polled.add((lane, barrier.phase))
    batch.touched()
    return True


def _touch(batch: Batch, i: Instruction, key: int, lane: int, how: str) -> None:
    """Whoever uses a barrier comes after its initialisation: that is a weak write, using it a strong read."""
    rival = batch.shared.races.note(np.array([key // 4]), np.array([lane]), batch.clock, how, how == "read")
    if rival[0] != NOBODY:
        shared_race(batch, i, batch.shared, np.array([key]), np.array([lane]), int(rival[0]), how)


def _hand_over(batch: Batch, barrier: Barrier, lane: int) -> None:
    if batch.order is not None:
        batch.order.tick(lane)
        row = batch.order.seen[lane]
        barrier.coming = row.copy() if barrier.coming is None else np.maximum(barrier.coming, row)


def completed(batch: Batch, barrier: Barrier, key: int) -> None:
    """The next phase, if this one lacks nothing."""
    if barrier.pending > 0 or barrier.bytes:
        return
    barrier.phase, barrier.pending = barrier.phase + 1, barrier.count
    barrier.done, barrier.coming = barrier.coming, None
    if batch.order is not None and barrier.done is not None:
        batch.order.now += 1
        barrier.done[batch.order.column[batch.total + key // 8 % AGENTS]] = batch.order.now


def arrive(batch: Batch) -> bool:
    """Copies arrive that complete on a barrier: as late as they can, when all threads wait. False if there are none."""
    found = [key for (kind, key), copies in batch.flights.copies.items() if kind == "barrier" and copies]
    for key in found:
        arrived = sum(len(c.data) for c in batch.flights.copies["barrier", key])
        batch.flights.wait(batch, "barrier", key, None)
        if key in batch.mbarriers:
            batch.mbarriers[key].bytes -= arrived
            completed(batch, batch.mbarriers[key], key)
    return bool(found)
