"""Engines: arrays, CUDA graphs and events of the library in use, PyTorch or else CuPy."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np

from lngen.bench.floor import memory_peak
from lngen.bench.timing import Launch
from lngen.errors import MissingError
from lngen.ir import DType
from lngen.runtime.launch import device_count

Array = Any

CUPY_DTYPES = {DType.F16: "float16", DType.BF16: "uint16", DType.F32: "float32", DType.F64: "float64"}


class Engine(Protocol):
    """A GPU as the benchmark uses it. All work is on the engine's own stream, inside ``active()``."""

    name: str

    def active(self) -> AbstractContextManager[None]:
        """Make the engine's stream the library's current one."""

    def stream(self) -> int:
        """The current stream, as a pointer."""

    def synchronize(self) -> None:
        """Wait for all work."""

    def device(self) -> tuple[int, str]:
        """Number and name of the GPU."""

    def memory(self) -> tuple[int, int]:
        """Free bytes, and bytes of the L2 cache."""

    def peak(self) -> float:
        """10^9 bytes per second that the memory can move at most, from its clock and width."""

    def release(self) -> None:
        """Return cached memory."""

    def empty(self, shape: Sequence[int], dtype: DType) -> Array:
        """A new array."""

    def normal(self, shape: Sequence[int], dtype: DType, mean: float, seed: int) -> Array:
        """A new array of normal numbers with standard deviation 1."""

    def clone(self, array: Array) -> Array:
        """A copy."""

    def poison(self, array: Array) -> None:
        """Fill with a value that no kernel computes."""

    def wide(self, array: Array) -> Array:
        """As float64."""

    def pointer(self, array: Array) -> int:
        """The address."""

    def copy(self, out: Array, x: Array) -> None:
        """``out = x``, by the library's copy, which is the driver's."""

    def scale(self, out: Array, x: Array) -> None:
        """``out = 1 * x``, an elementwise kernel that copies."""

    def add(self, out: Array, x: Array, y: Array) -> None:
        """``out = x + y``, the backward ceiling."""

    def capture(self, launch: Launch, indices: Sequence[int]) -> Any:
        """A replayable graph of one launch per index."""

    def elapsed(self, graphs: Sequence[Any]) -> list[float]:
        """Replay the graphs in the given order, back to back; milliseconds of each."""


def make_engine() -> Engine:
    """PyTorch's if it is installed with CUDA, else CuPy's; MissingError without a GPU."""
    if device_count() == 0:
        raise MissingError(
            "lngen bench needs an NVIDIA GPU and CuPy, but found no GPU that CuPy can use; 'lngen doctor' says what is "
            "missing, and 'lngen tune SPEC --ranking' shows without one how the model ranks the schedules."
        )
    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return TorchEngine()
    return CupyEngine()


class TorchEngine:
    """PyTorch on its current GPU."""

    name = "torch"

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._side = torch.cuda.Stream(self._device)

    @property
    def _dtypes(self) -> dict[DType, Any]:
        t = self._torch
        return {DType.F16: t.float16, DType.BF16: t.bfloat16, DType.F32: t.float32, DType.F64: t.float64}

    @contextmanager
    def active(self) -> Iterator[None]:
        with self._torch.cuda.stream(self._side):
            yield

    def stream(self) -> int:
        return int(self._torch.cuda.current_stream().cuda_stream)

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()

    def device(self) -> tuple[int, str]:
        return self._device.index or 0, str(self._torch.cuda.get_device_name(self._device))

    def memory(self) -> tuple[int, int]:
        properties = self._torch.cuda.get_device_properties(self._device)
        return int(self._torch.cuda.mem_get_info()[0]), int(getattr(properties, "L2_cache_size", 64 << 20))

    def peak(self) -> float:
        return memory_peak(self.device()[0])

    def release(self) -> None:
        self._torch.cuda.empty_cache()

    def empty(self, shape: Sequence[int], dtype: DType) -> Array:
        return self._torch.empty(tuple(shape), dtype=self._dtypes[dtype], device=self._device)

    def normal(self, shape: Sequence[int], dtype: DType, mean: float, seed: int) -> Array:
        t = self._torch
        generator = t.Generator(device=self._device)
        generator.manual_seed(seed)
        values = t.randn(tuple(shape), generator=generator, dtype=t.float32, device=self._device)
        return values.add_(mean).to(self._dtypes[dtype])

    def clone(self, array: Array) -> Array:
        return array.clone()

    def poison(self, array: Array) -> None:
        array.fill_(float("nan"))

    def wide(self, array: Array) -> Array:
        return array.detach().to(self._torch.float64)

    def pointer(self, array: Array) -> int:
        return int(array.data_ptr())

    def copy(self, out: Array, x: Array) -> None:
        out.copy_(x)

    def scale(self, out: Array, x: Array) -> None:
        self._torch.mul(x, 1, out=out)

    def add(self, out: Array, x: Array, y: Array) -> None:
        self._torch.add(x, y, out=out)

    def capture(self, launch: Launch, indices: Sequence[int]) -> Any:
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph, stream=self._side):
            stream = self.stream()
            for index in indices:
                launch(stream, index)
        return graph

    def elapsed(self, graphs: Sequence[Any]) -> list[float]:
        event = self._torch.cuda.Event
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in graphs]
        with self.active():
            for graph, (start, end) in zip(graphs, pairs, strict=True):
                start.record()
                graph.replay()
                end.record()
        self.synchronize()
        return [float(start.elapsed_time(end)) for start, end in pairs]


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
        return self._cupy.empty(tuple(shape), CUPY_DTYPES[dtype])

    def normal(self, shape: Sequence[int], dtype: DType, mean: float, seed: int) -> Array:
        count = int(np.prod(shape))
        drawn = np.random.default_rng(seed).normal(mean, 1.0, min(count, 1_000_003)).astype(np.float32)
        values = self._cupy.resize(self._cupy.asarray(drawn), tuple(shape))
        if dtype is DType.BF16:  # truncated, since any bf16 number near a normal one is suitable
            return (values.view("uint32") >> 16).astype("uint16")
        return values.astype(CUPY_DTYPES[dtype])

    def clone(self, array: Array) -> Array:
        return array.copy()

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
