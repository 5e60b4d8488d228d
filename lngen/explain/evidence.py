"""What is known about the times of schedules: recorded ones, and those that the model expects, with its error.

Records are those of this checkout, which an installed package lacks, and of the user's tuning database.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from lngen import config
from lngen.bench.store import source_digest
from lngen.bench.tasks import FEW_ROWS, LATENCY
from lngen.devices import Device
from lngen.errors import MissingError, ScheduleError
from lngen.explain.section import Subject
from lngen.files import parse_json, read
from lngen.problem import ANY, Problem, Schedule, check, parse_schedule
from lngen.schedule import workload
from lngen.schedule.model import STATED, Accuracy, estimates, features, terms
from lngen.schedule.recorded import benched, swept
from lngen.schedule.space import Numbers, Schedules, roomy_space
from lngen.schedule.table import key_of, rows_of
from lngen.tune import trials

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
    with suppress(MissingError):
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


# ---- the model ----


def predicted(schedules: Iterable[Schedule], p: Problem, rows: int, device: Device) -> Numbers:
    """Microseconds that the model expects of schedules; of form multipass, without the kernel of column sums."""
    found = schedules if isinstance(schedules, Schedules) else Schedules.of(schedules)
    alone, times = (estimates(features(found, q, rows, device), device) for q in (replace(p, column_sums=0), p))
    return np.where(found.has_form("multipass"), alone, times)


def time_and_terms(s: Schedule, p: Problem, rows: int, device: Device) -> tuple[float, dict[str, float]]:
    """Microseconds that a schedule is expected to take, and its unblended terms, with the factor of its spills."""
    f = features(Schedules.of([s]), replace(p, column_sums=0) if s.form == "multipass" else p, rows, device)
    return float(estimates(f, device)[0]), {name: float(us[0]) for name, us in vars(terms(f, device)).items()}


def percent(ratio: float) -> str:
    """A ratio of times as a difference, such as ``+8.1 %``."""
    return f"{100 * (ratio - 1):+.{1 if ratio < 2 else 0}f} %"


# ---- both, for a subject ----


@dataclass(frozen=True)
class Verdict:
    """One schedule against the chosen one.

    kind    rule: it is illegal; measured: both were, or it failed; predicted: the expected times differ by more than
            the model's error; unknown: they do not
    short   the answer in a few words; ``sentence``: with its numbers
    numbers microseconds of it and of the chosen one, measured or predicted; None where it has none
    """

    kind: str
    short: str
    sentence: str
    numbers: tuple[float, float] | None = None


@dataclass(frozen=True)
class Evidence:
    """The times of the schedules of a subject."""

    subject: Subject

    @cached_property
    def most(self) -> int:
        """The most rows of the workload class, for which the class is ranked."""
        s = self.subject
        return max(1, rows_of(s.problem, workload(s.problem, s.expected, s.device), s.device))

    @cached_property
    def runs(self) -> list[Run]:
        """The recorded runs of the workload class; first one on this GPU that compares the chosen schedule, if any."""
        s = self.subject
        found = runs(str(s.plan.spec), s.problem, s.device, s.expected or self.most)
        return sorted(found, key=lambda r: (r.device != s.device.name, s.schedule not in r.times, len(r.times) < 2))

    @cached_property
    def rows(self) -> int:
        """The rows of all times: the expected ones; for many, those of the first run, or the most of the class."""
        return self.subject.expected or (self.runs[0].rows if self.runs else self.most)

    @cached_property
    def space(self) -> Schedules:
        """The legal schedules for whose blocks the GPU has room."""
        return roomy_space(self.subject.problem, self.subject.device)

    @cached_property
    def times(self) -> Numbers:
        """Microseconds that the model expects of the schedules of the space."""
        s = self.subject
        return predicted(self.space, s.problem, self.rows, s.device)

    @cached_property
    def stated(self) -> Accuracy:
        """The model's error in this direction."""
        return STATED[key_of(self.subject.problem).direction]

    def terms(self, s: Schedule) -> tuple[float, dict[str, float]]:
        """Its expected microseconds and their terms, with four decimals."""
        us, parts = time_and_terms(s, self.subject.problem, self.rows, self.subject.device)
        return round(us, 4), {name: round(part, 4) for name, part in parts.items()}

    def expected(self, *schedules: Schedule) -> Numbers:
        """Microseconds that the model expects of schedules."""
        return predicted(schedules, self.subject.problem, self.rows, self.subject.device)

    def against(self, other: Schedule) -> Verdict:
        """A legal schedule against the chosen one: by the first run that compares them, else by the model."""
        chosen = self.subject.schedule
        for run in self.runs:
            if {chosen, other} <= run.times.keys():
                us, mine = run.times[other], run.times[chosen]
                short = f"measured {percent(us / mine)}"
                sentence = f"{short}, {us:.4g} us against {mine:.4g} ({run})"
                short += f" on {run.device}" * (run.device != self.subject.device.name)
                return Verdict("measured", short, sentence, (us, mine))
            failed = run.trials.get(other)
            if failed is not None and failed.us is None and run.device == self.subject.device.name:
                short = f"failed: {failed.status}"
                return Verdict("measured", short, f"{short}, {failed.reason} ({run})")
        us, mine = self.expected(other, chosen).tolist()
        error, change = self.stated.apart_most, percent(us / mine)
        sentence = (
            f"predicted {change}, {us:.4g} us against {mine:.4g}; the model's error is {percent(math.exp(error))[1:]}"
        )
        if abs(math.log(us / mine)) > error:
            return Verdict("predicted", f"predicted {change}", sentence, (us, mine))
        return Verdict("unknown", f"cannot tell ({change})", sentence, (us, mine))
