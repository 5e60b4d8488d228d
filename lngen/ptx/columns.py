"""The columns of a vector clock: whose accesses each of them stands for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

AGENTS = 64  # columns for writes of copies that no thread performs
MAX_GROUP = 32  # threads of a column: a warp
MOST_ENTRIES = 1 << 25  # of a table of clocks


@dataclass(frozen=True)
class Columns:
    """The columns of a clock, from the first to the last:

    threads     one for each thread, or for each ``group`` of neighbours
    agents      AGENTS columns for writes of copies that no thread performs
    wait        one that is not zero after griddepcontrol.wait
    proxies     for every space, a copy of the columns above: the times before a fence.proxy.async
    elsewhere   if fences are ``restricted`` to shared memory, a copy of the first columns: the times for all other
                memory
    """

    threads: int
    proxy_spaces: tuple[str, ...] = ()
    restricted: bool = False

    @property
    def wait(self) -> int:
        """The column of griddepcontrol.wait."""
        return self.threads + AGENTS

    @property
    def per_copy(self) -> int:
        """The columns that each copy repeats."""
        return self.wait + 1

    @cached_property
    def proxies(self) -> dict[str, int]:
        """Where the copy of each space begins."""
        return {space: (n + 1) * self.per_copy for n, space in enumerate(self.proxy_spaces)}

    @cached_property
    def elsewhere(self) -> int:
        """Where the columns for memory that is not shared begin: the first ones, unless fences are restricted."""
        return self.per_copy * (1 + len(self.proxy_spaces)) if self.restricted else 0

    @cached_property
    def memories(self) -> tuple[int, ...]:
        """Where the columns of shared memory and of all other memory begin, if they are not the same."""
        return (0, self.elsewhere) if self.restricted else (0,)

    @property
    def total(self) -> int:
        """The columns of a clock."""
        return self.per_copy * (1 + len(self.proxy_spaces) + self.restricted)

    def proxy(self, space: str) -> slice:
        """The copy of a space."""
        return slice(self.proxies[space], self.proxies[space] + self.per_copy)


def threads_per_column(blocks: int, members: int) -> int:
    """The neighbours that share a column, so few that the table of clocks has room.

    The threads of a block pass the same barriers, so most of the time they share a row of the table: it has about one
    for each block, and at least as many are free.
    """
    group = 1
    while 2 * blocks * (members // group) > MOST_ENTRIES and group < MAX_GROUP:
        group *= 2
    return group
