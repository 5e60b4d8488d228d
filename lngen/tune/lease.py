"""Which GPU is free: a lock per GPU, held as long as a worker measures on it.

Any number of threads, processes and Dask workers of one user may tune on one machine: each GPU serves one of them
at a time, or they would measure each other. The kernel gives a lock back when its process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lngen.runtime.launch import device_count


def visible_devices() -> tuple[str, ...]:
    """The GPUs of this process as CUDA_VISIBLE_DEVICES names them; empty if there is none."""
    count = device_count()
    named = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    return tuple(named[:count]) if named else tuple(str(n) for n in range(count))


@contextmanager
def lease(devices: Sequence[str], stopped: Callable[[], bool] = lambda: False) -> Iterator[str | None]:
    """One of ``devices`` that nobody else measures on, waiting until there is one; None once ``stopped``."""
    folder = Path(tempfile.gettempdir()) / f"lngen-gpus-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    while not stopped():
        for device in devices:
            handle = os.open(folder / f"{re.sub(r'[^A-Za-z0-9-]', '_', device)}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                if _locked(handle):
                    yield device
                    return
            finally:
                os.close(handle)
        time.sleep(0.05)
    yield None


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
