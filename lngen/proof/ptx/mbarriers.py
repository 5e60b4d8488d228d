"""mbarrier: arrivals, bytes expected and arrived, phases, and uses before the initialisation is visible.

PTX ISA, Parallel Synchronization and Communication Instructions: mbarrier. A phase ends when neither arrivals nor
bytes are pending. Arrivals release and waits acquire unless they are relaxed, in the scope of the block unless they
say .cluster; bytes that arrive release in that of the cluster. An initialised object is opaque until mbarrier.inval:
any access other than by mbarrier instructions, and a second mbarrier.init, is undefined.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lngen.compiler.ir.numerics import Array
from lngen.proof.ptx.accesses import place, report_shared_race
from lngen.proof.ptx.async_copies import wait
from lngen.proof.ptx.batch import MBARRIER, Batch
from lngen.proof.ptx.opcodes import LEVELS
from lngen.proof.ptx.ordering import NOBODY
from lngen.proof.ptx.parser import Instruction
from lngen.proof.ptx.program import BOOL, UNSIGNED, Lanes, Program, Step, unknown

_SCOPE = r"(?:\.cta|\.cluster)"
_FORM = re.compile(
    rf"mbarrier\.(?:(?P<op>init|inval)|(?P<arrive>arrive(?:\.expect_tx)?)(?:(?:\.release|\.relaxed){_SCOPE})?"
    rf"|(?P<expect>expect_tx)(?:\.relaxed{_SCOPE})?"
    rf"|(?P<wait>(?:try|test)_wait(?:\.parity)?)(?:(?:\.acquire|\.relaxed){_SCOPE})?)"
    r"\.shared(?P<space>::cta|::cluster)?\.b64"
)
MOST = (1 << 20) - 1  # arrivals of a phase, and bytes


@dataclass
class PhaseClocks:
    """The clocks that a phase releases: those of threads of the barrier's block, and of other blocks of the cluster."""

    own_block: Array | None = None
    other_blocks: Array | None = None

    def add(self, clock: Array, remote: bool) -> None:
        """Joins the clock of one arrival; ``remote``: from another block."""
        old = self.other_blocks if remote else self.own_block
        new = clock if old is None else np.maximum(old, clock)
        if remote:
            self.other_blocks = new
        else:
            self.own_block = new

    def acquired(self, cluster: bool) -> Array | None:
        """The clock that threads acquire that wait with the scope of the cluster, or of their block."""
        clocks = [c for c in (self.own_block, self.other_blocks if cluster else None) if c is not None]
        return np.maximum.reduce(clocks) if clocks else None


@dataclass
class Barrier:
    """One mbarrier: arrivals that a phase needs and still lacks, bytes that it lacks, phases completed.

    ``by``, ``initialised_at``: the thread that initialised it and the time; ``fenced``: the time of
    fence.mbarrier_init, or 0.
    """

    count: int
    pending: int
    by: int
    initialised_at: int
    fenced: int = 0
    bytes: int = 0
    phase: int = 0
    coming: PhaseClocks = field(default_factory=PhaseClocks)  # in this phase
    done: PhaseClocks = field(default_factory=PhaseClocks)  # in the last complete phase
    ended: int = 0  # time at which the last phase completed
    distant: bool = False  # bytes from another block arrived in this phase
    polled: Array | None = None  # by thread of the cluster: the last phase in which its wait failed once


@dataclass(frozen=True)
class Form:
    """The meaning of an instruction: operation, whether it waits, its ordering and its scope."""

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
    address_of, own = program.address(rest[0], i), m["space"] != "::cluster"
    form = Form(op, "wait" in op, "parity" in op, ".relaxed" not in i.opcode, ".cluster." in i.opcode)
    wide = UNSIGNED[8 if form.waits and not form.parity else 4]
    number = program.reader(rest[1], wide, i) if len(rest) > 1 else None
    result = BOOL if form.waits else UNSIGNED[8]
    write = program.writer(i.operands[0], result, i) if has_result else None

    def step(batch: Batch, lanes: Lanes) -> None:
        value = np.ones(lanes.count, np.int64) if number is None else lanes.each(number(batch.R))
        at, who, part = place(batch, i, lanes, batch.shared, address_of(batch.R, lanes), MBARRIER, own=own)
        value = value if part is None else value[part]
        found, rival = np.zeros(batch.total, result), np.full(len(at), NOBODY)
        if form.op not in ("init", "inval"):
            live = np.isin(at, [*batch.mbarriers])
            rival[live] = _noted(batch, at[live], who[live], "read")
        for key in np.unique(at).tolist():
            mine = np.flatnonzero(at == key)
            found[who[mine]] = _together(batch, i, form, key, who[mine], value[mine].astype(np.int64), rival[mine])
        if write is not None:
            write(batch.R, found, lanes)

    return step


def _together(batch: Batch, i: Instruction, form: Form, key: int, who: Array, numbers: Array, rival: Array) -> Any:
    """Several threads at one barrier, each with its rival; returns the results."""
    if form.op == "init":
        _begin(batch, i, key, who, int(numbers[-1]))
        return 0
    barrier: Barrier | None = batch.mbarriers.get(key)
    if barrier is None:
        batch.report("uninitialised", "An mbarrier is used, but nothing has initialised it.", i, who)
        return 1
    if form.op == "inval":
        _used(batch, i, key, who, "write", _noted(batch, np.full(len(who), key), who, "write"))
        if batch.flights.copies.get(("barrier", key)):
            text = "An mbarrier is invalidated on which an asynchronous copy has yet to complete."
            batch.report("mbarrier", text, i, who)
        _mark(batch, key, False)
        del batch.mbarriers[key]
        return 0
    _used(batch, i, key, who, "read", rival)
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
    for n in range(len(who)):  # one after the other, since a phase may end between two of them
        states.append(barrier.phase)
        part = slice(n, n + 1)
        _count(batch, i, form, barrier, key, who[part], numbers[part], times[part])
    return states


def _begin(batch: Batch, i: Instruction, key: int, who: Array, count: int) -> None:
    """An mbarrier is initialised."""
    if key in batch.mbarriers:
        batch.report("mbarrier", "An mbarrier is initialised over one that nothing has invalidated.", i, who)
    if not 1 <= count <= MOST:
        batch.report("mbarrier", f"An mbarrier is initialised with {count} arrivals: 1 to {MOST} are expected.", i, who)
    _used(batch, i, key, who, "write", _noted(batch, np.full(len(who), key), who, "write"))
    batch.mbarriers[key] = Barrier(count, count, int(who[-1]), batch.clock.moment)
    _mark(batch, key, True)
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
            remote = batch.slot_of[who] != key // batch.shared.room
            for mine, other in ((who[~remote], False), (who[remote], True)):
                if mine.size and (form.cluster or not other):
                    barrier.coming.add(batch.order.clock(mine), other)
    completed(batch, barrier, key)


def _passing(batch: Batch, barrier: Barrier, key: int, who: Array, complete: Array, form: Form) -> Array:
    """Which of the threads that find a phase complete go on.

    In each phase the wait of a thread fails once unless the thread already knows that the phase is complete: on a
    GPU it might have come earlier.
    """
    order = batch.order
    clock = barrier.done.acquired(form.cluster)
    if order is None or not complete.any():
        return complete
    aware = order.visible_time(who, order.column[batch.agent(key)]) >= barrier.ended
    if barrier.polled is None:
        barrier.polled = np.full(int(order.index_in_cluster.max()) + 1, -1, np.int32)
    place_ = order.index_in_cluster[who]
    back = complete & ~aware & (barrier.polled[place_] != barrier.phase)
    if back.any():
        barrier.polled[place_[back]] = barrier.phase
        batch.touched()
    complete = complete & ~back
    if complete.any() and clock is not None:
        (order.acquire if form.orders else order.relaxed_wait)(who[complete], clock)
    return complete


def completed(batch: Batch, barrier: Barrier, key: int) -> None:
    """Starts the next phase if this one lacks nothing."""
    if barrier.pending > 0 or barrier.bytes:
        return
    barrier.phase, barrier.pending = barrier.phase + 1, barrier.count
    barrier.done, barrier.coming = barrier.coming, PhaseClocks()
    if batch.order is not None:
        batch.order.now += 1
        barrier.ended = batch.order.now
        clock = np.zeros(batch.order.columns.total, np.int32)
        clock[batch.order.column[batch.agent(key)]] = barrier.ended
        barrier.done.add(clock, barrier.distant)
    barrier.distant = False


def complete_copies(batch: Batch) -> bool:
    """Completes the copies on a barrier, as late as possible: when all threads wait. False if there are none."""
    found = [key for (kind, key), copies in batch.flights.copies.items() if kind == "barrier" and copies]
    for key in found:
        copies = batch.flights.copies["barrier", key]
        wait(batch, "barrier", key, None)
        if barrier := batch.mbarriers.get(key):
            barrier.bytes -= sum(len(c.data) for c in copies)
            for copy in copies:
                remote = bool(batch.slot_of[copy.lane] != key // batch.shared.room)
                barrier.distant |= remote
                if copy.visible is not None:
                    barrier.coming.add(copy.visible, remote)
            completed(batch, barrier, key)
    return bool(found)


def _mark(batch: Batch, key: int, alive: bool) -> None:
    """Records that an mbarrier at a position is initialised, or no longer is."""
    batch.opaque[key // MBARRIER] = alive
    batch.shared.written[key : key + MBARRIER] = alive


def _noted(batch: Batch, at: Array, who: Array, how: str) -> Array:
    """The rival of each use of a barrier, or NOBODY: initialising one is a weak write, using it is a strong read."""
    places, unit = batch.places(batch.shared)
    return places.note(at // unit, who, batch.clock, how, LEVELS["sys"] if how == "read" else None)


def _used(batch: Batch, i: Instruction, key: int, who: Array, how: str, rival: Array) -> None:
    """Uses of a barrier must follow its initialisation: a finding for those with a rival."""
    bad = np.flatnonzero(rival != NOBODY)
    if bad.size and how == "read":
        bad = bad[~_released(batch, key, rival[bad])]
    if bad.size:
        report_shared_race(batch, i, np.full(bad.size, key), who[bad], int(rival[bad[0]]), how)


def _released(batch: Batch, key: int, rival: Array) -> Array:
    """True where ``rival`` initialised it, executed fence.mbarrier_init and then arrived at a cluster barrier.

    The whole cluster has passed that barrier, which may be relaxed.
    """
    barrier = batch.mbarriers[key]
    return np.asarray((rival == barrier.by) & (barrier.fenced > 0) & (barrier.fenced < batch.met_at[barrier.by]))


def fence_mbarriers(batch: Batch, lanes: Array) -> None:
    """fence.mbarrier_init: applies to the barriers that ``lanes`` initialised."""
    if batch.order is None:
        return
    batch.order.tick(lanes)
    for barrier in batch.mbarriers.values():
        if barrier.by in lanes and not barrier.fenced:
            barrier.fenced = batch.order.now


def reached(batch: Batch, i: Instruction, key: int, lane: int, bulk: bool) -> bool:
    """Checks the mbarrier at ``key``, on which a copy of ``lane`` completes; False if there is none.

    ``bulk``: the copy is not performed by a thread. PTX ISA, Memory Consistency Model: proxies. Most versions of the
    manual leave open through which proxy a bulk copy reaches its mbarrier, so fence.mbarrier_init or fence.proxy.async
    must follow the initialisation. st.async is ordered like a store of its thread.
    """
    who, barrier = np.array([lane]), batch.mbarriers.get(key)
    if barrier is None:
        batch.report("uninitialised", "A copy completes on an mbarrier that nothing has initialised.", i, who)
        return False
    _used(batch, i, key, who, "read", _noted(batch, np.array([key]), who, "read"))
    if not bulk or barrier.fenced or batch.order is None:
        return True
    by, at = np.array([barrier.by]), np.array([barrier.initialised_at])
    if not batch.order.separated_by_proxy_fence("shared", by, at, lane).all():
        text = f"A bulk copy completes on an mbarrier that thread {barrier.by % batch.width} initialised, and neither "
        batch.report("proxy", text + "fence.mbarrier_init nor fence.proxy.async follows the initialisation.", i, who)
    return True
