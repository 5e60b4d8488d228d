"""Tuning: jobs on any executor, every trial recorded, Ctrl-C keeps the best so far."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from pathlib import Path

from lngen.errors import LngenError, MissingError
from lngen.tune import database
from lngen.tune.job import NO_GPU, Job, Listener, Outcome, run_job
from lngen.tune.lease import visible_devices
from lngen.tune.pool import Pool
from lngen.tune.trial import Trial


@dataclass(frozen=True)
class Report:
    """The result of a run: an outcome per job reached, in the jobs' order. ``interrupted``: by Ctrl-C."""

    outcomes: tuple[Outcome, ...]
    interrupted: bool = False


class Keeper(Listener):
    """Puts trials into the database at once and passes everything on; shared by the threads of a run."""

    def __init__(self, path: Path, listener: Listener) -> None:
        self._path, self._listener = path, listener
        self._writing = threading.Lock()
        self._stop = threading.Event()

    def stop(self) -> None:
        """End every job."""
        self._stop.set()

    def stopped(self) -> bool:
        return self._stop.is_set() or self._listener.stopped()

    def recorded(self, trials: Sequence[Trial]) -> None:
        with self._writing:
            database.append(self._path, trials)
        self._listener.recorded(trials)

    def progress(self, job: Job, done: int, total: int, best: Trial | None) -> None:
        self._listener.progress(job, done, total, best)

    def message(self, text: str) -> None:
        self._listener.message(text)


def tune(
    jobs: Sequence[Job], path: Path, *, executor: Executor | None = None, listener: Listener | None = None
) -> Report:
    """Run jobs; their trials are appended to the database at ``path``.

    executor  where the jobs run, each on a GPU visible there; its trials arrive when a job ends. None: threads of this
              process, which keep a worker process per visible GPU; one job builds while another measures, and trials
              are recorded at once
    Ctrl-C ends the run with the results so far. MissingError without a GPU; another error of a job is in its outcome.
    """
    keeper = Keeper(path, listener or Listener())
    if executor is not None:
        futures = {executor.submit(run_job, job): n for n, job in enumerate(jobs)}
        return _collect(futures, jobs, keeper, remote=True)
    devices = {d for job in jobs for d in job.devices or ()} or {*visible_devices()}
    if not devices:
        raise MissingError(NO_GPU)
    with Pool(keeper.stopped) as workers, ThreadPoolExecutor(len(devices) + 1) as pool:
        futures = {pool.submit(run_job, job, keeper, workers): n for n, job in enumerate(jobs)}
        return _collect(futures, jobs, keeper, remote=False)


def _collect(futures: dict[Future[Outcome], int], jobs: Sequence[Job], keeper: Keeper, *, remote: bool) -> Report:
    """Collects outcomes; Ctrl-C cancels the jobs that have not started and, in this process, stops those that have."""
    found: dict[int, Outcome] = {}
    interrupted = False
    try:
        for future in as_completed(futures):
            _take(future, futures[future], jobs, keeper, found, remote)
    except KeyboardInterrupt:
        interrupted = True
        _stop(futures, keeper)
        if not remote:
            wait([f for f in futures if not f.cancelled()])
        for future, n in futures.items():
            if future.done() and not future.cancelled() and n not in found:
                _take(future, n, jobs, keeper, found, remote)
    except BaseException:
        _stop(futures, keeper)
        raise
    return Report(tuple(found[n] for n in sorted(found)), interrupted)


def _stop(futures: dict[Future[Outcome], int], keeper: Keeper) -> None:
    keeper.stop()
    for future in futures:
        future.cancel()


def _take(
    future: Future[Outcome], n: int, jobs: Sequence[Job], keeper: Keeper, found: dict[int, Outcome], remote: bool
) -> None:
    try:
        outcome = future.result()
    except MissingError:
        raise
    except LngenError as error:
        outcome = Outcome(str(jobs[n].spec), jobs[n].rows, error=str(error))
    if remote:
        keeper.recorded(outcome.new)
        for text in outcome.messages:
            keeper.message(text)
        best = outcome.choice.trial if outcome.choice else None
        keeper.progress(jobs[n], len(outcome.trials), len(outcome.trials), best)
    found[n] = outcome
