"""mbarrier: arrivals, bytes expected and arrived, phases."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx.access import address_of, place, spread
from lngen.ptx.batch import Batch
from lngen.ptx.bulk import memory_operand
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
    polled: Array | None = None  # by thread of the cluster the phase in which it has been sent back once


@dataclass(frozen=True)
class Form:
    """What an instruction does: its operation, whether it waits, and whether it orders what is around it."""

    op: str
    waits: bool
    parity: bool
    orders: bool


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
    form = Form(op, "wait" in op, "parity" in op, ".relaxed" not in i.opcode)
    wide = UNSIGNED[8 if form.waits and not form.parity else 4]
    extra = program.source(rest[1], wide, i) if len(rest) > 1 else None
    result = BOOL if form.waits else UNSIGNED[8]
    target = program.target(i.operands[0], result, i) if has_result else None

    def step(batch: Batch, lanes: Lanes) -> None:
        value = np.ones(lanes.count, np.int64)
        if extra is not None:
            value = spread(batch.R[extra[0]] if extra[1] is None else extra[1](batch.R[extra[0]]), lanes)
        at, who, part = place(batch, i, lanes, batch.shared, address_of(batch, *base, lanes), 8)
        value = value if part is None else value[part]
        found = np.zeros(batch.total, result)
        for key in np.unique(at).tolist():
            mine = np.flatnonzero(at == key)
            found[who[mine]] = _together(batch, i, form, key, who[mine], value[mine].astype(np.int64))
        if target is not None:
            slot, convert = target
            write(batch, slot, convert(found) if convert else found, lanes)

    return step


def _together(batch: Batch, i: Instruction, form: Form, key: int, who: Array, numbers: Array) -> Any:
    """Several threads at one barrier; the results."""
    if form.op == "init":
        batch.mbarriers[key] = Barrier(int(numbers[-1]), int(numbers[-1]))
        batch.shared.written[key : key + 8] = 1
        _touch(batch, i, key, who, "write")
        batch.touched()
        return 0
    barrier: Barrier | None = batch.mbarriers.get(key)
    if barrier is None:
        batch.report("uninitialised", "An mbarrier is used that nothing has initialised.", i, who)
        return 1
    if form.op == "inval":
        del batch.mbarriers[key]
        return 0
    _touch(batch, i, key, who, "read")
    if form.waits:
        complete = np.asarray((barrier.phase & 1) != numbers & 1 if form.parity else barrier.phase > numbers)
        return _passing(batch, barrier, key, who, complete, form.orders)
    batch.touched()
    times = numbers if form.op == "arrive" else np.ones_like(numbers)
    if not form.op.startswith("arrive") or int(times.sum()) <= barrier.pending:
        state = barrier.phase
        _count(batch, i, form, barrier, key, who, numbers, times)
        return state
    states = []
    for n in range(len(who)):  # one after the other: a phase may end between them
        states.append(barrier.phase)
        part = slice(n, n + 1)
        _count(batch, i, form, barrier, key, who[part], numbers[part], times[part])
    return states


def _count(
    batch: Batch, i: Instruction, form: Form, barrier: Barrier, key: int, who: Array, numbers: Array, times: Array
) -> None:
    """Arrivals and bytes expected."""
    if form.op.endswith("expect_tx"):
        barrier.bytes += int(numbers.sum())
    if form.op.startswith("arrive"):
        many = int(times.sum())
        if many > barrier.pending:
            text = f"An mbarrier gets more arrivals in a phase than the {barrier.count} it was initialised with."
            batch.report("divergent-barrier", text, i, who)
        barrier.pending -= many
        if batch.order is not None and form.orders:
            batch.order.tick(who)
            row = batch.order.row(who)
            barrier.coming = row if barrier.coming is None else np.maximum(barrier.coming, row)
    completed(batch, barrier, key)


def _passing(batch: Batch, barrier: Barrier, key: int, who: Array, complete: Array, orders: bool) -> Array:
    """Whether those that find a phase complete go on.

    Once a phase each is sent back if it cannot know yet that the phase is complete: it might have come sooner.
    """
    order = batch.order
    if order is None or barrier.done is None or not complete.any():
        return complete
    agent = order.column[batch.total + key // 8 % AGENTS]
    aware = order.rows.table[order.seen.of[who], agent] >= barrier.done[agent]
    if barrier.polled is None:
        barrier.polled = np.full(int(order.within.max()) + 1, -1, np.int32)
    place_ = order.within[who]
    back = complete & ~aware & (barrier.polled[place_] != barrier.phase)
    if back.any():
        barrier.polled[place_[back]] = barrier.phase
        batch.touched()
    complete = complete & ~back
    if complete.any():
        learn = functools.partial(order.rows.add_to, order.seen) if orders else order.tell
        learn(who[complete], barrier.done)
    return complete


def _touch(batch: Batch, i: Instruction, key: int, who: Array, how: str) -> None:
    """Whoever uses a barrier comes after its initialisation: that is a weak write, using it a strong read."""
    rival = batch.shared.races.note(np.full(len(who), key // batch.shared.unit), who, batch.clock, how, how == "read")
    bad = np.flatnonzero(rival != NOBODY)
    if bad.size:
        shared_race(batch, i, batch.shared, np.full(bad.size, key), who[bad], int(rival[bad[0]]), how)


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
        copies = batch.flights.copies["barrier", key]
        batch.flights.wait(batch, "barrier", key, None)
        if barrier := batch.mbarriers.get(key):
            barrier.bytes -= sum(len(c.data) for c in copies)
            rows = [row for row in (barrier.coming, *(c.seen for c in copies)) if row is not None]
            barrier.coming = np.max(rows, axis=0) if rows else None
            completed(batch, barrier, key)
    return bool(found)
