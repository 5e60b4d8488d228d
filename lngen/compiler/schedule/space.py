"""The space of legal schedules of a problem on a GPU, thousands of them as columns: an array for each field."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from functools import cache
from itertools import chain, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lngen.compiler.devices import Device, default_device
from lngen.compiler.problem import STAGED, Problem, Schedule, is_legal
from lngen.compiler.problem.footprint import WARP, exchanged_values, most_blocks, partial_rows, rows_of_a_block
from lngen.compiler.problem.legal import MAX_THREADS, MAX_THREADS_PER_SM, shared_fits
from lngen.compiler.problem.schedule import FORMS, MAX_CLUSTER

Numbers = NDArray[np.float64]
Places = NDArray[np.intp]
Fields = tuple[int, ...]  # the fields of a schedule in their order, with the number of its form

FIELDS = tuple(f.name for f in fields(Schedule))
FLAG_FIELDS = frozenset(f.name for f in fields(Schedule) if isinstance(f.default, bool))
WORDS = sorted(FORMS)  # of forms; numbered so that rows are in the order of their schedules
FORM_NUMBERS = {word: n for n, word in enumerate(WORDS)}

CLUSTERS = tuple(1 << n for n in range(MAX_CLUSTER.bit_length()))
BLOCKS_PER_SM = (*range(1, 9), 10, 12)
STAGES = tuple(range(2, 7))
NO, FLAGS = (False,), (False, True)


class Schedules:
    """Schedules in a fixed order; their fields are numbers from 0 on.

    A formula is computed once for all schedules that are equal in the few fields on which it depends.
    """

    def __init__(self, table: NDArray[np.int64]) -> None:
        """``table``: an array of [fields, schedules]."""
        self._table = table
        self._groups: dict[tuple[str, ...], tuple[list[Schedule], Places]] = {}

    @classmethod
    def of_fields(cls, listed: Iterable[Fields]) -> Schedules:
        """Schedules by their fields, in their order."""
        numbers = np.fromiter(chain.from_iterable(listed), dtype=np.int64)
        return cls(np.ascontiguousarray(numbers.reshape(-1, len(FIELDS)).T))

    @classmethod
    def of(cls, schedules: Iterable[Schedule]) -> Schedules:
        """Schedules in their order."""
        return cls.of_fields((FORM_NUMBERS[s.form], *(getattr(s, name) for name in FIELDS[1:])) for s in schedules)

    def __len__(self) -> int:
        return len(self._table[0])

    def __iter__(self) -> Iterator[Schedule]:
        return (self._schedule(n) for n in range(len(self)))

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

    def narrowed(self, vec: int) -> Schedules:
        """The schedules with accesses of at most ``vec`` elements."""
        table = self._table.copy()
        place = FIELDS.index("vec")
        table[place] = np.minimum(table[place], vec)
        return Schedules(table)

    def _grouped(self, names: tuple[str, ...]) -> tuple[list[Schedule], Places]:
        """A schedule of each group of equal ``names``, and the group of each schedule."""
        key = np.zeros(len(self), dtype=np.int64)
        for column in (self._table[FIELDS.index(name)] for name in names):
            key = key * (column.max(initial=0) + 1) + column
        _, first, group = np.unique(key, return_index=True, return_inverse=True)
        return [self._schedule(n) for n in first.tolist()], group

    def _schedule(self, n: int) -> Schedule:
        form, *others = self._table[:, n].tolist()
        named = zip(FIELDS[1:], others, strict=True)
        return Schedule(WORDS[form], *(bool(value) if name in FLAG_FIELDS else value for name, value in named))


class Flags(NamedTuple):
    """The options of a schedule that use neither shared memory nor threads."""

    prefetch: bool
    cached_weights: bool
    single_launch: bool
    row_in_registers: bool
    early_release: bool
    acquire_shared: bool


def space(p: Problem, device: Device | None = None) -> list[Schedule]:
    """Every legal schedule with the widest accesses that D allows and that may be worth a try, in a fixed order.

    Grids, and whether a grid barrier can serve them, depend on the device.
    """
    return list(_space(p, device or default_device(), roomy=False))


def roomy_space(p: Problem, device: Device) -> Schedules:
    """The schedules of the space for whose blocks the GPU has room, in the same order."""
    return _space(p, device, roomy=True)


@cache
def multipass_space(p: Problem, device: Device) -> Schedules:
    """The schedules of form multipass for whose blocks the GPU has room, also those that are not in the space.

    No row and no column sum stays in registers, so they fit where no other form does. They read rows once more than
    others, so short rows, whose row groups the graph has side by side, are not worth a try where another form fits.
    """
    bases = (b for t in _threads(p) if is_legal(b := Schedule("multipass", t, 1, p.run), p))
    return Schedules.of_fields(row for b in bases for row in _variants(b, p, device, roomy=True)).sorted()


@cache
def _space(p: Problem, device: Device, roomy: bool) -> Schedules:
    bases = (b for b in _bases(p, device) if is_legal(b, p))
    return Schedules.of_fields(row for b in bases for row in _variants(b, p, device, roomy)).sorted()


def _bases(p: Problem, device: Device) -> Iterator[Schedule]:
    """Forms and the layout of rows over threads, each as one block per multiprocessor.

    A base that is not legal has no variants. Most illegal combinations are skipped here without a check of the rules,
    because each rule takes time.
    """
    vec, store, whole = p.run, bool(p.output_sizes), p.d % p.chunk == 0
    # Three row groups help where a cluster shares staged rows; they are not tried elsewhere.
    groups = sorted(rows_of_a_block(p) if p.column_sums else (1, 2, 3, *(1 << n for n in range(2, 8))))
    clusters = [c for c in CLUSTERS if p.segments % c == 0]
    for t, r in product(_threads(p), groups):
        if t * r > MAX_THREADS or t * r % WARP:
            continue
        anywhere = r != 3 or p.column_sums > 0
        if anywhere:
            for cluster in clusters[:1] if p.column_sums else clusters:
                yield Schedule("registers", t, r, vec, cluster=cluster)
        if r == 1:
            yield Schedule("multipass", t, 1, vec)
        if t * r < 2 * WARP or not p.input_sizes:
            continue
        for cluster in clusters if anywhere else clusters[1:]:
            if cluster > 1 and p.column_sums and r != p.groups:
                continue  # without clusters, each row group is a block
            grid = 0 if p.column_sums else device.resident_clusters(cluster)
            if whole and grid + p.column_sums:
                yield Schedule("tma", t, r, vec, stages=2, cluster=cluster, grid=grid)
            if cluster == 1:
                yield Schedule("cp_async", t, r, vec, stages=2, grid=grid)
                if not whole:
                    yield Schedule("tma_unaligned", t, r, vec, stages=2, grid=grid, tma_store=store)


def _threads(p: Problem) -> list[int]:
    """The numbers of threads of a row: powers of two, up to one that has a thread for each chunk of a segment."""
    widest = max(1 << (p.segment_chunks - 1).bit_length(), WARP)
    return [1 << n for n in range(11) if 1 << n <= widest]


def _variants(base: Schedule, p: Problem, device: Device, roomy: bool) -> Iterator[Fields]:
    """The legal variants of a legal base: its stages, its options, and its blocks per multiprocessor.

    The combinations here satisfy the rules about options; room in shared memory is computed once for all that use the
    same amount. ``roomy``: only with as many blocks as the GPU has room for.
    """
    most = MAX_THREADS_PER_SM // base.block
    if base.form in STAGED:
        # Five blocks with one row each are faster where they fit; five row groups are no better than four.
        most = min(most, 5 if base.rows_per_block == 1 else 4)
    clusters = device.resident_clusters(base.cluster)
    for sized, listed in _sized(base, p):
        room = most_blocks(sized, p, device)
        for blocks in BLOCKS_PER_SM:
            if blocks > (min(room, most) if roomy else most):
                break
            # A grid barrier requires that all blocks run at the same time.
            side_by_side = blocks <= room and partial_rows(base, p) <= clusters * blocks
            alone = blocks * base.rows_per_block == 1  # rows that may exceed the registers
            for options in listed:
                if options.single_launch and not side_by_side:
                    continue
                if sized.dynamic and not options.row_in_registers and not alone:
                    continue
                yield _fields(sized, blocks, options)


def _sized(base: Schedule, p: Problem) -> Iterator[tuple[Schedule, list[Flags]]]:
    """The variants of a base that differ in shared memory, and the options of each."""
    if base.form not in STAGED:
        yield base, _flags(base, p)
        return
    stores: tuple[bool, ...] = (base.tma_store,)
    if base.form == "tma" and p.output_sizes and is_legal(replace(base, tma_store=True), p):
        stores = FLAGS
    taken = base.form != "cp_async" and not p.column_sums and base.threads >= WARP
    schedulers = FLAGS if taken and (base.cluster == 1 or exchanged_values(base, p)) else NO
    for store in stores:
        listed = _flags(replace(base, tma_store=store), p)
        for stages, dynamic in product(STAGES, schedulers):
            sized = replace(base, stages=stages, tma_store=store, dynamic=dynamic)
            if shared_fits(sized, p):
                yield sized, listed


def _flags(s: Schedule, p: Problem) -> list[Flags]:
    """The legal options of a schedule, if a grid barrier can serve its blocks."""
    sums, staged, rows = p.column_sums > 0, s.form in STAGED, s.form == "registers"
    found = product(
        FLAGS if rows and sums else NO,
        FLAGS if p.column_sizes and (staged or (rows and not sums)) else NO,
        FLAGS if sums and s.form != "multipass" else NO,
        FLAGS if staged else NO,
        FLAGS if s.form == "tma" and not s.tma_store else NO,
        FLAGS if staged and sums and s.cluster > 1 else NO,
    )
    return [o for o in map(Flags._make, found) if o.row_in_registers or not o.early_release]


def _fields(s: Schedule, blocks: int, o: Flags) -> Fields:
    """A schedule with options, and ``blocks`` instead of one block per multiprocessor."""
    return (
        FORM_NUMBERS[s.form], s.threads, s.rows_per_block, s.vec, blocks, o.prefetch, s.stages, s.cluster,
        s.grid * blocks, s.tma_store, o.cached_weights, o.single_launch, o.row_in_registers, o.early_release, s.dynamic,
        o.acquire_shared,
    )  # fmt: skip
