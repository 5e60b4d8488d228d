"""The choice of schedules: the order in which they are tried, measured ones first, then by the model's estimates.

Nothing is compiled here. ``attempts`` is the order of the search for a default, which lngen/compile.py ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

import numpy as np

from lngen.devices import Device, default_device, device_for
from lngen.errors import ScheduleError
from lngen.problem import Problem, Schedule, fits, is_legal
from lngen.problem.footprint import MAX_REGISTERS, register_limit, registers
from lngen.schedule.model import estimates, features
from lngen.schedule.space import Columns, multipass_space, roomy_space, space
from lngen.schedule.table import known_clean, measured, row_counts, rows_of, workload

__all__ = [
    "attempts", "candidates", "estimated", "known_clean", "last_resort", "ranked", "row_counts", "space", "workload",
]  # fmt: skip

MOST_TRIED = 8  # schedules to compile, at some tenths of a second each
DIGITS = 3  # of a nanosecond, so that rounding on different processors makes no difference


def attempts(
    p: Problem,
    arches: Sequence[str],
    vec: int | None = None,
    rows: int | None = None,
    device: Device | None = None,
) -> Iterator[Schedule]:
    """The schedules to compile one by one until one does not spill: that one is the default on all ``arches``.

    ``arches``: the oldest first; the order is the best for the oldest, and every schedule fits the others. ``vec``,
    ``rows``: as for ``ranked``. ``device``: the GPU; None for the one that represents the oldest arch.

    At most MOST_TRIED candidates come first, then at most as many schedules of form multipass.
    """
    oldest, *others = arches
    here = device if device is not None and device.arch == oldest else device_for(oldest)

    def fitting(listed: Iterable[Schedule]) -> Iterator[Schedule]:
        found = (s for s in listed if all(fits(s, p, device_for(arch)) for arch in others))
        return islice(_tighter_first(found, p), MOST_TRIED)

    yield from fitting(candidates(p, here, vec, rows))
    with suppress(ScheduleError):  # if no schedule of form multipass is legal
        yield from fitting(last_resort(p, here, vec, rows))


def _tighter_first(listed: Iterable[Schedule], p: Problem) -> Iterator[Schedule]:
    """Each schedule once: first those expected to need fewer registers than all before them, then the others.

    A schedule is compiled after another one has spilled, so fewer registers are the best hope. The estimate may be
    wrong: another form with the same layout of rows may spill less.
    """
    tightest, seen, others = math.inf, set[Schedule](), dict[Schedule, None]()
    for schedule in listed:
        tight = registers(schedule, p) / register_limit(schedule)
        if tight < tightest:
            tightest = tight
            seen.add(schedule)
            yield schedule
        else:
            others[schedule] = None
    yield from (s for s in others if s not in seen)


def ranked(p: Problem, device: Device | None = None, vec: int | None = None, rows: int | None = None) -> list[Schedule]:
    """The schedules worth trying on a GPU, best first: the default is the first that the compiler does not spill.

    ``vec``: the widest access that the arrays allow; their rows may have gaps, so unaligned TMA is excluded.
    ``rows``: the expected number, None for many. All numbers of one workload class have the same ranking.
    """
    return list(dict.fromkeys(candidates(p, device, vec, rows)))


def candidates(
    p: Problem, device: Device | None = None, vec: int | None = None, rows: int | None = None
) -> Iterator[Schedule]:
    """The schedules one by one: the table's nearest entry, if any, precedes the enumeration and is repeated in it."""
    device = device or default_device()
    if vec is None:
        yield from measured(p, workload(p, rows, device), device)
    yield from _fastest_first(p, device, vec, rows)


def estimated(p: Problem, device: Device, vec: int | None = None, rows: int | None = None) -> list[Schedule]:
    """The schedules in the order of the model alone, the fastest first."""
    return list(_fastest_first(p, device, vec, rows))


def last_resort(p: Problem, device: Device, vec: int | None = None, rows: int | None = None) -> list[Schedule]:
    """For a problem whose candidates all spill: form multipass with all registers that a thread can have.

    The fastest schedule for each number of threads, the fastest of them first. The kernel of the rows has no column
    sums, so the model is asked about such a problem.
    """
    found = _sorted(multipass_space(p, device), replace(p, column_sums=0), device, vec, _count(p, device, rows))
    fastest: dict[int, Schedule] = {}
    for s in found:
        if register_limit(s, device) == MAX_REGISTERS:
            fastest.setdefault(s.threads, s)
    return [*fastest.values()]


def _fastest_first(p: Problem, device: Device, vec: int | None, rows: int | None) -> Columns:
    """As ``estimated``, in columns: a default needs no other schedule than the first."""
    return _sorted(roomy_space(p, device), p, device, vec, _count(p, device, rows))


def _count(p: Problem, device: Device, rows: int | None) -> int:
    """The rows for which all numbers of their workload class are ranked."""
    return max(1, rows_of(p, workload(p, rows, device), device))


def _sorted(roomy: Columns, p: Problem, device: Device, vec: int | None, count: int) -> Columns:
    """Schedules for whose blocks the GPU has room, the fastest first, without those of which spills are expected."""
    if vec is not None:
        narrow = roomy.narrowed(vec)
        # Narrower accesses break no rule but those about the form and its accesses.
        allowed = narrow.each(lambda s: s.form != "tma_unaligned" and is_legal(s, p), "form", "vec")
        roomy = narrow.take(allowed > 0)
    if not len(roomy):
        raise ScheduleError(f"no schedule is legal for D={p.d}.")
    inputs = features(roomy, p, count, device)
    clean = inputs.spill_factor <= 1
    # Where the model expects spills of all of them, the compiler decides.
    places = np.flatnonzero(clean if clean.any() else ~clean)
    times = np.round(estimates(inputs, device)[places], DIGITS)
    return roomy.take(places[np.argsort(times, kind="stable")])
