"""CPU tensors of PyTorch that pass for tensors of a GPU, whose memory is that of a fake driver."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_driver import FakeDriver
from lngen.launch import arrays, driver
from lngen.launch.arrays import Layout, Torch
from lngen.launch.signature import contiguous


class HostTensors(Torch):
    """The library of such tensors; a tensor that a call sees becomes memory of the device, without a copy.

    seen   the tensors, which have to outlive the launches
    """

    def __init__(self, gpu: FakeDriver) -> None:
        super().__init__()
        self.gpu, self.seen = gpu, list[torch.Tensor]()
        self.stream = lambda device: 0

    def describe(self, arrays: Sequence[Any]) -> tuple[list[int], list[Layout]]:
        pointers, layouts = super().describe(arrays)
        for tensor in arrays:
            storage = tensor.untyped_storage()
            self.gpu.maps(storage.data_ptr(), storage.nbytes(), f"tensor{len(self.seen)}")
            self.seen.append(tensor)
        return pointers, [(dtype, shape, strides, 0) for dtype, shape, strides, _ in layouts]

    def maker(
        self, shape: Sequence[int], dtype: str, device: int, strides: Sequence[int] = ()
    ) -> Callable[[], torch.Tensor]:
        steps = tuple(strides) or contiguous(shape)
        whole = math.prod((*shape[:1], *steps[:1]))
        return lambda: torch.empty(whole, dtype=self.to_torch[dtype]).as_strided_(tuple(shape), steps)


def pass_for_gpu_tensors(monkeypatch: pytest.MonkeyPatch, gpu: FakeDriver) -> HostTensors:
    """All CPU tensors are memory of a fake GPU, which all launches run on."""
    library = HostTensors(gpu)
    monkeypatch.setattr(driver, "library", lambda: gpu)
    monkeypatch.setitem(arrays._BY_TYPE, torch.Tensor, library)
    assert gpu.cuInit(0) == 0
    return library


def gpu_with(monkeypatch: pytest.MonkeyPatch, folder: Path) -> FakeDriver:
    """A fake GPU for CPU tensors that knows the pack in a folder."""
    found = FakeDriver(version=13090)
    found.knows_pack(folder)
    pass_for_gpu_tensors(monkeypatch, found)
    return found
