"""Workspaces: memory that the kernels of a call share, one for each plan on each stream."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from lngen.ir import DType
from lngen.runtime.arrays import Library
from lngen.runtime.driver import PER_THREAD_STREAM, CapturedGraph, capture_of
from lngen.runtime.launch import Bound


@dataclass(slots=True, weakref_slot=True)
class Workspace:
    """Memory that grows; the holder of ``lock`` may request it and launch with it.

    A stream runs launches in order, also programmatic ones: each kernel waits for the completion of the previous one
    before it writes to memory. So calls on one stream can share a workspace, as long as no other kernels run between
    those of a call, which the lock ensures.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    address: int = 0
    size: int = 0
    arrays: list[Any] = field(default_factory=list)  # the last is in use; what still runs may use the others

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


# The workspaces of captured CUDA graphs, whoever made them: a graph may outlive its norm.
_of_graphs: dict[CapturedGraph, Workspace] = {}
_capturing = threading.Lock()


class Workspaces:
    """The workspaces of a spec's plans."""

    def __init__(self) -> None:
        self._held: dict[Hashable, Workspace] = {}
        self._captured: WeakValueDictionary[Hashable, Workspace] = WeakValueDictionary()
        self._local = threading.local()

    def of(self, device: int, stream: int, plan: str) -> Workspace:
        """The workspace of the plan called ``plan`` on ``stream``, a pointer.

        Each capture has its own workspace: its graph may run on any stream, beside other work, and zeroing runs when
        the graph runs, not during the capture. The handle of the per-thread default stream means another stream in
        every thread.
        """
        key = device, stream, plan
        if capture := capture_of(stream):
            return self._of_capture((*key, capture), stream)
        held = self._held
        if stream == PER_THREAD_STREAM:
            held = self._local.__dict__.setdefault("held", {})
        return held.get(key) or held.setdefault(key, Workspace())

    def _of_capture(self, key: Hashable, stream: int) -> Workspace:
        """The workspace of a capture. The next capture frees it, when its graph is gone and runs no more."""
        with _capturing:
            found = self._captured.get(key)
            if found is None:
                for graph in [graph for graph in _of_graphs if graph.ended()]:
                    del _of_graphs[graph]
                found = self._captured[key] = _of_graphs[CapturedGraph(stream)] = Workspace()
            return found
