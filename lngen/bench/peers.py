"""The choice among all providers: ceilings, lngen, and its peers."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from lngen.bench.ceilings import Ceiling
from lngen.bench.libraries import LIBRARIES
from lngen.bench.overlapped import OverlappedCeiling
from lngen.bench.providers import Lngen, Provider, Torch
from lngen.bench.records import OWN, VARIANT
from lngen.bench.tasks import CEILINGS, MOVES, OVERLAPPED
from lngen.errors import LngenError, MissingError
from lngen.schedule import Schedule, parse_schedule

ANY = Schedule("registers", threads=32, rows_per_block=1, vec=1)  # a schedule for variants to change
OVERLAPPING = OWN + OVERLAPPED
ON_REQUEST = (OVERLAPPING, "compile")  # not among the default providers


def known(schedules: Sequence[str] = ()) -> dict[str, Provider]:
    """Every provider by name, the ceilings first; lngen with the default schedule and with each of ``schedules``."""
    ceilings: list[Provider] = [*map(Ceiling, CEILINGS), *map(OverlappedCeiling, MOVES)]
    peers: list[Provider] = [Torch(), Torch("compile", compiled=True), *LIBRARIES]
    variants = [Lngen(VARIANT + text, text) for text in schedules]
    own: list[Provider] = [Lngen(), *variants, Lngen(OVERLAPPING, overlap=True)]
    return {p.name: p for p in (*ceilings, *own, *peers)}


def select(
    names: Sequence[str] = (), *, compiled: bool = False, overlap: bool = False, schedules: Sequence[str] = ()
) -> list[Provider]:
    """The named providers after the ceilings and lngen's variants; by default all that are available but ON_REQUEST.

    ``compiled`` and ``overlap`` add those. Ceilings whose calls overlap are there if lngen's calls overlap.
    LngenError for an unknown name, ScheduleError for a text that is not a schedule, MissingError for a named provider
    that is not installed.
    """
    for text in schedules:
        parse_schedule(text, ANY)
    providers = known(schedules)
    asked = [*([OVERLAPPING] if overlap else []), *(["compile"] if compiled else [])]
    for name in (*names, *asked):
        if name not in providers:
            near = difflib.get_close_matches(name, providers, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else "."
            raise LngenError(f"There is no provider '{name}', expected some of {', '.join(providers)}{hint}")
        if not providers[name].available():
            needs = providers[name].needs
            raise MissingError(f"The provider '{name}' needs {needs}, which is not installed.")
    named = names or [n for n, p in providers.items() if p.checked and p.available() and n not in ON_REQUEST]
    in_turn = OVERLAPPING not in (*named, *asked)
    ceilings = [n for n, p in providers.items() if not p.checked and p.available()]
    ceilings = [n for n in ceilings if not (in_turn and n.endswith(OVERLAPPED))]
    wanted = {
        *named,
        *ceilings,
        *asked,
        *(VARIANT + text for text in schedules),
    }
    return [p for name, p in providers.items() if name in wanted]
