"""The accesses to a memory in a launch with strong accesses: atomics, flags, mbarriers."""

from __future__ import annotations

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx.ordering import VectorClock
from lngen.ptx.scratch import NOBODY, Clock, Races


class Elsewhere:
    """The order of accesses to memory that is not shared, which a restricted fence does not order."""

    def __init__(self, clock: VectorClock) -> None:
        self._clock = clock

    @property
    def moment(self) -> int:
        """The time of an access made now."""
        return self._clock.moment

    def ordered(self, earlier: Array, time: Array, later: Array) -> Array:
        """True where an access of ``earlier`` at ``time`` is visible to ``later``."""
        return self._clock.ordered_at(self._clock.columns.elsewhere, earlier, time, later)


class Places:
    """Races in a launch with atomics: strong accesses race with weak accesses and not with each other.

    PTX ISA, Memory Consistency Model: morally strong operations. Two accesses are morally strong if both are strong
    and the scope of each includes the thread of the other.
    """

    def __init__(self, words: int, shared: bool) -> None:
        self.words, self.shared = words, shared
        self.plain = Races(words)
        self.strong: dict[int, Races] = {}  # by the level of the scope

    def note(self, words: Array, lanes: Array, clock: Clock, how: str, level: int | None = None) -> Array:
        """The thread that each access races with, or NOBODY; records the accesses. ``level``: scope of strong ones."""
        times = Elsewhere(clock) if isinstance(clock, VectorClock) and not self.shared else clock
        if level is None:
            rival = self.plain.note(words, lanes, times, how)
            for races in self.strong.values():
                rival = np.where(rival == NOBODY, races.peek(words, lanes, times, how), rival)
            return np.asarray(rival)
        assert isinstance(clock, VectorClock)
        rival = self.plain.peek(words, lanes, times, how)
        self.strong.setdefault(level, Races(self.words))
        for other, races in self.strong.items():
            found = (races.note if other == level else races.peek)(words, lanes, times, how)
            out_of_scope = (found != NOBODY) & ~clock.in_scope(found, lanes, min(level, other))
            rival = np.where((rival == NOBODY) & out_of_scope, found, rival)
        return np.asarray(rival)
