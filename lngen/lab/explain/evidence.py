"""What is known about the times of schedules: recorded ones, and those that the model expects, with its error."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lngen.compiler.devices import Device
from lngen.compiler.problem import Problem, Schedule
from lngen.compiler.schedule.model import MODEL, TERMS, estimates, features, terms
from lngen.compiler.schedule.space import Numbers, Schedules, roomy_space
from lngen.compiler.schedule.table import key_of
from lngen.compiler.spec import Spec
from lngen.lab.bench.tasks import floor_bytes
from lngen.lab.explain.section import Subject
from lngen.lab.explain.timings import Run
from lngen.lab.tune.recorded import STATED, Accuracy

# ---- the model ----


def predicted(schedules: Iterable[Schedule], p: Problem, rows: int, device: Device) -> Numbers:
    """Microseconds that the model expects of schedules; of form multipass, without the kernel of column sums."""
    found = schedules if isinstance(schedules, Schedules) else Schedules.of(schedules)
    alone, times = (estimates(features(found, q, rows, device), device) for q in (replace(p, column_sums=0), p))
    return np.where(found.has_form("multipass"), alone, times)


# What takes the time of a term.
PHRASES = {
    "memory": "all bytes at the memory's bandwidth",
    "waiting": "rows wait for those before them in their row group",
    "issuing": "instructions, shared memory and bulk copies of a multiprocessor",
    "starting": "the GPU starts its blocks",
    "latency": "the first row comes from memory",
    "first": "the first row is computed after its arrival",
    "launch": "the first block starts",
    "atomics": "all blocks wait for atomic operations",
}


# What a part of the predicted time is.
PARTS = PHRASES | {
    "memory": "every input and result once, at the memory's bandwidth",
    "traffic": "bytes that are read again, and bandwidth that is not reached",
    "spills": "spilled registers, which lengthen all other parts",
}


def memory_us(nbytes: float, device: Device) -> float:
    """Microseconds of bytes at the memory's bandwidth."""
    return nbytes / device.bandwidth_gb_s / 1e3


class Expected(NamedTuple):
    """Microseconds that a schedule is expected to take, the parts that add up to them, and what bounds them.

    memory                      every input and result once at the memory's bandwidth, as in a roofline
    traffic                     what the model's memory term has beyond that: bytes read again, bandwidth not reached
    waiting, issuing, starting  what the terms that overlap with it add to it
    latency, first, launch, atomics, and spills, which lengthen all others

    ``by``: the term that would take longest alone.
    """

    us: float
    parts: Mapping[str, float]
    by: str


def expected(s: Schedule, spec: Spec, p: Problem, rows: int, device: Device) -> Expected:
    """What the model expects of a schedule; of form multipass, without the kernel of column sums."""
    f = features(Schedules.of([s]), replace(p, column_sums=0) if s.form == "multipass" else p, rows, device)
    us, found = float(estimates(f, device)[0]), {name: float(n[0]) for name, n in vars(terms(f, device)).items()}
    clean, overlapping = us / found["spill_factor"], ("waiting", "issuing", "starting")
    once = {name: found[name] for name in ("latency", "first", "launch", "atomics")}
    overlapped = clean - sum(once.values())
    memory = min(memory_us(floor_bytes(spec, rows), device), overlapped)
    traffic = max(min(found["memory"], overlapped) - memory, 0.0)
    powers = {name: found[name] ** MODEL.blend for name in overlapping}
    added = {name: (overlapped - memory - traffic) * n / sum(powers.values()) for name, n in powers.items()}
    parts = {"memory": memory, "traffic": traffic, **added, **once, "spills": us - clean}
    return Expected(us, parts, max(TERMS, key=found.__getitem__))


def percent(ratio: float) -> str:
    """A ratio of times as a difference, such as ``+8.1 %``."""
    return f"{100 * (ratio - 1):+.{1 if ratio < 2 else 0}f} %"


# ---- both, for a subject ----


@dataclass(frozen=True)
class Verdict:
    """One schedule against the chosen one.

    kind    rule: it is illegal; measured: both were, or it failed; predicted: the expected times differ by more than
            the model's error; unknown: they do not
    short   the answer in a few words; ``sentence``: one or more, with its numbers
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

    @property
    def runs(self) -> list[Run]:
        """The recorded runs of the workload class."""
        return self.subject.runs

    @property
    def rows(self) -> int:
        """The rows of all times."""
        return self.subject.rows

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

    def expected(self, s: Schedule) -> Expected:
        """What the model expects of a schedule."""
        subject = self.subject
        return expected(s, subject.plan.spec, subject.problem, self.rows, subject.device)

    def predicted(self, *schedules: Schedule) -> Numbers:
        """Microseconds that the model expects of schedules."""
        return predicted(schedules, self.subject.problem, self.rows, self.subject.device)

    def against(self, other: Schedule) -> Verdict:
        """A legal schedule against the chosen one: by the first run that compares them, else by the model."""
        chosen = self.subject.schedule
        for run in self.runs:
            if {chosen, other} <= run.times.keys():
                us, mine = run.times[other], run.times[chosen]
                short = f"measured {percent(us / mine)}"
                sentence = f"It took {us:.4g} us against {mine:.4g} us: {percent(us / mine)}. "
                sentence += f"Both were measured on {run.place}."
                short += f" on {run.device}" * (run.device != self.subject.device.name)
                return Verdict("measured", short, sentence, (us, mine))
            failed = run.trials.get(other)
            if failed is not None and failed.us is None and run.device == self.subject.device.name:
                short = f"failed: {failed.status}"
                return Verdict("measured", short, f"It {short}, {failed.reason}. It ran on {run.place}.")
        us, mine = self.predicted(other, chosen).tolist()
        error, change = self.stated.apart_most, percent(us / mine)
        sentence = f"The model predicts {us:.4g} us against {mine:.4g} us: {change}."
        limit = percent(math.exp(error))[1:]
        if abs(math.log(us / mine)) > error:
            more = f"{sentence} That is more than its error of {limit}."
            return Verdict("predicted", f"predicted {change}", more, (us, mine))
        less = f"{sentence} That is less than its error of {limit}, so it cannot order the two."
        return Verdict("unknown", f"cannot tell ({change})", less, (us, mine))
