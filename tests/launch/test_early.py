"""If these fail, a captured kernel starts early where it loses time or may not, or a graph loses an edge."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

import lngen
from c_launcher import ADDRESS, POINTER, function_of, launch, load
from fake_driver import FakeDriver
from fake_kernels import DOUBLE, started
from lngen.compiler.emit import emit
from lngen.compiler.toolchain import compile_ptx
from lngen.errors import LngenError
from lngen.launch import driver, early
from lngen.launch.driver import MAX_DYNAMIC_SHARED_SIZE_BYTES, PROGRAMMATIC_STREAM_SERIALIZATION
from lngen.launch.runtime.launcher import Launcher
from paths import ROOT
from plans import plan_of
from schedules import registers

pytest.importorskip("cupy")

STREAM, GRAPH = 64, 5
HALF, WHOLE = 0, 160 << 10  # bytes of shared memory with which several blocks fit on a multiprocessor, or one
FORWARD, BACKWARD = "layernorm.fwd:d=96,dtype=f32", "layernorm.bwd:d=96,dtype=f32,blocks=2"
WAITS, TRIGGERED, BEGUN = (0, 0, 0), (1, 0, 1), (2, 0, 1)  # edges, as of FakeDriver.nodes


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A GPU of 132 multiprocessors, of which a stream is captured."""
    gpu = started()
    monkeypatch.setattr(driver, "library", lambda: gpu)
    gpu.captures = {STREAM: GRAPH}
    return gpu


def loaded(gpu: FakeDriver, spec: str = FORWARD, *, overlap: bool = True) -> Launcher:
    """A launcher whose first kernel has a block for each row of a forward."""
    plan = plan_of(spec, registers(32, 1, 4) if spec == FORWARD else registers(8, 64, 4))
    captures, gpu.captures = gpu.captures, {}
    found = Launcher(plan, gpu.made_up(emit(plan), driver.gpu(0).arch), 0, overlap)
    gpu.captures = captures
    return found


def call(made: Launcher, rows: int = 5, stream: int = STREAM) -> None:
    made(rows, dict.fromkeys(made.tensors, 4096), dict.fromkeys(made.tensors, 96), 4096, stream)


def before(gpu: FakeDriver, grid: int = 300, shared: int = HALF) -> None:
    """A kernel of somebody else, of a runtime, is captured."""
    captures, gpu.captures = gpu.captures, {}
    function = function_of(gpu, load(gpu, DOUBLE.replace("sm_90", driver.gpu(0).arch).encode()), "k")
    assert gpu.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared) == 0
    gpu.captures = captures
    gpu.kernels.add(function.value)
    assert launch(gpu, function, (grid,), 128, [ADDRESS(4096), ctypes.c_uint32(4)], shared=shared, stream=STREAM) == 0


def edges(gpu: FakeDriver) -> list[list[tuple[int, int, int]]]:
    """Those into each node."""
    return [[*node.edges.values()] for node in gpu.nodes[GRAPH].values()]


@pytest.mark.parametrize(
    ("grid", "shared", "rows", "edge"),
    [
        (300, HALF, 9999, BEGUN),  # elementwise
        (80, WHOLE, 156, BEGUN), (80, WHOLE, 157, WAITS),  # a GEMM with 52 idle multiprocessors
        (128, WHOLE, 12, BEGUN), (128, WHOLE, 13, WAITS), (132, WHOLE, 1, WAITS), (500, WHOLE, 1, WAITS),
    ],
)  # fmt: skip
def test_a_kernel_starts_early_where_there_is_room(
    gpu: FakeDriver, grid: int, shared: int, rows: int, edge: tuple[int, int, int]
) -> None:
    made = loaded(gpu)
    before(gpu, grid, shared)
    call(made, rows)
    assert edges(gpu) == [[], [edge]]
    assert gpu.launched[-1].attributes == {}


@pytest.mark.parametrize(("grid", "own", "port"), [
    ((80, 1, 1), (156, 1, 1), 2), ((80, 1, 1), (157, 1, 1), 0),
    ((40, 2, 1), (156, 1, 1), 2), ((66, 2, 1), (1, 1, 1), 0), ((11, 3, 4), (1, 1, 1), 0),
    ((80, 1, 1), (78, 2, 1), 2), ((80, 1, 1), (79, 2, 1), 0), ((80, 1, 1), (40, 1, 4), 0),
])  # fmt: skip
def test_blocks_of_all_dimensions_count(
    monkeypatch: pytest.MonkeyPatch, grid: tuple[int, ...], own: tuple[int, ...], port: int
) -> None:
    monkeypatch.setattr(early, "resident_blocks", lambda *kernel: 1)
    before, after = (early._Kernel(1, blocks, (384, 1, 1)) for blocks in (grid, own))
    assert early._port(before, after, 132) == port


def test_the_threads_of_all_dimensions_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "resident_blocks", lambda function, threads, shared: 1024 // threads)
    one, two = (early._Kernel(1, (132, 1, 1), block) for block in ((32, 8, 4), (32, 8, 2)))
    assert [early._port(before, one, 132) for before in (one, two)] == [0, 2]


def test_the_rule_loses_at_no_gemm_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, D, K, us behind the end of the GEMM, with the attribute, and early; and the GEMM's blocks."""
    monkeypatch.setattr(early, "resident_blocks", lambda *kernel: 1)
    lines = [line.split() for line in (ROOT / "generated/bench/h100-early.txt").read_text().splitlines()]
    gains = []
    for rows, _, _, end, _, begun, blocks in (n for n in lines if len(n) == 7 and n[0].isdigit()):
        before, own = (early._Kernel(1, (int(n), 1, 1), (384, 1, 1)) for n in (blocks, rows))
        if early._port(before, own, 132):
            gains.append(float(end) - float(begun))
    assert len(gains) == 10
    assert min(gains) > 0.4


def test_the_attribute_is_for_launches_outside_a_capture_and_for_later_kernels(gpu: FakeDriver) -> None:
    made = loaded(gpu, BACKWARD)
    gpu.raises = False  # addresses are made up
    for stream in (STREAM, 7, STREAM):
        before(gpu)
        call(made, stream=stream)
    attributes = [done.attributes for done in gpu.launched if done.kernel != "k"]
    early = {PROGRAMMATIC_STREAM_SERIALIZATION: 1}
    assert attributes == [{}, early, early, early, {}, early]
    assert edges(gpu) == [[], [BEGUN], [TRIGGERED], [WAITS], [WAITS], [BEGUN], [TRIGGERED]]


def test_a_capture_that_the_driver_refuses_keeps_the_attribute(gpu: FakeDriver) -> None:
    """Twice, and captures and launches that are not captured after it."""
    made = loaded(gpu)
    gpu.raises = False  # as above
    bound = made.bind(5, dict.fromkeys(made.tensors, 96))
    (launch,) = bound.launches
    for refused in (701, 0, 701, 0):
        gpu.refuse = {"cuLaunchKernelEx": refused} if refused else {}
        with pytest.raises(LngenError) if refused else nullcontext():
            bound([4096] * len(made.tensors), 0, STREAM)
        assert launch.config.count == 1
    for stream in (7, 7, STREAM, 7):
        bound([4096] * len(made.tensors), 0, stream)
        assert launch.config.count == 1
    once = {PROGRAMMATIC_STREAM_SERIALIZATION: 1}
    assert [one.attributes for one in gpu.launched] == [{}, {}, once, once, {}, once]


def test_only_the_edge_from_one_kernel_is_changed(gpu: FakeDriver) -> None:
    made = loaded(gpu)
    call(made)  # the first node
    gpu.cuMemsetD8Async(ADDRESS(gpu.memories.allocate(0, 64)), 0, 64, POINTER(STREAM))
    call(made)
    before(gpu)
    gpu.tails[GRAPH] = [*gpu.nodes[GRAPH]][-2:]
    call(made)
    assert edges(gpu) == [[], [WAITS], [WAITS], [WAITS], [WAITS, WAITS]]
    call(made)  # behind a kernel of lngen, which triggers
    assert edges(gpu)[-1] == [TRIGGERED]


ASKED = [
    "cuStreamGetCaptureInfo_v3", "cuGraphNodeGetType", "cuGraphKernelNodeGetParams_v2", "cuKernelGetFunction",
    "cuGraphNodeGetDependencies_v2", "cuOccupancyMaxActiveBlocksPerMultiprocessor", "cuGraphRemoveDependencies_v2",
]  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_a_driver_that_refuses_leaves_the_edge(gpu: FakeDriver, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = loaded(gpu)
    before(gpu)
    gpu.refuse = {name: 801}
    call(made)
    gpu.refuse = {}
    monkeypatch.setattr(gpu, name, None)  # it is too old
    call(made)
    assert edges(gpu)[:2] == [[], [WAITS]]
    assert name != ASKED[0] or lngen.overlap_captured(STREAM) == 0


def test_an_edge_that_was_taken_away_comes_back(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    add: Any = gpu.cuGraphAddDependencies_v2
    made = loaded(gpu)
    monkeypatch.setattr(gpu, "cuGraphAddDependencies_v2", lambda *given: 1 if given[3][0].type else add(*given))
    before(gpu)
    call(made)
    assert edges(gpu) == [[], [WAITS]]
    monkeypatch.setattr(gpu, "cuGraphAddDependencies_v2", lambda *given: 1)
    before(gpu)
    with pytest.raises(LngenError, match="The driver refuses cuGraphAddDependencies_v2 during a capture"):
        call(made)


def test_every_captured_call_can_start_early(gpu: FakeDriver) -> None:
    made = loaded(gpu, BACKWARD, overlap=False)
    before(gpu)
    call(made)
    call(made)
    assert edges(gpu) == [[], [WAITS], [TRIGGERED], [WAITS], [TRIGGERED]]
    assert lngen.overlap_captured(SimpleNamespace(cuda_stream=STREAM)) == 2
    assert edges(gpu) == [[], [BEGUN], *[[TRIGGERED]] * 3]
    assert lngen.overlap_captured(SimpleNamespace(ptr=STREAM)) == 0
    call(made)
    first = made.functions[0]
    assert early.kernel_sets[first] is made
    del made
    assert first not in early.kernel_sets
    assert lngen.overlap_captured(STREAM) == 0, "the function may be somebody else's by now"


def test_of_a_call_the_first_kernel_alone_starts_early(gpu: FakeDriver) -> None:
    """Another may wait for the end of the one before it, as if a program had taken it out of the call."""
    made = loaded(gpu, BACKWARD, overlap=False)
    before(gpu)
    call(made)
    last = [*gpu.nodes[GRAPH].values()][-1]
    last.edges = dict.fromkeys(last.edges, WAITS)
    assert lngen.overlap_captured(STREAM) == 1
    assert edges(gpu) == [[], [BEGUN], [WAITS]]


@pytest.mark.parametrize("stream", [0, 7, "a stream"])
def test_a_stream_that_captures_nothing_is_refused(gpu: FakeDriver, stream: Any) -> None:
    with pytest.raises(LngenError, match=r"expects a stream that captures a CUDA graph, .*, got .*; call it before"):
        lngen.overlap_captured(stream)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_kernels_without_a_wait_do_not_start_early(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of an older arch, on its GPUs, and on a newer GPU that compiles their PTX."""
    old = started(capability=capability, version=13090)
    monkeypatch.setattr(driver, "library", lambda: old)
    plan = plan_of(BACKWARD, registers(8, 64, 4))
    made = Launcher(plan, compile_ptx(emit(plan), "sm_80").encode(), 0, overlap=True)
    old.captures = {STREAM: GRAPH}
    before(old)
    call(made)
    assert lngen.overlap_captured(STREAM) == 0
    assert edges(old) == [[], [WAITS], [WAITS]]
