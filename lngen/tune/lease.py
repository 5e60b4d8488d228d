"""Leases: a lock per GPU, held as long as a worker measures on it.

Any number of threads, processes and Dask workers of one user may tune on one machine: each GPU serves one of them at a
time, since two would disturb each other's times. The kernel releases a lock when its process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lngen.runtime.launcher import device_count


def visible_devices() -> tuple[str, ...]:
    """The GPUs of this process as CUDA_VISIBLE_DEVICES names them; empty if there is none."""
    count = device_count()
    named = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    return tuple(named[:count]) if named else tuple(str(n) for n in range(count))


class Lease:
    """A GPU on which no other process measures until ``close``."""

    def __init__(self, gpu: str, handle: int) -> None:
        self.gpu, self._handle = gpu, handle

    def close(self) -> None:
        """Release the GPU."""
        os.close(self._handle)


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
