"""Who touched what of a memory, in a launch with strong accesses: atomics, flags, mbarriers."""

from __future__ import annotations

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx.ordering import VectorClock
from lngen.ptx.scratch import NOBODY, Clock, Races


class Places:
    """As ``Races``, for a launch with atomics: strong accesses do not race with each other, but with weak ones.

    PTX ISA, Memory Consistency Model: morally strong operations. Two strong accesses are, if each one's scope has the
    other's thread.
    """

    def __init__(self, words: int) -> None:
        self.words = words
        self.plain = Races(words)
        self.strong: dict[int, Races] = {}  # by the level of the scope

    def note(self, words: Array, lanes: Array, clock: Clock, how: str, level: int | None = None) -> Array:
        """The thread each access races with, NOBODY if none; notes the accesses. ``level``: of the scope, if strong."""
        if level is None:
            rival = self.plain.note(words, lanes, clock, how)
            for races in self.strong.values():
                rival = np.where(rival == NOBODY, races.peek(words, lanes, clock, how), rival)
            return np.asarray(rival)
        assert isinstance(clock, VectorClock)
        rival = self.plain.peek(words, lanes, clock, how)
        self.strong.setdefault(level, Races(self.words))
        for other, races in self.strong.items():
            found = (races.note if other == level else races.peek)(words, lanes, clock, how)
            far = (found != NOBODY) & ~clock.together(found, lanes, min(level, other))
            rival = np.where((rival == NOBODY) & far, found, rival)
        return np.asarray(rival)
