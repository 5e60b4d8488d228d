"""A table of the fastest measured schedules of a GPU, from recorded times."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lngen.compiler.devices import Device
from lngen.compiler.problem import Schedule
from lngen.compiler.schedule import workload
from lngen.compiler.schedule.table import Key, Table, key_of
from lngen.lab.tune.recorded import Point

NOISE = 0.02  # two times that differ by less are equal, since those of different runs differ
TIE = 0.01  # means of one run that differ by less are equal: the least of many is that much too good by chance
UNKNOWN = 0.05  # how much slower a schedule is taken to be where it was not timed: it may spill there


def build(device: Device, compared: Sequence[Point], defaults: Sequence[Point] = ()) -> Table:
    """The table of a GPU.

    compared  points at which several schedules were timed side by side. The table has the nearest to the best in
              geometric mean over the points of a key and class. Ties go to the schedule that is among the best
              at the most points of the key, then of all rows of its kind, so that few kernels are built
    defaults  points of one schedule each, timed in other runs: kept where no other schedule is known to be faster
    """
    groups: dict[tuple[Key, int], list[Point]] = {}
    single: dict[tuple[Key, int], Schedule] = {}
    times: dict[tuple[str, int], Mapping[Schedule, float]] = {}
    for p in filter(_plain, defaults):
        single[_place(p, device)] = _stripped(next(iter(p.times)))
        times[p.spec, p.rows] = p.times
    for p in filter(_plain, compared):
        known = replace(p, times={**times.get((p.spec, p.rows), {}), **p.times})
        groups.setdefault(_place(p, device), []).append(known)
    shared = Counter(
        (rows, s) for (key, _), found in groups.items() for p in found for s in _tied([p]) for rows in (key, key.kind)
    )
    entries: dict[Key, dict[int, str]] = {}
    for key, size in sorted({*groups, *single}, key=lambda place: (place[0].order, place[1])):
        chosen, found = single.get((key, size)), groups.get((key, size), [])
        if chosen is None or _slower(chosen, found):
            chosen = _most_shared(_tied(found), key, shared)
        entries.setdefault(key, {})[size] = short(chosen)
    return Table(device.name, device.arch, entries)


def text(table: Table, about: str) -> str:
    """A table as TOML, the same bytes for the same table."""
    lines = [f"# {line}".rstrip() for line in about.splitlines()]
    lines += ["", f'device = "{table.device}"', f'arch = "{table.arch}"']
    for key, sizes in table.entries.items():
        classes: dict[str, list[int]] = {}
        for size, schedule in sizes.items():
            classes.setdefault(schedule, []).append(size)
        lines += ["", f"[{key.section}]"]
        lines += [f'"{s}" = {sizes}' for s, sizes in classes.items()]
    return "\n".join(lines) + "\n"


def short(schedule: Schedule) -> str:
    """A schedule without the entries that a table omits: the accesses, which follow from D."""
    return ",".join(part for part in str(schedule).split(",") if not part.startswith("vec="))


def _tied(found: Sequence[Point]) -> list[Schedule]:
    """The schedules that tie with the best at these points."""
    means = _means(found)
    least = min(means.values())
    return [s for s, mean in means.items() if mean <= least + TIE]


def _most_shared(tied: Sequence[Schedule], key: Key, shared: Mapping[tuple[Any, Schedule], int]) -> Schedule:
    return min(tied, key=lambda s: (-shared[key, s], -shared[key.kind, s], s))


def _slower(default: Schedule, found: Sequence[Point]) -> bool:
    """Whether a default is known to be slower than the best at these points."""
    means = _means(found)
    return means.get(default, 0) > min(means.values(), default=0) + NOISE


def _means(found: Sequence[Point]) -> dict[Schedule, float]:
    """The logarithms of the times over those of the best, in the mean over these points."""
    logs: dict[Schedule, list[float]] = {}
    for p in found:
        for schedule, us in p.times.items():
            logs.setdefault(_stripped(schedule), []).append(math.log(us / p.best))
    return {s: (sum(each) + UNKNOWN * (len(found) - len(each))) / len(found) for s, each in logs.items()}


def _plain(p: Point) -> bool:
    """True for the rows that a table covers: those of a norm, or with another input, all of one size."""
    return key_of(p.problem).more in (0, 1) and len({*p.problem.input_sizes}) == 1


def _place(p: Point, device: Device) -> tuple[Key, int]:
    return key_of(p.problem), workload(p.problem, p.rows, device)


def _stripped(schedule: Schedule) -> Schedule:
    """A schedule as a table has it, without accesses and grid."""
    return replace(schedule, vec=1, grid=0)
