"""The workers of a run: one per leased GPU, kept from job to job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from lngen.tune.lease import Lease, take
from lngen.tune.trial import Device
from lngen.tune.worker import POLL, Limits, Stopped, Worker


@dataclass(frozen=True)
class Setup:
    """The requirements of a job: the measurer, the GPUs to choose from, the timeouts."""

    measurer: str
    devices: tuple[str, ...]
    limits: Limits


@dataclass(frozen=True)
class _Entry:
    setup: Setup
    lease: Lease
    worker: Worker

    def close(self) -> None:
        self.worker.close()
        self.lease.close()


class Pool:
    """Lends workers to jobs, one per job at a time, since starting a process and its GPU takes seconds.

    ``stopped``: while it is true, every call raises Stopped. Any number of threads may use a pool.
    """

    def __init__(self, stopped: Callable[[], bool] = lambda: False) -> None:
        self._stopped = stopped
        self._idle: list[_Entry] = []
        self._guard, self._asking = threading.Lock(), threading.Lock()
        self._devices: dict[Setup, Device] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        while self._idle:
            self._idle.pop().close()

    def device(self, setup: Setup) -> Device:
        """A GPU that a worker would have, and its compiler; cached, so that only the first call waits."""
        with self._asking:
            if setup not in self._devices:
                with self.worker(setup) as worker:
                    self._devices[setup] = worker.device()
            return self._devices[setup]

    @contextmanager
    def worker(self, setup: Setup) -> Iterator[Worker]:
        """A worker for exclusive use; waits for one."""
        entry = self._take(setup)
        try:
            yield entry.worker
        finally:
            with self._guard:
                self._idle.append(entry)

    def _take(self, setup: Setup) -> _Entry:
        while not self._stopped():
            with self._guard:
                for entry in self._idle:
                    if entry.setup == setup:
                        self._idle.remove(entry)
                        return entry
                while self._idle:  # idle workers of other setups may hold the GPU that is needed here
                    self._idle.pop().close()
                lease = take(setup.devices)
                if lease is not None:
                    return _Entry(setup, lease, Worker(setup.measurer, lease.gpu, setup.limits, self._stopped))
            time.sleep(POLL)
        raise Stopped
