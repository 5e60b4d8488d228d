"""The space of legal schedules of a problem on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from itertools import product
from operator import attrgetter

from lngen.devices import Device, default_device
from lngen.schedule.layout import WARP, exchanged_values, rows_of_a_block
from lngen.schedule.legal import MAX_CLUSTER, MAX_THREADS, MAX_THREADS_PER_SM, is_legal, shared_fits
from lngen.schedule.problem import Problem
from lngen.schedule.resources import side_by_side
from lngen.schedule.schedule import Schedule

CLUSTERS = tuple(1 << n for n in range(MAX_CLUSTER.bit_length()))
BLOCKS_PER_SM = (*range(1, 9), 10, 12)
STAGES = tuple(range(2, 7))
NO, FLAGS = (False,), (False, True)
IN_ORDER = attrgetter(*(f.name for f in fields(Schedule)))


def space(p: Problem, device: Device | None = None) -> list[Schedule]:
    """Every legal schedule with the widest accesses that D allows and that may be worth a try, in a fixed order.

    Grids, and whether a grid barrier can serve them, depend on the device.
    """
    return list(_space(p, device or default_device()))


@cache
def _space(p: Problem, device: Device) -> tuple[Schedule, ...]:
    bases = (b for b in _bases(p, device) if is_legal(b, p))
    return tuple(sorted((s for b in bases for s in _variants(b, p, device)), key=IN_ORDER))


def _bases(p: Problem, device: Device) -> Iterator[Schedule]:
    """Forms and the layout of rows over threads and blocks; a base that is not legal has no variants.

    Most illegal combinations are skipped here without a check of the rules, because each rule takes time.
    """
    vec, store, whole = p.run, bool(p.output_sizes), p.d % p.chunk == 0
    # Three row groups help where a cluster shares staged rows; they are not tried elsewhere.
    groups = sorted(rows_of_a_block(p) if p.column_sums else (1, 2, 3, *(1 << n for n in range(2, 8))))
    widest = max(1 << (p.segment_chunks - 1).bit_length(), WARP)
    threads = [1 << n for n in range(11) if 1 << n <= widest]
    clusters = [c for c in CLUSTERS if p.segments % c == 0]
    for t, r, blocks in product(threads, groups, BLOCKS_PER_SM):
        if t * r > MAX_THREADS or t * r % WARP or t * r * blocks > MAX_THREADS_PER_SM:
            continue
        anywhere = r != 3 or p.column_sums > 0
        if anywhere:
            for cluster in clusters[:1] if p.column_sums else clusters:
                yield Schedule("registers", t, r, vec, blocks, cluster=cluster)
        if r == 1:
            yield Schedule("multipass", t, 1, vec, blocks)
        # Five blocks with one row each are faster where they fit; five row groups are no better than four.
        if blocks > (5 if r == 1 else 4) or t * r < 2 * WARP or not p.input_sizes:
            continue
        for cluster in clusters if anywhere else clusters[1:]:
            if cluster > 1 and p.column_sums and r != p.groups:
                continue  # without clusters, each row group is a block
            grid = 0 if p.column_sums else device.resident_clusters(cluster) * blocks
            if whole and grid + p.column_sums:
                yield Schedule("tma", t, r, vec, blocks, stages=2, cluster=cluster, grid=grid)
            if cluster == 1:
                yield Schedule("cp_async", t, r, vec, blocks, stages=2, grid=grid)
                if not whole:
                    yield Schedule("tma_unaligned", t, r, vec, blocks, stages=2, grid=grid, tma_store=store)


def _variants(base: Schedule, p: Problem, device: Device) -> Iterator[Schedule]:
    """The legal options of a legal base, including its stages.

    The combinations here satisfy the rules about options; room in shared memory is checked once for all options that
    use the same amount.
    """
    weights = FLAGS if p.column_sizes else NO
    sums = p.column_sums > 0
    alike = FLAGS if sums and base.form != "multipass" and side_by_side(base, p, device) else NO
    if base.form == "multipass":
        yield base
    elif base.form == "registers" and sums:
        for prefetch, single in product(FLAGS, alike):
            yield replace(base, prefetch=prefetch, single_launch=single)
    elif base.form == "registers":
        for cached in weights:
            yield replace(base, cached_weights=cached)
    else:
        yield from _staged(base, p, device, weights)


def _staged(base: Schedule, p: Problem, device: Device, weights: tuple[bool, ...]) -> Iterator[Schedule]:
    """The variants of a base whose rows come through shared memory."""
    sums, tma = p.column_sums > 0, base.form == "tma"
    stores: tuple[bool, ...] = FLAGS if tma and p.output_sizes else (base.tma_store,)
    alone = base.blocks_per_sm * base.rows_per_block == 1  # rows that may exceed the registers
    waits = FLAGS if sums and base.cluster > 1 else NO
    schedulers: tuple[bool, ...] = FLAGS if base.form != "cp_async" and not sums and base.threads >= WARP else NO
    if tma:
        stores = tuple(store for store in stores if not store or is_legal(replace(base, tma_store=True), p))
    if base.cluster > 1 and not exchanged_values(base, p):
        schedulers = NO
    for stages, store in product(STAGES, stores):
        sized = replace(base, stages=stages, tma_store=store)
        if not shared_fits(sized, p):
            continue
        singles = FLAGS if sums and side_by_side(sized, p, device) else NO
        dynamics = tuple(d for d in schedulers if not d or shared_fits(replace(sized, dynamic=True), p))
        for cached, held, single in product(weights, FLAGS, singles):
            early = FLAGS if tma and held and not store else NO
            for release, dynamic, acquire in product(early, dynamics if held or alone else NO, waits):
                yield Schedule(
                    base.form, base.threads, base.rows_per_block, base.vec, base.blocks_per_sm, False, stages,
                    base.cluster, base.grid, store, cached, single, held, release, dynamic, acquire,
                )  # fmt: skip
