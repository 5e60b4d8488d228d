"""The order between the accesses of a launch: barriers, fences, and the clocks that atomics and flags release."""

from __future__ import annotations

from typing import Any

import numpy as np

from lngen.compiler.ir.numerics import Array
from lngen.proof.ptx.clocks import (
    AGENTS,
    ClockTable,
    Columns,
    PendingAcquires,
    ReleasedClocks,
    ThreadClocks,
    threads_per_column,
)
from lngen.proof.ptx.opcodes import LEVELS, Semantics

NOBODY = -1
BARRIERS = 16  # of a block, by number: PTX ISA
STAMPS = 2 * BARRIERS  # of each time: one for every barrier passed then, the last for accesses


class Clock:
    """The times at which each thread last passed the block barrier and a named barrier.

    ``now`` grows with every release; the stamp of a release is its time and its barrier, so two threads of a
    block with equal stamps passed the same barrier together.
    """

    def __init__(self, total: int) -> None:
        self.now = 0
        self.whole = np.zeros(total, np.int32)
        self.named = np.zeros(total, np.int32)

    def release(self) -> None:
        """Advances the time."""
        self.now += 1

    def barrier_passed(self, lanes: Array | slice, barrier: Array | int) -> None:
        """``lanes`` passed ``barrier`` now."""
        stamp = np.asarray(self.now * STAMPS + barrier + 1, np.int32)
        if np.ndim(barrier) == 0:
            (self.named if barrier else self.whole)[lanes] = stamp
            return
        lanes = np.asarray(lanes)
        self.whole[lanes[barrier == 0]] = self.now * STAMPS + 1
        self.named[lanes[barrier != 0]] = stamp[barrier != 0]

    @property
    def moment(self) -> int:
        """The time of an access made now: before every later release."""
        return self.now * STAMPS + STAMPS - 1

    def ordered(self, earlier: Array, time: Array, later: Array, shared: bool) -> Array:
        """True where ``later`` and ``earlier`` both passed a barrier after the access of ``earlier`` at ``time``."""
        whole, named = self.whole[later], self.named[later]
        return np.asarray(
            ((whole > time) & (self.whole[earlier] == whole)) | ((named > time) & (self.named[earlier] == named))
        )


class VectorClock(Clock):
    """A vector clock per thread: for each other thread, the time before which its accesses are visible to the first.

    ``cluster_only``: threads synchronise within their cluster alone, so a clock has columns for one cluster. With many
    threads a column stands for several neighbours, and races between them and other threads may go unnoticed. Times
    are of one counter, ``now``. Besides threads there are agents, which count as the writers of copies that no thread
    performs; an array by actor has an entry for each thread and then for each agent.
    """

    def __init__(
        self,
        total: int,
        slot_of: Array,
        cluster_of: Array,
        index_in_cluster: Array,
        cluster_only: bool,
        proxy_spaces: tuple[str, ...] = (),
        restricted: bool = False,
    ) -> None:
        super().__init__(total)
        self.slot_of, self.cluster_of, self.cluster_only = slot_of, cluster_of, cluster_only
        self.index_in_cluster = index_in_cluster
        members = int(index_in_cluster.max()) + 1 if cluster_only else total
        group = threads_per_column(len(cluster_of), members)
        self.columns = Columns(-(-members // group), proxy_spaces, restricted)
        column = (index_in_cluster if cluster_only else np.arange(total)) // group
        self.column = np.concatenate([column, self.columns.threads + np.arange(AGENTS)])  # by actor
        self._actor_cluster = np.concatenate([cluster_of[slot_of], np.full(AGENTS, -1)])
        self._table = ClockTable(self.columns.total)
        self._visible = self._table.thread_clocks(total)
        self._arrived = self._table.thread_clocks(total)  # released to the cluster's barrier
        self._pending_waits = self._table.thread_clocks(total)  # of relaxed waits, acquired at the next fence
        self._pending_reads: dict[int, PendingAcquires] = {}  # by thread
        self._release_fences: dict[int, ThreadClocks] = {}  # by level: the clocks at each thread's last release fence
        self._proxy_fence = {space: np.zeros(total, np.int32) for space in proxy_spaces}  # times of the last ones
        self._released: dict[int, ReleasedClocks] = {}  # by flag
        self.now = 1

    @property
    def moment(self) -> int:
        """The time of an access made now."""
        return self.now

    def in_scope(self, a: Array, b: Array, level: int) -> Array:
        """True where both threads are in the scope."""
        if level >= LEVELS["gpu"]:
            return np.ones(len(a), np.bool_)
        a, b = self.slot_of[a], self.slot_of[b]
        return np.asarray(a == b if level == LEVELS["cta"] else self.cluster_of[a] == self.cluster_of[b])

    def ordered(self, earlier: Array, time: Array, later: Array, shared: bool) -> Array:
        """True where an access of ``earlier`` at ``time``, to ``shared`` memory or another, is visible to ``later``.

        Where ``earlier`` is NOBODY the result has no meaning.
        """
        earlier = np.where(earlier == NOBODY, 0, earlier)
        column = self.column[earlier] if shared else self.columns.elsewhere + self.column[earlier]
        found = self.visible_time(later, column) > time
        if self.cluster_only:
            cluster = self._actor_cluster
            found &= (cluster[earlier] == cluster[later]) | (cluster[earlier] < 0)
        return np.asarray(found)

    def visible_time(self, lanes: Array, columns: Array | int) -> Array:
        """The time in a column before which accesses are visible to a thread, besides its own accesses."""
        return np.asarray(self._table.rows[self._visible.row[lanes], columns])

    def separated_by_proxy_fence(self, space: str, earlier: Array, time: Array, later: int) -> Array:
        """True where a fence.proxy.async separates accesses of threads at a time from those of ``later`` now.

        ``earlier`` is never NOBODY: it is the writer of bytes, or the thread that initialised an mbarrier.
        """
        found = self.visible_time(np.array([later]), self.columns.proxies[space] + self.column[earlier]) > time
        return np.asarray(found | ((earlier == later) & (self._proxy_fence[space][later] > time)))

    def proxy_fence(self, lanes: Array, spaces: tuple[str, ...]) -> None:
        """Asynchronous copies after this fence see the accesses that ``lanes`` did or saw before it."""
        self.tick(lanes)
        numbers, which = np.unique(self._visible.row[lanes], return_inverse=True)
        clocks = self._table.rows[numbers]
        for space in spaces:
            if space in self.columns.proxies:
                part = clocks[:, self.columns.proxy(space)]
                np.maximum(part, clocks[:, : self.columns.per_copy], out=part)
                self._proxy_fence[space][lanes] = self.now
        self._visible.row[lanes] = self._table.add(clocks)[which]

    def tick(self, lanes: Any) -> None:
        """The accesses of these threads until now can be released."""
        self.now += 1
        self._visible.own_time[lanes] = self.now

    def clock(self, lanes: Array, clocks: ThreadClocks | None = None) -> Array:
        """The join of the clocks of ``lanes``: the accesses that are visible to at least one of them."""
        return np.asarray(self._joined(clocks or self._visible, lanes, np.zeros(len(lanes), np.int64), 1)[0])

    def _joined(self, clocks: ThreadClocks, lanes: Array, group: Array, count: int) -> Array:
        """The join of the clocks of each group of ``lanes``, with the threads' own accesses."""
        found = self._table.joined(clocks.row[lanes], group, count)
        flat, place = found.reshape(-1), group * self.columns.total + self.column[lanes]
        for begin in self.columns.memories:
            np.maximum.at(flat, begin + place, clocks.own_time[lanes])
        for space, begin in self.columns.proxies.items():
            times = self._proxy_fence[space][lanes]
            if times.any():
                np.maximum.at(flat, begin + place, times)
        return found

    def waited(self, lanes: Array) -> None:
        """``lanes`` waited for the previous kernel."""
        clock = np.zeros(self.columns.total, np.int32)
        clock[self.columns.wait] = 1
        self.acquire(lanes, clock)

    def has_waited(self, lanes: Array) -> Array:
        """For each thread: has it waited, or is it ordered after a thread that has?"""
        return np.asarray(self.visible_time(lanes, self.columns.wait) != 0)

    def barrier_passed(self, lanes: Array | slice, barrier: Array | int) -> None:
        """``lanes`` pass ``barrier`` of their block now."""
        who = np.arange(len(self._visible.row))[lanes]
        self.synchronise(who, self.slot_of[who] * BARRIERS + barrier)

    def synchronise(self, lanes: Array, keys: Array) -> None:
        """A barrier joins the clocks of the threads with the same key."""
        self.tick(lanes)
        names, group = np.unique(keys, return_inverse=True)
        self._visible.row[lanes] = self._table.add(self._joined(self._visible, lanes, group, len(names)))[group]
        # A flag that one of these threads writes may release what another's fence did; the same holds for flags read.
        for clocks in self._release_fences.values():
            if clocks.row[lanes].any() or clocks.own_time[lanes].any():
                clocks.row[lanes] = self._table.add(self._joined(clocks, lanes, group, len(names)))[group]
        if self._pending_reads:
            for n in range(len(names)):
                self._share_pending_reads(lanes[group == n].tolist())

    def _share_pending_reads(self, lanes: list[int]) -> None:
        """A fence of each of ``lanes`` acquires what any of them read. They share a dict, which is never changed."""
        pending: PendingAcquires = {}
        for lane in lanes:
            pending |= self._pending_reads.get(lane, {})
        if pending:
            for lane in lanes:
                self._pending_reads[lane] = pending

    def cluster_arrive(self, lanes: Array, relaxed: bool = False) -> None:
        """``lanes`` arrive at the barrier of their cluster; ``relaxed``: only their earlier fences release."""
        self.tick(lanes)
        arrived, visible = self._arrived, self._visible
        if not relaxed:
            arrived.row[lanes], arrived.own_time[lanes] = visible.row[lanes], visible.own_time[lanes]
            return
        arrived.row[lanes] = arrived.own_time[lanes] = 0
        for clocks in (clocks for level, clocks in self._release_fences.items() if level >= LEVELS["cluster"]):
            for lane in lanes[(clocks.row[lanes] != 0) | (clocks.own_time[lanes] != 0)].tolist():
                self._table.join(arrived, np.array([lane]), self.clock(np.array([lane]), clocks))

    def cluster_wait(self, lanes: Array, keys: Array) -> None:
        """``lanes`` pass the barrier of their cluster, and acquire what all with the same key released on arrival."""
        names, group = np.unique(keys, return_inverse=True)
        clocks = self._joined(self._arrived, lanes, group, len(names))
        for n in range(len(names)):
            self.acquire(lanes[group == n], clocks[n])
        self.tick(lanes)

    def acquire(self, lanes: Array, clock: Array) -> None:
        """What ``clock`` knows becomes visible to ``lanes``."""
        self._table.join(self._visible, lanes, clock)

    def relaxed_wait(self, lanes: Array, clock: Array) -> None:
        """``lanes`` waited for an event that released ``clock``; their next fence acquires it."""
        self._table.join(self._pending_waits, lanes, clock)

    def fence(
        self, lanes: Array, level: int, acquire: bool = True, release: bool = True, restricted: bool = False
    ) -> None:
        """A fence of ``lanes`` in the scope of a level.

        ``acquire``: it acquires what earlier relaxed reads and waits found; ``restricted``: in shared memory alone.
        ``release``: later flags release what is visible now.
        """
        self.tick(lanes)
        if acquire:
            self._acquire_pending(lanes, level, restricted)
        if release:
            if level not in self._release_fences:
                self._release_fences[level] = self._table.thread_clocks(len(self._visible.row))
            clocks = self._release_fences[level]
            clocks.row[lanes], clocks.own_time[lanes] = self._visible.row[lanes], self._visible.own_time[lanes]

    def _acquire_pending(self, lanes: Array, level: int, restricted: bool) -> None:
        """``lanes`` acquire what their relaxed waits and reads found. It stays pending after a restricted fence."""
        rows = self._pending_waits.row[lanes]
        for number in np.unique(rows[rows != 0]).tolist():
            self._join_clock(lanes[rows == number], self._table.rows[number].copy(), restricted)
        if self._pending_reads:
            for lane in lanes.tolist():
                for released, scope in self._pending_reads.get(lane, {}).values():
                    self._acquire_from(lane, released, min(level, scope), restricted)
                if not restricted:
                    self._pending_reads.pop(lane, None)
        if not restricted:
            self._pending_waits.row[lanes] = 0

    def _join_clock(self, lanes: Array, clock: Array, restricted: bool) -> None:
        """As ``acquire``; ``restricted``: without the columns of memory that is not shared."""
        if restricted:
            clock = np.where(np.arange(len(clock)) < self.columns.elsewhere, clock, 0)
        self.acquire(lanes, clock)

    def _acquire_from(self, lane: int, released: ReleasedClocks, level: int, restricted: bool = False) -> None:
        """``lane`` acquires those clocks of a flag's value whose scope, and its own, include the other thread."""
        slot, everywhere = int(self.slot_of[lane]), level >= LEVELS["gpu"]
        clocks = [released.gpu_scope] if everywhere and released.gpu_scope is not None else []
        clocks += [
            clock
            for (scope, origin), clock in released.clocks.items()
            if not (everywhere and scope >= LEVELS["gpu"]) and self._reaches(min(level, scope), origin, slot)
        ]
        for clock in clocks:
            self._join_clock(np.array([lane]), clock, restricted)
        self.tick(lane)

    def _reaches(self, level: int, origin: int, slot: int) -> bool:
        """True if a scope of this level around a thread of block ``origin`` includes the threads of block ``slot``."""
        if level >= LEVELS["gpu"] or origin == slot:
            return True
        return level == LEVELS["cluster"] and bool(self.cluster_of[origin] == self.cluster_of[slot])

    def flag_read(self, flag: int, lane: int, how: Semantics) -> None:
        """``lane`` reads a flag."""
        released = self._released.get(flag)
        if released is None:
            return
        if how.acquire:
            self._acquire_from(lane, released, how.level)
        elif id(released) not in self._pending_reads.get(lane, {}):
            self._pending_reads[lane] = self._pending_reads.get(lane, {}) | {id(released): (released, how.level)}

    def flag_written(self, flag: int, lane: int, how: Semantics, keep: bool) -> None:
        """``lane`` writes a flag; ``keep``: as part of a read-modify-write, which continues earlier releases."""
        found = dict(self._released[flag].clocks) if keep and flag in self._released else {}
        who = np.array([lane])
        clocks = {
            level: self.clock(who, fenced)
            for level, fenced in self._release_fences.items()
            if fenced.row[lane] or fenced.own_time[lane]
        }
        if how.release:
            self.tick(lane)
            clocks[how.level] = self.clock(who)
        for level, clock in clocks.items():
            key = min(level, how.level), int(self.slot_of[lane])
            found[key] = np.maximum(found[key], clock) if key in found else clock
        if found:
            self._released[flag] = ReleasedClocks(found)
        else:
            self._released.pop(flag, None)
