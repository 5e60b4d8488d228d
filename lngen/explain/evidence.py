"""What is known about the times of a subject's schedules: the model's expectation, its error, and recorded runs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lngen.devices import Device
from lngen.explain.measurements import Run, runs
from lngen.explain.subject import Subject
from lngen.problem import Problem, Schedule
from lngen.schedule import workload
from lngen.schedule.accuracy import STATED, Accuracy
from lngen.schedule.model import estimates, features, terms
from lngen.schedule.space import Numbers, Schedules, roomy_space
from lngen.schedule.table import key_of, rows_of


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
        """Its expected microseconds and their terms, to four digits."""
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
        sentence = f"predicted {change}, {us:.4g} us against {mine:.4g}, the error is {percent(math.exp(error))[1:]}"
        if abs(math.log(us / mine)) > error:
            return Verdict("predicted", f"predicted {change}", sentence, (us, mine))
        return Verdict("unknown", f"cannot tell ({change})", sentence, (us, mine))
