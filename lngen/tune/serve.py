"""The worker process: a measurer that answers requests one after the other.

Started as ``python -c COMMAND FD MODULE:CLASS``; requests and answers are pickled through the pipe FD.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, Protocol

from lngen.bench.timing import Stats, describe
from lngen.errors import LngenError
from lngen.spec import Spec
from lngen.tune.build import Candidate
from lngen.tune.trial import Device


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


@dataclass(frozen=True)
class Answer:
    """The result of a request, or its exception; ``healthy`` False: this process ends now."""

    value: Any = None
    failure: str = ""
    error: LngenError | None = None
    healthy: bool = True


# Not ``-m``: the classes here would then belong to a module __main__, from which no other process can unpickle them.
COMMAND = "import sys; from lngen.tune.serve import main; main(*sys.argv[1:])"


def main(handle: str, name: str) -> None:
    """The main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the parent decides
    serve(Connection(int(handle)), name)
    os._exit(0)  # ends without waiting for a GPU that no longer answers


def serve(connection: Connection, name: str) -> None:
    """Answer until the other end of the pipe closes."""
    questions: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, questions), daemon=True).start()
    measurer: Measurer | None = None
    while True:
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
        if not answer.healthy:
            return


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
