"""The GPU of a benchmark as PyTorch has it: memory, random inputs, CUDA graphs and events on a stream of their own."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lngen.compiler.ir import DType
from lngen.errors import MissingError
from lngen.files import load_cupy
from lngen.lab.bench.timing import Launch
from lngen.launch.arrays import torch_dtypes
from lngen.launch.runtime.launcher import device_count
from lngen.version import install_hint

Array = Any
"""A torch tensor."""


def find_gpu() -> Gpu:
    """PyTorch's current GPU; MissingError without one, or without PyTorch or CuPy, which launches lngen's kernels."""
    if importlib.util.find_spec("torch") is None:
        raise MissingError(
            f"lngen bench needs PyTorch, which is not installed; install it with: {install_hint('bench')}. "
            "'lngen bench --from FILE' shows a file without it, and 'lngen tune SPEC' times schedules without it."
        )
    import torch

    if device_count() == 0 or not torch.cuda.is_available():
        raise MissingError(
            "lngen bench needs an NVIDIA GPU that CuPy and PyTorch can use, but found none; 'lngen doctor' says what "
            "is missing, and 'lngen tune SPEC --ranking' shows without one how the model ranks the schedules."
        )
    return Gpu()


class Gpu:
    """PyTorch's current GPU. All work is on one stream, inside ``active()``; graphs are captured from it."""

    def __init__(self) -> None:
        import torch

        self.torch, self.device = torch, torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self.device)

    @property
    def number(self) -> int:
        """As CUDA counts."""
        return int(self.device.index)

    @property
    def name(self) -> str:
        """As the driver names it."""
        return str(self.torch.cuda.get_device_name(self.device))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make the stream PyTorch's current one."""
        with self.torch.cuda.stream(self._stream):
            yield

    def stream(self) -> int:
        """PyTorch's current stream, as a pointer."""
        return int(self.torch.cuda.current_stream(self.device).cuda_stream)

    def synchronize(self) -> None:
        """Wait for all work."""
        self.torch.cuda.synchronize(self.device)

    def memory(self) -> tuple[int, int]:
        """Free bytes, and bytes of the L2 cache."""
        properties = self.torch.cuda.get_device_properties(self.device)
        return int(self.torch.cuda.mem_get_info(self.device)[0]), int(getattr(properties, "L2_cache_size", 64 << 20))

    def peak(self) -> float:
        """10^9 bytes per second that the memory can move at most: two transfers a clock over the whole bus.

        Infinite where the driver does not report its clock.
        """
        runtime = load_cupy().cuda.runtime
        khz = runtime.deviceGetAttribute(runtime.cudaDevAttrMemoryClockRate, self.number)
        bits = runtime.deviceGetAttribute(runtime.cudaDevAttrGlobalMemoryBusWidth, self.number)
        return float(2 * khz * bits / 8 / 1e6) or math.inf

    def release(self) -> None:
        """Return cached memory."""
        self.torch.cuda.empty_cache()

    def empty(self, shape: Sequence[int], dtype: DType) -> Array:
        """A new array."""
        return self.torch.empty(tuple(shape), dtype=torch_dtypes()[dtype], device=self.device)

    def normal(self, shape: Sequence[int], dtype: DType, mean: float, seed: int, *, positive: bool = False) -> Array:
        """A new array of normal numbers with standard deviation 1, made positive as ``check.inputs`` does."""
        generator = self.torch.Generator(device=self.device)
        generator.manual_seed(seed)
        values = self.torch.randn(tuple(shape), generator=generator, device=self.device).add_(mean)
        return (values.abs_().add_(0.25) if positive else values).to(torch_dtypes()[dtype])

    def whole(self, shape: Sequence[int], dtype: DType, end: int, seed: int) -> Array:
        """A new array of whole numbers from 0, below ``end``."""
        generator = self.torch.Generator(device=self.device)
        generator.manual_seed(seed)
        values = self.torch.randint(end, tuple(shape), generator=generator, device=self.device)
        return values.to(torch_dtypes()[dtype])

    def capture(self, launch: Launch, indices: Sequence[int]) -> Any:
        """A replayable graph of one launch per index."""
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, stream=self._stream):
            stream = self.stream()
            for index in indices:
                launch(stream, index)
        return graph

    def elapsed(self, graphs: Sequence[Any]) -> list[float]:
        """Replay the graphs in the given order, back to back; milliseconds of each."""
        pairs = [tuple(self.torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in graphs]
        with self.active():
            for graph, (start, end) in zip(graphs, pairs, strict=True):
                start.record()
                graph.replay()
                end.record()
        self.synchronize()
        return [float(start.elapsed_time(end)) for start, end in pairs]
