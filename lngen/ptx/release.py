"""Release and acquire: scopes, the semantics of strong accesses, and the clocks that a flag's value releases."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lngen.ir.numerics import Array

LEVELS = {"cta": 0, "cluster": 1, "gpu": 2, "sys": 3}  # of scopes

Releases = dict[tuple[int, int], Array]  # by level of the scope and block of a release: the clock of its thread


@dataclass(frozen=True)
class Semantics:
    """The ordering of a strong access: whether it acquires or releases, and the level of its scope."""

    acquire: bool
    release: bool
    level: int


class ReleasedClocks:
    """The clocks that one value of a flag releases. They never change: another value has clocks of its own."""

    def __init__(self, clocks: Releases) -> None:
        self.clocks = clocks

    @cached_property
    def gpu_scope(self) -> Array | None:
        """The clock released to every thread of the grid."""
        clocks = [clock for (level, _), clock in self.clocks.items() if level >= LEVELS["gpu"]]
        return np.max(clocks, axis=0) if clocks else None

    def narrower_scopes(self) -> Releases:
        """The clocks released to a block or a cluster."""
        return {key: clock for key, clock in self.clocks.items() if key[0] < LEVELS["gpu"]}


# Relaxed reads of a thread, which acquire at its next fence: what was read, by identity, and the level of the scope.
PendingAcquires = dict[int, tuple[ReleasedClocks, int]]


def add_release(releases: Releases, key: tuple[int, int], clock: Array) -> None:
    """Joins a clock to that of an earlier release of the same scope and block."""
    releases[key] = np.maximum(releases[key], clock) if key in releases else clock
