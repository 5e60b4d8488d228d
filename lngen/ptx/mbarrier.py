"""mbarrier: arrivals, bytes expected and arrived, phases.

PTX ISA, Parallel Synchronization and Communication Instructions: mbarrier. A phase ends when neither arrivals nor
bytes are pending. Arrivals release and waits acquire unless they are relaxed, in the scope of the block unless they
say .cluster; bytes that arrive release in that of the cluster.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx import opaque
from lngen.ptx.access import address_of, place, spread
from lngen.ptx.batch import Batch
from lngen.ptx.bulk import agent, memory_operand
from lngen.ptx.lanes import Lanes
from lngen.ptx.parser import Instruction
from lngen.ptx.program import Program, Step, unknown, write
from lngen.ptx.values import BOOL, UNSIGNED

_SCOPE = r"(?:\.cta|\.cluster)"
_FORM = re.compile(
    rf"mbarrier\.(?:(?P<op>init|inval)|(?P<arrive>arrive(?:\.expect_tx)?)(?:(?:\.release|\.relaxed){_SCOPE})?"
    rf"|(?P<expect>expect_tx)(?:\.relaxed{_SCOPE})?"
    rf"|(?P<wait>(?:try|test)_wait(?:\.parity)?)(?:(?:\.acquire|\.relaxed){_SCOPE})?)"
    r"\.shared(?P<space>::cta|::cluster)?\.b64"
)
MOST = (1 << 20) - 1  # arrivals of a phase, and bytes


@dataclass
class Handed:
    """What a phase hands over: inside the block of its barrier, and from other blocks of the cluster."""

    near: Array | None = None
    far: Array | None = None

    def add(self, row: Array, far: bool) -> None:
        """One more has arrived."""
        old = self.far if far else self.near
        new = row if old is None else np.maximum(old, row)
        self.near, self.far = (self.near, new) if far else (new, self.far)

    def row(self, cluster: bool) -> Array | None:
        """What those learn that wait, for the cluster or for their block."""
        rows = [row for row in (self.near, self.far if cluster else None) if row is not None]
        return np.maximum.reduce(rows) if rows else None


@dataclass
class Barrier:
    """One in shared memory: arrivals a phase needs and still lacks, bytes it lacks, phases completed.

    ``by``, ``begun``: who initialised it and when; ``fenced``: when fence.mbarrier_init came, 0 if it has not.
    """

    count: int
    pending: int
    by: int
    begun: int
    fenced: int = 0
    bytes: int = 0
    phase: int = 0
    coming: Handed = field(default_factory=Handed)  # of this phase
    done: Handed = field(default_factory=Handed)  # of the last complete one
    ended: int = 0  # when that was complete
    distant: bool = False  # bytes of another block arrived in this phase
    polled: Array | None = None  # by thread of the cluster the phase in which it has been sent back once


@dataclass(frozen=True)
class Form:
    """What an instruction does: its operation, whether it waits, whether it orders what is around it, and where."""

    op: str
    waits: bool
    parity: bool
    orders: bool
    cluster: bool


def barrier_step(program: Program, i: Instruction) -> Step:
    """The step of an mbarrier instruction."""
    m = _FORM.fullmatch(i.opcode)
    if m is None or (m["space"] == "::cluster" and (m["op"] or m["wait"])):
        raise unknown(i)
    op = m["op"] or m["arrive"] or m["expect"] or m["wait"]
    has_result = not m["op"] and not m["expect"]
    rest = i.operands[has_result:]
    if not rest or len(rest) > 3:
        raise unknown(i)
    base, own = memory_operand(program, i, rest[0]), m["space"] != "::cluster"
    form = Form(op, "wait" in op, "parity" in op, ".relaxed" not in i.opcode, ".cluster." in i.opcode)
    wide = UNSIGNED[8 if form.waits and not form.parity else 4]
    extra = program.source(rest[1], wide, i) if len(rest) > 1 else None
    result = BOOL if form.waits else UNSIGNED[8]
    target = program.target(i.operands[0], result, i) if has_result else None

    def step(batch: Batch, lanes: Lanes) -> None:
        value = np.ones(lanes.count, np.int64)
        if extra is not None:
            value = spread(batch.R[extra[0]] if extra[1] is None else extra[1](batch.R[extra[0]]), lanes)
        at, who, part = place(batch, i, lanes, batch.shared, address_of(batch, *base, lanes), 8, own=own)
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
        _begin(batch, i, key, who, int(numbers[-1]))
        return 0
    barrier: Barrier | None = batch.mbarriers.get(key)
    if barrier is None:
        batch.report("uninitialised", "An mbarrier is used that nothing has initialised.", i, who)
        return 1
    if form.op == "inval":
        opaque.used(batch, i, key, who, "write")
        if batch.flights.copies.get(("barrier", key)):
            text = "An mbarrier is invalidated on which an asynchronous copy has yet to complete."
            batch.report("mbarrier", text, i, who)
        opaque.live(batch, key, False)
        del batch.mbarriers[key]
        return 0
    opaque.used(batch, i, key, who, "read")
    if form.waits:
        complete = np.asarray((barrier.phase & 1) != numbers & 1 if form.parity else barrier.phase > numbers)
        return _passing(batch, barrier, key, who, complete, form)
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


def _begin(batch: Batch, i: Instruction, key: int, who: Array, count: int) -> None:
    """An mbarrier is initialised."""
    if key in batch.mbarriers:
        batch.report("mbarrier", "An mbarrier is initialised where one lives that nothing has invalidated.", i, who)
    if not 1 <= count <= MOST:
        batch.report("mbarrier", f"An mbarrier is initialised with {count} arrivals: 1 to {MOST} are expected.", i, who)
    opaque.used(batch, i, key, who, "write")
    batch.mbarriers[key] = Barrier(count, count, int(who[-1]), batch.clock.moment)
    opaque.live(batch, key, True)
    batch.touched()


def _count(
    batch: Batch, i: Instruction, form: Form, barrier: Barrier, key: int, who: Array, numbers: Array, times: Array
) -> None:
    """Arrivals and bytes expected."""
    if form.op.endswith("expect_tx"):
        barrier.bytes += int(numbers.sum())
        if barrier.bytes > MOST:
            batch.report("mbarrier", f"An mbarrier expects {barrier.bytes} bytes: {MOST} at most.", i, who)
    if form.op.startswith("arrive"):
        many = int(times.sum())
        if many > barrier.pending:
            text = f"An mbarrier gets more arrivals in a phase than the {barrier.count} it was initialised with."
            batch.report("divergent-barrier", text, i, who)
        barrier.pending -= many
        if batch.order is not None and form.orders:
            batch.order.tick(who)
            home = batch.slot_of[who] == key // batch.shared.room
            for mine, far in ((who[home], False), (who[~home], True)):
                if mine.size and (form.cluster or not far):
                    barrier.coming.add(batch.order.row(mine), far)
    completed(batch, barrier, key)


def _passing(batch: Batch, barrier: Barrier, key: int, who: Array, complete: Array, form: Form) -> Array:
    """Whether those that find a phase complete go on.

    Once a phase each is sent back if it cannot know yet that the phase is complete: it might have come sooner.
    """
    order = batch.order
    row = barrier.done.row(form.cluster)
    if order is None or not complete.any():
        return complete
    aware = order.rows.table[order.seen.of[who], order.column[agent(batch, key)]] >= barrier.ended
    if barrier.polled is None:
        barrier.polled = np.full(int(order.within.max()) + 1, -1, np.int32)
    place_ = order.within[who]
    back = complete & ~aware & (barrier.polled[place_] != barrier.phase)
    if back.any():
        barrier.polled[place_[back]] = barrier.phase
        batch.touched()
    complete = complete & ~back
    if complete.any() and row is not None:
        if form.orders:
            order.rows.add_to(order.seen, who[complete], row)
        else:
            order.tell(who[complete], row)
    return complete


def completed(batch: Batch, barrier: Barrier, key: int) -> None:
    """The next phase, if this one lacks nothing."""
    if barrier.pending > 0 or barrier.bytes:
        return
    barrier.phase, barrier.pending = barrier.phase + 1, barrier.count
    barrier.done, barrier.coming = barrier.coming, Handed()
    if batch.order is not None:
        batch.order.now += 1
        barrier.ended = batch.order.now
        row = np.zeros(batch.order.rows.columns, np.int32)
        row[batch.order.column[agent(batch, key)]] = barrier.ended
        barrier.done.add(row, barrier.distant)
    barrier.distant = False


def arrive(batch: Batch) -> bool:
    """Copies arrive that complete on a barrier: as late as they can, when all threads wait. False if there are none."""
    found = [key for (kind, key), copies in batch.flights.copies.items() if kind == "barrier" and copies]
    for key in found:
        copies = batch.flights.copies["barrier", key]
        batch.flights.wait(batch, "barrier", key, None)
        if barrier := batch.mbarriers.get(key):
            barrier.bytes -= sum(len(c.data) for c in copies)
            for copy in copies:
                far = bool(batch.slot_of[copy.lane] != key // batch.shared.room)
                barrier.distant |= far
                if copy.seen is not None:
                    barrier.coming.add(copy.seen, far)
            completed(batch, barrier, key)
    return bool(found)
