"""Which accesses of a launch come before which: barriers, fences and the values that atomics and flags hand over."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx.rows import Known, Rows
from lngen.ptx.scratch import NOBODY, Clock

LEVELS = {"cta": 0, "cluster": 1, "gpu": 2, "sys": 3}
AGENTS = 64  # columns for what copies asynchronous to all threads have written
ROOM = 1 << 25  # entries of the table of who has seen whom

Messages = dict[tuple[int, int], Array]  # scope and block of a release: what its thread had seen


class Said:
    """What a flag says, for ever: another value of it says something else."""

    def __init__(self, rows: Messages) -> None:
        self.rows = rows

    @cached_property
    def far(self) -> Array | None:
        """What reaches every thread of the grid."""
        rows = [row for (scope, _), row in self.rows.items() if scope >= LEVELS["gpu"]]
        return np.max(rows, axis=0) if rows else None

    def near(self) -> Messages:
        """The rest."""
        return {key: row for key, row in self.rows.items() if key[0] < LEVELS["gpu"]}


Heard = dict[int, tuple[Said, int]]  # by identity: what a thread read with no order, and the scope in which it did


@dataclass(frozen=True)
class Semantics:
    """Of a strong access: whether it acquires or releases, and its scope."""

    acquire: bool
    release: bool
    level: int


class VectorClock(Clock):
    """What every thread has seen of every other: accesses stamped with a smaller time come before its next one.

    ``near``: threads hand over nothing beyond their cluster, so a row has columns for one cluster only. For many
    threads a column stands for several neighbours: races between them and others may then go unnoticed. Behind the
    threads a row has agents (what copies asynchronous to all threads have written), one place for
    griddepcontrol.wait, and for every space in ``proxies`` columns once more: times before a fence.proxy.async. If
    there are ``restricted`` fences, which order shared memory alone, columns once more for all other memory.
    """

    def __init__(
        self,
        total: int,
        slot_of: Array,
        cluster_of: Array,
        within: Array,
        near: bool,
        proxies: tuple[str, ...] = (),
        restricted: bool = False,
    ) -> None:
        super().__init__(total)
        self.slot_of, self.cluster_of, self.near = slot_of, cluster_of, near
        self.within = within  # the number of each thread in its cluster
        members = int(within.max()) + 1 if near else total
        group = 1
        while 2 * len(cluster_of) * (members // group) > ROOM and group < 32:
            group *= 2
        columns = -(-members // group)
        self.agent = columns
        place = (within if near else np.arange(total)) // group
        self.column = np.concatenate([place, columns + np.arange(AGENTS)])
        self.home = np.concatenate([cluster_of[slot_of], np.full(AGENTS, -1)])
        self.span = columns + AGENTS + 1
        self.proxies = {space: (n + 1) * self.span for n, space in enumerate(proxies)}
        self.elsewhere = self.span * (1 + len(proxies)) if restricted else 0
        self.rows = Rows(self.span * (1 + len(proxies) + restricted))
        self.seen, self.handed, self.told = (self.rows.holder(total) for _ in range(3))
        self.fences: dict[int, Known] = {}
        self.passed_proxy = {space: np.zeros(total, np.int32) for space in proxies}
        self.now = 1
        self.messages: dict[int, Said] = {}
        self.pending: dict[int, Heard] = {}

    @property
    def moment(self) -> int:
        """The time of an access made now."""
        return self.now

    def together(self, a: Array, b: Array, level: int) -> Array:
        """True where the scope has both threads."""
        if level >= LEVELS["gpu"]:
            return np.ones(len(a), np.bool_)
        a, b = self.slot_of[a], self.slot_of[b]
        return np.asarray(a == b if level == LEVELS["cta"] else self.cluster_of[a] == self.cluster_of[b])

    def ordered(self, earlier: Array, time: Array, later: Array) -> Array:
        """True where ``later`` has seen what ``earlier`` did at ``time`` in shared memory."""
        return self.ordered_at(0, earlier, time, later)

    def ordered_at(self, begin: int, earlier: Array, time: Array, later: Array) -> Array:
        """As ``ordered``, by the columns from ``begin`` on."""
        earlier = np.where(earlier == NOBODY, 0, earlier)
        found = self.rows.table[self.seen.of[later], begin + self.column[earlier]] > time
        if self.near:
            found &= (self.home[earlier] == self.home[later]) | (self.home[earlier] < 0)
        return np.asarray(found)

    def fenced(self, space: str, earlier: Array, time: Array, later: int) -> Array:
        """True where a fence.proxy.async lies between what threads did at a time and what ``later`` does now."""
        row = self.rows.table[self.seen.of[later]]
        found = row[self.proxies[space] + self.column[earlier]] > time
        return np.asarray(found | ((earlier == later) & (self.passed_proxy[space][later] > time)))

    def fence_proxy(self, lanes: Array, spaces: tuple[str, ...]) -> None:
        """What ``lanes`` did or saw before, copies asynchronous to them may see after."""
        self.tick(lanes)
        numbers, which = np.unique(self.seen.of[lanes], return_inverse=True)
        rows = self.rows.table[numbers]
        for space in spaces:
            if space in self.proxies:
                part = rows[:, self.proxies[space] : self.proxies[space] + self.span]
                np.maximum(part, rows[:, : self.span], out=part)
                self.passed_proxy[space][lanes] = self.now
        self.seen.of[lanes] = self.rows.add(rows)[which]

    def tick(self, lanes: Any) -> None:
        """What these threads did until now can be handed over."""
        self.now += 1
        self.seen.own[lanes] = self.now

    def row(self, lanes: Array, known: Known | None = None) -> Array:
        """What all of ``lanes`` together have seen."""
        return np.asarray(self._merged(known or self.seen, lanes, np.zeros(len(lanes), np.int64), 1)[0])

    def _merged(self, known: Known, lanes: Array, group: Array, count: int) -> Array:
        """As ``Rows.groups``, with what the threads know of themselves."""
        found = self.rows.groups(known.of[lanes], group, count)
        column = self.column[lanes]
        for begin in {0, self.elsewhere}:
            np.maximum.at(found, (group, begin + column), known.own[lanes])
        for space, at in self.proxies.items():
            times = self.passed_proxy[space][lanes]
            if times.any():
                np.maximum.at(found, (group, at + column), times)
        return found

    def waited(self, lanes: Array) -> None:
        """``lanes`` waited for the kernel before this one."""
        row = np.zeros(self.rows.columns, np.int32)
        row[self.span - 1] = 1
        self.rows.add_to(self.seen, lanes, row)

    def has_waited(self, lanes: Array) -> Array:
        """True for those that did, or come after one that did."""
        return np.asarray(self.rows.table[self.seen.of[lanes], self.span - 1] != 0)

    def passed(self, lanes: Array | slice, barrier: Array | int) -> None:
        """``lanes`` passed ``barrier`` of their block now."""
        who = np.arange(len(self.seen.of))[lanes]
        self.join(who, self.slot_of[who] * 32 + barrier)

    def join(self, lanes: Array, keys: Array) -> None:
        """Threads with the same key have met."""
        self.tick(lanes)
        names, group = np.unique(keys, return_inverse=True)
        self.seen.of[lanes] = self.rows.add(self._merged(self.seen, lanes, group, len(names)))[group]
        # Flags that one of those who met writes may hand over what another fenced; likewise what one read.
        for known in self.fences.values():
            if known.of[lanes].any() or known.own[lanes].any():
                known.of[lanes] = self.rows.add(self._merged(known, lanes, group, len(names)))[group]
        if self.pending:
            for n in range(len(names)):
                self._share(lanes[group == n].tolist())

    def _share(self, lanes: list[int]) -> None:
        heard: Heard = {}
        for lane in lanes:
            heard |= self.pending.get(lane, {})
        if heard:
            for lane in lanes:
                self.pending[lane] = heard

    def hand(self, lanes: Array, relaxed: bool = False) -> None:
        """``lanes`` arrive at the barrier of their cluster; ``relaxed``: they hand over what they fenced before."""
        self.tick(lanes)
        if not relaxed:
            self.handed.of[lanes], self.handed.own[lanes] = self.seen.of[lanes], self.seen.own[lanes]
            return
        self.handed.of[lanes] = self.handed.own[lanes] = 0
        for known in (known for level, known in self.fences.items() if level >= LEVELS["cluster"]):
            for lane in lanes[(known.of[lanes] != 0) | (known.own[lanes] != 0)].tolist():
                self.rows.add_to(self.handed, np.array([lane]), self.row(np.array([lane]), known))

    def take(self, lanes: Array, keys: Array) -> None:
        """``lanes`` pass the barrier of their cluster: they know what all with the same key knew when they arrived."""
        names, group = np.unique(keys, return_inverse=True)
        rows = self._merged(self.handed, lanes, group, len(names))
        for n in range(len(names)):
            self.rows.add_to(self.seen, lanes[group == n], rows[n])
        self.tick(lanes)

    def tell(self, lanes: Array, row: Array) -> None:
        """``lanes`` were told of ``row`` by a barrier that orders nothing; they see it after a fence."""
        self.rows.add_to(self.told, lanes, row)

    def fence(
        self, lanes: Array, level: int, acquire: bool = True, release: bool = True, restricted: bool = False
    ) -> None:
        """``acquire``: what flags said is seen from now on; ``release``: what was done, flags hand over from now on.

        ``restricted``: it is seen in shared memory only.
        """
        self.tick(lanes)
        if acquire:
            self._hear(lanes, level, restricted)
        if release:
            if level not in self.fences:
                self.fences[level] = self.rows.holder(len(self.seen.of))
            known = self.fences[level]
            known.of[lanes], known.own[lanes] = self.seen.of[lanes], self.seen.own[lanes]

    def _hear(self, lanes: Array, level: int, restricted: bool) -> None:
        told = self.told.of[lanes]
        for number in np.unique(told[told != 0]).tolist():
            self._learn(lanes[told == number], self.rows.table[number].copy(), restricted)
        if self.pending:
            for lane in lanes.tolist():
                for said, scope in self.pending.get(lane, {}).values():
                    self.acquire(lane, said, min(level, scope), restricted)
                if not restricted:
                    self.pending.pop(lane, None)
        if not restricted:
            self.told.of[lanes] = 0

    def _learn(self, lanes: Array, row: Array, restricted: bool) -> None:
        if restricted:
            row = np.where(np.arange(len(row)) < self.elsewhere, row, 0)
        self.rows.add_to(self.seen, lanes, row)

    def acquire(self, lane: int, said: Said, level: int, restricted: bool = False) -> None:
        """``lane`` sees what of ``said`` reaches it; ``restricted``: in shared memory."""
        slot, far = int(self.slot_of[lane]), level >= LEVELS["gpu"]
        rows = [said.far] if far and said.far is not None else []
        others = said.near() if far else said.rows
        rows += [row for (scope, origin), row in others.items() if self._reaches(min(level, scope), origin, slot)]
        for row in rows:
            self._learn(np.array([lane]), row, restricted)
        self.tick(lane)

    def _reaches(self, level: int, origin: int, slot: int) -> bool:
        if level >= LEVELS["gpu"] or origin == slot:
            return True
        return level == LEVELS["cluster"] and bool(self.cluster_of[origin] == self.cluster_of[slot])

    def observed(self, place: int, lane: int, how: Semantics) -> None:
        """``lane`` read the flag at ``place``."""
        said = self.messages.get(place)
        if said is None:
            return
        if how.acquire:
            self.acquire(lane, said, how.level)
        elif id(said) not in self.pending.get(lane, {}):
            self.pending[lane] = self.pending.get(lane, {}) | {id(said): (said, how.level)}

    def published(self, place: int, lane: int, how: Semantics, keep: bool) -> None:
        """``lane`` wrote the flag at ``place``; ``keep``: as part of a read-modify-write."""
        found = dict(self.messages[place].rows) if keep and place in self.messages else {}
        who = np.array([lane])
        rows = {
            level: self.row(who, known) for level, known in self.fences.items() if known.of[lane] or known.own[lane]
        }
        if how.release:
            self.tick(lane)
            rows[how.level] = self.row(who)
        for level, row in rows.items():
            merge(found, (min(level, how.level), int(self.slot_of[lane])), row)
        if found:
            self.messages[place] = Said(found)
        else:
            self.messages.pop(place, None)


def merge(messages: Messages, key: tuple[int, int], row: Array) -> None:
    """Add a row to what is said under ``key``."""
    messages[key] = np.maximum(messages[key], row) if key in messages else row
