"""Engines: arrays, CUDA graphs and events of the library in use, PyTorch or else CuPy."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lngen.bench.cupy_engine import CupyEngine
from lngen.bench.floor import memory_peak
from lngen.bench.timing import Launch
from lngen.errors import MissingError
from lngen.ir import DType
from lngen.runtime.launch import device_count

Array = Any


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

    def normal(self, shape: Sequence[int], dtype: DType, mean: float, seed: int, *, positive: bool = False) -> Array:
        """A new array of normal numbers with standard deviation 1, made positive as ``lngen.check.inputs`` does."""

    def clone(self, array: Array) -> Array:
        """A copy."""

    def alike(self, array: Array) -> Array:
        """A new array of that shape and dtype."""

    def host(self, array: Array) -> NDArray[np.float64]:
        """A float64 array, copied to the host."""

    def array(self, values: NDArray[np.float64]) -> Array:
        """A new float64 array with these values."""

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

    def normal(self, shape: Sequence[int], dtype: DType, mean: float, seed: int, *, positive: bool = False) -> Array:
        t = self._torch
        generator = t.Generator(device=self._device)
        generator.manual_seed(seed)
        values = t.randn(tuple(shape), generator=generator, dtype=t.float32, device=self._device)
        values.add_(mean)
        return (values.abs_().add_(0.25) if positive else values).to(self._dtypes[dtype])

    def clone(self, array: Array) -> Array:
        return array.clone()

    def alike(self, array: Array) -> Array:
        return self._torch.empty_like(array)

    def host(self, array: Array) -> NDArray[np.float64]:
        return np.asarray(array.cpu().numpy())

    def array(self, values: NDArray[np.float64]) -> Array:
        return self._torch.from_numpy(values).to(self._device)

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
