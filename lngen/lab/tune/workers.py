"""Workers: one process per leased GPU, kept from job to job, in which a candidate may crash or hang.

A process pool of the standard library, or a library on top of it, does not do. Its processes import the caller's main
module and take modules from the current folder, a daemon such as a Dask worker may not start them, and one that hangs
outlives a parent that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from lngen.compiler.spec import Spec
from lngen.errors import LngenError
from lngen.lab.bench.timing import Stats, describe
from lngen.lab.tune.candidates import Candidate
from lngen.lab.tune.trials import Device
from lngen.launch.runtime.launcher import device_count

POLL = 0.05  # seconds between two checks whether to stop
LAST_WORDS = 2.0  # seconds in which a process that closed its pipe may end by itself


@dataclass(frozen=True)
class Timed:
    """The times of one set of interleaved rounds, in the order of the candidates: statistics, or a reason.

    reference  microseconds of the copy; ``drift``: how far it moved, relative to itself
    moved      how far the reference moved in rounds that were repeated
    """

    stats: tuple[Stats | str, ...]
    reference: float | None
    drift: float = 0.0
    moved: tuple[float, ...] = ()


class Measurer(Protocol):
    """The measurer of a worker process. Any exception is a failure of the candidate of the request."""

    def device(self) -> Device:
        """The GPU and its compiler."""

    def open(self, spec: Spec, rows: int) -> None:
        """Prepare inputs, expected bits and argument sets; LngenError if that is impossible."""

    def check(self, candidate: Candidate) -> str:
        """Run the candidate on poisoned results; the difference from the interpreter's bits, or an empty text."""

    def time(self, candidates: Sequence[Candidate], rounds: int) -> Timed:
        """Time candidates and the reference side by side."""

    def healthy(self) -> bool:
        """False if the process is no longer usable, as after an illegal access on a GPU."""


# ---- the process ----


@dataclass(frozen=True)
class Answer:
    """The result of a request, or its exception; ``healthy`` False: this process ends now."""

    value: Any = None
    failure: str = ""
    error: LngenError | None = None
    healthy: bool = True


# Not ``-m``: the classes here would then belong to a module __main__, from which no other process can unpickle them.
COMMAND = "import sys; from lngen.lab.tune.workers import serve; serve(*sys.argv[1:])"


def serve(handle: str, name: str) -> None:
    """The main function of a worker process: a measurer answers requests one after the other.

    handle  a pipe; requests and answers are pickled through it
    name    MODULE:CLASS of the measurer
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the parent decides
    connection = Connection(int(handle))
    questions: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, questions), daemon=True).start()
    measurer: Measurer | None = None
    healthy = True
    while healthy:
        method, arguments = questions.get()
        try:
            if measurer is None:
                module, _, attribute = name.partition(":")
                measurer = getattr(import_module(module), attribute)()
            answer = Answer(getattr(measurer, method)(*arguments))
        except LngenError as error:
            answer = Answer(error=error, healthy=measurer is None or _healthy(measurer))
        except Exception as error:  # every exception is reported, not raised
            answer = Answer(failure=describe(error), healthy=measurer is not None and _healthy(measurer))
        connection.send(answer)
        healthy = answer.healthy
    os._exit(0)  # ends without waiting for a GPU that no longer answers


def _healthy(measurer: Measurer) -> bool:
    try:
        return measurer.healthy()
    except Exception:  # a broken context raises at every call
        return False


def _listen(connection: Connection, questions: queue.SimpleQueue[tuple[str, tuple[Any, ...]]]) -> None:
    """Put requests into the queue; when the parent is gone, end the process, whatever it is doing."""
    while True:
        try:
            questions.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)


# ---- its parent ----


@dataclass(frozen=True)
class Limits:
    """Seconds after which a worker counts as hung: while it starts and prepares, checks, times."""

    start: float = 180.0
    check: float = 20.0
    time: float = 60.0


class Failure(Exception):
    """A request without an answer. ``status``: runtime (an error, a crash) or timeout."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class Stopped(Exception):
    """The run is over: the user pressed Ctrl-C."""


class Worker:
    """A process with one GPU and a measurer. A crash or a hang ends the process; the next request starts another.

    measurer  MODULE:CLASS, imported in the process
    gpu       the only GPU visible to the process, as CUDA_VISIBLE_DEVICES names it
    """

    def __init__(
        self, measurer: str, gpu: str, limits: Limits | None = None, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self._measurer, self._gpu, self._stopped = measurer, gpu, stopped
        self._limits = limits or Limits()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed in close)
        self._opened: tuple[Spec, int] | None = None
        self.starts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self._end()
        self._errors.close()

    def device(self) -> Device:
        """The GPU and its compiler."""
        device = self._sure("device")
        assert isinstance(device, Device)
        return device

    def open(self, spec: Spec, rows: int) -> None:
        """Prepare for a spec; repeated whenever the process is started again."""
        self._opened = None
        self._sure("open", spec, rows)
        self._opened = spec, rows

    def check(self, candidate: Candidate) -> str:
        """The difference from the interpreter's bits, or an empty text; Failure if the candidate does not run."""
        return str(self._try(self._limits.check, "check", candidate))

    def time(self, candidates: Sequence[Candidate], rounds: int) -> Timed:
        """Time candidates and the reference side by side; Failure if one of them does not run."""
        timed = self._try(self._limits.time, "time", tuple(candidates), rounds)
        assert isinstance(timed, Timed)
        return timed

    def _sure(self, method: str, *arguments: Any) -> Any:
        """A request that no candidate can make fail: a failure ends the job."""
        self._ensure()
        try:
            return self._request(self._limits.start, method, *arguments)
        except Failure as failure:
            raise LngenError(
                f"the worker process cannot measure on GPU {self._gpu}: {failure.reason}; 'lngen doctor' says what "
                "is missing."
            ) from failure

    def _try(self, seconds: float, method: str, *arguments: Any) -> Any:
        """A request about candidates: an exception is their failure."""
        self._ensure()
        try:
            return self._request(seconds, method, *arguments)
        except LngenError as error:  # a launch that the driver refuses, for example
            raise Failure("runtime", str(error)) from error

    def _ensure(self) -> None:
        """Start the process if there is none; it imports what this one can import, and nothing else."""
        if self._process is not None:
            return
        ours, theirs = Pipe()
        search = os.pathsep.join(p or os.getcwd() for p in sys.path)
        self._errors.truncate(0)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", COMMAND, str(theirs.fileno()), self._measurer],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": self._gpu, "PYTHONPATH": search},
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._connection = ours
        self.starts += 1
        if self._opened is not None:
            self._sure("open", *self._opened)

    def _request(self, seconds: float, method: str, *arguments: Any) -> Any:
        assert self._connection is not None
        deadline = time.monotonic() + seconds
        try:
            self._connection.send((method, arguments))
            while True:
                if self._stopped():
                    self._end()
                    raise Stopped
                if self._connection.poll(POLL):
                    break
                if time.monotonic() > deadline:
                    self._end()
                    raise Failure("timeout", f"no answer within {seconds:g} s; its process was killed")
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise Failure("runtime", self._last_words()) from None
        assert isinstance(answer, Answer)
        if not answer.healthy:
            self._end()
        if answer.error is not None:
            raise answer.error
        if answer.failure:
            raise Failure("runtime", answer.failure)
        return answer.value

    def _last_words(self) -> str:
        """How the process died, and the last line of its output."""
        code = self._end(LAST_WORDS)
        how = f"exit code {code}"
        with contextlib.suppress(ValueError):
            how = signal.Signals(-code).name if code < 0 else how
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"the worker process died ({how})" + (f": {lines[-1].strip()[:200]}" if lines else "")

    def _end(self, grace: float = 0.0) -> int:
        """Kill the process, after ``grace`` seconds in which it may end by itself; its exit code."""
        process, self._process = self._process, None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if process is None:
            return 0
        if grace:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace)
        process.kill()
        return process.wait()


# ---- leases: a lock per GPU, held as long as a worker measures on it ----


def visible_devices() -> tuple[str, ...]:
    """The GPUs of this process as CUDA_VISIBLE_DEVICES names them; empty if there is none."""
    count = device_count()
    named = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    return tuple(named[:count]) if named else tuple(str(n) for n in range(count))


@dataclass(frozen=True)
class Lease:
    """A GPU on which no other process of this user measures until ``close``.

    Two measurements on one GPU would disturb each other's times. The kernel releases a lock when its process ends,
    however it ends.
    """

    gpu: str
    handle: int

    def close(self) -> None:
        """Release the GPU."""
        os.close(self.handle)


def take(devices: Sequence[str]) -> Lease | None:
    """The first of ``devices`` that is free, None if none is."""
    folder = Path(tempfile.gettempdir()) / f"lngen-gpus-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for gpu in devices:
        handle = os.open(folder / f"{re.sub(r'[^A-Za-z0-9-]', '_', gpu)}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
        else:
            return Lease(gpu, handle)
    return None


# ---- the workers of a run ----


@dataclass(frozen=True)
class Setup:
    """The requirements of a job: the measurer, the GPUs to choose from, the timeouts."""

    measurer: str
    devices: tuple[str, ...]
    limits: Limits


class Workers:
    """Lends workers to jobs, one per job at a time, since starting a process and its GPU takes seconds.

    ``stopped``: while it is true, every call raises Stopped. Any number of threads may use it.
    """

    def __init__(self, stopped: Callable[[], bool] = lambda: False) -> None:
        self._stopped = stopped
        self._idle: list[tuple[Setup, Lease, Worker]] = []
        self._guard, self._asking = threading.Lock(), threading.Lock()
        self._devices: dict[Setup, Device] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._close_idle()

    def device(self, setup: Setup) -> Device:
        """A GPU that a worker would have, and its compiler; cached, so that only the first call waits."""
        with self._asking:
            if setup not in self._devices:
                with self.worker(setup) as worker:
                    self._devices[setup] = worker.device()
            return self._devices[setup]

    @contextlib.contextmanager
    def worker(self, setup: Setup) -> Iterator[Worker]:
        """A worker for exclusive use; waits for one."""
        entry = self._take(setup)
        try:
            yield entry[2]
        finally:
            with self._guard:
                self._idle.append(entry)

    def _take(self, setup: Setup) -> tuple[Setup, Lease, Worker]:
        while not self._stopped():
            with self._guard:
                for n, (of, _, _) in enumerate(self._idle):
                    if of == setup:
                        return self._idle.pop(n)
                self._close_idle()  # idle workers of other setups may hold the GPU that is needed here
                lease = take(setup.devices)
                if lease is not None:
                    return setup, lease, Worker(setup.measurer, lease.gpu, setup.limits, self._stopped)
            time.sleep(POLL)
        raise Stopped

    def _close_idle(self) -> None:
        while self._idle:
            _, lease, worker = self._idle.pop()
            worker.close()
            lease.close()
