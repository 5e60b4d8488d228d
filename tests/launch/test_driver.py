"""If these fail, kernels are launched with wrong arguments or attributes, or a refused launch is not explained."""

import ctypes

import pytest

from fake_gpu import FakeGpu
from lngen.compiler.devices import device_for
from lngen.compiler.lower import Plan, requested_shared
from lngen.errors import LngenError, MissingError
from lngen.launch import driver
from lngen.launch.driver import (
    CLUSTER_DIMENSION,
    COOPERATIVE,
    COOPERATIVE_LAUNCH_TOO_LARGE,
    MAX_DYNAMIC_SHARED_SIZE_BYTES,
    NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
    PROGRAMMATIC_STREAM_SERIALIZATION,
    allow_cluster,
    allow_shared,
    capture_of,
    registers,
)
from lngen.launch.runtime.launcher import Launcher
from plans import PLANS, plan_of

REFUSED = 719  # any CUresult but success


def launcher(gpu: FakeGpu, plan: Plan, overlap: bool = False) -> Launcher:
    return Launcher(plan, gpu.compiled(plan).image, 0, overlap)


def launch(made: Launcher, rows: int) -> None:
    """On stream 7, with the workspace at 5000; the pointer of a tensor is 1000 and its place, its row stride 4096."""
    count = len(made.tensors)
    made.bind(rows, dict.fromkeys(made.tensors, 4096))(range(1000, 1000 + count), 5000, 7)


@pytest.mark.parametrize(("name", "rows", "overlap", "attributes"), [
    ("row", 5, False, {}),
    ("row", 5, True, {PROGRAMMATIC_STREAM_SERIALIZATION: 1}),
    ("bulk, a cluster for each", 5, False, {CLUSTER_DIMENSION: 4}),
    ("row_columns, one launch", 0, False, {COOPERATIVE: 1}),
    ("bulk, columns, a cluster for each, one launch", 300, True,
     {COOPERATIVE: 1, CLUSTER_DIMENSION: 2, PROGRAMMATIC_STREAM_SERIALIZATION: 1}),
])  # fmt: skip
def test_the_driver_gets_what_the_plan_says(
    gpu: FakeGpu, name: str, rows: int, overlap: bool, attributes: dict[int, int]
) -> None:
    plan = plan_of(*PLANS[name])
    made = launcher(gpu, plan, overlap)
    launch(made, rows)
    done, k = gpu.launched[0], plan.kernels[0]
    assert (done.kernel, done.attributes, done.stream) == (k, attributes, 7)
    assert (done.grid, done.block) == ((k.grid[0](rows), 1, 1), (k.block, 1, 1))
    assert done.shared == made.shared[0] >= k.dynamic
    assert done.grid[0] % k.cluster == 0, "a grid of broken clusters"
    offsets = plan.workspace_offsets(rows)
    for a in k.arguments:
        pointer = 1000 + made.tensors.index(a.tensor) if a.kind in ("input", "output") else None
        expected = {"rows": rows, "stride": 4096, "workspace": 5000 + offsets.get(a.tensor, 0)}
        assert done.values[a.name] == expected.get(a.kind, pointer)


@pytest.mark.parametrize(("capability", "overlap", "early"), [
    (90, False, [False, True]), (90, True, [True, True]), (80, False, [False, False]), (80, True, [False, False]),
])  # fmt: skip
def test_kernels_start_early_behind_one_of_their_own_call(
    monkeypatch: pytest.MonkeyPatch, capability: int, overlap: bool, early: list[bool]
) -> None:
    """The first one as well if calls may overlap; none where no kernel can wait for the one before it."""
    gpu = FakeGpu(monkeypatch, capability)
    launch(launcher(gpu, plan_of(*PLANS["row_columns"]), overlap), 300)
    assert [PROGRAMMATIC_STREAM_SERIALIZATION in done.attributes for done in gpu.launched] == early


def test_what_the_driver_refuses_is_one_sentence(gpu: FakeGpu) -> None:
    plan, why = plan_of(*PLANS["row"]), "CUDA_ERROR_LAUNCH_FAILED (719)."
    made, name = launcher(gpu, plan), plan.kernels[0].name
    gpu.refuse = dict.fromkeys(("cuLaunchKernelEx", "cuFuncGetAttribute", "cuFuncSetAttribute"), REFUSED)
    for call, message in (
        (lambda: launch(made, 1), f"The driver refuses the launch of '{name}': {why}"),
        (lambda: registers(7), f"The driver does not report the registers of a kernel: {why}"),
        (lambda: allow_shared(4, 300000), f"The GPU cannot give a block 300000 bytes of dynamic shared memory: {why}"),
        (lambda: allow_cluster(4, 16), f"The GPU has no clusters of 16 blocks: {why}"),
    ):
        with pytest.raises(LngenError) as error:
            call()
        assert str(error.value) == message
    gpu.refuse["cuLaunchKernelEx"] = COOPERATIVE_LAUNCH_TOO_LARGE
    with pytest.raises(LngenError, match=r"needs its 1 blocks to run at the same time, .* with single_launch=no"):
        launch(made, 1)


def test_only_what_is_not_given_anyway_is_asked_for(gpu: FakeGpu) -> None:
    made = launcher(gpu, plan_of(*PLANS["row"]))
    for shared, cluster, asked in (
        (0, 1, []),
        (0, 8, []),
        (98304, 16, [(MAX_DYNAMIC_SHARED_SIZE_BYTES, 98304), (NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)]),
    ):
        allow_shared(made.functions[0], shared)
        allow_cluster(made.functions[0], cluster)
        assert gpu.asked == asked


def test_a_capture_has_a_number(gpu: FakeGpu) -> None:
    """The default streams cannot be captured, and are not asked for."""
    gpu.captures = {stream: stream for stream in (1, 64, 1 << 33)}
    assert [capture_of(stream) for stream in (0, 1, 2, 64, 1 << 33)] == [0, 0, 0, 64, 1 << 33]
    gpu.refuse["cuStreamGetCaptureInfo_v2"] = 901
    assert capture_of(64) == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("capability", [80, 90])
def test_a_cubin_is_loaded_and_its_registers_count(
    monkeypatch: pytest.MonkeyPatch, capability: int, overlap: bool
) -> None:
    """With so many registers the finish does not fit beside the rows.

    Only with ``overlap`` the first kernel is launched before the end of earlier work on the stream; the second kernel
    always is, where the GPU can.
    """
    gpu = FakeGpu(monkeypatch, capability)
    plan = plan_of("layernorm.bwd:d=4096,dtype=bf16", "form=tma,threads=128,rows_per_block=2,stages=3")
    gpu.registers = used = {k.name: n for k, n in zip(plan.kernels, (200, 40), strict=True)}
    made = launcher(gpu, plan, overlap)
    asked = requested_shared(plan, used, device_for(f"sm_{capability}"))
    assert made.shared == [asked[k.name] for k in plan.kernels]
    assert (made.shared[1] > 0) == made.dependent == (capability == 90)
    assert gpu.asked == [(MAX_DYNAMIC_SHARED_SIZE_BYTES, size) for size in made.shared if size]
    launch(made, 5)
    early = [PROGRAMMATIC_STREAM_SERIALIZATION in done.attributes for done in gpu.launched]
    assert early == ([overlap, True] if capability == 90 else [False, False])


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
