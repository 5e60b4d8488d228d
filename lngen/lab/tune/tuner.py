"""A run: jobs on any executor, every trial recorded, Ctrl-C keeps the best so far; a lock file gets the choices."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from pathlib import Path

from lngen.compiler.spec import Spec
from lngen.errors import LngenError, LockError, MissingError
from lngen.files import exclusive, resolved, write_in_order
from lngen.lab.tune import trials
from lngen.lab.tune.job import NO_GPU, Job, Listener, Outcome, run_job
from lngen.lab.tune.trials import Trial
from lngen.lab.tune.workers import Workers, visible_devices
from lngen.launch.runtime.lock_file import Lock, Locked, read_lock


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

    def recorded(self, new: Sequence[Trial]) -> None:
        with self._writing:
            trials.append(self._path, new)
        self._listener.recorded(new)

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
    with Workers(keeper.stopped) as workers, ThreadPoolExecutor(len(devices) + 1) as pool:
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


# ---- the lock file; runtime/lock_file.py has the format ----


def store_choices(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Put the choices of outcomes into the lock file; they replace those for the same device, spec and rows.

    The replacement is atomic, and concurrent additions of others are kept.
    """
    chosen = [
        Locked(o.device.name, o.device.arch, o.spec, o.rows, o.choice.trial.schedule)
        for o in outcomes
        if o.choice is not None and o.device is not None
    ]
    if not chosen:
        return
    path = resolved(path)
    with exclusive(path.parent, path.name) as staging:
        write_in_order([(path, read_lock(path, missing_ok=True).updated(chosen).render().encode())], staging)


def incumbents(lock: Lock, spec: Spec, rows: int) -> tuple[tuple[str, str], ...]:
    """(device, schedule) locked for a spec at a number of rows."""
    return tuple((e.device, e.schedule) for e in lock.entries if (e.spec, e.rows) == (str(spec), rows))


def frozen_choices(lock: Lock, specs: Sequence[Spec], rows: Sequence[int], device: str | None) -> list[Locked]:
    """The choices for every spec and number of rows, on ``device`` (None: any); LockError if a spec is not locked.

    ``Lock.nearest`` chooses, as for ``compile(lock=)`` and ``lngen build --lock``: rows that are not locked get the
    choice for the nearest number of rows.
    """
    found = []
    for spec in specs:
        for m in rows:
            entry = lock.nearest(str(spec), m, device=device)
            if entry is None:
                where = f" on {device}" if device else ""
                raise LockError(
                    f"'{lock.path}' is frozen and holds no schedule for {spec}{where}; run 'lngen tune {spec} "
                    f"--rows {m}' without --frozen, and keep the lock file."
                )
            found.append(entry)
    return found
