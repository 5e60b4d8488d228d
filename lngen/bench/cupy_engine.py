"""The engine on CuPy, for a benchmark without PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lngen.bench.floor import memory_peak
from lngen.bench.timing import Launch
from lngen.check.inputs import normal
from lngen.ir import DType

Array = Any

DTYPES = {DType.F16: "float16", DType.BF16: "uint16", DType.F32: "float32", DType.F64: "float64"}


class CupyEngine:
    """CuPy on its current GPU; bf16 is held as its 16 bits.

    CuPy's kernels move one element at a time. Scaling and addition here only provide a time, so they treat 16 bytes
    as one element, as PyTorch's kernels move them: the bytes are the same, the numbers are not.
    """

    name = "cupy"

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._side = cupy.cuda.Stream(non_blocking=True)

    @contextmanager
    def active(self) -> Iterator[None]:
        with self._side:
            yield

    def stream(self) -> int:
        return int(self._cupy.cuda.get_current_stream().ptr)

    def synchronize(self) -> None:
        self._cupy.cuda.runtime.deviceSynchronize()

    def _properties(self) -> dict[str, Any]:
        runtime = self._cupy.cuda.runtime
        properties: dict[str, Any] = runtime.getDeviceProperties(runtime.getDevice())
        return properties

    def device(self) -> tuple[int, str]:
        return int(self._cupy.cuda.runtime.getDevice()), self._properties()["name"].decode()

    def memory(self) -> tuple[int, int]:
        free = int(self._cupy.cuda.runtime.memGetInfo()[0])
        return free, int(self._properties().get("l2CacheSize", 64 << 20))

    def peak(self) -> float:
        return memory_peak(self.device()[0])

    def release(self) -> None:
        self._cupy.get_default_memory_pool().free_all_blocks()

    def empty(self, shape: Sequence[int], dtype: DType) -> Array:
        return self._cupy.empty(tuple(shape), DTYPES[dtype])

    def normal(self, shape: Sequence[int], dtype: DType, mean: float, seed: int, *, positive: bool = False) -> Array:
        count = min(int(np.prod(shape)), 1_000_003)
        drawn = normal(np.random.default_rng(seed), (count,), mean, positive=positive).astype(np.float32)
        values = self._cupy.resize(self._cupy.asarray(drawn), tuple(shape))
        if dtype is DType.BF16:  # truncated, since any bf16 number near a normal one is suitable
            return (values.view("uint32") >> 16).astype("uint16")
        return values.astype(DTYPES[dtype])

    def clone(self, array: Array) -> Array:
        return array.copy()

    def alike(self, array: Array) -> Array:
        return self._cupy.empty_like(array)

    def host(self, array: Array) -> NDArray[np.float64]:
        return np.asarray(self._cupy.asnumpy(array))

    def array(self, values: NDArray[np.float64]) -> Array:
        return self._cupy.asarray(values)

    def poison(self, array: Array) -> None:
        array.fill(0x7FFF if array.dtype == np.uint16 else np.nan)

    def wide(self, array: Array) -> Array:
        if array.dtype == np.uint16:
            array = (array.astype("uint32") << 16).view("float32")
        return array.astype("float64")

    def pointer(self, array: Array) -> int:
        return int(array.data.ptr)

    def copy(self, out: Array, x: Array) -> None:
        self._cupy.copyto(out, x)

    def scale(self, out: Array, x: Array) -> None:
        self._cupy.positive(_words(x), out=_words(out))

    def add(self, out: Array, x: Array, y: Array) -> None:
        self._cupy.add(_words(x), _words(y), out=_words(out))

    def capture(self, launch: Launch, indices: Sequence[int]) -> Any:
        with self._side:
            self._side.begin_capture()
            try:
                for index in indices:
                    launch(self._side.ptr, index)
            finally:
                graph = self._side.end_capture()
        return graph

    def elapsed(self, graphs: Sequence[Any]) -> list[float]:
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
