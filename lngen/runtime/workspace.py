"""Workspaces: memory that the kernels of a call share, one for each plan on each stream."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from lngen.ir import DType
from lngen.runtime.arrays import Library
from lngen.runtime.driver import PER_THREAD_STREAM, capture_of
from lngen.runtime.launch import Bound


@dataclass(slots=True)
class Workspace:
    """Memory that grows; the holder of ``lock`` may request it and launch with it.

    A stream runs launches in order, also programmatic ones: each kernel waits for the completion of the previous one
    before it writes to memory. So calls on one stream can share a workspace, as long as no other kernels run between
    those of a call, which the lock ensures.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    address: int = 0
    size: int = 0
    arrays: list[Any] = field(default_factory=list)  # the last is in use; a captured CUDA graph may use the others

    def fit(self, library: Library, device: int, stream: int, bound: Bound) -> int:
        """The address of a workspace that is large enough for ``bound``, and prepared for it."""
        if self.size < bound.workspace_bytes:
            size = max(bound.workspace_bytes, 2 * self.size)
            array = library.maker((-(-size // 8),), DType.F64, device)()
            (address,), _ = library.describe([array])
            bound.prepare(address, stream)
            self.arrays.append(array)
            self.address, self.size = address, size
        return self.address


class Workspaces:
    """The workspaces of a spec's plans."""

    def __init__(self) -> None:
        self._held: dict[Hashable, Workspace] = {}
        self._local = threading.local()

    def of(self, device: int, stream: int, plan: str) -> Workspace:
        """The workspace of the plan called ``plan`` on ``stream``, a pointer.

        Each capture has its own workspace: its graph may run on any stream, beside other work, and zeroing runs when
        the graph runs, not during the capture. The handle of the per-thread default stream means another stream in
        every thread.
        """
        capture = capture_of(stream)
        held = self._held
        if stream == PER_THREAD_STREAM and not capture:
            held = self._local.__dict__.setdefault("held", {})
        key = device, stream, plan, capture
        return held.get(key) or held.setdefault(key, Workspace())
