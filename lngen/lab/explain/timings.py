"""Recorded times of schedules: those of this checkout, which an installed package lacks, and the user's own."""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lngen import config
from lngen.compiler.devices import Device
from lngen.compiler.problem import ANY, Problem, Schedule, check, parse_schedule
from lngen.compiler.schedule import workload
from lngen.errors import MissingError, ScheduleError
from lngen.files import parse_json, read
from lngen.lab.bench.store import source_digest
from lngen.lab.bench.tasks import FEW_ROWS, LATENCY
from lngen.lab.tune import trials
from lngen.lab.tune.recorded import benched, swept

UNKNOWN = "not recorded"
CALLS = {True: "in turn", False: "overlapped"}


@dataclass(frozen=True)
class Record:
    """A schedule of a spec on a GPU: its time in microseconds, or why it has none.

    ``source``: the name of the file; ``calls``: how they followed each other; ``version``: of lngen, or the compiler;
    ``generator``: whether that which made the kernel is today's; ``kernel``: the hash of its text.
    """

    source: str
    device: str
    rows: int
    schedule: str
    us: float | None
    calls: str = UNKNOWN
    version: str = ""
    date: str = ""
    generator: str = UNKNOWN
    kernel: str = ""
    status: str = "correct"
    reason: str = ""


def records(spec: str) -> Iterator[Record]:
    """Trials of tune, records of bench but those of latency, and points of sweeps."""
    with suppress(MissingError):  # nor has a user without a home folder any
        yield from _trials(config.cache_dir() / "tune" / "trials.jsonl", spec)
    with suppress(MissingError):
        folder = config.data_dir("generated")
        for path in sorted(folder.glob("tuned/*.jsonl")):
            yield from _trials(path, spec)
        for path in sorted(folder.glob("bench/*.json")):
            yield from _benched(path, spec)


def _trials(path: Path, spec: str) -> Iterator[Record]:
    kept = [t for t in trials.read(path).trials if t.spec == spec]
    for device, rows, in_turn in dict.fromkeys((t.device, t.rows, t.in_turn) for t in kept):
        for t in trials.of((t for t in kept if t.in_turn == in_turn), spec, rows, device):
            about = {"version": t.compiler, "date": t.date, "kernel": t.kernel, "status": t.status, "reason": t.reason}
            us = t.us_median if t.timed else None
            yield Record(path.name, device, rows, t.schedule, us, CALLS[in_turn], **about)


def _benched(path: Path, spec: str) -> Iterator[Record]:
    raw = read(path, trials.LARGEST)
    if f'"{spec}"'.encode() not in raw:
        return
    data, today = parse_json(raw), source_digest()
    for p in (p for p in data.get("points", ()) if p["spec"] == spec):
        yield from (
            Record(path.name, data.get("device", UNKNOWN), p["rows"], s, us) for s, us in swept(data, p).items()
        )
    about, date = data.get("conditions", {}), "".join(run.get("date", "")[:10] for run in data.get("runs", ())[:1])
    for r in (r for r in benched(data.get("records", ())) if r["spec"] == spec):
        if r.get("schedule") and r.get("us_median") and r.get("kind") not in (LATENCY, *FEW_ROWS):
            calls = CALLS["begins while" not in about.get(f"provider {r['provider']}", about["method"])]
            made = f"lngen {about['lngen']}", date, "today's" if about["kernels"] == today else "earlier"
            yield Record(path.name, about["device"], r["rows"], r["schedule"], r["us_median"], calls, *made)


@dataclass(frozen=True)
class Run:
    """Records of a file that compare with each other: of one GPU, number of rows, version and way of calling."""

    source: str
    device: str
    rows: int
    about: str
    trials: Mapping[Schedule, Record]

    @cached_property
    def times(self) -> Mapping[Schedule, float]:
        """Microseconds of the schedules that were timed."""
        return {s: r.us for s, r in self.trials.items() if r.us is not None}

    @property
    def place(self) -> str:
        """In words, where the times are from."""
        return f"the {self.device} with {self.rows} rows ({', '.join(filter(None, (self.source, self.about)))})"

    def __str__(self) -> str:
        about = f", {self.about}" if self.about else ""
        count = f"{len(self.times)} schedule{'s' * (len(self.times) != 1)}"
        return f"{self.source}: {self.device}, {self.rows} rows{about}, {count}"


def runs(spec: str, p: Problem, device: Device, rows: int) -> list[Run]:
    """The runs of a spec in the workload class of ``rows``: those on that GPU, and of nearly as many rows, first."""
    found: dict[tuple[str, str, int, str], dict[Schedule, Record]] = {}
    for r in records(spec):
        about = ", ".join(filter(None, (r.version, f"calls {r.calls}" * (r.calls != UNKNOWN))))
        with suppress(ScheduleError):  # of another version, which had other fields
            s = parse_schedule(r.schedule, ANY)
            check(s, p)
            found.setdefault((r.source, r.device, r.rows, about), {})[s] = r
    of_class = [Run(*key, of) for key, of in found.items() if workload(p, key[2], device) == workload(p, rows, device)]
    near = sorted(of_class, key=lambda r: (r.device != device.name, len(r.times) < 2, abs(math.log(r.rows / rows))))
    return [r for r in near if r.times]
