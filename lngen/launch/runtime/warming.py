"""Kernels that are made before a call asks for them: threads compile side by side, since NVRTC releases Python's lock.

A call that comes meanwhile waits for its own kernels alone, or makes them itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any

from lngen.launch import driver
from lngen.launch.kernels import Loaded
from lngen.launch.runtime.direction import Call

THREADS = min(4, os.cpu_count() or 1)

Maker = Callable[[], Call | None]  # of a call, which may have to be derived; None if there is none after all


def begun(pool: Executor, makers: Iterable[Maker], device: int, rows: int | None = None) -> list[Future[Loaded]]:
    """The kernels of calls for about that many rows on a device, or (None) for any number of rows, being made."""

    def begin(make: Maker) -> list[Future[Loaded]]:
        call = make()
        if call is None:
            return []
        return [pool.submit(call.launcher, device, rows=count) for count in call.row_counts(device, rows)]

    return [future for one in [pool.submit(begin, make) for make in makers] for future in one.result()]


def begin_unseen(makers: Iterable[Maker], device: int) -> None:
    """The same in the background, for any number of rows, and many first.

    What cannot be made is left to the call that asks for it, which says why. The end of the program waits for no more
    than what is being compiled.
    """

    def begin(make: Maker) -> None:
        call = make()
        if call is not None:
            for count in reversed(call.row_counts(device)):
                _background().submit(_unseen, call.launcher, device, rows=count)

    def begin_all() -> None:
        for make in makers:
            _unseen(begin, make)

    _background().submit(begin_all)


def _unseen(job: Callable[..., Any], *given: Any, **named: Any) -> None:
    """Do it, whatever comes of it; the main thread is gone when the program ends."""
    if threading.main_thread().is_alive():
        with suppress(Exception), driver.beside_captures():
            job(*given, **named)


@cache
def _background() -> Executor:
    return ThreadPoolExecutor(THREADS, "lngen-warm")
