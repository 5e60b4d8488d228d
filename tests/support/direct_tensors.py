"""CPU tensors that the direct way takes for tensors of a GPU: it launches on a fake driver."""

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fake_driver import FakeDriver
from host_tensors import HostTensors, pass_for_gpu_tensors
from lngen.compiler.compile import KernelSet
from lngen.launch import direct
from lngen.torch.bridge import side

PTX: dict[str, str] = {}  # of each text, compiled once for all tests


def go_the_direct_way(monkeypatch: pytest.MonkeyPatch, *, launches: bool = True) -> FakeDriver:
    """The driver that launches run on, by the PTX that NVRTC makes; the dispatcher's way runs the interpreter.

    Without ``launches`` the driver answers a launch at once, in C, and nothing runs.
    """
    pytest.importorskip("cupy")
    gpu = FakeDriver(version=13090)
    library = pass_for_gpu_tensors(monkeypatch, gpu)
    compiled = KernelSet.cubin

    def cubin(kernels: KernelSet, arch: str) -> Any:
        found = compiled(kernels, arch)
        if kernels.text not in PTX:
            PTX[kernels.text] = kernels.ptx(arch)
        gpu.knows(found.image, PTX[kernels.text], arch, source=kernels.text)
        return found

    monkeypatch.setattr(KernelSet, "cubin", cubin)
    monkeypatch.setattr(direct, "on_gpu", lambda tensor: True)
    forget()
    if not launches:
        new = torch._C._dynamo.guards._empty_strided_cpu
        monkeypatch.setattr(direct, "maker", lambda device: new)
        monkeypatch.setattr(gpu, "cuLaunchKernelEx", ctypes.CDLL(None).pthread_equal)  # of two addresses: 0
        return gpu
    map_direct_tensors(monkeypatch, library)
    return gpu


def map_direct_tensors(monkeypatch: pytest.MonkeyPatch, library: HostTensors) -> None:
    """What the direct way is given and makes is memory of the fake GPU."""

    def known(make: Any) -> Any:
        def made(*args: Any, **options: Any) -> torch.Tensor:
            tensor: torch.Tensor = make(*args, **options)
            library.describe([tensor])
            return tensor

        return made

    written = direct.Kernels._written

    def run_of(kernels: direct.Kernels, given: Sequence[torch.Tensor]) -> Any:
        run = written(kernels, given)

        def launched(*arguments: Any) -> Any:
            library.describe([a for a in arguments if isinstance(a, torch.Tensor)])
            return run(*arguments)

        return launched

    monkeypatch.setattr(direct.Kernels, "_written", run_of)
    new = known(lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype))
    monkeypatch.setattr(direct, "maker", lambda device: new)


def forget() -> None:
    """What earlier calls loaded and prepared is gone."""
    side.cache_clear()
    direct.forget()
