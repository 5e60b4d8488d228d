"""The space of legal schedules, and the order in which to try them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

from lngen.errors import ScheduleError
from lngen.passes.order import THREE
from lngen.schedule.cost import cost
from lngen.schedule.legal import (
    MAX_CLUSTER,
    MAX_THREADS,
    MAX_THREADS_PER_SM,
    WARP,
    is_legal,
    rows_of_a_block,
)
from lngen.schedule.problem import Problem
from lngen.schedule.resources import SIDE_BY_SIDE, fits, has_room, side_by_side
from lngen.schedule.schedule import Schedule
from lngen.schedule.shares import share

CLUSTERS = (1, 2, 4, 8, MAX_CLUSTER)
RESIDENT = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)


def space(p: Problem) -> list[Schedule]:
    """Every legal schedule with the widest accesses D allows that may be worth a try, in a fixed order."""
    return list(_space(p))


@cache
def _space(p: Problem) -> tuple[Schedule, ...]:
    legal = (s for base in _bases(p) if is_legal(base, p) for s in _variants(base, p) if is_legal(s, p))
    return tuple(sorted({s for s in legal if not s.one_launch or side_by_side(s, p)}))


def _bases(p: Problem) -> Iterator[Schedule]:
    """Forms and how rows are laid over threads and blocks: what is not legal as it stands is in no variant."""
    vec = p.run
    # Three row groups gain where a cluster shares staged rows, and were not tried elsewhere.
    rows = sorted(rows_of_a_block(p) if p.column_sums else (1, 2, THREE, 4, 8, 16, 32, 64, 128))
    store = bool(p.output_sizes)
    for threads, r, resident in product([1 << n for n in range(11)], rows, RESIDENT):
        if threads * r > MAX_THREADS or threads * r % WARP or threads * r * resident > MAX_THREADS_PER_SM:
            continue
        anywhere = r != THREE or p.column_sums > 0
        if anywhere:
            for cluster in (1,) if p.column_sums else CLUSTERS:
                yield Schedule("registers", threads, r, vec, resident, cluster=cluster)
        if r == 1:
            yield Schedule("stream", threads, 1, vec, resident)
        # Five blocks of a row each gained where they fit; of row groups five were no better than four.
        if resident > (5 if r == 1 else 4) or threads * r < 64:
            continue
        for cluster in CLUSTERS if anywhere else CLUSTERS[1:]:
            if cluster > 1 and p.column_sums and r != p.groups:
                continue  # row groups are a block each where there are no clusters
            owners = 0 if p.column_sums else SIDE_BY_SIDE[cluster.bit_length() - 1] * resident
            yield Schedule("bulk", threads, r, vec, resident, stages=2, cluster=cluster, owners=owners)
            if cluster == 1:
                yield Schedule("async", threads, r, vec, resident, stages=2, owners=owners)
                yield Schedule("ragged", threads, r, vec, resident, stages=2, owners=owners, bulk_store=store)


def _variants(base: Schedule, p: Problem) -> Iterator[Schedule]:
    """The options of a form, its stages among them."""
    no, flags = (False,), (False, True)
    if base.form == "stream":
        yield base
    elif base.form == "registers" and p.column_sums:
        for prefetch, one in product(flags, flags):
            yield replace(base, prefetch=prefetch, one_launch=one)
    elif base.form == "registers":
        for keep in flags:
            yield replace(base, keep=keep)
    else:
        stores = flags if base.form == "bulk" else (base.bulk_store,)
        ones = flags if p.column_sums else no
        claims = flags if base.form != "async" and not p.column_sums else no
        alone = base.resident * base.rows == 1  # rows so long that they may be more than registers hold
        waits = flags if p.column_sums and base.cluster > 1 else no
        for stages, keep, hold, store, one in product((2, 3, 4, 5, 6), flags, flags, stores, ones):
            staged = replace(base, stages=stages, keep=keep, hold=hold, bulk_store=store, one_launch=one)
            soons = flags if base.form == "bulk" and hold and not store else no
            for soon, claim, restrict in product(soons, claims if hold or alone else no, waits):
                yield replace(staged, soon=soon, claim=claim, restrict=restrict)


def ranked(p: Problem, capability: int = 90, vec: int | None = None, rows: int | None = None) -> list[Schedule]:
    """The schedules worth trying on a GPU, best first: the default is the first that the compiler does not spill.

    ``vec``: the widest access that the arrays allow, whose rows then may lie apart: none are ragged.
    ``rows``: how many there will be, None for many. What is equal in ``share`` is ranked alike.
    """
    roomy = [s for s in space(p) if has_room(s, p, capability)]
    if vec is not None:
        narrow = (replace(s, vec=min(vec, s.vec)) for s in roomy if s.form != "ragged")
        roomy = [s for s in narrow if is_legal(s, p)]
    # Where the model expects spills of all of them, the compiler has the last word.
    found = [s for s in roomy if fits(s, p, capability)] or roomy
    if not found:
        raise ScheduleError(f"no schedule is legal for D={p.d}.")
    there = share(p, rows)
    return sorted(dict.fromkeys(found), key=lambda s: (cost(s, p, there), s))
