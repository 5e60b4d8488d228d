"""The order in which to try schedules: measured ones first, then by the model's estimates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lngen.devices import Device, default_device
from lngen.errors import ScheduleError
from lngen.schedule.columns import Columns
from lngen.schedule.legal import is_legal
from lngen.schedule.model import estimates, features
from lngen.schedule.problem import Problem
from lngen.schedule.resources import MAX_REGISTERS, register_limit
from lngen.schedule.schedule import Schedule
from lngen.schedule.space import multipass_space, roomy_space
from lngen.schedule.table import measured
from lngen.schedule.workload import rows_of, workload

DIGITS = 3  # of a nanosecond, so that rounding on different processors makes no difference


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
