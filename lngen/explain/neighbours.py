"""The neighbours of a schedule in one field, each as a legal schedule or with the rule that forbids it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lngen.devices import Device
from lngen.errors import ScheduleError
from lngen.problem import ANY, STAGED, Problem, Schedule, check, check_arch, parse_schedule
from lngen.problem.footprint import most_blocks
from lngen.problem.legal import MIN_STAGES
from lngen.problem.schedule import FORMS, value_text
from lngen.schedule.space import FIELDS, FLAG_FIELDS, Numbers, Schedules

Value = str | int | bool
DOUBLED = ("threads", "rows_per_block", "vec", "cluster", "grid")  # fields whose values are far apart


def values(s: Schedule, name: str) -> list[Value]:
    """The values next to the one that the field has: every other form, the other flag, the next larger and smaller."""
    value = getattr(s, name)
    if name == "form":
        return [form for form in FORMS if form != value]
    if name in FLAG_FIELDS:
        return [not value]
    if not value:
        return [MIN_STAGES if name == "stages" else 1]
    return [n for n in ([2 * value, value // 2] if name in DOUBLED else [value + 1, value - 1]) if n]


def broken_rule(s: Schedule, p: Problem, device: Device) -> str:
    """The rule that forbids a schedule on a GPU, as legality words it; empty if none does."""
    try:
        check(s, p)
        check_arch(s, device.arch)
    except ScheduleError as error:
        return str(error).rpartition(f"is illegal for D={p.d}: ")[2].rstrip(".")
    room = most_blocks(s, p, device)
    return "" if s.blocks_per_sm <= room else f"a multiprocessor has room for {room} such blocks"


def neighbour(
    s: Schedule, name: str, value: Value, space: Schedules, times: Numbers, p: Problem, device: Device
) -> tuple[Schedule, str]:
    """The schedule with that value nearest to ``s``, and the rule that forbids it, which is empty if it is legal.

    Where a change of the field alone is illegal, and for another form, it is the schedule of the ``space`` with the
    fewest other changes, and of these with the shortest of the expected ``times``. Flags that are off stay off, and
    form and cluster stay, unless the form is what changes.
    """
    wanted = changed(s, f"{name}={value_text(value)}", p, device)
    why = broken_rule(wanted, p, device)
    if name == "grid" or not (why or name == "form"):
        return wanted, why
    other = {f: space.field(f) != float(getattr(wanted if f == name else s, f)) for f in FIELDS[1:] if f != "grid"}
    other["form"] = space.has_form(wanted.form) == 0
    kept = {name, *(("form", "cluster", *(f for f in FLAG_FIELDS if not getattr(s, f))) if name != "form" else ())}
    allowed = np.flatnonzero(~np.any([other[f] for f in kept], axis=0))
    if not len(allowed):
        return wanted, why
    count = np.sum([other[f][allowed] for f in other], axis=0)
    return next(iter(space.take(allowed[np.lexsort((times[allowed], count))[:1]]))), ""


def changed(s: Schedule, text: str, p: Problem, device: Device) -> Schedule:
    """``s`` changed by ``text``; ScheduleError if it is no schedule.

    Unless the text names them, stages are the fewest if a form needs them, and the grid follows: as many blocks as run
    at a time, if they are persistent without column sums.
    """
    named, found = {part.partition("=")[0] for part in text.split(",")}, parse_schedule(text, s)
    if found.form in STAGED and not found.stages and "stages" not in named:
        found = replace(found, stages=MIN_STAGES)
    persistent = found.form in STAGED and not p.column_sums
    grid = device.resident_clusters(found.cluster) * found.blocks_per_sm if persistent else 0
    return found if "grid" in named else replace(found, grid=grid)


def changes(s: Schedule, other: Schedule) -> str:
    """The text that makes ``other`` of ``s``, as ``parse_schedule`` reads it; the grid is left out where it follows."""
    base = s if s.form == other.form else replace(ANY, threads=s.threads, rows_per_block=s.rows_per_block, vec=s.vec)
    names = [f for f in FIELDS if getattr(base, f) != getattr(other, f) or (f == "form" and base is not s)]
    shown = [f for f in names if f != "grid" or names == ["grid"]]
    return ",".join(f"{f}={value_text(getattr(other, f))}" for f in shown)
