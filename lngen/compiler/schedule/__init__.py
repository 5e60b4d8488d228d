"""The choice of schedules: the order in which they are tried.

Measured ones come first, then those of the model; behind the first, those that need ever fewer registers, since it may
spill; form=multipass last.

Nothing is compiled here. ``attempts`` is the order of the search for a default, which lngen/compiler/compile.py ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice

from lngen.compiler.devices import Device, default_device, device_for
from lngen.compiler.problem import Problem, Schedule, fits
from lngen.compiler.problem.footprint import register_limit, registers
from lngen.compiler.schedule.table import known_clean, measured, most_bytes, row_bytes, row_counts, workload
from lngen.errors import ScheduleError

MOST_TRIED = 8  # schedules to compile, at some tenths of a second each


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
    from lngen.compiler.schedule.model import last_resort  # as in ``candidates``

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
    from lngen.compiler.schedule.model import (
        fastest_first,  # not at the top: where a schedule was measured, none is estimated
    )

    yield from fastest_first(p, device, vec, rows)
