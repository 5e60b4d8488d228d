"""Rows staged through shared memory: if these fail, a way of staging them changes bits, races or waits for nothing."""

import re
from dataclasses import replace
from typing import Any

import pytest

import sampling
from lngen.emit import emit
from lngen.graphs import Definition, GraphBuilder
from lngen.ir import D, M
from lngen.lower import lower
from lngen.problem import Schedule, problem
from lngen.ptx import parse
from lngen.spec import Spec, make_spec, parse_spec
from lngen.toolchain import compile_ptx
from plans import run_checked
from schedules import cp_async, multipass, registers, tma, unaligned

pytest.importorskip("cupy")


def run(spec: str | Spec, schedule: Schedule, rows: int, **options: Any) -> None:
    """Bits are compared; no findings, so nothing out of bounds and nothing left out, are expected."""
    run_checked(lower(parse_spec(spec) if isinstance(spec, str) else spec, schedule), rows, **options)


Case = tuple[str, Schedule, tuple[int, ...]]

# (form and what is varied, without owners), spread so that each value of each meets each direction.
FORWARD: list[Case] = [
    # Sub-warp rows.
    ("layernorm.fwd:d=64,dtype=bf16", tma(4, 16, 8, 2), (0, 1, 77)),
    ("layernorm.fwd:d=64,dtype=bf16", tma(2, 32, 8, 3, "store cached"), (130,)),
    ("rmsnorm.fwd:d=64,dtype=f16,weight=f32", cp_async(4, 16, 8, 2, "cached"), (1, 77)),
    ("rmsnorm.fwd:d=31,dtype=f64", cp_async(16, 2, 1, 2), (0, 9)),
    # One segment; the last chunk partial where copies are asynchronous.
    ("layernorm.fwd:d=1000,dtype=bf16", tma(32, 2, 8, 2, "cached"), (1, 3, 13)),
    ("layernorm.fwd:d=1000,dtype=f32", tma(64, 1, 4, 4, "store"), (0, 1, 13)),
    ("layernorm.fwd:d=1002,dtype=bf16", cp_async(32, 1, 2, 3), (0, 9)),
    ("rmsnorm.fwd:d=999,dtype=f32,beta=yes", cp_async(64, 2, 1, 4, "cached"), (9,)),
    # Results that are wider, or narrower, than the inputs.
    ("rmsnorm.fwd:d=768,dtype=bf16,out=f32", tma(32, 4, 8, 2, "store"), (17,)),
    ("rmsnorm.fwd:d=1004,dtype=f32,out=bf16", tma(32, 4, 4, 2), (17,)),
    # Rows that begin anywhere.
    ("layernorm.fwd:d=1001,dtype=bf16", unaligned(32, 2, 1, 2), (0, 1, 13)),
    ("layernorm.fwd:d=999,dtype=f32", unaligned(64, 1, 1, 3, "cached"), (9,)),
    ("rmsnorm.fwd:d=1001,dtype=f32,out=bf16", unaligned(16, 4, 1, 2), (17,)),
    ("rmsnorm.fwd:d=123,dtype=bf16,out=f32", unaligned(16, 4, 1, 2), (17,)),
    ("layernorm.fwd:d=8193,dtype=bf16", unaligned(256, 1, 1, 2), (5,)),
    # Several segments, in a block and shared by a cluster.
    ("layernorm.fwd:d=12288,dtype=bf16", tma(256, 1, 8, 2, "store"), (7,)),
    ("rmsnorm.fwd:d=8194,dtype=bf16", cp_async(256, 1, 2, 2, "cached"), (3,)),
    ("layernorm.fwd:d=12288,dtype=bf16", tma(128, 1, 8, 3, "cached", cluster=2), (0, 1, 9)),
    ("rmsnorm.fwd:d=5000,dtype=f32", tma(32, 4, 4, 2, "store", cluster=2), (17,)),
    # The stage of a row in registers takes the next one: row groups of less than a warp, of warps, in a cluster.
    ("rmsnorm.fwd:d=64,dtype=bf16", tma(4, 8, 8, 2, "regs early"), (1, 33, 100)),
    ("layernorm.fwd:d=1000,dtype=f32", tma(64, 2, 4, 3, "cached regs early"), (50,)),
    ("layernorm.fwd:d=12288,dtype=f16",
     tma(128, 2, 8, 2, "cached regs early", cluster=2), (1, 13)),
    ("layernorm.fwd:d=32768,dtype=bf16", tma(128, 1, 8, 2, "store", cluster=4), (5,)),
    ("rmsnorm.fwd:d=8200,dtype=f64", tma(128, 1, 2, 2, "store", cluster=4), (3,)),
]  # fmt: skip


def factors(spec: str, s: Schedule, counts: tuple[int, ...]) -> tuple[object, ...]:
    """What differs in kind from case to case."""
    return (
        parse_spec(spec).dtype, (s.form, s.cluster > 1), s.cached_weights, s.row_in_registers, s.single_launch,
        s.tma_store,
    )  # fmt: skip


def held(cases: list[Case]) -> list[Case]:
    """Every other case with a staged row, which stays in registers through all phases."""
    staged = [case for case in cases if case[1].stages and not case[1].row_in_registers]
    return [(spec, replace(s, row_in_registers=True), counts[-1:]) for spec, s, counts in staged[::2]]


@sampling.grid(("spec", "schedule", "counts"), FORWARD + held(FORWARD), factors, strength=1)
def test_forward(spec: str, schedule: Schedule, counts: tuple[int, ...]) -> None:
    """Of the rows: none, fewer than owners, more than all owners have on their way."""
    for n, rows in enumerate(counts):
        run(spec, replace(schedule, grid=2 - n % 2), rows, order=n)


BACKWARD: list[Case] = [
    ("layernorm.bwd:d=64,dtype=bf16", tma(4, 128, 8, 2, "store cached"), (0, 1)),
    ("layernorm.bwd:d=64,dtype=bf16", tma(2, 128, 8, 3, "single"), (300,)),
    ("layernorm.bwd:d=64,dtype=bf16", cp_async(4, 128, 8, 2, "cached single"), (0, 130)),
    ("layernorm.bwd:d=31,dtype=f32", cp_async(8, 64, 1, 2), (5,)),
    ("layernorm.bwd:d=1000,dtype=f32", tma(32, 4, 4, 2, "single"), (17,)),
    ("rmsnorm.bwd:d=1002,dtype=bf16", cp_async(64, 8, 2, 2, "single"), (9,)),
    ("rmsnorm.bwd:d=1000,dtype=f16,weight=f32", tma(64, 8, 8, 4, "cached"), (9,)),
    ("layernorm.bwd:d=768,dtype=f32,out=bf16", tma(32, 16, 8, 2, "store"), (17,)),
    ("layernorm.bwd:d=1001,dtype=bf16", unaligned(64, 8, 1, 2, "cached"), (9,)),
    ("rmsnorm.bwd:d=1001,dtype=f32", unaligned(32, 4, 1, 2, "single"), (5,)),
    ("rmsnorm.bwd:d=8191,dtype=bf16", unaligned(256, 1, 1, 2), (3,)),
    # Row groups that are a block each, on every form that has them; not all of them are there, or a ring goes round.
    ("rmsnorm.bwd:d=8192,dtype=bf16", tma(256, 1, 8, 2, "store cached"), (1, 3)),
    ("rmsnorm.bwd:d=8192,dtype=bf16,blocks=4", tma(256, 1, 8, 3, "single"), (0, 13)),
    ("rmsnorm.bwd:d=8192,dtype=bf16,blocks=4", cp_async(256, 1, 8, 2, "single"), (3,)),
    ("rmsnorm.bwd:d=8191,dtype=bf16,blocks=2", registers(256, 1, 1, "prefetch"), (7,)),
    ("layernorm.bwd:d=8200,dtype=bf16,blocks=2", multipass(256, 8), (0, 7, 17)),
    ("layernorm.bwd:d=16384,dtype=bf16,blocks=2", tma(256, 1, 8, 2, cluster=4), (3,)),
    # Clusters that share rows.
    ("rmsnorm.bwd:d=8192,dtype=f16,blocks=1", tma(64, 4, 8, 2, "cached", cluster=4), (1, 9)),
    ("layernorm.bwd:d=5120,dtype=bf16,blocks=2",
     tma(64, 4, 8, 2, "cached regs early acquire", cluster=2), (33,)),
    ("layernorm.bwd:d=1000,dtype=bf16,blocks=3", tma(64, 8, 8, 2, "regs early"), (90,)),
    ("rmsnorm.bwd:d=96,dtype=f16,blocks=2", tma(4, 128, 8, 2, "regs early"), (900,)),
    ("rmsnorm.bwd:d=8200,blocks=1", tma(64, 2, 4, 2, "single", cluster=4), (6,)),
    ("layernorm.bwd:d=16384,dtype=bf16", tma(256, 1, 8, 3, "cached", cluster=2), (3,)),
    ("rmsnorm.bwd:d=5000,blocks=4", tma(128, 1, 4, 2, "single", cluster=2), (5,)),
    ("layernorm.bwd:d=12296,dtype=f32", tma(256, 1, 4, 2, "store", cluster=4), (3,)),
    ("rmsnorm.bwd:d=8200,dtype=f64,blocks=4", tma(128, 1, 2, 2, "single", cluster=4), (0, 2)),
    # So many columns that a thread of the finish has several; the last tile is not full. Not where units are not whole.
    ("rmsnorm.bwd:d=33000,dtype=bf16", tma(128, 2, 8, 2, cluster=8), (0, 5)),
    ("rmsnorm.bwd:d=32800,dtype=f64", multipass(512, 2), (3,)),
    ("rmsnorm.bwd:d=33002,dtype=bf16", multipass(512, 2), (3,)),
    # Without column sums, and without row sums.
    ("layernorm.bwd:d=768,dtype=bf16,wrt=x", tma(32, 2, 8, 2, "cached", grid=2), (9,)),
    ("layernorm.bwd:d=768,dtype=bf16,wrt=x", cp_async(32, 2, 8, 3, grid=1), (9,)),
    ("layernorm.bwd:d=768,dtype=f32,wrt=beta", tma(32, 8, 4, 2, "single"), (33,)),
    ("layernorm.bwd:d=768,dtype=f32,wrt=beta", cp_async(32, 8, 4, 2), (33,)),
    ("layernorm.bwd:d=768,dtype=bf16,save=none", tma(32, 16, 8, 2, "cached"), (17,)),
    # Rows in registers, the column sums finished behind a grid barrier.
    ("layernorm.bwd:d=1000,dtype=bf16", registers(64, 8, 8, "prefetch single"), (0, 17)),
    ("layernorm.bwd:d=1,dtype=f32", registers(1, 64, 1, "single"), (130,)),
]  # fmt: skip


@sampling.grid(("spec", "schedule", "counts"), BACKWARD + held(BACKWARD), factors, strength=1)
def test_backward(spec: str, schedule: Schedule, counts: tuple[int, ...]) -> None:
    """A column sum has many owners: a row for each of their stages is too many to run here."""
    for n, rows in enumerate(counts):
        run(spec, schedule, rows, order=n)


def test_strides_and_the_order_of_blocks() -> None:
    """Rows at a distance that bulk copies allow: a multiple of 16 bytes."""
    strides = {"x": 1024, "y": 1040}
    for schedule in (tma(64, 2, 8, 2, "store", grid=2), cp_async(64, 2, 8, 2, grid=2)):
        for order in (1, 2):
            run("layernorm.fwd:d=1000,dtype=bf16", schedule, 9, strides=strides, offset=8, order=order)


def test_asynchronous_copies_of_rows_that_are_not_aligned() -> None:
    schedule = cp_async(64, 2, 1, 2, grid=2)
    run("layernorm.fwd:d=1000,dtype=f32", schedule, 9, strides={"x": 1001, "y": 1003}, offset=1)


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_asynchronous_copies_on_other_arches(arch: str) -> None:
    run("layernorm.bwd:d=1000,dtype=bf16", cp_async(64, 8, 8, 2, "single"), 9, arch=arch)


def scaled(b: GraphBuilder) -> None:
    """No row is summed."""
    b.output("y", b.mul("product", b.input("x", M, D), b.input("gamma", D)))


def peaked(b: GraphBuilder) -> None:
    """A maximum and a sum end one phase."""
    x = b.input("x", M, D)
    square = b.mul("square", x, x)
    largest = b.reduce_max("largest", square, axis=D)
    total = b.add("total", b.add("raised", largest, b.eps()), b.reduce_mean("ms", square, axis=D))
    b.output("y", b.mul("scaled", x, b.rsqrt("rstd", total)))


def test_no_row_of_a_graph_is_summed() -> None:
    """Nothing ends a phase; with a cluster, nothing is exchanged."""
    for direction, options, schedule in (
        ("fwd", {}, tma(128, 1, 8, 2, "store", cluster=2, grid=2)),
        ("bwd", {"blocks": 3}, tma(128, 1, 8, 2, "single", cluster=2)),
    ):
        spec = make_spec(Definition("scaled", scaled), direction, {"d": 8200, "dtype": "bf16"} | options)
        run(spec, schedule, 5)


def test_maxima_and_sums_that_end_one_phase() -> None:
    for direction, options in (("fwd", {}), ("bwd", {"blocks": 3})):
        spec = make_spec(Definition("peaked", peaked), direction, {"d": 8200, "dtype": "bf16"} | options)
        run(spec, tma(128, 1, 8, 2, "store", cluster=2, grid=2), 7)
        run(spec, cp_async(128, 2, 8, 2, grid=1), 3)


@pytest.mark.parametrize("schedule", [tma(64, 8, 8, 2), registers(64, 8, 1)])
def test_partial_rows_stay_in_l2(schedule: Schedule) -> None:
    """Both column sums, and nothing else; where there are no policies they are stored plainly."""
    plan = lower(parse_spec("layernorm.bwd:d=1024,dtype=bf16"), schedule)
    rows = parse(compile_ptx(emit(plan), "sm_90")).entries[plan.kernels[0].name]
    stores = [i.opcode for i in rows.instructions if i.opcode.startswith("st.global")]
    stay = [o for o in stores if o == "st.global.L2::cache_hint.v4.u32"]
    assert len(stay) >= 2
    assert len(stay) < len(stores), "dx may leave"
    assert not any("cache_hint" in o for o in stores if o not in stay)
    policies = {i.opcode for i in rows.instructions if i.opcode.startswith("createpolicy")}
    assert policies == {"createpolicy.fractional.L2::evict_last.b64"}
    if schedule.form == "registers":
        assert "cache_hint" not in compile_ptx(emit(plan), "sm_75")


UNMOVED = "UnmovedLoad16>("
PRELOADED = {  # what is loaded before the first rows are requested, and after
    "layernorm.bwd:d=7168,dtype=bf16": (
        ("mean_next_ = load_scalar<UnmovedLoad4>(", UNMOVED + "gamma_cached_"),
        (),
    ),
    "layernorm.fwd:d=7168,dtype=bf16": ((UNMOVED + "gamma_cached_", UNMOVED + "beta_cached_"), ()),
    "layernorm.fwd:d=7168,dtype=f32": ((), (UNMOVED + "gamma_cached_", UNMOVED + "beta_cached_")),
    "layernorm.fwd:d=7168,dtype=bf16,weight=f32": ((), (UNMOVED + "gamma_cached_",)),
}
PRIME, LOOP = "stream_.prime(fill_stage_);", "while (stream_.next()) {"


def _source(text: str, schedule: Schedule) -> str:
    """The CUDA text of a staged kernel that keeps its weights, with the widest accesses."""
    spec = parse_spec(text)
    return emit(lower(spec, replace(schedule, cached_weights=True, vec=problem(spec.graph(), spec.d).run)))


@pytest.mark.parametrize("text", PRELOADED)
def test_what_is_needed_first_is_loaded_first(text: str) -> None:
    """Memory answers in order: what comes after the rows waits for all of them."""
    grid = 0 if text.startswith("layernorm.bwd") else 132
    source = _source(text, tma(256, 1, 1, 3, "regs", grid=grid))
    before, after = source.split(PRIME)
    after = after[: after.index(LOOP)]
    first, later = PRELOADED[text]
    assert all(load in before and load not in after for load in first)
    assert all(load in after and load not in before for load in later)


def test_what_clusters_load_and_wait_for() -> None:
    """Rows that clusters share leave loads of numbers to the compiler; without column sums L1 need not be emptied."""
    back = _source("layernorm.bwd:d=8192,dtype=bf16", tma(64, 4, 1, 3, cluster=4))
    first = back.index("mean_next_ = load_scalar<ReadOnlyLoad>(")
    assert first < back.index(UNMOVED + "gamma_cached_") < back.index(PRIME)
    alone = _source("layernorm.bwd:d=4096,dtype=bf16", tma(128, 2, 1, 3))
    assert "mean_next_ = load_scalar<UnmovedLoad4>(" in alone
    assert "AcquireAll>" in back
    assert "AcquireShared" not in back
    forward = _source("layernorm.fwd:d=32768,dtype=bf16", tma(128, 1, 1, 3, cluster=4, grid=30))
    shared = _source("layernorm.bwd:d=8192,dtype=bf16", tma(64, 4, 1, 3, "acquire", cluster=4))
    assert all("AcquireShared>" in source for source in (forward, shared))


@pytest.mark.parametrize("cached", [False, True])
def test_what_is_loaded_before_the_rows_is_waited_for_before_them(cached: bool) -> None:
    """No wait for it is left to the loop, where it would be one for the next row's numbers, too."""
    schedule = replace(tma(256, 1, 8, 4, "regs"), cached_weights=cached)
    text = emit(lower(parse_spec("layernorm.bwd:d=7168,dtype=f16"), schedule))
    before, loop = re.sub(r"\s+", " ", text).split(LOOP)
    settled = re.search(
        r"stream_\.parity \^= \((.*?)\) & static_cast<unsigned>\(rows_ >> 63\);", before[before.index(PRIME) :]
    )
    assert settled
    assert all(f"bits_of({number}_next_)" in settled[1] for number in ("mean", "rstd"))
    assert ("vector_bits<Row>(gamma_cached_)" in settled[1]) == cached
    assert "parity" not in loop
    forward = tma(256, 1, 8, 4, "cached", grid=132)
    assert "bits_of" not in emit(lower(parse_spec("layernorm.fwd:d=7168,dtype=f16"), forward)), (
        "it loads nothing by row"
    )
