"""A pack of every kind of kernels, its C library, and the launchers, all on one fake GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from c_driver import Bridge
from c_launcher import begin
from c_library import CLibrary
from calls import pack
from fake_arrays import ArraysOf, FakeArray
from fake_driver import FakeDriver
from fake_images import cubins_of_ptx
from launchers import LAUNCHERS, Compiled, Launcher, Torch
from lngen.compiler.compile import KernelSet
from lngen.launch import arrays, driver

pytest.importorskip("cupy")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("calls") / "pack"
    with cubins_of_ptx():
        return pack(out, "sm_90", "ptx,cubin")


@pytest.fixture(scope="session")
def gpu(folder: Path) -> FakeDriver:
    found = FakeDriver(version=14000)
    found.knows_pack(folder)
    begin(found)
    return found


@pytest.fixture(scope="session")
def bridge(gpu: FakeDriver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bridge]:
    found = Bridge(tmp_path_factory.mktemp("driver"))
    with found.behind(gpu):
        yield found


@pytest.fixture(scope="session")
def launcher_of(gpu: FakeDriver, folder: Path, request: Any, tmp_path_factory: Any) -> Callable[[str], Launcher]:
    """The launcher of a name in LAUNCHERS; there is one of each."""

    @cache
    def made(name: str) -> Launcher:
        kind: Any = LAUNCHERS[name]
        if name in ("c", "tvm"):
            ffi = {"LNGEN_TVM_FFI": ""} if name == "tvm" else {}
            out, bridge = tmp_path_factory.mktemp(name), request.getfixturevalue("bridge")
            CLibrary.built(folder, out, LNGEN_PACK_DIR=folder, LNGEN_CUDA_LIBRARY=bridge.path, **ffi)
            given: tuple[Any, ...] = folder, out / "kernels.so"
        elif issubclass(kind, Torch):
            from host_tensors import HostTensors

            given = (HostTensors(gpu),)
        else:
            given = {"numpy": (), "compiled": (ArraysOf(gpu),), "pack": (ArraysOf(gpu), folder)}[name]
        found: Launcher = kind(*given)
        return found

    return made


@pytest.fixture
def launcher(
    request: Any, launcher_of: Any, gpu: FakeDriver, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Launcher]:
    """A launcher by its name, for which the fake GPU is the only one, and its arrays are those of a library."""
    needed = {"tvm": "tvm_ffi"}.get(request.param, "torch" if issubclass(LAUNCHERS[request.param], Torch) else "numpy")
    pytest.importorskip(needed, reason=f"needs {needed}")
    made = launcher_of(request.param)
    begin(gpu)
    monkeypatch.setattr(driver, "library", lambda: gpu)

    def cubin(kernels: KernelSet, arch: str) -> SimpleNamespace:
        return SimpleNamespace(image=gpu.made_up(kernels.text, arch), resources={})

    monkeypatch.setattr(KernelSet, "cubin", cubin)
    if isinstance(made, Compiled):
        monkeypatch.setitem(arrays._BY_TYPE, FakeArray, made.arrays)
    if isinstance(made, Torch):
        yield from of_tensors(made, folder, monkeypatch)
    else:
        yield made


def of_tensors(made: Torch, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """CPU tensors are those of the fake GPU; a hub package has the pack."""
    import torch

    from direct_tensors import forget, map_direct_tensors
    from lngen.launch import direct
    from lngen.launch.hub_package import functional

    monkeypatch.setattr(functional, "__file__", str(folder.with_name("functional.py")))
    functional.pack.cache_clear()
    monkeypatch.setattr(direct, "on_gpu", lambda tensor: made.direct)
    monkeypatch.setitem(arrays._BY_TYPE, torch.Tensor, made.tensors)
    map_direct_tensors(monkeypatch, made.tensors)
    forget()
    yield made
    forget()
