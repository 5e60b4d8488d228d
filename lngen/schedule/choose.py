"""The default schedule of a spec: the first without spills among the measured ones, then in the model's order."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from lngen import config
from lngen.devices import Device, device_for, oldest_first
from lngen.errors import LowerError, MissingError, ScheduleError
from lngen.schedule.problem import Problem
from lngen.schedule.ranking import candidates, last_resort
from lngen.schedule.resources import fits, register_limit, registers
from lngen.schedule.schedule import Schedule
from lngen.spec import Spec

MOST_TRIED = 8  # schedules to compile, at some tenths of a second each

# Compiles a schedule; bytes per thread that spill on the first of these archs where any do.
Spilled = Callable[[Schedule, tuple[str, ...]], int]


def choose(
    spec: Spec,
    facts: Problem,
    spilled: Spilled,
    arches: Sequence[str],
    vec: int | None = None,
    rows: int | None = None,
    device: Device | None = None,
) -> Schedule:
    """The schedule for ``spec`` on all ``arches`` without tuning; its accesses are at most ``vec`` elements wide.

    ``rows``: the expected number, None for many. ``device``: the GPU; None for the one that represents the oldest arch.

    Measured schedules come first, then the model's order; the compile log decides: a candidate with spills is
    skipped. At most MOST_TRIED are compiled; if all of them spill, form multipass follows, and if that spills, too, the
    result is the one that spills least. Without a compiler, where ``spilled`` raises MissingError, it is the first.
    One schedule serves all archs: the best for the oldest that fits the others; ScheduleError if there is none.
    """
    oldest, *others = oldest_first(arches)
    device = device if device is not None and device.arch == oldest else device_for(oldest)

    def fitting(listed: Iterable[Schedule]) -> Iterator[Schedule]:
        return (s for s in listed if all(fits(s, facts, device_for(a)) for a in others))

    def compiled(listed: Iterable[Schedule]) -> dict[Schedule, int]:
        return _tried(listed, lambda s: spilled(s, (oldest, *others)))

    tried = compiled(_in_turn(facts, fitting(candidates(facts, device, vec, rows))))
    if all(tried.values()):
        with suppress(ScheduleError, LowerError):  # if no schedule of form multipass is legal, or has the graph's sums
            tried |= compiled(_in_turn(facts, fitting(last_resort(facts, device, vec, rows))))
    if not tried:
        raise ScheduleError(f"no schedule for {spec} fits all of {', '.join((oldest, *others))}; build each alone.")
    best = min(tried, key=lambda s: tried[s])
    if tried[best] and config.debug_level() >= 1:
        print(f"lngen: {spec}: {spill_text(best, tried[best], len(tried))}", file=sys.stderr)
    return best


def _tried(listed: Iterable[Schedule], spilled: Callable[[Schedule], int]) -> dict[Schedule, int]:
    """The bytes that each compiled schedule spills, up to the first without spills.

    Without a compiler no schedule is known to spill.
    """
    tried: dict[Schedule, int] = {}
    for schedule in listed:
        try:
            tried[schedule] = spilled(schedule)
        except MissingError:
            tried[schedule] = 0
        if not tried[schedule] or len(tried) == MOST_TRIED:
            break
    return tried


def _in_turn(facts: Problem, listed: Iterable[Schedule]) -> Iterator[Schedule]:
    """Schedules of which each is expected to need fewer registers than those before it, which spill; then the others.

    The estimate may be wrong: with one layout of rows, another form may spill less.
    """
    tightest, others = math.inf, dict[Schedule, None]()
    for schedule in listed:
        tight = registers(schedule, facts) / register_limit(schedule)
        if tight < tightest:
            yield schedule
            tightest = tight
        else:
            others[schedule] = None
    yield from others


def spill_text(schedule: Schedule, bytes_: int, tried: int = 1) -> str:
    """The message that a schedule spills."""
    among = f", the least of {tried} schedules" if tried > 1 else ""
    return f"registers spill, {bytes_} bytes a thread{among}: {schedule}"
