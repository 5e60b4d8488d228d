"""The space of legal schedules of a problem on a GPU, thousands of them as columns: an array for each field."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import cache, partial
from itertools import chain, repeat

import numpy as np
from numpy.typing import NDArray

from lngen.compiler.devices import Device, default_device
from lngen.compiler.problem import ANY, STAGED, Problem, Schedule
from lngen.compiler.problem.facts import WARP
from lngen.compiler.problem.footprint import (
    has_grid,
    has_room,
    most_blocks,
    partial_rows,
    rows_of_a_block,
    whole_groups,
)
from lngen.compiler.problem.legal import RULES, Rules, is_legal
from lngen.compiler.problem.schedule import FORMS, MAX_CLUSTER

Numbers = NDArray[np.float64]
Places = NDArray[np.intp]

FIELDS = tuple(f.name for f in fields(Schedule))
FLAG_FIELDS = frozenset(f.name for f in fields(Schedule) if isinstance(f.default, bool))
WORDS = sorted(FORMS)  # of forms; numbered so that rows are in the order of their schedules
FORM_NUMBERS = {word: n for n, word in enumerate(WORDS)}

CLUSTERS = tuple(1 << n for n in range(MAX_CLUSTER.bit_length()))
BLOCKS_PER_SM = (*range(1, 9), 10, 12)
STAGES = tuple(range(2, 7))
FLAGS = (False, True)
Limit = tuple[str, Callable[[Schedule], bool]]  # the fields on which it depends, and whether it holds

ROOM = "form threads rows_per_block stages cluster tma_store dynamic"  # the fields of ``most_blocks``
THREADS = tuple(1 << n for n in range(11))


class Schedules:
    """Schedules in a fixed order; their fields are numbers from 0 on.

    A formula is computed once for all schedules that are equal in the few fields on which it depends.
    """

    def __init__(self, table: NDArray[np.int64]) -> None:
        """``table``: an array of [fields, schedules]."""
        self._table = table
        self._groups: dict[tuple[str, ...], tuple[list[Schedule], Places]] = {}

    @classmethod
    def of(cls, schedules: Iterable[Schedule]) -> Schedules:
        """Schedules in their order."""
        rows = ((FORM_NUMBERS[s.form], *(getattr(s, name) for name in FIELDS[1:])) for s in schedules)
        numbers = np.fromiter(chain.from_iterable(rows), dtype=np.int64)
        return cls(np.ascontiguousarray(numbers.reshape(-1, len(FIELDS)).T))

    def __len__(self) -> int:
        return len(self._table[0])

    def __iter__(self) -> Iterator[Schedule]:
        """One by one: a default needs no other than the first."""
        return map(_schedule, repeat(FIELDS), self._values(FIELDS))

    def field(self, name: str) -> Numbers:
        """The values of a field other than the form; flags are 0 or 1."""
        return np.array(self._table[FIELDS.index(name)], dtype=np.float64)

    def has_form(self, *forms: str) -> Numbers:
        """1 for each schedule of one of ``forms``, else 0."""
        return self.each(lambda s: s.form in forms, "form")

    def each(self, formula: Callable[[Schedule], float], *names: str) -> Numbers:
        """The value of ``formula`` for each schedule; it depends on no field but ``names``."""
        if names not in self._groups:
            self._groups[names] = self._grouped(names)
        alike, group = self._groups[names]
        return np.array([formula(s) for s in alike], dtype=np.float64)[group]

    def take(self, which: Places | NDArray[np.bool_]) -> Schedules:
        """The schedules at places, or where a mask is true."""
        return Schedules(self._table[:, which])

    def sorted(self) -> Schedules:
        """The schedules in their natural order."""
        return self.take(np.lexsort(self._table[::-1]))

    def replaced(self, name: str, values: Numbers) -> Schedules:
        """The schedules with other values of a field."""
        table = self._table.copy()
        table[FIELDS.index(name)] = values
        return Schedules(table)

    def times(self, name: str, values: Sequence[int], most: Numbers | float = np.inf) -> Schedules:
        """Each schedule with each of ``values`` of a field, up to ``most``."""
        every = np.broadcast_to(np.array(values, dtype=np.float64), (len(self), len(values)))
        places, chosen = np.nonzero(every <= np.reshape(most, (-1, 1)))
        return self.take(places).replaced(name, every[0, chosen])

    def within(self, limits: Iterable[Limit]) -> Schedules:
        """The schedules that keep all limits, each of which is asked about those that keep the ones before it."""
        found = self
        for names, holds in limits:
            found = found.take(found.each(holds, *names.split()) > 0)
        return found

    def _grouped(self, names: tuple[str, ...]) -> tuple[list[Schedule], Places]:
        """A schedule of these fields alone for each group of equal ``names``, and the group of each schedule."""
        key = np.zeros(len(self), dtype=np.int64)
        for column in (self._table[FIELDS.index(name)] for name in names):
            key = key * (column.max(initial=0) + 1) + column
        _, first, group = np.unique(key, return_index=True, return_inverse=True)
        return [_schedule(names, values) for values in self.take(first)._values(names)], group

    def _values(self, names: tuple[str, ...]) -> Iterator[tuple[str | int, ...]]:
        """The values of these fields for each schedule."""
        return zip(*map(self._column, names), strict=True)

    def _column(self, name: str) -> list[str] | list[int]:
        column = self._table[FIELDS.index(name)]
        numbers: list[int] = (column.astype(bool) if name in FLAG_FIELDS else column).tolist()
        return [WORDS[n] for n in numbers] if name == "form" else numbers


def _schedule(names: tuple[str, ...], values: tuple[str | int, ...]) -> Schedule:
    """A schedule of these fields; the constructor of a frozen class takes four times as long."""
    made = object.__new__(Schedule)
    made.__dict__.update(zip(names, values, strict=True))
    return made


@cache
def in_one_block(p: Problem, device: Device) -> bool:
    """True if a block has room for two rows of form tma_unaligned, so that no cluster needs to share one."""
    stages = {"stages": 2, "grid": int(p.column_sums == 0), "tma_store": bool(p.output_sizes)}
    tried = (
        Schedule("tma_unaligned", threads, rows, p.run, **stages)  # type: ignore[arg-type]
        for threads in THREADS
        for rows in (rows_of_a_block(p) if p.column_sums else (1,))
    )
    return any(is_legal(s, p) and has_room(s, p, device) for s in tried)


# Limits beyond legality, by the fields on which they depend: room on the GPU, and what may be worth a try.
Worth = tuple[str, Callable[[Problem, Device, Schedule], bool]]
WORTH_IN_ROOM: tuple[Worth, ...] = (
    ("form grid", lambda p, device, s: s.grid > 0 or not has_grid(s, p)),
    ("cluster grid", lambda p, device, s: not s.grid or device.resident_clusters(s.cluster) > 0),
    (
        "form cluster",
        lambda p, device, s: s.form != "tma_unaligned" or s.cluster == 1 or not in_one_block(p, device),
    ),
    # Three row groups help where a cluster shares staged rows.
    (
        "form rows_per_block cluster",
        lambda p, device, s: s.rows_per_block != 3 or p.column_sums > 0 or (s.form in STAGED and s.cluster > 1),
    ),
    ("form threads rows_per_block", lambda p, device, s: s.form not in STAGED or s.block >= 2 * WARP),
    ("rows_per_block cluster", lambda p, device, s: whole_groups(s, p)),
    # Five blocks with one row each are faster where they fit; five row groups are no better than four.
    (
        "form rows_per_block blocks_per_sm",
        lambda p, device, s: s.form not in STAGED or s.blocks_per_sm <= (5 if s.rows_per_block == 1 else 4),
    ),
    # A dynamic scheduler is for rows in registers, and for rows that fill a multiprocessor: they may exceed registers.
    (
        "rows_per_block blocks_per_sm row_in_registers dynamic",
        lambda p, device, s: not s.dynamic or s.row_in_registers or s.blocks_per_sm * s.rows_per_block == 1,
    ),
    # A grid barrier requires that all blocks run at the same time, and that the GPU has room for them.
    (
        "form rows_per_block cluster blocks_per_sm single_launch",
        lambda p, device, s: (
            not s.single_launch or partial_rows(s, p) <= device.resident_clusters(s.cluster) * s.blocks_per_sm
        ),
    ),
)
WORTH: tuple[Worth, ...] = (
    *WORTH_IN_ROOM,
    (f"{ROOM} blocks_per_sm single_launch", lambda p, device, s: not s.single_launch or has_room(s, p, device)),
)


def space(p: Problem, device: Device | None = None) -> list[Schedule]:
    """Every legal schedule with the widest accesses that D allows and that may be worth a try, in a fixed order.

    Grids, and whether a grid barrier can serve them, depend on the device.
    """
    return list(_generated(p, device or default_device(), WORTH))


@cache
def roomy_space(p: Problem, device: Device) -> Schedules:
    """The schedules of the space for whose blocks the GPU has room, in the same order."""
    return _generated(p, device, WORTH_IN_ROOM, roomy=True)


@cache
def multipass_space(p: Problem, device: Device) -> Schedules:
    """The schedules of form multipass for whose blocks the GPU has room, also those that are not in the space.

    No row and no column sum stays in registers, so they fit where no other form does. They read rows once more than
    others, so short rows, whose row groups the graph has side by side, are not worth a try where another form fits.
    """
    return _generated(p, device, (), roomy=True, form=[FORM_NUMBERS["multipass"]], rows_per_block=[1])


def narrowed(found: Schedules, p: Problem, vec: int) -> Schedules:
    """The schedules that stay legal with accesses of at most ``vec`` elements, except those of form tma_unaligned."""
    narrow = found.replaced("vec", np.minimum(found.field("vec"), vec))
    aligned = narrow.take(narrow.has_form("tma_unaligned") == 0)
    return aligned.within((names, rule) for names, rule in _legal(p) if "vec" in names.split())


def _generated(
    p: Problem, device: Device, limits: Iterable[Worth], roomy: bool = False, **only: Sequence[int]
) -> Schedules:
    """The legal schedules within ``limits``: field by field, each rule as soon as its fields have values.

    ``roomy``: only those for whose blocks the GPU has room; ``only``: the values to try of a field.
    """
    values: dict[str, Sequence[int]] = {
        "threads": THREADS,
        "rows_per_block": _rows_side_by_side(p) if p.column_sums else (1, 2, 3, *(1 << n for n in range(2, 8))),
        "form": range(len(WORDS)),
        "vec": [p.run],
        "cluster": CLUSTERS,
        # Flags first, most of which the form decides: they would double what stages and blocks have multiplied.
        **dict.fromkeys(("prefetch", "acquire_shared", "single_launch"), FLAGS),
        **dict.fromkeys(("grid", "tma_store", "cached_weights", "row_in_registers", "early_release"), FLAGS),
        "stages": (0, *STAGES),
        "dynamic": FLAGS,
        "blocks_per_sm": BLOCKS_PER_SM,
        **only,
    }
    every: list[Limit] = [*_legal(p), *((names, partial(limit, p, device)) for names, limit in limits)]
    if roomy:  # which includes the rules for shared memory
        every = [(names, holds) for names, holds in every if names != ROOM]
    chosen, found = set[str](), Schedules.of([ANY])
    for name, tried in values.items():
        chosen.add(name)
        in_room = roomy and name == "blocks_per_sm"
        room = found.each(lambda s: most_blocks(s, p, device), *ROOM.split()) if in_room else np.inf
        ready = [limit for limit in every if name in limit[0].split() and chosen.issuperset(limit[0].split())]
        found = found.times(name, tried, room).within(ready)
    clusters = found.each(lambda s: device.resident_clusters(s.cluster), "cluster")
    return found.replaced("grid", found.field("grid") * clusters * found.field("blocks_per_sm")).sorted()


def _rows_side_by_side(p: Problem) -> tuple[int, ...]:
    """Rows of a block that adds column sums; one of form multipass for long rows, whose stretches have several."""
    return tuple(dict.fromkeys((*rows_of_a_block(p), *[1] * (p.cluster > 1))))


def _legal(p: Problem) -> list[Limit]:
    """The rules of legality."""
    return [(names, partial(_all_hold, rules, p)) for names, rules in RULES]


def _all_hold(rules: Rules, p: Problem, s: Schedule) -> bool:
    return all(holds for holds, _ in rules(s, p))
