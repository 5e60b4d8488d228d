"""Asynchronous copies in flight, and the bytes that they use."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx.memory import Buffer
from lngen.ptx.parser import Instruction
from lngen.ptx.scratch import Scratch

Memory = Scratch | Buffer


@dataclass
class Copy:
    """One copy of one thread: its bytes, its source (if that may change) and its destination."""

    instruction: Instruction
    lane: int
    writer: int  # the thread, or the agent of a barrier, that counts as having written
    data: Array
    to: Memory
    at: int
    source: Memory | None = None
    start: int = 0
    group: int = 0
    releases: bool = False  # threads that wait on its barrier see what was visible to its thread
    visible: Array | None = None  # the clock of its thread, if it releases


@dataclass
class Flights:
    """Of a batch: copies by thread and kind, and for every byte the number of copies in flight that use it."""

    copies: dict[tuple[str, int], list[Copy]] = field(default_factory=dict)
    commits: dict[tuple[str, int], int] = field(default_factory=dict)
    loading: dict[int, int] = field(default_factory=dict)  # bytes in flight from global memory, by block
    _marks: dict[tuple[str, int], Array] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        """True once a copy has started."""
        return bool(self._marks)

    def marks(self, how: str, memory: Memory) -> Array:
        """Number of copies that write ("to") or read ("from") each byte."""
        key = how, id(memory)
        if key not in self._marks:
            self._marks[key] = np.zeros(len(memory.data), np.int16)
        return self._marks[key]

    def commit(self, kind: str, lanes: Array) -> None:
        """The uncommitted copies become a group of their thread."""
        for lane in lanes.tolist():
            self.commits[kind, lane] = self.commits.get((kind, lane), 0) + 1
