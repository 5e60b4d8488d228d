"""If these fail, a GPU gives other bits than the interpreter, or arrays, streams or graphs are mishandled on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import lngen.launch.runtime as runtime
from lngen.compiler.compile import Compilation, KernelSet
from lngen.compiler.devices import capability
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import DType
from lngen.compiler.ir.numerics import NUMPY_DTYPE
from lngen.compiler.lower import lower, requested_shared
from lngen.compiler.problem import Schedule, problem
from lngen.compiler.problem.schedule import exists
from lngen.compiler.schedule import ranked
from lngen.compiler.spec import parse_spec
from lngen.launch.driver import on, resident_blocks
from lngen.launch.runtime import Norm
from lngen.launch.runtime.launcher import Launcher, device_arch, live_gpu
from lngen.launch.runtime.numpy_arrays import launch_numpy, raw
from lngen.proof.check.inputs import POISON, mismatches, random_inputs, same_bits
from lngen.proof.check.spec_checks import check_spec
from own_graphs import gated
from schedules import cp_async, registers, tma, unaligned
from test_outputs import add_layernorm, apart, arrays_for, vanishing

pytestmark = pytest.mark.gpu

Put = Callable[[Any], Any]


def to_gpu(a: Any) -> Any:
    import cupy

    return cupy.asarray(a)


def to_torch(a: Any) -> Any:
    import torch

    if a.dtype == NUMPY_DTYPE[DType.BF16]:
        return torch.from_numpy(a.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(a).cuda()


PUT = (to_gpu, to_torch)


def bits_of(a: Any) -> Any:
    import torch

    if isinstance(a, torch.Tensor):
        return a.contiguous().view(torch.uint8).cpu().numpy().reshape(-1)
    return a.get().view(np.uint8).reshape(-1)


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    for name, array in got.items():
        assert (bits_of(array) == want[name].view(np.uint8).reshape(-1)).all(), name


def weighted(inputs: dict[str, Any], put: Put) -> tuple[Any, Any, Any]:
    """The arrays that forward takes."""
    return put(inputs["x"]), put(inputs["gamma"]), put(inputs["beta"])


def gradients(results: Iterable[Any]) -> dict[str, Any]:
    """What backward gives, by name."""
    return dict(zip(("dx", "dgamma", "dbeta"), results, strict=True))


SPECS = [
    f"{graph}.{direction}:d={d},{dtype}"
    for graph in ("layernorm", "rmsnorm")
    for direction in ("fwd", "bwd")
    for d in (1, 31, 64, 768, 1000, 4096, 16384, 40000)
    for dtype in ("dtype=f16", "dtype=bf16,weight=f32", "dtype=f32", "dtype=f64")
]
OPTIONS = [
    "layernorm.fwd:d=768,dtype=bf16,gamma=no,beta=no",
    "layernorm.fwd:d=768,dtype=bf16,out=f32,save=none",
    "layernorm.bwd:d=768,dtype=bf16,save=none",
    "layernorm.bwd:d=40000,dtype=bf16,save=none",
    "layernorm.bwd:d=768,dtype=bf16,wrt=x",
    "layernorm.bwd:d=40000,dtype=f32,wrt=gamma+beta",
    "layernorm.bwd:d=768,dtype=f32,out=bf16,wrt=beta",
    "qk_rmsnorm.fwd:d=5120,dtype=bf16,k_heads=8",
    "qk_rmsnorm.bwd:d=5120,dtype=bf16,k_heads=8,casts=llama",
    "qk_layernorm.fwd:d=8320,dtype=f16,k_heads=1",
    "qk_layernorm.bwd:d=640,dtype=f32,head=64,k_heads=2",
    "qk_layernorm.bwd:d=512,dtype=bf16,head=64,head_weights=own,beta=no",
    "rmsnorm.fwd:d=768,dtype=f16,beta=yes,weight=bf16",
    "rmsnorm.fwd:d=768,dtype=f64,out=bf16",
    "rmsnorm.bwd:d=768,dtype=f16,out=f64",
    *(f"rmsnorm.fwd:d={d},dtype=bf16,quant={q},amax=yes" for d in (768, 12288) for q in ("int8", "e4m3,scales=tensor")),
    *(f"softmax.{way}:d={d},dtype={t}" for way in ("fwd", "bwd") for d in (31, 4096, 40000) for t in ("bf16", "f32")),
]


@pytest.mark.parametrize("text", SPECS + OPTIONS)
def test_bits(text: str) -> None:
    wrong = [r for r in check_spec(parse_spec(text), on="gpu", rows=(0, 1, 3, 133), schedules=3) if not r.ok]
    assert not wrong


# Every form, cluster, way to store, to keep and to finish. Of those that claim rows, some have few owners, so that most
# rows are claimed, and some as many as a default schedule has.
CLAIMED = [
    ("layernorm.fwd:d=4096,dtype=bf16", tma(128, 1, 8, 3, "cached regs dynamic", grid=9, blocks_per_sm=4)),
    ("layernorm.fwd:d=4096,dtype=f32", tma(128, 2, 4, 3, "cached regs dynamic", grid=132)),
    ("rmsnorm.fwd:d=1000,dtype=f16", tma(32, 8, 8, 2, "store dynamic", grid=7)),
    ("layernorm.fwd:d=12288,dtype=bf16", tma(256, 1, 8, 3, "cached regs dynamic", grid=50, blocks_per_sm=2)),
    ("layernorm.fwd:d=4093,dtype=bf16", unaligned(128, 2, 1, 3, "cached regs dynamic", grid=33)),
    ("layernorm.bwd:d=1001,dtype=f32,wrt=x", unaligned(64, 1, 1, 2, "dynamic", grid=99, blocks_per_sm=4)),
    ("layernorm.fwd:d=4096,dtype=bf16", tma(128, 1, 8, 2, "cached regs early dynamic", grid=9, blocks_per_sm=4)),
    ("layernorm.fwd:d=32768,dtype=f32", tma(64, 3, 4, 2, "cached regs early dynamic", grid=2, cluster=8)),
    ("layernorm.fwd:d=65536,dtype=bf16", tma(128, 3, 8, 2, "cached regs early dynamic", grid=15, cluster=8)),
    (
        "layernorm.fwd:d=131072,dtype=f32",
        tma(128, 1, 4, 2, "cached regs early dynamic", grid=3, cluster=16, blocks_per_sm=2),
    ),
    ("rmsnorm.fwd:d=20000,dtype=f16", tma(128, 2, 8, 3, "dynamic", grid=4, cluster=4)),
]
STAGED = [
    ("layernorm.fwd:d=64,dtype=bf16", tma(4, 16, 8, 3, "store cached", grid=128)),
    ("layernorm.fwd:d=64,dtype=bf16", cp_async(2, 32, 8, 2, grid=64)),
    ("layernorm.fwd:d=1000,dtype=bf16", tma(32, 4, 8, 4, grid=100)),
    ("layernorm.fwd:d=1001,dtype=bf16", unaligned(32, 4, 1, 4, grid=100)),
    ("rmsnorm.fwd:d=999,dtype=f32", cp_async(64, 2, 1, 3, "cached", grid=64)),
    ("rmsnorm.fwd:d=999,dtype=f32,out=bf16", unaligned(64, 2, 1, 3, grid=9)),
    ("layernorm.fwd:d=4096,dtype=f32", tma(128, 2, 4, 3, "store", grid=128)),
    ("layernorm.fwd:d=12288,dtype=bf16", tma(256, 1, 8, 3, "cached", grid=66, cluster=2)),
    ("rmsnorm.fwd:d=32768,dtype=bf16", tma(256, 1, 8, 2, "store", grid=9, cluster=4)),
    ("rmsnorm.fwd:d=65536,dtype=f16", tma(256, 1, 8, 3, "store", grid=15, cluster=8)),
    ("rmsnorm.fwd:d=131072,dtype=bf16", tma(256, 1, 8, 4, "cached", grid=7, cluster=16)),
    ("rmsnorm.fwd:d=20000,dtype=f64", tma(256, 1, 2, 2, "store", grid=7, cluster=16)),
    ("layernorm.bwd:d=64,dtype=bf16", tma(4, 128, 8, 3, "store cached")),
    ("layernorm.bwd:d=1000,dtype=f32", tma(64, 4, 4, 2)),
    ("layernorm.bwd:d=1000,dtype=f32", cp_async(64, 4, 4, 2, "cached")),
    ("layernorm.bwd:d=1001,dtype=bf16", unaligned(64, 8, 1, 2, "cached")),
    ("layernorm.bwd:d=4096,dtype=bf16", tma(256, 2, 8, 3, "store cached")),
    ("layernorm.bwd:d=8192,dtype=bf16", tma(256, 1, 8, 3, "cached")),
    ("layernorm.bwd:d=8192,dtype=bf16", tma(64, 4, 8, 3, "cached", cluster=4)),
    ("layernorm.bwd:d=12288,dtype=f32", tma(64, 2, 4, 2, "store", cluster=4)),
    ("layernorm.bwd:d=12288,dtype=f32", tma(128, 2, 4, 3, "cached acquire", cluster=4)),
    ("layernorm.bwd:d=5120,dtype=bf16", tma(64, 4, 8, 2, "cached regs early acquire", cluster=2)),
    ("layernorm.bwd:d=1024,dtype=f32", tma(64, 4, 4, 2, "cached regs early")),
    ("layernorm.bwd:d=32768,dtype=f32", tma(128, 1, 4, 3, "cached regs early", cluster=8)),
    ("layernorm.bwd:d=65536,dtype=f32", tma(128, 1, 4, 3, "cached regs early", cluster=16)),
    ("layernorm.bwd:d=1536,dtype=bf16", tma(64, 8, 8, 2, "cached regs early")),
    ("layernorm.bwd:d=12288,dtype=f16", tma(128, 3, 8, 2, "cached regs early", cluster=4)),
    ("rmsnorm.bwd:d=64,dtype=f16", tma(4, 128, 8, 2, "cached regs early")),
    ("layernorm.fwd:d=32768,dtype=bf16", tma(128, 2, 8, 2, "cached regs early", grid=30, cluster=4)),
    ("layernorm.bwd:d=8191,dtype=bf16", unaligned(256, 1, 1, 2)),
    ("rmsnorm.bwd:d=16384,dtype=bf16", tma(256, 1, 8, 3, "cached", cluster=2)),
    ("rmsnorm.bwd:d=32768,dtype=f16", tma(512, 1, 8, 2, "store", cluster=4)),
    ("layernorm.bwd:d=65536,dtype=bf16", tma(256, 1, 8, 3, cluster=8)),
    ("layernorm.bwd:d=131072,dtype=bf16", tma(256, 1, 8, 2, "store", cluster=16)),
    ("layernorm.bwd:d=768,dtype=bf16", registers(32, 16, 8, "prefetch")),
    ("layernorm.fwd:d=1000,dtype=bf16,weight=f32", registers(128, 1, 8, "cached")),
    ("rmsnorm.fwd:d=999,dtype=f16", registers(64, 2, 1, "cached")),
    ("layernorm.fwd:d=12288,dtype=bf16", registers(256, 1, 8, "cached", cluster=2)),
    ("layernorm.fwd:d=40000,dtype=f32", registers(128, 1, 4, cluster=8, blocks_per_sm=2)),
    ("rmsnorm.fwd:d=131072,dtype=f16", registers(256, 1, 8, "cached", cluster=16)),
    ("layernorm.fwd:d=4093,dtype=bf16", unaligned(128, 4, 1, 3, "cached regs", grid=99)),
    ("rmsnorm.fwd:d=8201,dtype=f16", unaligned(128, 1, 1, 2, "regs", grid=33)),
    ("rmsnorm.fwd:d=171,dtype=f16", unaligned(16, 4, 1, 3, "regs", grid=33)),
    *CLAIMED,
    ("layernorm.bwd:d=768,dtype=bf16,wrt=x", tma(32, 4, 8, 2, "store", grid=99)),
    ("layernorm.bwd:d=768,dtype=f32,wrt=beta", cp_async(32, 8, 4, 2)),
]
HELD = [
    (spec, replace(s, row_in_registers=True)) for spec, s in STAGED if s.form != "registers" and not s.row_in_registers
][::2]
ONE_LAUNCH = [(spec, replace(s, single_launch=True)) for spec, s in STAGED if ".bwd" in spec and "wrt=x" not in spec]


def with_schedule(text: str, schedule: Schedule) -> tuple[Any, Any]:
    """The plan of a spec under a schedule, and its launcher."""
    arch = device_arch(0)
    if not exists(schedule, capability(arch)):
        pytest.skip(f"{schedule} does not exist on {arch}")
    plan = lower(parse_spec(text), schedule)
    return plan, Launcher(plan, KernelSet(plan).cubin(arch).image, 0, overlap=True)


@pytest.mark.parametrize(("text", "schedule"), STAGED + HELD + ONE_LAUNCH, ids=str)
def test_bits_of_every_structure(text: str, schedule: Schedule) -> None:
    """From no row to more than all stages of all owners take."""
    plan, launcher = with_schedule(text, schedule)
    for rows in (0, 1, 133, 1000 if plan.spec.d > 10000 else 3001):
        inputs = random_inputs(plan.spec, rows)
        got = launch_numpy(launcher, rows, inputs, POISON)
        assert mismatches(got, interpret(plan.graph, inputs)) == [], rows


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("layernorm.fwd:d=768,dtype=f16", 5461),
        ("layernorm.fwd:d=4096,dtype=f32", 512),
        ("rmsnorm.fwd:d=1024,dtype=f32", 4096),
    ],
)
def test_a_multiprocessor_holds_as_many_blocks_that_stay_as_the_schedule_counts_on(text: str, rows: int) -> None:
    """By the driver's count; with the shared memory the kernel uses it would be one more of some of them."""
    spec = parse_spec(text)
    fitting = []
    for schedule in [s for s in ranked(problem(spec.graph(), spec.d), rows=rows) if s.form == "tma"][:40:4]:
        plan, launcher = with_schedule(text, schedule)
        with on(launcher.gpu.context):
            asked, least = (
                resident_blocks(launcher.functions[0], plan.kernels[0].block, shared)
                for shared in (launcher.shared[0], plan.kernels[0].dynamic)
            )
        fitting.append(least)
        assert asked == min(schedule.blocks_per_sm, least), str(schedule)
    assert fitting


@pytest.mark.parametrize("text", ["layernorm.bwd:d=4096,dtype=bf16", "layernorm.bwd:d=1024,dtype=f32"])
def test_what_launches_ask_for_follows_from_the_compiled_registers(text: str) -> None:
    """The driver's registers are the compiler's; the finish of bf16 is spread, that of f32 fits beside the rows."""
    spec = parse_spec(text)
    plan = lower(spec, Compilation(spec).schedule(device_arch(0), rows=1024))
    binary = KernelSet(plan).cubin(device_arch(0))
    asked = requested_shared(plan, {name: used.registers for name, used in binary.resources.items()}, live_gpu(0))
    assert Launcher(plan, binary.image, 0).shared == [asked[k.name] for k in plan.kernels]
    assert (asked[plan.kernels[1].name] > 0) == ("bf16" in text)


REPEATED = [
    *CLAIMED,
    ("layernorm.bwd:d=1024,dtype=bf16", tma(64, 8, 8, 3, "cached single")),
    ("layernorm.bwd:d=8192,dtype=bf16", tma(256, 1, 8, 3, "single")),
    ("layernorm.bwd:d=16384,dtype=bf16", tma(256, 1, 8, 3, "single", cluster=2)),
    ("layernorm.bwd:d=1000,dtype=f32", registers(64, 4, 4, "single")),
]


class Arrays:
    """Inputs and results of a plan on the GPU, a workspace, and the launch for some numbers of rows."""

    def __init__(self, plan: Any, launcher: Any, rows: int) -> None:
        import cupy

        self.launcher = launcher
        inputs = random_inputs(plan.spec, rows)
        self.want = interpret(plan.graph, inputs)
        self.held = {n: to_gpu(raw(a)) for n, a in (inputs | self.want).items()}
        self.bound = launcher.bind(rows, launcher.contiguous(rows))
        self.workspace = cupy.full(max(1, self.bound.workspace_bytes), POISON, "u1")
        cupy.cuda.runtime.deviceSynchronize()
        self.bound.prepare(self.workspace.data.ptr, 0)

    def launch(self, stream: int) -> None:
        self.bound([self.held[n].data.ptr for n in self.launcher.tensors], self.workspace.data.ptr, stream)

    def forget(self) -> None:
        for name in self.want:
            self.held[name].fill(0)

    def differ(self) -> list[str]:
        got = {n: self.held[n].get().view(a.dtype).reshape(a.shape) for n, a in self.want.items()}
        return mismatches(got, self.want)


@pytest.mark.parametrize(("text", "schedule"), REPEATED, ids=str)
def test_one_launch_after_another_on_one_workspace(text: str, schedule: Schedule) -> None:
    """Counters are fit for the next launch, whatever the number of blocks and of rows."""
    import cupy

    plan, launcher = with_schedule(text, schedule)
    cases = [Arrays(plan, launcher, rows) for rows in (700, 0, 3, 130)]
    stream = cupy.cuda.Stream(non_blocking=True)
    for case in cases:
        case.workspace = cases[0].workspace
        case.forget()
    cupy.cuda.runtime.deviceSynchronize()
    for _ in range(250):
        for case in cases:
            case.launch(stream.ptr)
    stream.synchronize()
    assert [case.differ() for case in cases] == [[]] * len(cases)


@pytest.mark.parametrize(("text", "schedule"), REPEATED, ids=str)
def test_one_launch_on_two_streams_at_once(text: str, schedule: Schedule) -> None:
    """Two grids that wait for all their blocks must not keep each other's from running."""
    import cupy

    plan, launcher = with_schedule(text, schedule)
    cases = [Arrays(plan, launcher, rows) for rows in (2000, 1500)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in cases]
    for case in cases:
        case.forget()
    cupy.cuda.runtime.deviceSynchronize()
    for _ in range(200):
        for case, stream in zip(cases, streams, strict=True):
            case.launch(stream.ptr)
    for stream in streams:
        stream.synchronize()
    assert [case.differ() for case in cases] == [[], []]


def single() -> Norm:
    """A norm whose backward is one launch."""
    return runtime.compile("layernorm", d=1000, schedule={"bwd": str(registers(64, 4, 4, "single"))})


def step(norm: Norm, rows: int, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inputs of a norm's forward and backward, and the interpreter's results of both."""
    inputs, want = dict[str, Any](), dict[str, Any]()
    for direction in ("bwd", "fwd"):
        spec = norm.spec(direction)
        drawn = random_inputs(spec, rows, seed=seed)
        inputs, want = inputs | drawn, want | interpret(spec.graph(), drawn)
    return inputs, want


def test_one_launch_through_the_library() -> None:
    """Forward and backward again and again, with more rows and fewer: the workspace grows, and is prepared again."""
    norm = single()
    for rows in (5, 700, 1, 0, 2000, 700) * 3:
        inputs, want = step(norm, rows)
        _, saved = norm.forward(*weighted(inputs, to_gpu))
        assert_same(gradients(norm.backward(to_gpu(inputs["dy"]), saved)), want)


@pytest.mark.parametrize("describe", [add_layernorm, apart, vanishing])
def test_cotangents_of_several_outputs(describe: Any) -> None:
    """Of all outputs, and of the first alone: what depends on no other than that has zeros."""
    norm = runtime.compile(describe, d=1000)
    inputs, cotangents = arrays_for(norm, rows=133)
    (first, *others), names = cotangents.values(), [f"d{name}" for name in norm.spec("bwd").differentiates]
    _, here = norm.forward(**inputs)
    _, there = norm.forward(**{n: to_gpu(a) for n, a in inputs.items()})
    for given in ((first, *others), (first, *(None for _ in others))):
        got = norm.backward(tuple(None if a is None else to_gpu(a) for a in given), there)
        want = norm.backward(given, here)
        assert_same(dict(zip(names, got, strict=True)), dict(zip(names, want, strict=True)))


@pytest.mark.parametrize("text", ["rmsnorm.bwd:d=128,dtype=bf16", "layernorm.fwd:d=12288,dtype=bf16"])
def test_checks_on_rows_with_gaps(text: str) -> None:
    results = list(check_spec(parse_spec(f"{text},strides=2"), on="gpu", rows=(0, 1, 133), schedules=4))
    assert {r.what for r in results} >= {"bits"}
    assert not [r for r in results if not r.ok]


def test_special_numbers_keep_their_places() -> None:
    spec = parse_spec("layernorm.fwd:d=64,dtype=f32")
    inputs = random_inputs(spec, 6)
    inputs["x"][0, 3], inputs["x"][1, 5], inputs["x"][2, 7] = np.nan, np.inf, -np.inf
    inputs["x"][3] = 0.0
    inputs["x"][4] *= 1e-40
    inputs["x"][5] *= 1e30
    want = interpret(spec.graph(), inputs)
    y, saved = runtime.compile("layernorm", d=64).forward(*weighted(inputs, to_gpu))
    assert same_bits(y.get(), want["y"]).all()
    assert same_bits(saved["rstd"].get(), want["rstd"]).all()
    assert np.isnan(want["y"][0]).all()
    assert not np.isnan(want["y"][3:]).any()


# ---- arrays of every kind ----


@pytest.fixture(params=["bf16", "f32"])
def case(request: pytest.FixtureRequest) -> tuple[Norm, dict[str, Any], dict[str, Any]]:
    """A norm, its inputs, and the interpreter's results."""
    norm = runtime.compile("layernorm", d=768, dtype=request.param)
    return norm, *step(norm, 133)


class OnlyInterface:
    """An array that is nothing but its ``__cuda_array_interface__``."""

    def __init__(self, array: Any, stream: int | None = None) -> None:
        self._array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": stream}


class OnlyDLPack:
    """An array that is nothing but its DLPack capsule."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("wrap", [OnlyInterface, lambda a: OnlyInterface(a, 1), OnlyDLPack])
def test_foreign_arrays(case: Any, wrap: Any) -> None:
    norm, inputs, want = case
    x, gamma, beta = weighted(inputs, to_gpu)
    y, saved = norm.forward(wrap(x), wrap(gamma), wrap(beta))
    assert_same({"y": y, "rstd": saved["rstd"]}, want)
    assert_same({"y": norm.forward(x, wrap(gamma), beta)[0]}, want)


# ---- streams, graphs, threads ----


def captured(norm: Norm, dy: Any, saved: Any, stream: Any = None) -> tuple[Any, dict[str, Any]]:
    """A graph of one backward, and the arrays that it writes."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = gradients(norm.backward(dy, saved))
    return graph, results


def begun(norm: Norm, inputs: dict[str, Any]) -> tuple[Any, Any]:
    """dy and what forward saved, as PyTorch's; one backward has run."""
    dy, saved = to_torch(inputs["dy"]), norm.forward(*weighted(inputs, to_torch))[1]
    norm.backward(dy, saved)
    return dy, saved


def test_the_current_stream_is_read_at_each_launch_and_nothing_waits(case: Any) -> None:
    import torch

    norm, inputs, want = case
    arrays = weighted(inputs, to_torch)
    dy, _ = begun(norm, inputs)
    torch.cuda.synchronize()
    busy, free = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(400_000_000)
        norm.forward(*arrays)
        behind = busy.record_event()
    with torch.cuda.stream(free):
        y, saved = norm.forward(*arrays)
        dx, _, _ = norm.backward(dy, saved)
        done = free.record_event()
    done.synchronize()
    assert not behind.query(), "the launch on the busy stream ran elsewhere, or the host waited for it"
    assert_same({"y": y, "dx": dx}, want)


def test_captures_of_one_launch_replay_in_any_order() -> None:
    """Each has counters of its own, zeroed where its graph begins."""
    import torch

    norm = single()
    inputs, want = step(norm, 700)
    stream, begin = torch.cuda.Stream(), begun(norm, inputs)
    graphs = [captured(norm, *begin, stream) for _ in range(2)]
    for graph, results in (graphs[1], graphs[0], graphs[1]):
        for result in results.values():
            result.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert_same(results, want)


def at_once(work: Callable[[int], None]) -> None:
    """Four threads that work; raises what one of them raises."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


@pytest.mark.parametrize("put", PUT)
def test_threads_that_share_a_stream(case: Any, put: Put) -> None:
    """Column sums of one call do not meet those of another, though both lie in one workspace."""
    norm, inputs, _ = case
    spec = norm.spec("bwd")
    _, saved = norm.forward(*weighted(inputs, put))
    scaled = [{**random_inputs(spec, 133), "dy": inputs["dy"] * inputs["dy"].dtype.type(2.0**n)} for n in range(4)]
    got: list[list[Any]] = [[] for _ in scaled]

    def work(n: int) -> None:
        dy = put(scaled[n]["dy"])
        got[n].extend(norm.backward(dy, saved) for _ in range(100))

    at_once(work)
    for one, results in zip(scaled, got, strict=True):
        want = interpret(spec.graph(), one)
        assert len(results) == 100
        for each in results:
            assert_same(gradients(each), want)


def test_the_workspaces_of_graphs_that_are_gone_are_freed() -> None:
    """Graphs that exist keep theirs and give the right bits; the driver says a little later which ones are gone."""
    import torch

    from lngen.launch import kernels

    norm = runtime.compile("layernorm", d=1024)
    inputs, want = step(norm, 2000)
    begin = begun(norm, inputs)
    graph, results = captured(norm, *begin)
    before = len(kernels._of_graphs)
    for _ in range(50):
        other, _ = captured(norm, *begin)
        other.replay()
        torch.cuda.synchronize()
        del other
        time.sleep(0.01)
    assert len(kernels._of_graphs) < before + 10
    graph.replay()
    torch.cuda.synchronize()
    assert_same(results, want)


def test_captures_side_by_side() -> None:
    """Two graphs captured on one stream and replayed on two have a workspace each."""
    import torch

    norm = runtime.compile("layernorm", d=1024)
    cases, kept = [], []
    capturing = torch.cuda.Stream()
    for seed in (0, 1):
        inputs, want = step(norm, 2000, seed)
        kept.append(begun(norm, inputs))  # what a graph reads: the next capture would free it
        cases.append((*captured(norm, *kept[-1], capturing), torch.cuda.Stream(), want))
    torch.cuda.synchronize()
    for _ in range(200):
        for graph, _, stream, _ in cases:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _, results, _, want in cases:
        assert_same(results, want)


def test_a_graph_of_ones_own() -> None:
    norm = runtime.compile(gated, d=1000, dtype="bf16")
    for direction in ("fwd", "bwd"):
        assert all(r.ok for r in check_spec(norm.spec(direction), on="gpu", schedules=3))
