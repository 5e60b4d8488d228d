"""Recorded trials of a spec: those of this checkout, and those of the user's tuning database."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lngen import config
from lngen.devices import Device, device_names
from lngen.errors import MissingError, ScheduleError
from lngen.problem import ANY, Problem, Schedule, check, parse_schedule
from lngen.schedule import workload
from lngen.schedule.recorded import points
from lngen.tune import trials


@dataclass(frozen=True)
class Run:
    """Trials of schedules on one GPU: their times compare with each other, those of different runs do not.

    ``source``: the name of the file; ``about``: the compiler, and how calls followed each other, as far as recorded.
    """

    source: str
    device: str
    rows: int
    about: str
    trials: Mapping[Schedule, trials.Trial]

    @cached_property
    def times(self) -> Mapping[Schedule, float]:
        """Microseconds of the schedules that were timed."""
        return {s: t.us_median for s, t in self.trials.items() if t.timed and t.us_median is not None}

    def __str__(self) -> str:
        about = f", {self.about}" if self.about else ""
        count = f"{len(self.times)} schedule{'s' * (len(self.times) != 1)}"
        return f"{self.source}: {self.device}, {self.rows} rows{about}, {count}"


def runs(spec: str, p: Problem, device: Device, rows: int) -> list[Run]:
    """The runs of a spec in the workload class of ``rows``: those on that GPU, and of nearly as many rows, first."""
    found = (r for r in (*_databases(spec, p), *_files(spec)) if r.times)
    alike = [r for r in found if workload(p, r.rows, device) == workload(p, rows, device)]
    return sorted(alike, key=lambda r: (r.device != device.name, len(r.times) < 2, abs(math.log(r.rows / rows))))


def _databases(spec: str, p: Problem) -> Iterator[Run]:
    for path in (config.cache_dir() / "tune" / "trials.jsonl", *_records("tuned", "jsonl")):
        kept = [t for t in trials.read(path).trials if t.spec == spec]
        for device, rows in dict.fromkeys((t.device, t.rows) for t in kept):
            found: dict[str, dict[Schedule, trials.Trial]] = {}
            for t in trials.of(kept, spec, rows, device):
                about = f"{t.compiler}, {'each call waits for the last' if t.in_turn else 'calls overlap'}"
                with suppress(ScheduleError):  # of another version, which had other fields
                    s = parse_schedule(t.schedule, ANY)
                    check(s, p)
                    found.setdefault(about, {})[s] = t
            yield from (Run(path.name, device, rows, about, of) for about, of in found.items())


def _files(spec: str) -> Iterator[Run]:
    for path in _records("bench", "json"):
        for point in points([path], spec=spec):
            of = {
                s: trials.Trial(spec, point.rows, point.device, "", str(s), "", 0, "correct", us_median=us)
                for s, us in point.times.items()
            }
            yield Run(path.name, point.device, point.rows, "", of)


def _records(folder: str, ending: str) -> list[Path]:
    """The files of records of every described GPU; none in an installed wheel."""
    try:
        base = config.data_dir("generated") / folder
    except MissingError:
        return []
    return sorted(path for name in device_names() for path in base.glob(f"{name}*.{ending}"))
