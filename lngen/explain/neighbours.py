"""The neighbours of a schedule in one field, each as a legal schedule or with the rule that forbids it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lngen.devices import Device
from lngen.errors import ScheduleError
from lngen.problem import ANY, STAGED, Problem, Schedule, check, check_arch
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

    The grid follows from the other fields. If ``s`` with that value is illegal, the nearest schedule of the ``space``
    has the fewest other changes, and of these the shortest of the expected ``times``. Flags that are off stay off, and
    form and cluster stay, unless the form is what changes.
    """
    wanted = replace(s, **{name: value})  # type: ignore[arg-type]
    if name != "grid":
        wanted = with_grid(wanted, p, device)
    why = broken_rule(wanted, p, device)
    if not why:
        return wanted, ""
    other = {f: space.field(f) != float(getattr(wanted, f)) for f in FIELDS[1:] if f != "grid"}
    other["form"] = space.has_form(wanted.form) == 0
    off = {f for f in FLAG_FIELDS if not getattr(wanted, f)}
    kept = {"form"} if name == "form" else {name, "form", "cluster", *off}
    allowed = np.flatnonzero(~np.any([other[f] for f in kept if f in other], axis=0))
    if name != "grid" and len(allowed):
        changes = np.add.reduce([other[f][allowed] for f in other], dtype=int)
        return next(iter(space.take(allowed[np.lexsort((times[allowed], changes))[:1]]))), ""
    if name == "form":
        wanted = plain(wanted, p, device)
        why = broken_rule(wanted, p, device)
    return wanted, why


def with_grid(s: Schedule, p: Problem, device: Device) -> Schedule:
    """``s`` with the grid that follows: as many blocks as run at a time, if they are persistent without column sums."""
    persistent = s.form in STAGED and not p.column_sums
    return replace(s, grid=device.resident_clusters(s.cluster) * s.blocks_per_sm if persistent else 0)


def plain(s: Schedule, p: Problem, device: Device) -> Schedule:
    """The rows of ``s`` in its form, without options."""
    stages, store = MIN_STAGES * (s.form in STAGED), s.form == "tma_unaligned" and bool(p.output_sizes)
    rows = 1 if s.form == "multipass" else s.rows_per_block
    return with_grid(Schedule(s.form, s.threads, rows, p.run, stages=stages, tma_store=store), p, device)


def changes(s: Schedule, other: Schedule) -> str:
    """The text that makes ``other`` of ``s``, as ``parse_schedule`` reads it; the grid is left out where it follows."""
    base = s if s.form == other.form else replace(ANY, threads=s.threads, rows_per_block=s.rows_per_block, vec=s.vec)
    names = [
        name for name in FIELDS if getattr(base, name) != getattr(other, name) or (name == "form" and base is not s)
    ]
    shown = [name for name in names if name != "grid" or names == ["grid"]]
    return ",".join(f"{name}={value_text(getattr(other, name))}" for name in shown)
