"""Worker processes of the tuner that are forked from one process, which has imported what they need.

A worker that Python starts imports NumPy and lngen first, which takes most of the time of a test.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, Any, Self

LARGEST = 1 << 20  # bytes of a request
COMMAND = "import sys, tune_nursery; tune_nursery.serve(int(sys.argv[1]))"


def serve(handle: int) -> None:
    """Fork a worker for each request, until the other end is closed."""
    import tune_fakes  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the guards
    requests = socket.socket(fileno=handle)
    while True:
        message, handles, _, _ = socket.recv_fds(requests, LARGEST, 3)
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            _guard(json.loads(message), *handles)
        for handle in handles:
            os.close(handle)


def _guard(request: Mapping[str, Any], pipe: int, output: int, status: int) -> None:
    """Fork the worker, and write its number and, when it has ended, its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    worker = os.fork()
    if worker == 0:
        from lngen.lab.tune.workers import serve

        os.close(status)
        for number, to in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
            os.dup2(number, to)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["folder"])
        tempfile.tempdir = None
        serve(str(pipe), request["measurer"])
    os.close(pipe)
    os.write(status, f"{worker}\n".encode())
    _, how = os.waitpid(worker, 0)
    os.write(status, f"{os.waitstatus_to_exitcode(how)}\n".encode())
    os._exit(0)


class Forked:
    """What ``lngen.lab.tune.workers`` uses of a Popen."""

    def __init__(self, status: socket.socket) -> None:
        self._status = status.makefile("r")
        status.close()
        self._pid = int(self._status.readline())
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; TimeoutExpired if it does not end in time."""
        if self._code is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("worker", timeout or 0.0)
            self._code = int(self._status.readline())
            self._status.close()
        return self._code

    def kill(self) -> None:
        """End it, unless it has ended."""
        if self._code is None:
            try:
                os.kill(self._pid, signal.SIGKILL)
            except ProcessLookupError:
                return


class Nursery:
    """The process, and a function that takes the place of ``subprocess.Popen``."""

    def __enter__(self) -> Self:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
        command = [sys.executable, "-P", "-c", COMMAND, str(theirs.fileno())]
        self._process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()])
        theirs.close()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._requests.close()
        self._process.wait()

    def popen(
        self, command: Sequence[str], *, env: Mapping[str, str], stdin: int, stdout: IO[bytes], stderr: IO[bytes],
        pass_fds: Sequence[int],
    ) -> Forked:  # fmt: skip
        """A worker as ``lngen.lab.tune.workers`` starts it."""
        ours, theirs = socket.socketpair()
        request = json.dumps({"env": {**env}, "folder": os.getcwd(), "measurer": command[-1]}).encode()
        socket.send_fds(self._requests, [request], [pass_fds[0], stdout.fileno(), theirs.fileno()])
        theirs.close()
        return Forked(ours)
