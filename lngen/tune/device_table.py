"""A table of the fastest measured schedules of a GPU, from recorded times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lngen.devices import Device
from lngen.problem import Schedule
from lngen.schedule import workload
from lngen.schedule.recorded import Point
from lngen.schedule.table import Key, Table

NOISE = 0.02  # two times that differ by less are equal, since those of different runs differ


def build(device: Device, compared: Sequence[Point], defaults: Sequence[Point] = ()) -> Table:
    """The table of a GPU.

    compared  points at which several schedules were timed side by side. Of the schedules that were timed at half the
              points of a key and class at least, the table has the nearest to the best in geometric mean
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
    entries: dict[Key, dict[int, str]] = {}
    for key, size in sorted({*groups, *single}, key=lambda place: (place[0].order, place[1])):
        found = groups.get((key, size), [])
        chosen = _fastest(found, single.get((key, size))) if found else single[key, size]
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
        lines += ["", f"[{key.direction}.{key.element}_bytes.{key.d}]"]
        lines += [f'"{s}" = {sizes}' for s, sizes in classes.items()]
    return "\n".join(lines) + "\n"


def short(schedule: Schedule) -> str:
    """A schedule without the entries that a table omits: the accesses, which follow from D."""
    return ",".join(part for part in str(schedule).split(",") if not part.startswith("vec="))


def _fastest(found: Sequence[Point], default: Schedule | None) -> Schedule:
    """The best of the schedules timed at half of these points at least; the default unless it is known to be slower."""
    logs: dict[Schedule, list[float]] = {}
    for p in found:
        for schedule, us in p.times.items():
            logs.setdefault(_stripped(schedule), []).append(math.log(us / p.best))
    half = len(found) / 2
    means = {s: sum(each) / len(each) for s, each in logs.items() if len(each) >= half}
    best = min(means, key=lambda s: (means[s], -len(logs[s]), s))
    if default is None:
        return best
    own = logs.get(default, [])
    return best if own and sum(own) / len(own) > means[best] + NOISE else default


def _plain(p: Point) -> bool:
    """True for the rows that a table covers: one [M, D] input, or two with column sums, all of one size."""
    facts = p.problem
    return len(facts.input_sizes) == (2 if facts.column_sums else 1) and len({*facts.input_sizes}) == 1


def _place(p: Point, device: Device) -> tuple[Key, int]:
    facts = p.problem
    direction = "bwd" if facts.column_sums else "fwd"
    return Key(direction, facts.element, facts.d), workload(facts, p.rows, device)


def _stripped(schedule: Schedule) -> Schedule:
    """A schedule as a table has it, without accesses and grid."""
    return replace(schedule, vec=1, grid=0)
