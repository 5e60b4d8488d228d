"""If these fail, kernels are launched with wrong arguments or attributes, or a refused launch is not explained."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lngen.devices import device_for
from lngen.errors import LngenError, MissingError
from lngen.lower import Kernel, requested_shared
from lngen.runtime import driver
from lngen.runtime.driver import (
    CLUSTER_DIMENSION,
    COOPERATIVE,
    COOPERATIVE_LAUNCH_TOO_LARGE,
    MAX_DYNAMIC_SHARED_SIZE_BYTES,
    NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
    NUM_REGS,
    PROGRAMMATIC_STREAM_SERIALIZATION,
    Launch,
    allow_cluster,
    allow_shared,
    registers,
)
from lngen.runtime.launcher import Launcher, _Arguments
from test_lower import PLANS, plan_of

REFUSED = 719  # any CUresult but success


class Recorder:
    """A driver that refuses with ``status`` and keeps what it was asked."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.launched: list[dict[str, Any]] = []
        self.attributes: list[tuple[int, int, int]] = []

    def cuLaunchKernelEx(self, config: Any, function: Any, arguments: Any, extra: None) -> int:
        c = config._obj
        listed = ctypes.cast(c.attributes, ctypes.POINTER(driver._Attribute))
        self.launched.append({
            "grid": tuple(c.grid), "block": tuple(c.block), "shared": c.shared, "stream": c.stream,
            "attributes": {listed[n].id: tuple(listed[n].value[:3]) for n in range(c.count)},
            "function": function.value, "values": [ctypes.c_longlong.from_address(p).value for p in arguments],
        })  # fmt: skip
        return self.status

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        self.attributes.append((function.value, attribute, value))
        return self.status

    def cuFuncGetAttribute(self, number: Any, attribute: int, function: Any) -> int:
        number._obj.value = 100 * attribute + function.value
        return self.status

    def cuStreamGetCaptureInfo_v2(self, stream: Any, status: Any, number: Any, *others: None) -> int:
        """Streams of 64 and more are being captured, their number is the capture's; 63 has failed."""
        assert others == (None, None, None)
        at = stream.value or 0
        status._obj.value, number._obj.value = int(at >= 64), at
        return 901 if at == 63 else self.status

    def cuGetErrorName(self, status: int, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_OF_A_TEST"
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Recorder]:
    def use(status: int = 0) -> Recorder:
        recorder = Recorder(status)
        monkeypatch.setattr(driver, "library", lambda: recorder)
        return recorder

    return use


def kernel(name: str) -> Kernel:
    return plan_of(*PLANS[name]).kernels[0]


def launch(k: Kernel, rows: int, dependent: bool) -> None:
    """The kernel launched on stream 7: a tensor's pointer is 1000 and its place, a buffer's offset 256."""
    tensors = [a.tensor for a in k.arguments if a.kind in ("input", "output")]
    strides = {a.tensor: 4096 for a in k.arguments if a.kind == "stride"}
    offsets = {a.tensor: 256 for a in k.arguments if a.kind == "workspace"}
    bound = _Arguments(k, 99, rows, tensors, strides, offsets, k.dynamic + 4096, dependent)
    for position, index in bound.tensors:
        bound.values[position] = 1000 + index
    for position, offset in bound.buffers:
        bound.values[position] = 5000 + offset
    bound.launch(7)


@pytest.mark.parametrize(
    ("name", "rows", "dependent", "attributes"),
    [
        ("row", 5, False, {}),
        ("row", 5, True, {PROGRAMMATIC_STREAM_SERIALIZATION: (1, 1, 1)}),
        ("bulk, a cluster for each", 5, False, {CLUSTER_DIMENSION: (4, 1, 1)}),
        ("row_columns, one launch", 0, False, {COOPERATIVE: (1, 1, 1)}),
        (
            "bulk, columns, a cluster for each, one launch", 300, True,
            {COOPERATIVE: (1, 1, 1), CLUSTER_DIMENSION: (2, 1, 1), PROGRAMMATIC_STREAM_SERIALIZATION: (1, 1, 1)},
        ),
    ],
)  # fmt: skip
def test_the_driver_gets_what_the_plan_says(
    library: Callable[[int], Recorder], name: str, rows: int, dependent: bool, attributes: dict[int, Any]
) -> None:
    recorder, k = library(0), kernel(name)
    launch(k, rows, dependent)
    (done,) = recorder.launched
    assert done["attributes"] == attributes
    assert (done["grid"], done["block"]) == ((k.grid[0](rows), 1, 1), (k.block, 1, 1))
    assert (done["shared"], done["stream"], done["function"]) == (k.dynamic + 4096, 7, 99)
    assert done["grid"][0] % k.cluster == 0, "a grid of broken clusters"
    pointers = iter(range(1000, 2000))
    expected = {"rows": lambda: rows, "stride": lambda: 4096, "workspace": lambda: 5256}
    assert done["values"] == [expected.get(a.kind, lambda: next(pointers))() for a in k.arguments]


def test_what_the_driver_refuses_is_one_sentence(library: Callable[[int], Recorder]) -> None:
    library(REFUSED)
    k, why = kernel("row"), "CUDA_ERROR_OF_A_TEST (719)."
    for call, message in (
        (lambda: launch(k, 1, False), f"The driver refuses the launch of '{k.name}': {why}"),
        (lambda: registers(7), f"The driver does not report the registers of a kernel: {why}"),
        (lambda: allow_shared(4, 300000), f"The GPU cannot give a block 300000 bytes of dynamic shared memory: {why}"),
        (lambda: allow_cluster(4, 16), f"The GPU has no clusters of 16 blocks: {why}"),
    ):
        with pytest.raises(LngenError) as error:
            call()
        assert str(error.value) == message
    library(COOPERATIVE_LAUNCH_TOO_LARGE)
    with pytest.raises(LngenError, match=r"needs its 1 blocks to run at the same time, .* with single_launch=no"):
        launch(k, 1, False)


def test_what_a_launch_points_to_is_kept(library: Callable[[int], Recorder]) -> None:
    """The arguments' table belongs to the launch; a second launch sees other values and another stream."""
    recorder = library(0)
    values = (ctypes.c_longlong * 1)(1)
    made = Launch(3, (2, 5), 32, 0, {}, (ctypes.c_void_p * 1)(ctypes.addressof(values)), "k")
    made(11)
    values[0] = 2
    made(12)
    found = [(d["values"], d["stream"], d["grid"], d["attributes"]) for d in recorder.launched]
    assert found == [([1], 11, (2, 5, 1), {}), ([2], 12, (2, 5, 1), {})]


def test_only_what_is_not_given_anyway_is_asked_for(library: Callable[[int], Recorder]) -> None:
    recorder = library(0)
    allow_shared(4, 0)
    allow_cluster(4, 1)
    allow_cluster(4, 8)
    assert recorder.attributes == []
    allow_shared(4, 98304)
    allow_cluster(4, 16)
    assert recorder.attributes == [
        (4, MAX_DYNAMIC_SHARED_SIZE_BYTES, 98304),
        (4, NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
    ]


def test_registers_are_those_the_driver_knows(library: Callable[[int], Recorder]) -> None:
    library(0)
    assert registers(7) == 100 * NUM_REGS + 7


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    driver.library.cache_clear()
    with pytest.raises(MissingError, match=r"needs an NVIDIA driver, and libcuda.so.1 cannot be loaded \(libcuda"):
        driver.library()


def test_the_structures_are_those_of_the_driver() -> None:
    """cuda.h: 8 bytes and a union of 64; three dimensions twice, then pointers from a multiple of 8 on."""
    config = driver._Config
    assert (ctypes.sizeof(driver._Attribute), driver._Attribute.value.offset, ctypes.sizeof(config)) == (72, 8, 56)
    assert (config.shared.offset, config.stream.offset, config.attributes.offset) == (24, 32, 40)


def test_a_capture_has_a_number(library: Callable[[int], Recorder]) -> None:
    library(0)
    assert [driver.capture_of(stream) for stream in (0, 1, 2, 63, 64, 1 << 33)] == [0, 0, 0, 0, 64, 1 << 33]


class Cupy:
    """As much of CuPy as loads a cubin: function number n of its text is at address n + 1."""

    def __init__(self, capability: int) -> None:
        self.loaded: list[bytes] = []
        here = self

        class Device(contextlib.nullcontext[None]):
            compute_capability = str(capability)

        class Module:
            def load(self, image: bytes) -> None:
                here.loaded.append(image)

            def get_function(self, name: str) -> Any:
                return SimpleNamespace(ptr=1 + here.loaded[-1].decode().split().index(name))

        runtime = SimpleNamespace(setDevice=lambda d: None, getDevice=lambda: 0, getDeviceProperties=lambda device: {})
        self.cuda = SimpleNamespace(Device=Device, runtime=runtime, function=SimpleNamespace(Module=Module))


@pytest.mark.parametrize(("capability", "spread"), [(80, False), (90, True)])
def test_a_cubin_alone_is_loaded_and_its_registers_count(
    library: Callable[[int], Recorder], monkeypatch: pytest.MonkeyPatch, capability: int, spread: bool
) -> None:
    """The recorder's kernels have more than 400 registers a thread, so the finish does not fit beside the rows."""
    recorder, plan = (
        library(0),
        plan_of("layernorm.bwd:d=4096,dtype=bf16", "form=tma,threads=128,rows_per_block=2,stages=3"),
    )
    cupy = Cupy(capability)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    image = " ".join(k.name for k in plan.kernels).encode()
    launcher = Launcher(plan, image, 0)
    assert cupy.loaded == [image]
    assert launcher.dependent == spread
    used = {k.name: 100 * NUM_REGS + n + 1 for n, k in enumerate(plan.kernels)}
    asked = requested_shared(plan, used, device_for(f"sm_{capability}"))
    assert launcher.shared == [asked[k.name] for k in plan.kernels]
    assert (launcher.shared[1] > 0) == spread
    allowed = [(n + 1, MAX_DYNAMIC_SHARED_SIZE_BYTES, size) for n, size in enumerate(launcher.shared) if size]
    assert recorder.attributes == allowed


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_first_kernel_is_launched_early_only_where_it_may(
    library: Callable[[int], Recorder], monkeypatch: pytest.MonkeyPatch, overlap: bool, capability: int
) -> None:
    """With overlap=False it waits for the end of earlier work on the stream; the second kernel of a call does not."""
    recorder, plan = library(0), plan_of(*PLANS["row_columns"])
    monkeypatch.setitem(sys.modules, "cupy", Cupy(capability))
    launcher = Launcher(plan, " ".join(k.name for k in plan.kernels).encode(), 0, overlap=overlap)
    bound = launcher.bind(5, dict.fromkeys(launcher.tensors, 4096))
    bound([4096] * len(launcher.tensors), 4096, 7)
    early = [PROGRAMMATIC_STREAM_SERIALIZATION in done["attributes"] for done in recorder.launched]
    assert early == ([overlap, True] if capability == 90 else [False, False])
