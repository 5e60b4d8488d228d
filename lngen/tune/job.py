"""One job: the best schedule of one spec at one number of rows, on one GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from lngen.bench.timing import DRIFT, ROUNDS
from lngen.compile import Compilation
from lngen.errors import MissingError
from lngen.spec import Spec
from lngen.tune.build import Candidate, build_all
from lngen.tune.candidates import candidates
from lngen.tune.choose import Choice, choose, finalists
from lngen.tune.lease import visible_devices
from lngen.tune.pool import Pool, Setup
from lngen.tune.trial import Device, Trial, latest
from lngen.tune.worker import Failure, Limits, Stopped, Worker

GPU, OVERLAPPING = "lngen.tune.measure:GpuMeasurer", "lngen.tune.measure:OverlappingMeasurer"
BRIEF_ROUNDS, FINAL_ROUNDS = 4, ROUNDS
GROUP = 8  # candidates timed side by side
BUILD_SHARE, BRIEF_SHARE = 0.4, 0.75  # of the budget, after which no build or no brief round starts
NO_GPU = (
    "lngen tune needs an NVIDIA GPU and CuPy, but found no GPU that CuPy can use; 'lngen doctor' says what is "
    "missing, and 'lngen tune SPEC --ranking' prints the model's order without one."
)


@dataclass(frozen=True)
class Job:
    """What to tune, and the limits. Can be pickled if the spec can.

    seconds     budget; candidates not reached within it are left out
    trials      number of candidates at most, the first of the model's order
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


def run_job(job: Job, listener: Listener | None = None, pool: Pool | None = None) -> Outcome:
    """Tune one spec on the first free GPU; MissingError if there is none. Runs on any executor.

    pool  workers shared with other jobs of this process; by default a pool of its own
    """
    listener = listener or Listener()
    if pool is None:
        with Pool(listener.stopped) as own:
            return run_job(job, listener, own)
    devices = visible_devices() if job.devices is None else job.devices
    if not devices:
        raise MissingError(NO_GPU)
    return _Run(job, pool, Setup(job.measurer, devices, job.limits), listener).run()


class _Run:
    """A job in progress."""

    def __init__(self, job: Job, pool: Pool, setup: Setup, listener: Listener) -> None:
        self._job, self._pool, self._setup, self._listener = job, pool, setup, listener
        self._worker: Worker | None = None
        self._device: Device | None = None
        self._total = 0
        self._trials: list[Trial] = []
        self._new: list[Trial] = []
        self._messages: list[str] = []

    def run(self) -> Outcome:
        """Builds without holding the GPU, so that another job may use it meanwhile; then measures."""
        start = time.monotonic()
        complete, waited = False, 0.0
        try:
            self._device = self._pool.device(self._setup)
            built = self._build()
            if self._missing(built):
                waiting = time.monotonic()
                with self._pool.worker(self._setup) as self._worker:
                    waited = time.monotonic() - waiting
                    if self._worker.device() != self._device:  # the GPUs of this machine differ
                        self._device = self._worker.device()
                        built = self._build()
                    complete = self._measure(built, start + waited + self._job.seconds)
            else:
                complete = len(built) == self._total
        except Stopped:
            pass
        return replace(self._outcome(), complete=complete, seconds=round(time.monotonic() - start - waited, 1))

    def _outcome(self) -> Outcome:
        """The outcome so far."""
        incumbents = dict(self._job.incumbents)
        trials = latest(self._trials)
        choice = choose(trials, incumbents.get(self._device.name, "") if self._device else "")
        spec, rows = str(self._job.spec), self._job.rows
        return Outcome(
            spec, rows, self._device, tuple(trials), tuple(self._new), choice, messages=tuple(self._messages)
        )

    # ---- stages ----

    def _build(self) -> list[Candidate]:
        """Every candidate there is time for; failures are recorded, known trials are not built again."""
        job, device = self._job, self._device
        assert device is not None
        compilation = Compilation(job.spec)
        ranked = [*enumerate(candidates(compilation, job.rows, device.arch)[: job.trials])]
        self._total = len(ranked)
        self._report(0)
        built = build_all(
            compilation, ranked, device.arch, seconds=BUILD_SHARE * job.seconds, stopped=self._listener.stopped
        )
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

    def _measure(self, built: Sequence[Candidate], deadline: float) -> bool:
        """Checks and briefly times new candidates, then times the best again; True if every candidate was reached."""
        worker, job = self._worker, self._job
        assert worker is not None
        worker.open(job.spec, job.rows)
        complete = len(built) == self._total
        waiting = self._fresh(built)
        done = len(built) - len(waiting)
        for group in _groups(waiting):
            if time.monotonic() > deadline - (1 - BRIEF_SHARE) * job.seconds and self._timed():
                complete = False
                break
            self._brief(group)
            done += len(group)
            self._report(done)
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

    # ---- records ----

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
