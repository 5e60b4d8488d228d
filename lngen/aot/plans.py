"""From what a person types, a spec and perhaps a schedule, to a plan."""

from __future__ import annotations

from dataclasses import MISSING, fields

from lngen.lower import Plan, lower
from lngen.runtime.choose import default_schedule
from lngen.schedule import Schedule, parse_schedule
from lngen.spec import Spec


def plan_for(spec: Spec, schedule: str, *arches: str, rows: int | None = None) -> Plan:
    """The plan of ``spec`` under its default schedule on ``arches``, changed as ``schedule`` says.

    ``rows``: about how many there will be, None for many.
    For several archs it is one schedule that all of them have. A text that names every key without a default
    replaces it, so that no compiler is asked; a form takes the defaults of the other keys with it.
    """
    named = {part.partition("=")[0] for part in schedule.split(",")}
    if named >= {f.name for f in fields(Schedule) if f.default is MISSING}:
        base = Schedule("registers", threads=1, rows=1, vec=1)
    else:
        first, *also = arches
        base = default_schedule(spec, first, also=also, rows=rows)
    return lower(spec, parse_schedule(schedule, base))
