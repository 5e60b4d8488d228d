"""Which accesses of a launch come before which: barriers, fences and the values that atomics and flags hand over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx.scratch import NOBODY, Clock, Races

LEVELS = {"cta": 0, "cluster": 1, "gpu": 2, "sys": 3}
AGENTS = 16  # columns for what copies asynchronous to all threads have written
ROOM = 1 << 24  # entries of the table of who has seen whom

Messages = dict[tuple[int, int], Array]  # scope and block of a release: what its thread had seen


@dataclass(frozen=True)
class Semantics:
    """Of a strong access: whether it acquires or releases, and its scope."""

    acquire: bool
    release: bool
    level: int


def semantics(opcode: str, atomic: bool = False) -> Semantics | None:
    """What the modifiers of a memory instruction say; None for a weak access."""
    parts = opcode.split(".")
    level = next((LEVELS[p] for p in parts if p in LEVELS), LEVELS["sys" if "volatile" in parts else "gpu"])
    both = "acq_rel" in parts
    if not atomic and not {"volatile", "relaxed", "acquire", "release"} & set(parts):
        return None
    return Semantics(both or "acquire" in parts, both or "release" in parts, level)


class VectorClock(Clock):
    """What every thread has seen of every other: accesses stamped with a smaller time come before its next one.

    For many threads a column stands for several neighbours: races between them and others may then go unnoticed.
    """

    def __init__(self, total: int, slot_of: Array, cluster_of: Array) -> None:
        super().__init__(total)
        group = 1
        while total * (total // group) > ROOM and group < 32:
            group *= 2
        columns = -(-total // group)
        self.slot_of, self.cluster_of = slot_of, cluster_of
        self.column = np.concatenate([np.arange(total) // group, columns + np.arange(AGENTS)])
        self.seen = np.zeros((total, columns + AGENTS + 1), np.int32)  # the last: griddepcontrol.wait
        self.now = 1
        self.messages: dict[int, Messages] = {}
        self.pending: dict[int, Messages] = {}
        self.fenced: dict[int, dict[int, Array]] = {}

    @property
    def moment(self) -> int:
        """The time of an access made now."""
        return self.now

    def ordered(self, earlier: Array, time: Array, later: Array) -> Array:
        """True where ``later`` has seen what ``earlier`` did at ``time``."""
        earlier = np.where(earlier == NOBODY, 0, earlier)
        return np.asarray(self.seen[later, self.column[earlier]] > time)

    def tick(self, lanes: Any) -> None:
        """What these threads did until now can be handed over."""
        self.now += 1
        self.seen[lanes, self.column[lanes]] = self.now

    def waited(self, lanes: Array) -> None:
        """``lanes`` waited for the kernel before this one."""
        self.seen[lanes, -1] = 1

    def has_waited(self, lanes: Array) -> Array:
        """True for those that did, or come after one that did."""
        return np.asarray(self.seen[lanes, -1] != 0)

    def passed(self, lanes: Array | slice, barrier: Array | int) -> None:
        """``lanes`` passed ``barrier`` of their block now."""
        who = np.arange(len(self.seen))[lanes]
        self.join(who, self.slot_of[who] * 32 + barrier)

    def join(self, lanes: Array, keys: Array) -> None:
        """Threads with the same key have met."""
        self.tick(lanes)
        for key in np.unique(keys):
            mine = lanes[keys == key]
            self.seen[mine] = self.seen[mine].max(axis=0)
            self._share(mine.tolist())

    def _share(self, lanes: list[int]) -> None:
        """Flags that one of those who met writes may hand over what another fenced; likewise what one read."""
        rows, heard = dict[int, Array](), Messages()
        for lane in lanes:
            for level, row in self.fenced.get(lane, {}).items():
                rows[level] = np.maximum(rows[level], row) if level in rows else row
            for key, row in self.pending.get(lane, {}).items():
                merge(heard, key, row)
        for lane in lanes:
            if rows:
                self.fenced[lane] = dict(rows)
            if heard:
                self.pending[lane] = dict(heard)

    def fence(self, lanes: Array, level: int) -> None:
        """What flags said before is seen after; what was done before is handed over by flags after."""
        self.tick(lanes)
        for lane in lanes.tolist():
            if lane in self.pending:
                self.acquire(lane, self.pending.pop(lane), level)
            self.fenced.setdefault(lane, {})[level] = self.seen[lane].copy()

    def acquire(self, lane: int, messages: Messages, level: int) -> None:
        """``lane`` sees what those of ``messages`` say that reach it."""
        for (scope, origin), row in messages.items():
            if self._reaches(min(level, scope), origin, int(self.slot_of[lane])):
                np.maximum(self.seen[lane], row, out=self.seen[lane])
        self.tick(lane)

    def _reaches(self, level: int, origin: int, slot: int) -> bool:
        if level >= LEVELS["gpu"] or origin == slot:
            return True
        return level == LEVELS["cluster"] and bool(self.cluster_of[origin] == self.cluster_of[slot])

    def observed(self, place: int, lane: int, how: Semantics) -> None:
        """``lane`` read the flag at ``place``."""
        messages = self.messages.get(place)
        if not messages:
            return
        if how.acquire:
            self.acquire(lane, messages, how.level)
            return
        mine = self.pending.setdefault(lane, {})
        for (scope, origin), row in messages.items():
            merge(mine, (min(scope, how.level), origin), row)

    def published(self, place: int, lane: int, how: Semantics, keep: bool) -> None:
        """``lane`` wrote the flag at ``place``; ``keep``: as part of a read-modify-write."""
        found = dict(self.messages.get(place, {})) if keep else {}
        rows = dict(self.fenced.get(lane, {}))
        if how.release:
            self.tick(lane)
            rows[how.level] = self.seen[lane].copy()
        for level, row in rows.items():
            merge(found, (min(level, how.level), int(self.slot_of[lane])), row)
        self.messages[place] = found


def merge(messages: Messages, key: tuple[int, int], row: Array) -> None:
    """Add a row to what is said under ``key``."""
    messages[key] = np.maximum(messages[key], row) if key in messages else row


class Places:
    """As ``Races``, for a launch with atomics: strong accesses do not race with each other, but with weak ones."""

    def __init__(self, words: int) -> None:
        self.plain, self.strong = Races(words), Races(words)

    def note(self, words: Array, lanes: Array, clock: Clock, how: str, strong: bool = False) -> Array:
        """The thread each access races with, NOBODY if none; notes the accesses."""
        mine, other = (self.strong, self.plain) if strong else (self.plain, self.strong)
        rival = mine.note(words, lanes, clock, how)
        if strong:
            rival = np.full(len(words), NOBODY, np.int32)
        return np.asarray(np.where(rival == NOBODY, other.peek(words, lanes, clock, how), rival))
