"""One job: the best schedule of one spec at one number of rows, on one GPU.

Two candidates closer than the noise are a tie, and a tie goes to the first in the model's order. So runs choose alike,
although their times differ.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from lngen.compiler.compile import Compilation
from lngen.compiler.devices import live_device
from lngen.compiler.spec import Spec
from lngen.errors import MissingError
from lngen.lab.bench.timing import DRIFT, ROUNDS
from lngen.lab.tune.candidates import Candidate, build_trials, candidates
from lngen.lab.tune.trials import Device, Trial, latest
from lngen.lab.tune.workers import Failure, Limits, Setup, Stopped, Worker, Workers, visible_devices

NOISE = 0.01  # two medians that differ by less are equal
MOST_NOISE = 0.03  # the most that a wide spread may raise it to
NEAR = 0.05  # brief rounds are less exact: trials this close to the best go on
FINALISTS = 8
FASTEST = 3  # of the finalists, chosen by time alone
GPU, OVERLAPPING = "lngen.lab.tune.measure:GpuMeasurer", "lngen.lab.tune.measure:OverlappingMeasurer"
BRIEF_ROUNDS, FINAL_ROUNDS = 4, ROUNDS
GROUP = 8  # candidates timed side by side
# Of the budget. No build starts after so long a time of building, which precedes the budget, and no brief round so long
# after the first one: before its end the worker and the GPU start, and inputs and the first kernels are loaded.
BUILD_SHARE, BRIEF_SHARE = 0.4, 0.75
NO_GPU = (
    "lngen tune needs an NVIDIA GPU and CuPy, but found no GPU that CuPy can use; 'lngen doctor' says what is "
    "missing, and 'lngen tune SPEC --ranking' prints the model's order without one."
)


@dataclass(frozen=True)
class Choice:
    """The chosen trial, and all that tie with it (itself included), in order."""

    trial: Trial
    ties: tuple[Trial, ...]


def finalists(trials: Sequence[Trial]) -> list[Trial]:
    """The trials to time again, in rank order.

    These are the first of all, which is the default, so that the gain of tuning is known; the fastest few; and the
    first in order of those near the fastest.
    """
    timed = sorted((t for t in trials if t.timed), key=_order)
    fastest = sorted(timed, key=lambda t: (t.ratio, *_order(t)))
    near = [t for t in timed if t.ratio <= (1 + NEAR) * fastest[0].ratio]
    chosen = dict.fromkeys([*timed[:1], *fastest[:FASTEST], *near])
    return sorted([*chosen][:FINALISTS], key=_order)


def choose(trials: Sequence[Trial], incumbent: str = "") -> Choice | None:
    """The choice among trials of one job; None if none has a time.

    Only trials with the most rounds count. ``incumbent``, the schedule chosen before, wins a tie, so that a lock
    file does not change without reason.
    """
    timed = [t for t in trials if t.timed]
    if not timed:
        return None
    rounds = max(t.rounds for t in timed)
    final = sorted((t for t in timed if t.rounds == rounds), key=_order)
    best = min(final, key=lambda t: (t.ratio, *_order(t)))
    ties = tuple(t for t in final if t.ratio <= (1 + noise(best)) * best.ratio)
    return Choice(next((t for t in ties if t.schedule == incumbent), ties[0]), ties)


def taken(trials: Sequence[Trial], schedule: str) -> Choice | None:
    """The choice that a lock file names, among trials of one job; None if it has no time there."""
    return next((Choice(t, (t,)) for t in trials if t.timed and t.schedule == schedule), None)


def noise(trial: Trial) -> float:
    """The fraction by which a candidate may be slower than ``trial`` and still tie with it."""
    if not trial.us_median or trial.us_p10 is None or trial.us_p90 is None:
        return NOISE
    spread = (trial.us_p90 - trial.us_p10) / 2 / trial.us_median
    return min(max(spread, NOISE), MOST_NOISE)


def _order(trial: Trial) -> tuple[int, str]:
    return trial.rank, trial.schedule


@dataclass(frozen=True)
class Job:
    """What to tune, and the limits. It can be pickled.

    seconds     budget, from the first measured trial on; candidates not reached within it are left out
    trials      number of candidates at most that do not spill, the first of the model's order
    known       trials of an earlier run, which are not repeated
    incumbents  (device name, schedule) chosen before, which win ties
    measurer    MODULE:CLASS of the measurer
    devices     GPUs to choose from as CUDA_VISIBLE_DEVICES names them; None: those visible where the job runs
    """

    spec: Spec
    rows: int
    seconds: float = 20.0
    trials: int = 64
    known: tuple[Trial, ...] = ()
    incumbents: tuple[tuple[str, str], ...] = ()
    measurer: str = GPU
    devices: tuple[str, ...] | None = None
    limits: Limits = field(default_factory=Limits)

    def __str__(self) -> str:
        return f"{self.spec} rows={self.rows}"


@dataclass(frozen=True)
class Outcome:
    """The result of a job.

    trials    one per candidate, old and new; ``new``: the records of this run, which may have two of a candidate
    choice    None if no candidate is correct and timed
    complete  False if the budget or the user ended the job early
    skipped   number of schedules that were not compiled because one like them has spilled
    """

    spec: str
    rows: int
    device: Device | None = None
    trials: tuple[Trial, ...] = ()
    new: tuple[Trial, ...] = ()
    choice: Choice | None = None
    complete: bool = False
    messages: tuple[str, ...] = ()
    error: str = ""
    seconds: float = 0.0
    skipped: int = 0


class Listener:
    """The callbacks of a running job, and the request to stop. This one does nothing."""

    def stopped(self) -> bool:
        """True: end as soon as possible, with the results so far."""
        return False

    def recorded(self, trials: Sequence[Trial]) -> None:
        """Trials to be recorded, as soon as they are known."""

    def progress(self, job: Job, done: int, total: int, best: Trial | None) -> None:
        """Number of candidates done, number of all, and the fastest so far."""

    def message(self, text: str) -> None:
        """A message for the user."""


def run_job(job: Job, listener: Listener | None = None, workers: Workers | None = None) -> Outcome:
    """Tune one spec on the first free GPU; MissingError if there is none. Runs on any executor.

    workers  shared with other jobs of this process; by default of its own
    """
    listener = listener or Listener()
    if workers is None:
        with Workers(listener.stopped) as own:
            return run_job(job, listener, own)
    devices = visible_devices() if job.devices is None else job.devices
    if not devices:
        raise MissingError(NO_GPU)
    return _Run(job, workers, Setup(job.measurer, devices, job.limits), listener).run()


class _Run:
    """A job in progress."""

    def __init__(self, job: Job, workers: Workers, setup: Setup, listener: Listener) -> None:
        self._job, self._workers, self._setup, self._listener = job, workers, setup, listener
        self._worker: Worker | None = None
        self._device: Device | None = None
        self._total = self._skipped = 0
        self._trials: list[Trial] = []
        self._new: list[Trial] = []
        self._messages: list[str] = []

    def run(self) -> Outcome:
        """Builds without holding the GPU, so that another job may use it meanwhile; then measures."""
        start = time.monotonic()
        complete, waited = False, 0.0
        try:
            self._device = self._workers.device(self._setup)
            built = self._build()
            if self._missing(built):
                waiting = time.monotonic()
                with self._workers.worker(self._setup) as self._worker:
                    waited = time.monotonic() - waiting
                    if self._worker.device() != self._device:  # the GPUs of this machine differ
                        self._device = self._worker.device()
                        built = self._build()
                    complete = self._measure(built)
            else:
                complete = len(built) == self._total
        except Stopped:
            pass
        seconds = round(time.monotonic() - start - waited, 1)
        return replace(self._outcome(), complete=complete, seconds=seconds, skipped=self._skipped)

    def _outcome(self) -> Outcome:
        """The outcome so far."""
        incumbents = dict(self._job.incumbents)
        trials = latest(self._trials)
        choice = choose(trials, incumbents.get(self._device.name, "") if self._device else "")
        spec, rows = str(self._job.spec), self._job.rows
        return Outcome(
            spec, rows, self._device, tuple(trials), tuple(self._new), choice, messages=tuple(self._messages)
        )

    def _build(self) -> list[Candidate]:
        """Every candidate there is time for; failures are recorded, known trials are not built again."""
        job, device = self._job, self._device
        assert device is not None
        compilation = Compilation(job.spec)
        gpu = live_device(device.arch, {"name": device.name})
        ranked = candidates(compilation, job.rows, device.arch, gpu)
        self._total = min(job.trials, len(ranked))
        self._report(0)
        seconds, stopped = BUILD_SHARE * job.seconds, self._listener.stopped
        found = build_trials(compilation, ranked, device.arch, job.trials, seconds=seconds, stopped=stopped)
        built, self._skipped = [*found.candidates], found.skipped
        self._total = len(built) + found.left
        ranks = {self._trial(c).identity: c.rank for c in built}
        # The ranks are those of the current model, which may differ from those of the recorded trials.
        self._trials = [replace(t, rank=ranks[t.identity]) for t in job.known if t.identity in ranks]
        known = {t.identity for t in self._trials}
        failed = [self._trial(c) for c in built if c.status != "correct"]
        self._record([t for t in failed if t.identity not in known])
        return built

    def _missing(self, built: Sequence[Candidate]) -> bool:
        """True if something is left to be measured."""
        return bool(self._fresh(built)) or any(t.rounds < FINAL_ROUNDS for t in self._best())

    def _measure(self, built: Sequence[Candidate]) -> bool:
        """Checks and briefly times new candidates, then times the best again; True if every candidate was reached."""
        worker, job = self._worker, self._job
        assert worker is not None
        worker.open(job.spec, job.rows)
        complete = len(built) == self._total
        waiting = self._fresh(built)
        done, until = len(built) - len(waiting), math.inf
        for group in _groups(waiting):
            if time.monotonic() > until:
                complete = False
                break
            self._brief(group)
            done += len(group)
            self._report(done)
            if until == math.inf and self._timed():
                until = time.monotonic() + BRIEF_SHARE * job.seconds
        usable = {self._trial(c).identity: c for c in built}
        best = self._best()
        if any(t.rounds < FINAL_ROUNDS for t in best):
            self._time([usable[t.identity] for t in best], FINAL_ROUNDS)
        self._report(done)
        return complete

    def _fresh(self, built: Sequence[Candidate]) -> list[Candidate]:
        """Candidates without a trial."""
        known = {t.identity for t in self._trials}
        return [c for c in built if c.status == "correct" and self._trial(c).identity not in known]

    def _best(self) -> list[Trial]:
        """The latest trials of the finalists; only brief rounds decide, so that a resumed run has the same."""
        failed = {t.identity for t in self._trials if t.status != "correct"}
        brief = [t for t in self._trials if t.rounds == BRIEF_ROUNDS and t.identity not in failed]
        chosen = {t.identity for t in finalists(latest(brief))}
        return [t for t in latest(self._trials) if t.identity in chosen]

    def _brief(self, group: Sequence[Candidate]) -> None:
        """Checks every candidate's bits, then times the correct ones."""
        worker = self._worker
        assert worker is not None
        right = []
        for candidate in group:
            try:
                wrong = worker.check(candidate)
            except Failure as failure:
                self._record([self._trial(candidate, failure.status, failure.reason)])
                continue
            if wrong:
                self._record([self._trial(candidate, "correctness", wrong)])
            else:
                right.append(candidate)
        if right:
            self._time(right, BRIEF_ROUNDS)

    def _time(self, group: Sequence[Candidate], rounds: int) -> None:
        """Times side by side; if the worker dies, one by one, so that only the culprit fails."""
        worker = self._worker
        assert worker is not None
        try:
            timed = worker.time(group, rounds)
        except Failure as failure:
            if len(group) == 1:
                self._record([self._trial(group[0], failure.status, failure.reason)])
            else:
                for candidate in group:
                    self._time([candidate], rounds)
            return
        for moved in timed.moved:
            self._say(
                f"{self._job}: the reference moved by {moved:.1%}, the GPU is busy or throttling; these "
                "rounds were repeated."
            )
        trials = []
        for candidate, stats in zip(group, timed.stats, strict=True):
            if isinstance(stats, str):
                trials.append(self._trial(candidate, "runtime", stats))
                continue
            us = {f"us_{k}": round(getattr(stats, k), 3) for k in ("median", "p10", "p90")}
            reference = None if timed.reference is None else round(timed.reference, 3)
            drifted = timed.drift > DRIFT
            trials.append(replace(self._trial(candidate), **us, reference=reference, rounds=rounds, drifted=drifted))
        self._record(trials)

    def _trial(self, c: Candidate, status: str = "", reason: str = "") -> Trial:
        device = self._device
        assert device is not None
        where = str(self._job.spec), self._job.rows, device.name, device.compiler
        used, in_turn = (c.registers, c.shared, c.compile_ms), self._job.measurer != OVERLAPPING
        trial = Trial(*where, str(c.schedule), c.kernel, c.rank, status or c.status, reason or c.reason)
        today = datetime.now(UTC).date().isoformat()
        return replace(trial, registers=used[0], shared=used[1], compile_ms=used[2], date=today, in_turn=in_turn)

    def _record(self, trials: Sequence[Trial]) -> None:
        self._trials += trials
        self._new += trials
        self._listener.recorded(trials)

    def _timed(self) -> list[Trial]:
        return [t for t in latest(self._trials) if t.timed]

    def _report(self, done: int) -> None:
        timed = self._timed()
        self._listener.progress(self._job, done, self._total, min(timed, key=lambda t: t.ratio, default=None))

    def _say(self, text: str) -> None:
        self._messages.append(text)
        self._listener.message(text)


def _groups(waiting: Sequence[Candidate]) -> Iterator[Sequence[Candidate]]:
    for start in range(0, len(waiting), GROUP):
        yield waiting[start : start + GROUP]
