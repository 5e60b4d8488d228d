"""A worker process, from its parent: requests, timeouts, kills, restarts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from lngen.errors import LngenError
from lngen.spec import Spec
from lngen.tune.build import Candidate
from lngen.tune.serve import COMMAND, Answer, Timed
from lngen.tune.trial import Device

POLL = 0.05  # seconds between two checks whether to stop


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

    measurer  MODULE:CLASS, imported in the process; see ``lngen.tune.serve.Measurer``
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

    # ---- requests ----

    def device(self) -> Device:
        """The GPU and its compiler."""
        self._ensure()
        device = self._sure("device")
        assert isinstance(device, Device)
        return device

    def open(self, spec: Spec, rows: int) -> None:
        """Prepare for a spec; repeated whenever the process is started again."""
        self._opened = None
        self._ensure()
        self._sure("open", spec, rows)
        self._opened = spec, rows

    def check(self, candidate: Candidate) -> str:
        """The difference from the interpreter's bits, or an empty text; Failure if the candidate does not run."""
        self._ensure()
        return str(self._try(self._limits.check, "check", candidate))

    def time(self, candidates: Sequence[Candidate], rounds: int) -> Timed:
        """Time candidates and the reference side by side; Failure if one of them does not run."""
        self._ensure()
        timed = self._try(self._limits.time, "time", tuple(candidates), rounds)
        assert isinstance(timed, Timed)
        return timed

    # ---- the process ----

    def _ensure(self) -> None:
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

    def _sure(self, method: str, *arguments: Any) -> Any:
        """A request that no candidate can make fail: a failure ends the job."""
        try:
            return self._request(self._limits.start, method, *arguments)
        except Failure as failure:
            raise LngenError(
                f"the worker process cannot measure on GPU {self._gpu}: {failure.reason}; 'lngen doctor' says what "
                "is missing."
            ) from failure

    def _try(self, seconds: float, method: str, *arguments: Any) -> Any:
        """A request about candidates: an exception is their failure."""
        try:
            return self._request(seconds, method, *arguments)
        except LngenError as error:  # a launch that the driver refuses, for example
            raise Failure("runtime", str(error)) from error

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
        process = self._process
        self._end(grace=2.0)
        code = process.returncode if process is not None else 0
        how = f"exit code {code}"
        with contextlib.suppress(ValueError):
            how = signal.Signals(-code).name if code < 0 else how
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"the worker process died ({how})" + (f": {lines[-1].strip()[:200]}" if lines else "")

    def _end(self, grace: float = 0.0) -> None:
        """Kill the process, after ``grace`` seconds in which it may end by itself."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            if grace:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(grace)
            self._process.kill()
            self._process.wait()
        self._process = self._connection = None
