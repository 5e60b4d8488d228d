"""From what a person types, a spec and perhaps a schedule, to a plan."""

from __future__ import annotations

from dataclasses import MISSING, fields

from lngen.lower import Plan, lower
from lngen.runtime.choose import default_schedule
from lngen.schedule import Schedule, parse_schedule
from lngen.spec import Spec


def plan_for(spec: Spec, schedule: str, arch: str) -> Plan:
    """The plan of ``spec`` under its default schedule on ``arch``, changed as ``schedule`` says.

    A text that names every key without a default replaces that schedule, which then need not be found: no compiler
    is asked.
    """
    named = {part.partition("=")[0] for part in schedule.split(",")}
    if named >= {f.name for f in fields(Schedule) if f.default is MISSING}:
        base = Schedule("registers", threads=1, rows=1, vec=1)
    else:
        base = default_schedule(spec, arch)
    return lower(spec, parse_schedule(schedule, base))
