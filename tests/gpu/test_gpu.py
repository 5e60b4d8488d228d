"""On a GPU: bits equal to the interpreter, every way of passing arrays, streams and graphs as they should be."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import numpy as np
import pytest

import lngen.runtime as runtime
from lngen.check.check import check_spec
from lngen.check.inputs import POISON, mismatches, random_inputs, same_bits
from lngen.compile import Compilation, KernelSet
from lngen.devices import capability
from lngen.errors import ArrayError
from lngen.graphs import GraphBuilder
from lngen.interpret import interpret
from lngen.ir import D, M
from lngen.ir.numerics import NUMPY_DTYPE
from lngen.lower import lower, requested_shared
from lngen.runtime.driver import library
from lngen.runtime.launch import Launcher, device_arch, live_gpu
from lngen.runtime.numpy_arrays import launch_numpy, raw
from lngen.schedule import Schedule, exists, parse_schedule, problem, ranked
from lngen.spec import parse_spec
from test_outputs import add_layernorm, apart, arrays_for, vanishing
from test_passes import gated

pytestmark = pytest.mark.gpu

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
    "rmsnorm.fwd:d=768,dtype=f16,beta=yes,weight=bf16",
    "rmsnorm.fwd:d=768,dtype=f64,out=bf16",
    "rmsnorm.bwd:d=768,dtype=f16,out=f64",
]


@pytest.mark.parametrize("text", SPECS + OPTIONS)
def test_bits(text: str) -> None:
    wrong = [r for r in check_spec(parse_spec(text), on="gpu", rows=(0, 1, 3, 133), schedules=3) if not r.ok]
    assert not wrong


# (spec, schedules): every form, cluster, way to store, to keep and to finish.
# Few owners, so that most rows are claimed, and as many as a default schedule has.
CLAIMED = [
    ("layernorm.fwd:d=4096,dtype=bf16",
     "form=tma,threads=128,rows_per_block=1,vec=8,blocks_per_sm=4,stages=3,grid=9,cached_weights=yes,row_in_registers=yes,dynamic=yes"),
    ("layernorm.fwd:d=4096,dtype=f32",
     "form=tma,threads=128,rows_per_block=2,vec=4,stages=3,grid=132,cached_weights=yes,row_in_registers=yes,dynamic=yes"),
    ("rmsnorm.fwd:d=1000,dtype=f16", "form=tma,threads=32,rows_per_block=8,vec=8,stages=2,grid=7,tma_store=yes,"
                                     "dynamic=yes"),
    ("layernorm.fwd:d=12288,dtype=bf16",
     "form=tma,threads=256,rows_per_block=1,vec=8,blocks_per_sm=2,stages=3,grid=50,cached_weights=yes,row_in_registers=yes,dynamic=yes"),
    ("layernorm.fwd:d=4093,dtype=bf16",
     "form=tma_unaligned,threads=128,rows_per_block=2,vec=1,stages=3,grid=33,tma_store=yes,cached_weights=yes,row_in_registers=yes,dynamic=yes"),
    ("layernorm.bwd:d=1001,dtype=f32,wrt=x",
     "form=tma_unaligned,threads=64,rows_per_block=1,vec=1,blocks_per_sm=4,stages=2,grid=99,tma_store=yes,dynamic=yes"),
    ("layernorm.fwd:d=4096,dtype=bf16",
     "form=tma,threads=128,rows_per_block=1,vec=8,blocks_per_sm=4,stages=2,grid=9,cached_weights=yes,row_in_registers=yes,early_release=yes,dynamic=yes"),
    ("layernorm.fwd:d=32768,dtype=f32",
     "form=tma,threads=64,rows_per_block=3,vec=4,stages=2,cluster=8,grid=2,cached_weights=yes,row_in_registers=yes,early_release=yes,dynamic=yes"),
    ("layernorm.fwd:d=65536,dtype=bf16",
     "form=tma,threads=128,rows_per_block=3,vec=8,stages=2,cluster=8,grid=15,cached_weights=yes,row_in_registers=yes,early_release=yes,dynamic=yes"),
    ("layernorm.fwd:d=131072,dtype=f32",
     "form=tma,threads=128,rows_per_block=1,vec=4,blocks_per_sm=2,stages=2,cluster=16,grid=3,cached_weights=yes,row_in_registers=yes,early_release=yes,dynamic=yes"),
    ("rmsnorm.fwd:d=20000,dtype=f16", "form=tma,threads=128,rows_per_block=2,vec=8,stages=3,cluster=4,grid=4,"
                                      "dynamic=yes"),
]  # fmt: skip
STAGED = [
    ("layernorm.fwd:d=64,dtype=bf16", "form=tma,threads=4,rows_per_block=16,vec=8,stages=3,grid=128,tma_store=yes,"
                                      "cached_weights=yes"),
    ("layernorm.fwd:d=64,dtype=bf16", "form=cp_async,threads=2,rows_per_block=32,vec=8,stages=2,grid=64"),
    ("layernorm.fwd:d=1000,dtype=bf16", "form=tma,threads=32,rows_per_block=4,vec=8,stages=4,grid=100"),
    ("layernorm.fwd:d=1001,dtype=bf16", "form=tma_unaligned,threads=32,rows_per_block=4,vec=1,stages=4,grid=100,"
                                        "tma_store=yes"),
    ("rmsnorm.fwd:d=999,dtype=f32", "form=cp_async,threads=64,rows_per_block=2,vec=1,stages=3,grid=64,"
                                    "cached_weights=yes"),
    ("rmsnorm.fwd:d=999,dtype=f32,out=bf16", "form=tma_unaligned,threads=64,rows_per_block=2,vec=1,stages=3,grid=9,"
                                             "tma_store=yes"),
    ("layernorm.fwd:d=4096,dtype=f32", "form=tma,threads=128,rows_per_block=2,vec=4,stages=3,grid=128,tma_store=yes"),
    ("layernorm.fwd:d=12288,dtype=bf16", "form=tma,threads=256,rows_per_block=1,vec=8,stages=3,grid=66,cluster=2,"
                                         "cached_weights=yes"),
    ("rmsnorm.fwd:d=32768,dtype=bf16", "form=tma,threads=256,rows_per_block=1,vec=8,stages=2,grid=9,cluster=4,"
                                       "tma_store=yes"),
    ("rmsnorm.fwd:d=65536,dtype=f16", "form=tma,threads=256,rows_per_block=1,vec=8,stages=3,grid=15,cluster=8,"
                                      "tma_store=yes"),
    ("rmsnorm.fwd:d=131072,dtype=bf16", "form=tma,threads=256,rows_per_block=1,vec=8,stages=4,grid=7,cluster=16,"
                                        "cached_weights=yes"),
    ("rmsnorm.fwd:d=20000,dtype=f64", "form=tma,threads=256,rows_per_block=1,vec=2,stages=2,grid=7,cluster=16,"
                                      "tma_store=yes"),
    ("layernorm.bwd:d=64,dtype=bf16", "form=tma,threads=4,rows_per_block=128,vec=8,stages=3,cached_weights=yes,"
                                      "tma_store=yes"),
    ("layernorm.bwd:d=1000,dtype=f32", "form=tma,threads=64,rows_per_block=4,vec=4,stages=2"),
    ("layernorm.bwd:d=1000,dtype=f32", "form=cp_async,threads=64,rows_per_block=4,vec=4,stages=2,cached_weights=yes"),
    ("layernorm.bwd:d=1001,dtype=bf16", "form=tma_unaligned,threads=64,rows_per_block=8,vec=1,stages=2,"
                                        "cached_weights=yes,tma_store=yes"),
    ("layernorm.bwd:d=4096,dtype=bf16", "form=tma,threads=256,rows_per_block=2,vec=8,stages=3,tma_store=yes,"
                                        "cached_weights=yes"),
    ("layernorm.bwd:d=8192,dtype=bf16", "form=tma,threads=256,rows_per_block=1,vec=8,stages=3,cached_weights=yes"),
    ("layernorm.bwd:d=8192,dtype=bf16", "form=tma,threads=64,rows_per_block=4,vec=8,stages=3,cluster=4,"
                                        "cached_weights=yes"),
    ("layernorm.bwd:d=12288,dtype=f32", "form=tma,threads=64,rows_per_block=2,vec=4,stages=2,cluster=4,tma_store=yes"),
    ("layernorm.bwd:d=12288,dtype=f32", "form=tma,threads=128,rows_per_block=2,vec=4,stages=3,cluster=4,"
                                        "cached_weights=yes,acquire_shared=yes"),
    ("layernorm.bwd:d=5120,dtype=bf16",
     "form=tma,threads=64,rows_per_block=4,vec=8,stages=2,cluster=2,cached_weights=yes,row_in_registers=yes,early_release=yes,acquire_shared=yes"),
    ("layernorm.bwd:d=1024,dtype=f32", "form=tma,threads=64,rows_per_block=4,vec=4,stages=2,cached_weights=yes,"
                                       "row_in_registers=yes,early_release=yes"),
    ("layernorm.bwd:d=32768,dtype=f32",
     "form=tma,threads=128,rows_per_block=1,vec=4,stages=3,cluster=8,cached_weights=yes,row_in_registers=yes,early_release=yes"),
    ("layernorm.bwd:d=65536,dtype=f32",
     "form=tma,threads=128,rows_per_block=1,vec=4,stages=3,cluster=16,cached_weights=yes,row_in_registers=yes,early_release=yes"),
    ("layernorm.bwd:d=1536,dtype=bf16", "form=tma,threads=64,rows_per_block=8,vec=8,stages=2,cached_weights=yes,"
                                        "row_in_registers=yes,early_release=yes"),
    ("layernorm.bwd:d=12288,dtype=f16",
     "form=tma,threads=128,rows_per_block=3,vec=8,stages=2,cluster=4,cached_weights=yes,row_in_registers=yes,early_release=yes"),
    ("rmsnorm.bwd:d=64,dtype=f16", "form=tma,threads=4,rows_per_block=128,vec=8,stages=2,cached_weights=yes,"
                                   "row_in_registers=yes,early_release=yes"),
    ("layernorm.fwd:d=32768,dtype=bf16",
     "form=tma,threads=128,rows_per_block=2,vec=8,stages=2,grid=30,cluster=4,cached_weights=yes,row_in_registers=yes,early_release=yes"),
    ("layernorm.bwd:d=8191,dtype=bf16", "form=tma_unaligned,threads=256,rows_per_block=1,vec=1,stages=2,tma_store=yes"),
    ("rmsnorm.bwd:d=16384,dtype=bf16", "form=tma,threads=256,rows_per_block=1,vec=8,stages=3,cluster=2,"
                                       "cached_weights=yes"),
    ("rmsnorm.bwd:d=32768,dtype=f16", "form=tma,threads=512,rows_per_block=1,vec=8,stages=2,cluster=4,tma_store=yes"),
    ("layernorm.bwd:d=65536,dtype=bf16", "form=tma,threads=256,rows_per_block=1,vec=8,stages=3,cluster=8"),
    ("layernorm.bwd:d=131072,dtype=bf16", "form=tma,threads=256,rows_per_block=1,vec=8,stages=2,cluster=16,"
                                          "tma_store=yes"),
    ("layernorm.bwd:d=768,dtype=bf16", "form=registers,threads=32,rows_per_block=16,vec=8,prefetch=yes"),
    ("layernorm.fwd:d=1000,dtype=bf16,weight=f32", "form=registers,threads=128,rows_per_block=1,vec=8,"
                                                   "cached_weights=yes"),
    ("rmsnorm.fwd:d=999,dtype=f16", "form=registers,threads=64,rows_per_block=2,vec=1,cached_weights=yes"),
    ("layernorm.fwd:d=12288,dtype=bf16", "form=registers,threads=256,rows_per_block=1,vec=8,cluster=2,"
                                         "cached_weights=yes"),
    ("layernorm.fwd:d=40000,dtype=f32", "form=registers,threads=128,rows_per_block=1,vec=4,cluster=8,blocks_per_sm=2"),
    ("rmsnorm.fwd:d=131072,dtype=f16", "form=registers,threads=256,rows_per_block=1,vec=8,cluster=16,"
                                       "cached_weights=yes"),
    ("layernorm.fwd:d=4093,dtype=bf16",
     "form=tma_unaligned,threads=128,rows_per_block=4,vec=1,stages=3,grid=99,tma_store=yes,cached_weights=yes,row_in_registers=yes"),
    ("rmsnorm.fwd:d=8201,dtype=f16",
     "form=tma_unaligned,threads=128,rows_per_block=1,vec=1,stages=2,grid=33,tma_store=yes,row_in_registers=yes"),
    ("rmsnorm.fwd:d=171,dtype=f16", "form=tma_unaligned,threads=16,rows_per_block=4,vec=1,stages=3,grid=33,"
                                    "tma_store=yes,row_in_registers=yes"),
    *CLAIMED,
    ("layernorm.bwd:d=768,dtype=bf16,wrt=x", "form=tma,threads=32,rows_per_block=4,vec=8,stages=2,grid=99,"
                                             "tma_store=yes"),
    ("layernorm.bwd:d=768,dtype=f32,wrt=beta", "form=cp_async,threads=32,rows_per_block=8,vec=4,stages=2"),
]  # fmt: skip
GENERAL = Schedule("registers", 32, 1, 1)


def with_schedule(text: str, schedule: str) -> tuple[Any, Any]:
    """The plan of a spec under a schedule, and its launcher."""
    plan = lower(parse_spec(text), parse_schedule(schedule, GENERAL))
    arch = device_arch(0)
    if not exists(plan.schedule, capability(arch)):
        pytest.skip(f"{plan.schedule} does not exist on {arch}")
    return plan, Launcher(plan, KernelSet(plan).cubin(arch).image, 0, overlap=True)


HELD = [
    (spec, f"{text},row_in_registers=yes")
    for spec, text in STAGED
    if "form=registers" not in text and "row_in_registers" not in text
][::2]
ONE_LAUNCH = [(spec, f"{text},single_launch=yes") for spec, text in STAGED if ".bwd" in spec and "wrt=x" not in spec]


@pytest.mark.parametrize(("text", "schedule"), STAGED + HELD + ONE_LAUNCH)
def test_bits_of_every_structure(text: str, schedule: str) -> None:
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
        plan, launcher = with_schedule(text, str(schedule))
        found = []
        for shared in (launcher.shared[0], plan.kernels[0].dynamic):
            blocks = ctypes.c_int()
            found.append(blocks)
            asked = ctypes.byref(blocks), ctypes.c_void_p(launcher._functions[0].ptr), plan.kernels[0].block
            assert library().cuOccupancyMaxActiveBlocksPerMultiprocessor(*asked, ctypes.c_size_t(shared)) == 0
        fitting.append(found[1].value)
        assert found[0].value == min(schedule.blocks_per_sm, fitting[-1]), str(schedule)
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
    (
        "layernorm.bwd:d=1024,dtype=bf16",
        "form=tma,threads=64,rows_per_block=8,vec=8,stages=3,cached_weights=yes,single_launch=yes",
    ),
    ("layernorm.bwd:d=8192,dtype=bf16", "form=tma,threads=256,rows_per_block=1,vec=8,stages=3,single_launch=yes"),
    (
        "layernorm.bwd:d=16384,dtype=bf16",
        "form=tma,threads=256,rows_per_block=1,vec=8,stages=3,cluster=2,single_launch=yes",
    ),
    ("layernorm.bwd:d=1000,dtype=f32", "form=registers,threads=64,rows_per_block=4,vec=4,single_launch=yes"),
]


class Arrays:
    """Inputs and results of a plan on the GPU, a workspace, and the launch for some numbers of rows."""

    def __init__(self, plan: Any, launcher: Any, rows: int, stream: int = 0) -> None:
        import cupy

        self.plan, self.launcher, self.rows = plan, launcher, rows
        inputs = random_inputs(plan.spec, rows)
        self.want = interpret(plan.graph, inputs)
        self.held = {n: to_gpu(raw(a)) for n, a in (inputs | self.want).items()}
        self.bound = launcher.bind(rows, dict.fromkeys(launcher.tensors, plan.spec.d))
        self.workspace = cupy.full(max(1, self.bound.workspace_bytes), POISON, "u1")
        cupy.cuda.runtime.deviceSynchronize()
        self.bound.prepare(self.workspace.data.ptr, stream)

    def launch(self, stream: int) -> None:
        self.bound([self.held[n].data.ptr for n in self.launcher.tensors], self.workspace.data.ptr, stream)

    def forget(self) -> None:
        for name in self.want:
            self.held[name].fill(0)

    def differ(self) -> list[str]:
        got = {n: self.held[n].get().view(a.dtype).reshape(a.shape) for n, a in self.want.items()}
        return mismatches(got, self.want)


@pytest.mark.parametrize(("text", "schedule"), REPEATED)
def test_one_launch_after_another_on_one_workspace(text: str, schedule: str) -> None:
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


@pytest.mark.parametrize(("text", "schedule"), REPEATED)
def test_one_launch_on_two_streams_at_once(text: str, schedule: str) -> None:
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


def test_one_launch_through_the_library() -> None:
    """Forward and backward again and again, with more rows and fewer: the workspace grows, and is prepared again."""
    norm = runtime.compile(
        "layernorm", d=1000, schedule={"bwd": "form=registers,threads=64,rows_per_block=4,vec=4,single_launch=yes"}
    )
    for rows in (5, 700, 1, 0, 2000, 700) * 3:
        spec = norm.spec("bwd")
        inputs = random_inputs(spec, rows) | random_inputs(norm.spec("fwd"), rows)
        _, saved = norm.forward(*(to_gpu(inputs[n]) for n in ("x", "gamma", "beta")))
        got = dict(zip(("dx", "dgamma", "dbeta"), norm.backward(to_gpu(inputs["dy"]), saved), strict=True))
        assert_same(got, interpret(spec.graph(), random_inputs(spec, rows)))


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


@pytest.mark.parametrize("put", ["to_gpu", "to_torch"])
@pytest.mark.parametrize(
    ("offset", "pitch"), [(0, 1000), (0, 1008), (8, 1016), (0, 1001), (1, 1003), (4, 1004), (2, 1000), (3, 5000)]
)
def test_bulk_copies_give_way_where_arrays_are_not_aligned(put: str, offset: int, pitch: int) -> None:
    """Any address and any row stride: copies in bulk where they are whole 16 bytes, narrower accesses elsewhere."""
    bulk = "form=tma,threads=64,rows_per_block={},vec=8,stages=2"
    schedule = {
        "fwd": bulk.format(2) + ",grid=64,tma_store=yes",
        "bwd": bulk.format(8) + ",cached_weights=yes,tma_store=yes",
    }
    norm = runtime.compile("layernorm", d=1000, dtype="bf16", schedule=schedule)
    backward, forward = norm.spec("bwd"), norm.spec("fwd")
    inputs = random_inputs(forward, 133) | random_inputs(backward, 133)
    place = {"to_gpu": to_gpu, "to_torch": to_torch}[put]

    def blocks_per_partial(a: Any) -> Any:
        flat = np.zeros(offset + 133 * pitch, a.dtype)
        view = np.lib.stride_tricks.as_strided(flat[offset:], (133, 1000), (pitch * a.itemsize, a.itemsize))
        view[...] = a
        on_gpu = place(flat)[offset : offset + 132 * pitch + 1000]
        if put == "to_torch":
            return on_gpu.as_strided((133, 1000), (pitch, 1))
        import cupy

        return cupy.lib.stride_tricks.as_strided(on_gpu, (133, 1000), (pitch * a.itemsize, a.itemsize))

    x, dy = blocks_per_partial(inputs["x"]), blocks_per_partial(inputs["dy"])
    y, saved = norm.forward(x, place(inputs["gamma"]), place(inputs["beta"]))
    dx, dgamma, dbeta = norm.backward(dy, saved)
    want = interpret(forward.graph(), random_inputs(forward, 133)) | interpret(
        backward.graph(), random_inputs(backward, 133)
    )
    assert_same({"y": y, "dx": dx, "dgamma": dgamma, "dbeta": dbeta}, want)


def test_special_numbers_keep_their_places() -> None:
    spec = parse_spec("layernorm.fwd:d=64,dtype=f32")
    inputs = random_inputs(spec, 6)
    inputs["x"][0, 3], inputs["x"][1, 5], inputs["x"][2, 7] = np.nan, np.inf, -np.inf
    inputs["x"][3] = 0.0
    inputs["x"][4] *= 1e-40
    inputs["x"][5] *= 1e30
    want = interpret(spec.graph(), inputs)
    norm = runtime.compile("layernorm", d=64)
    y, saved = norm.forward(*(to_gpu(inputs[n]) for n in ("x", "gamma", "beta")))
    assert same_bits(y.get(), want["y"]).all()
    assert same_bits(saved["rstd"].get(), want["rstd"]).all()
    assert np.isnan(want["y"][0]).all()
    assert not np.isnan(want["y"][3:]).any()


# ---- arrays of every kind ----


def to_gpu(a: Any) -> Any:
    import cupy

    return cupy.asarray(a)


def to_torch(a: Any) -> Any:
    import torch

    if a.dtype == NUMPY_DTYPE[parse_spec("layernorm.fwd:d=1,dtype=bf16").dtype]:
        return torch.from_numpy(a.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(a).cuda()


def bits_of(a: Any) -> Any:
    import torch

    if isinstance(a, torch.Tensor):
        return a.contiguous().view(torch.uint8).cpu().numpy().reshape(-1)
    return a.get().view(np.uint8).reshape(-1)


@pytest.fixture(params=["bf16", "f32"])
def case(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    spec = parse_spec(f"layernorm.bwd:d=768,dtype={request.param}")
    inputs = random_inputs(spec, 133)
    forward = random_inputs(spec.with_direction("fwd"), 133)
    want = {**interpret(spec.with_direction("fwd").graph(), forward), **interpret(spec.graph(), inputs)}
    return runtime.compile("layernorm", d=768, dtype=request.param), {**inputs, **forward}, want


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    for name, array in got.items():
        assert (bits_of(array) == want[name].view(np.uint8).reshape(-1)).all(), name


@pytest.mark.parametrize("put", [to_gpu, to_torch])
def test_forward_and_backward(case: Any, put: Any) -> None:
    norm, inputs, want = case
    x, gamma, beta, dy = (put(inputs[n]) for n in ("x", "gamma", "beta", "dy"))
    y, saved = norm.forward(x, gamma, beta)
    assert type(y) is type(x)
    dx, dgamma, dbeta = norm.backward(dy, saved)
    got = {"y": y, "mean": saved["mean"], "rstd": saved["rstd"], "dx": dx, "dgamma": dgamma, "dbeta": dbeta}
    assert_same(got, want)


@pytest.mark.parametrize("put", [to_gpu, to_torch])
def test_rows_at_a_distance_and_unaligned_addresses(case: Any, put: Any) -> None:
    norm, inputs, want = case
    wide = np.zeros((133, 1003), inputs["x"].dtype)
    wide[:, 1:769] = inputs["x"]
    x = put(wide)[:, 1:769]
    y, saved = norm.forward(x, put(inputs["gamma"]), put(inputs["beta"]))
    assert_same({"y": y, "mean": saved["mean"]}, want)
    dx, _, _ = norm.backward(put(inputs["dy"]), saved)
    assert_same({"dx": dx}, want)


@pytest.mark.parametrize("put", [to_gpu, to_torch])
def test_out(case: Any, put: Any) -> None:
    norm, inputs, want = case
    x, gamma, beta = (put(inputs[n]) for n in ("x", "gamma", "beta"))
    pool = put(np.zeros((133, 1000), inputs["x"].dtype))
    y = pool[:, 3:771]
    got, _ = norm.forward(x, gamma, beta, out=y)
    assert got is y
    assert (bits_of(y.copy() if put is to_gpu else y) == want["y"].view(np.uint8).reshape(-1)).all()
    assert not bits_of(pool[:, 771:].copy() if put is to_gpu else pool[:, 771:]).any()


def test_leading_dimensions(case: Any) -> None:
    norm, inputs, want = case
    x = to_gpu(inputs["x"]).reshape(7, 19, 768)
    y, saved = norm.forward(x, to_gpu(inputs["gamma"]), to_gpu(inputs["beta"]))
    assert y.shape == (7, 19, 768)
    assert saved["rstd"].shape == (7, 19)
    assert_same({"y": y}, want)


class OnlyInterface:
    """An array that is nothing but its ``__cuda_array_interface__``."""

    def __init__(self, array: Any, stream: int | None = None) -> None:
        self._array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "multipass": stream}


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
    y, saved = norm.forward(*(wrap(to_gpu(inputs[n])) for n in ("x", "gamma", "beta")))
    assert_same({"y": y, "rstd": saved["rstd"]}, want)
    mixed, _ = norm.forward(to_gpu(inputs["x"]), wrap(to_gpu(inputs["gamma"])), to_gpu(inputs["beta"]))
    assert_same({"y": mixed}, want)


def test_no_rows() -> None:
    import cupy

    norm = runtime.compile("layernorm", d=768)
    x, gamma = cupy.zeros((0, 768), "f4"), cupy.ones(768, "f4")
    y, saved = norm.forward(x, gamma, gamma)
    assert y.shape == (0, 768)
    dx, dgamma, dbeta = norm.backward(y, saved)
    assert dx.shape == (0, 768)
    assert bits_of(dgamma).sum() == bits_of(dbeta).sum() == 0


def test_wrong_arrays(case: Any) -> None:
    import torch

    norm, inputs, _ = case
    x, gamma, beta = (to_torch(inputs[n]) for n in ("x", "gamma", "beta"))
    with pytest.raises(ArrayError, match="'gamma' is expected on GPU 0, but lies on the CPU"):
        norm.forward(x, gamma.cpu(), beta)
    with pytest.raises(ArrayError, match="'gamma' is expected to be an array of the same library"):
        norm.forward(x, inputs["gamma"], beta)
    with pytest.raises(ArrayError, match="'beta' is expected to be an array of the same library"):
        norm.forward(x, gamma, to_gpu(inputs["beta"]))
    with pytest.raises(ArrayError, match=r"'x' is expected to be (bf16|f32), got torch.float64"):
        norm.forward(x.double(), gamma, beta)
    with pytest.raises(ArrayError, match="contiguous rows"):
        norm.forward(torch.zeros(768, 768, dtype=x.dtype, device="cuda").t(), gamma, beta)
    with pytest.raises(ArrayError, match="its rows overlap"):
        norm.forward(x, gamma, beta, out=torch.zeros(768, dtype=x.dtype, device="cuda").expand(133, 768))


# ---- streams, graphs, threads ----


def test_the_current_stream_is_read_at_each_launch_and_nothing_waits(case: Any) -> None:
    import torch

    norm, inputs, want = case
    x, gamma, beta, dy = (to_torch(inputs[n]) for n in ("x", "gamma", "beta", "dy"))
    norm.backward(dy, norm.forward(x, gamma, beta)[1])
    torch.cuda.synchronize()
    busy, free = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(400_000_000)
        norm.forward(x, gamma, beta)
        behind = busy.record_event()
    with torch.cuda.stream(free):
        y, saved = norm.forward(x, gamma, beta)
        dx, _, _ = norm.backward(dy, saved)
        done = free.record_event()
    done.synchronize()
    assert not behind.query(), "the launch on the busy stream ran elsewhere, or the host waited for it"
    assert_same({"y": y, "dx": dx}, want)


def test_torch_graph_capture_replays(case: Any) -> None:
    import torch

    norm, inputs, want = case
    x, gamma, beta, dy = (to_torch(inputs[n]) for n in ("x", "gamma", "beta", "dy"))
    norm.backward(dy, norm.forward(x, gamma, beta)[1])
    static = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, saved = norm.forward(static, gamma, beta)
        dx, dgamma, dbeta = norm.backward(dy, saved)
    static.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    assert_same({"y": y, "dx": dx, "dgamma": dgamma, "dbeta": dbeta}, want)


def test_captures_of_one_launch_replay_in_any_order() -> None:
    """Each has counters of its own, zeroed where its graph begins."""
    import torch

    norm = runtime.compile(
        "layernorm", d=1000, schedule={"bwd": "form=registers,threads=64,rows_per_block=4,vec=4,single_launch=yes"}
    )
    spec = norm.spec("bwd")
    inputs = random_inputs(spec, 700) | random_inputs(norm.spec("fwd"), 700)
    x, gamma, beta, dy = (to_torch(inputs[n]) for n in ("x", "gamma", "beta", "dy"))
    _, saved = norm.forward(x, gamma, beta)
    norm.backward(dy, saved)
    stream, graphs = torch.cuda.Stream(), []
    for _ in range(2):
        graphs.append((torch.cuda.CUDAGraph(), []))
        with torch.cuda.graph(graphs[-1][0], stream=stream):
            graphs[-1][1].extend(norm.backward(dy, saved))
    want = interpret(spec.graph(), random_inputs(spec, 700))
    for graph, results in (graphs[1], graphs[0], graphs[1]):
        for result in results:
            result.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert_same(dict(zip(("dx", "dgamma", "dbeta"), results, strict=True)), want)


def test_cupy_stream_capture_replays(case: Any) -> None:
    import cupy

    norm, inputs, want = case
    x, gamma, beta = (to_gpu(inputs[n]) for n in ("x", "gamma", "beta"))
    y, saved = norm.forward(x, gamma, beta)
    out = (cupy.zeros_like(y), saved["mean"], saved["rstd"])
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        norm.forward(x, gamma, beta, out=out)
        graph = stream.end_capture()
    assert not bits_of(out[0]).any()
    graph.launch(stream)
    stream.synchronize()
    assert_same({"y": out[0]}, want)


def test_workspace_is_reused_and_streams_have_their_own(case: Any) -> None:
    import cupy

    norm, inputs, _ = case
    arrays = [to_gpu(inputs[n]) for n in ("x", "gamma", "beta")]
    _, saved = norm.forward(*arrays)
    dy = to_gpu(inputs["dy"])
    norm.backward(dy, saved)
    norm.backward(dy, saved)
    held = norm._backward._workspaces._held
    assert len(held) == 1
    with cupy.cuda.Stream():
        norm.backward(dy, saved)
    assert len({workspace.address for workspace in held.values()}) == 2


def test_threads(case: Any) -> None:
    norm, inputs, want = case
    arrays = [to_gpu(inputs[n]) for n in ("x", "gamma", "beta")]
    problems: list[BaseException] = []

    def work() -> None:
        try:
            import cupy

            with cupy.cuda.Stream(non_blocking=True) as stream:
                for _ in range(50):
                    y, _ = norm.forward(*arrays)
                stream.synchronize()
            assert_same({"y": y}, want)
        except BaseException as e:
            problems.append(e)

    arrays[0].device.synchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not problems


@pytest.mark.parametrize("put", [to_gpu, to_torch])
def test_threads_that_share_a_stream(case: Any, put: Any) -> None:
    """Column sums of one call do not meet those of another, though both lie in one workspace."""
    norm, inputs, _ = case
    spec = norm.spec("bwd")
    _, saved = norm.forward(*(put(inputs[n]) for n in ("x", "gamma", "beta")))
    scaled = [{**random_inputs(spec, 133), "dy": inputs["dy"] * inputs["dy"].dtype.type(2.0**n)} for n in range(4)]
    got: list[list[Any]] = [[] for _ in scaled]

    def work(n: int) -> None:
        dy = put(scaled[n]["dy"])
        got[n].extend(norm.backward(dy, saved) for _ in range(100))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(scaled))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for one, results in zip(scaled, got, strict=True):
        want = interpret(spec.graph(), one)
        assert len(results) == 100
        for each in results:
            assert_same(dict(zip(("dx", "dgamma", "dbeta"), each, strict=True)), want)


@pytest.mark.parametrize("put", [to_gpu, to_torch])
def test_results_in_an_input_s_place(case: Any, put: Any) -> None:
    norm, inputs, want = case
    x, gamma, beta, dy = (put(inputs[n]) for n in ("x", "gamma", "beta", "dy"))
    _, saved = norm.forward(x, gamma, beta)
    dx, dgamma, dbeta = norm.backward(dy, saved, out=(dy, None, None))
    assert dx is dy
    assert_same({"dx": dx, "dgamma": dgamma, "dbeta": dbeta}, want)
    y, saved = norm.forward(x, gamma, beta, out=x)
    assert_same({"y": y, "mean": saved["mean"], "rstd": saved["rstd"]}, want)
    with pytest.raises(ArrayError, match="'x' is needed, but a result was written over it"):
        norm.backward(dy, saved)
    with pytest.raises(ArrayError, match="'y' is written to, but shares memory with 'x'"):
        norm.forward(x[1:], gamma, beta, out=x[:-1])


def test_the_workspaces_of_graphs_that_are_gone_are_freed() -> None:
    """Graphs that exist keep theirs and give the right bits; the driver says a little later which ones are gone."""
    import torch

    from lngen.runtime import launch

    norm = runtime.compile("layernorm", d=1024)
    spec = norm.spec("bwd")
    inputs = random_inputs(spec, 2000) | random_inputs(norm.spec("fwd"), 2000)
    _, saved = norm.forward(*(to_torch(inputs[n]) for n in ("x", "gamma", "beta")))
    dy = to_torch(inputs["dy"])
    norm.backward(dy, saved)

    def captured() -> tuple[Any, Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = norm.backward(dy, saved)
        return graph, results

    graph, results = captured()
    before = len(launch._of_graphs)
    for _ in range(50):
        other, _ = captured()
        other.replay()
        torch.cuda.synchronize()
        del other
        time.sleep(0.01)
    assert len(launch._of_graphs) < before + 10
    graph.replay()
    torch.cuda.synchronize()
    assert_same(
        dict(zip(("dx", "dgamma", "dbeta"), results, strict=True)), interpret(spec.graph(), random_inputs(spec, 2000))
    )


def test_captures_side_by_side() -> None:
    """Two graphs captured on one stream and replayed on two have a workspace each."""
    import torch

    norm = runtime.compile("layernorm", d=1024)
    spec = norm.spec("bwd")
    cases, kept = [], []
    capturing = torch.cuda.Stream()
    for seed in (0, 1):
        inputs = random_inputs(spec, 2000, seed=seed) | random_inputs(norm.spec("fwd"), 2000, seed=seed)
        _, saved = norm.forward(*(to_torch(inputs[n]) for n in ("x", "gamma", "beta")))
        dy = to_torch(inputs["dy"])
        norm.backward(dy, saved)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=capturing):
            results = norm.backward(dy, saved)
        kept.append((dy, saved))  # what a graph reads: the next capture would free it
        cases.append(
            (graph, torch.cuda.Stream(), results, interpret(spec.graph(), random_inputs(spec, 2000, seed=seed)))
        )
    torch.cuda.synchronize()
    for _ in range(200):
        for graph, stream, _, _ in cases:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _, _, results, want in cases:
        assert_same(dict(zip(("dx", "dgamma", "dbeta"), results, strict=True)), want)


def test_a_graph_of_ones_own() -> None:
    norm = runtime.compile(gated, d=1000, dtype="bf16")
    for direction in ("fwd", "bwd"):
        assert all(r.ok for r in check_spec(norm.spec(direction), on="gpu", schedules=3))


def test_outputs_do_not_depend_on_the_schedule() -> None:
    x = to_gpu(np.random.default_rng(0).normal(3, 1, (133, 4096)).astype(np.float32))
    gamma = x[0].copy()
    results = set()
    for schedule in (
        "form=registers,threads=32,rows_per_block=1,vec=4",
        "form=registers,threads=128,rows_per_block=1,vec=4",
        "form=registers,threads=1024,rows_per_block=1,vec=4",
        "form=multipass,threads=256,rows_per_block=1,vec=4,blocks_per_sm=2",
        "form=tma,threads=256,rows_per_block=1,vec=4,stages=3,grid=128,tma_store=yes",
        "form=cp_async,threads=256,rows_per_block=2,vec=4,stages=2,grid=50,cached_weights=yes",
        "form=registers,threads=128,rows_per_block=1,vec=1",
    ):
        y, saved = runtime.compile("layernorm", d=4096, schedule={"fwd": schedule}).forward(x, gamma, gamma)
        results.add(bits_of(y).tobytes() + bits_of(saved["rstd"]).tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("d", [1, 31, 768, 4096, 40000])
def test_row_maxima(d: int) -> None:
    def by_largest(b: GraphBuilder) -> None:
        x, gamma = b.input("x", M, D), b.input("gamma", D)
        square = b.mul("square", x, x)
        largest = b.reduce_max("largest", square, axis=D)
        total = b.add("total", b.add("raised", largest, b.eps()), b.reduce_mean("ms", square, axis=D))
        b.output("y", b.mul("scaled", b.maximum("kept", x, b.mul("shrunk", x, b.rsqrt("rstd", total))), gamma))

    for dtype in ("bf16", "f32", "f64"):
        norm = runtime.compile(by_largest, d=d, dtype=dtype)
        for direction in ("fwd", "bwd"):
            wrong = [
                r for r in check_spec(norm.spec(direction), on="gpu", schedules=3) if not r.ok and r.what == "bits"
            ]
            assert not wrong
