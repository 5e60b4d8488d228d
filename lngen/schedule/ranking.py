"""The order in which to try schedules: measured ones first, then by the model's estimates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lngen.devices import Device, default_device
from lngen.errors import ScheduleError
from lngen.schedule.legal import is_legal
from lngen.schedule.model import estimates, features
from lngen.schedule.problem import Problem
from lngen.schedule.resources import fits, has_room
from lngen.schedule.schedule import Schedule
from lngen.schedule.space import space
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
    yield from estimated(p, device, vec, rows)


def estimated(p: Problem, device: Device, vec: int | None = None, rows: int | None = None) -> list[Schedule]:
    """The schedules in the order of the model alone, the fastest first."""
    roomy = [s for s in space(p, device) if has_room(s, p, device)]
    if vec is not None:
        narrow = (replace(s, vec=min(vec, s.vec)) for s in roomy if s.form != "tma_unaligned")
        roomy = [s for s in narrow if is_legal(s, p)]
    # Where the model expects spills of all of them, the compiler decides.
    found = list(dict.fromkeys([s for s in roomy if fits(s, p, device)] or roomy))
    if not found:
        raise ScheduleError(f"no schedule is legal for D={p.d}.")
    count = max(1, rows_of(p, workload(p, rows, device), device))
    times = np.round(estimates(features(found, p, count, device), device), DIGITS)
    return [found[n] for n in np.lexsort((np.arange(len(found)), times))]
