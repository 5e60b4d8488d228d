"""If these fail, a launcher gives other bits on a GPU than the interpreter, or refuses other calls than on a fake one.

The calls are those of tests/calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from c_library import CLibrary
from calls import GIVEN, SCHEDULES, TABLE, Call, Memory, of_every_spec, pack
from launchers import C, CCall, Compiled, Direct, HubDirect, Launcher, Packed, TvmFfi, tensor_at, wrong
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array
from lngen.dtypes import DType
from lngen.launch.runtime.launcher import device_arch

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")


class OnGpu:
    """The memories of a call in tensors of bytes."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.bytes = {name: torch.from_numpy(content).cuda() for name, content in memory.before.items()}
        self.rooms: list[Any] = []

    def address(self, name: str) -> int:
        memory, at = self.memory.place(name)
        return int(self.bytes[memory].data_ptr()) + at

    def after(self, memory: str) -> Array:
        return np.asarray(self.bytes[memory].cpu())

    def view(self, name: str) -> Array:
        return self.memory.view(name, self.after(self.memory.laid[name].memory))

    def tensor(self, name: str) -> Any:
        return tensor_at(self.memory, name, self.bytes[self.memory.laid[name].memory])

    def room(self, size: int) -> int:
        self.rooms.append(torch.full((size,), 0xFE, dtype=torch.uint8, device="cuda"))
        return int(self.rooms[-1].data_ptr())


class TorchArrays:
    """Tensors as a library of arrays."""

    def of_call(self, host: OnGpu, name: str) -> Any:
        return host.tensor(name)

    def put(self, content: Array) -> Any:
        made = torch.empty(content.shape, dtype=getattr(torch, DType.of(content.dtype).library))
        if content.size:
            made.view(torch.uint8).numpy()[...] = np.ascontiguousarray(content).view(np.uint8)
        return made.cuda()

    def read(self, array: Any) -> Array:
        bytes_ = np.asarray(array.contiguous().flatten().view(torch.uint8).cpu())
        return bytes_.view(NUMPY_DTYPE[DType.of(array.dtype)]).reshape(array.shape)


class CupyArrays(TorchArrays):
    """CuPy arrays, which may have strides below 0."""

    def of_call(self, host: OnGpu, name: str) -> Any:
        import cupy

        laid, (memory, at) = host.memory.laid[name], host.memory.place(name)
        pointer = cupy.from_dlpack(host.bytes[memory]).data + at
        strides = [step * laid.size for step in laid.strides]
        return cupy.ndarray(laid.shape, NUMPY_DTYPE[DType(laid.dtype)], pointer, strides)

    def put(self, content: Array) -> Any:
        import cupy

        return cupy.asarray(content)

    def read(self, array: Any) -> Array:
        return np.asarray(array.get())


KINDS: dict[str, type[Launcher]] = {
    "CuPy": Compiled, "torch": Compiled, "pack": Packed, "C": C, "TVM FFI": TvmFfi, "functions": Direct,
    "hub": HubDirect,
}  # fmt: skip


CALLS = TABLE | dict(of_every_spec((5000,)))  # rows of which a pack has other kernels


def takes(kind: str, call: Call) -> bool:
    """Tensors of PyTorch have no strides below 0."""
    below = any(step < 0 for place in call.at.values() for step in place.strides)
    return KINDS[kind].takes(call) and (kind in ("CuPy", "C", "TVM FFI") or not below)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(tmp_path_factory.mktemp("calls") / "pack", device_arch(0), "cubin", "1,many")


@pytest.fixture(scope="module")
def launcher_of(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Launcher]:
    @cache
    def made(kind: str) -> Launcher:
        of: Any = KINDS[kind]
        if of in (C, TvmFfi):
            out = tmp_path_factory.mktemp("library")
            CLibrary.built(folder, out, LNGEN_PACK_DIR=folder, **({} if of is C else {"LNGEN_TVM_FFI": ""}))
            given: tuple[Any, ...] = folder, out / "kernels.so"
        else:
            arrays = CupyArrays() if kind == "CuPy" else TorchArrays()
            given = (arrays, folder) if of is Packed else (arrays,)
        found: Launcher = of(*given)
        return found

    return made


def needs_its_schedule(spec: str) -> None:
    """Skips a spec whose schedule this GPU does not have."""
    if spec in SCHEDULES and device_arch(0) != "sm_90":
        pytest.skip("its schedule is for 9.0")


@pytest.mark.parametrize("spec", dict.fromkeys(call.spec for call in CALLS.values()))
@pytest.mark.parametrize("kind", KINDS)
def test_calls_have_the_bits_of_the_interpreter_or_are_refused(
    launcher_of: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, spec: str
) -> None:
    needs_its_schedule(spec)
    if kind == "TVM FFI":
        pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")
    if kind == "hub":
        from lngen.launch.hub_package import functional

        monkeypatch.setattr(functional, "__file__", str(folder.with_name("functional.py")))
    found = {}
    for name, call in CALLS.items():
        if call.spec == spec and takes(kind, call):
            memory = Memory(call)
            found[name] = wrong(launcher_of(kind), memory, OnGpu(memory))
    assert {name: faults for name, faults in found.items() if faults} == {}


@pytest.mark.parametrize("name", GIVEN)
def test_a_graph_holds_a_call_of_c(launcher_of: Any, name: str) -> None:
    """Host memory is seen before."""
    c, memory = launcher_of("C"), Memory(GIVEN[name])
    needs_its_schedule(memory.call.spec)
    call, graph = CCall(c.library, c.groups[str(memory.spec)], memory, OnGpu(memory)), torch.cuda.CUDAGraph()
    call.prepare()
    first = memory.signature.inputs[0].name
    assert call.status(**{first: memory.before[first].ctypes.data // 256 * 256}) == "WRONG_DEVICE"
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call.launch(torch.cuda.current_stream().cuda_stream)
    assert call.wrong() != []
    for _ in range(2):
        graph.replay()
        assert call.wrong() == []
