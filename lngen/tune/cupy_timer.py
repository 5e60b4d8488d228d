"""CuPy's current GPU as the tuner uses it: memory, CUDA graphs and events on a stream of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from lngen.bench.timing import Launch

Array = Any


class CupyTimer:
    """Copies, captures and times. All work is on one stream, inside ``active()``."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._side = cupy.cuda.Stream(non_blocking=True)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make the stream CuPy's current one."""
        with self._side:
            yield

    def stream(self) -> int:
        """CuPy's current stream, as a pointer."""
        return int(self._cupy.cuda.get_current_stream().ptr)

    def synchronize(self) -> None:
        """Wait for all work."""
        self._cupy.cuda.runtime.deviceSynchronize()

    def _properties(self) -> dict[str, Any]:
        runtime = self._cupy.cuda.runtime
        properties: dict[str, Any] = runtime.getDeviceProperties(runtime.getDevice())
        return properties

    def name(self) -> str:
        """As the driver names the GPU."""
        return str(self._properties()["name"].decode())

    def memory(self) -> tuple[int, int]:
        """Free bytes, and bytes of the L2 cache."""
        free = int(self._cupy.cuda.runtime.memGetInfo()[0])
        return free, int(self._properties().get("l2CacheSize", 64 << 20))

    def release(self) -> None:
        """Return cached memory."""
        self._cupy.get_default_memory_pool().free_all_blocks()

    def pointer(self, array: Array) -> int:
        """The address."""
        return int(array.data.ptr)

    def copy(self, out: Array, x: Array) -> None:
        """``out = x``, by the driver's copy."""
        self._cupy.copyto(out, x)

    def add(self, out: Array, x: Array, y: Array) -> None:
        """``out = x + y`` as a time: 16 bytes are one element, as PyTorch's kernels move them, so numbers differ."""
        self._cupy.add(_words(x), _words(y), out=_words(out))

    def capture(self, launch: Launch, indices: Sequence[int]) -> Any:
        """A replayable graph of one launch per index."""
        with self._side:
            self._side.begin_capture()
            try:
                for index in indices:
                    launch(self._side.ptr, index)
            finally:
                graph = self._side.end_capture()
        return graph

    def elapsed(self, graphs: Sequence[Any]) -> list[float]:
        """Replay the graphs in the given order, back to back; milliseconds of each."""
        event = self._cupy.cuda.Event
        pairs = [(event(), event()) for _ in graphs]
        for graph, (start, end) in zip(graphs, pairs, strict=True):
            start.record(self._side)
            graph.launch(self._side)
            end.record(self._side)
        self.synchronize()
        return [float(self._cupy.cuda.get_elapsed_time(start, end)) for start, end in pairs]


def _words(array: Array) -> Array:
    """The same memory as elements of 16 bytes, if its size is a multiple of 16."""
    flat = array.reshape(-1)
    return flat.view(np.complex128) if flat.nbytes % 16 == 0 else flat
