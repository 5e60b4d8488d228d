"""Rows staged through shared memory, on the PTX executor: bits, and no finding, for every way of staging them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

import sampling
from lngen.check.inputs import mismatches, random_inputs
from lngen.emit import emit
from lngen.graphs import Definition, GraphBuilder
from lngen.interpret import interpret
from lngen.ir import D, M
from lngen.lower import Plan, lower
from lngen.problem import Schedule, parse_schedule, problem
from lngen.ptx import Outcome, parse, run_plan
from lngen.spec import Spec, make_spec, parse_spec
from lngen.toolchain import compile_ptx

pytest.importorskip("cupy")

BASE = Schedule("registers", 32, 1, 1)


def run(spec: str | Spec, schedule: str, rows: int, **options: Any) -> tuple[Plan, Outcome]:
    """The plan and its outcome, its bits equal to the interpreter's, nothing found."""
    plan = lower(parse_spec(spec) if isinstance(spec, str) else spec, parse_schedule(schedule, BASE))
    inputs = random_inputs(plan.spec, rows)
    outcome = run_plan(plan, inputs, **options)
    assert mismatches(outcome.results, interpret(plan.graph, inputs)) == []
    assert outcome.findings == (), "\n".join(map(str, outcome.findings[:3]))
    return plan, outcome


Case = tuple[str, str, tuple[int, ...]]

# (form and what is varied, without owners), spread so that each value of each meets each direction.
FORWARD: list[Case] = [
    # Sub-warp rows.
    ("layernorm.fwd:d=64,dtype=bf16", "form=tma,threads=4,rows_per_block=16,vec=8,stages=2", (0, 1, 77)),
    ("layernorm.fwd:d=64,dtype=bf16", "form=tma,threads=2,rows_per_block=32,vec=8,stages=3,tma_store=yes,"
                                      "cached_weights=yes", (130,)),
    ("rmsnorm.fwd:d=64,dtype=f16,weight=f32", "form=cp_async,threads=4,rows_per_block=16,vec=8,stages=2,"
                                              "cached_weights=yes", (1, 77)),
    ("rmsnorm.fwd:d=31,dtype=f64", "form=cp_async,threads=16,rows_per_block=2,vec=1,stages=2", (0, 9)),
    # One segment; the last chunk partial where copies are asynchronous.
    ("layernorm.fwd:d=1000,dtype=bf16", "form=tma,threads=32,rows_per_block=2,vec=8,stages=2,"
                                        "cached_weights=yes", (1, 3, 13)),
    ("layernorm.fwd:d=1000,dtype=f32", "form=tma,threads=64,rows_per_block=1,vec=4,stages=4,tma_store=yes", (0, 1, 13)),
    ("layernorm.fwd:d=1002,dtype=bf16", "form=cp_async,threads=32,rows_per_block=1,vec=2,stages=3", (0, 9)),
    ("rmsnorm.fwd:d=999,dtype=f32,beta=yes", "form=cp_async,threads=64,rows_per_block=2,vec=1,stages=4,"
                                             "cached_weights=yes", (9,)),
    # Results that are wider, or narrower, than the inputs.
    ("rmsnorm.fwd:d=768,dtype=bf16,out=f32", "form=tma,threads=32,rows_per_block=4,vec=8,stages=2,"
                                             "tma_store=yes", (17,)),
    ("rmsnorm.fwd:d=1004,dtype=f32,out=bf16", "form=tma,threads=32,rows_per_block=4,vec=4,stages=2", (17,)),
    # Rows that begin anywhere.
    ("layernorm.fwd:d=1001,dtype=bf16", "form=tma_unaligned,threads=32,rows_per_block=2,vec=1,stages=2,"
                                        "tma_store=yes", (0, 1, 13)),
    ("layernorm.fwd:d=999,dtype=f32", "form=tma_unaligned,threads=64,rows_per_block=1,vec=1,stages=3,"
                                      "cached_weights=yes,tma_store=yes", (9,)),
    ("rmsnorm.fwd:d=1001,dtype=f32,out=bf16", "form=tma_unaligned,threads=16,rows_per_block=4,vec=1,stages=2,"
                                              "tma_store=yes", (17,)),
    ("rmsnorm.fwd:d=123,dtype=bf16,out=f32", "form=tma_unaligned,threads=16,rows_per_block=4,vec=1,stages=2,"
                                             "tma_store=yes", (17,)),
    ("layernorm.fwd:d=8193,dtype=bf16", "form=tma_unaligned,threads=256,rows_per_block=1,vec=1,stages=2,"
                                        "tma_store=yes", (5,)),
    # Several segments, in a block and shared by a cluster.
    ("layernorm.fwd:d=12288,dtype=bf16", "form=tma,threads=256,rows_per_block=1,vec=8,stages=2,tma_store=yes", (7,)),
    ("rmsnorm.fwd:d=8194,dtype=bf16", "form=cp_async,threads=256,rows_per_block=1,vec=2,stages=2,"
                                      "cached_weights=yes", (3,)),
    ("layernorm.fwd:d=12288,dtype=bf16", "form=tma,threads=128,rows_per_block=1,vec=8,stages=3,cluster=2,"
                                         "cached_weights=yes", (0, 1, 9)),
    ("rmsnorm.fwd:d=5000,dtype=f32", "form=tma,threads=32,rows_per_block=4,vec=4,stages=2,cluster=2,"
                                     "tma_store=yes", (17,)),
    # The stage of a row in registers takes the next one: row groups of less than a warp, of warps, in a cluster.
    ("rmsnorm.fwd:d=64,dtype=bf16", "form=tma,threads=4,rows_per_block=8,vec=8,stages=2,row_in_registers=yes,"
                                    "early_release=yes", (1, 33, 100)),
    ("layernorm.fwd:d=1000,dtype=f32", "form=tma,threads=64,rows_per_block=2,vec=4,stages=3,cached_weights=yes,"
                                       "row_in_registers=yes,early_release=yes", (50,)),
    ("layernorm.fwd:d=12288,dtype=f16",
     "form=tma,threads=128,rows_per_block=2,vec=8,stages=2,cluster=2,cached_weights=yes,row_in_registers=yes,"
     "early_release=yes", (1, 13)),
    ("layernorm.fwd:d=32768,dtype=bf16", "form=tma,threads=128,rows_per_block=1,vec=8,stages=2,cluster=4,"
                                         "tma_store=yes", (5,)),
    ("rmsnorm.fwd:d=8200,dtype=f64", "form=tma,threads=128,rows_per_block=1,vec=2,stages=2,cluster=4,"
                                     "tma_store=yes", (3,)),
]  # fmt: skip


def factors(spec: str, schedule: str, counts: tuple[int, ...]) -> tuple[object, ...]:
    """What differs in kind from case to case."""
    s = parse_schedule(schedule, BASE)
    return (
        parse_spec(spec).dtype,
        (s.form, s.cluster > 1),
        s.cached_weights,
        s.row_in_registers,
        s.single_launch,
        s.tma_store,
    )


def held(cases: list[Case]) -> list[Case]:
    """Every other case with a staged row, which stays in registers through all phases."""
    staged = [case for case in cases if "stages=" in case[1] and "row_in_registers" not in case[1]]
    return [(spec, f"{schedule},row_in_registers=yes", counts[-1:]) for spec, schedule, counts in staged[::2]]


@sampling.grid(("spec", "schedule", "counts"), FORWARD + held(FORWARD), factors, strength=1)
def test_forward(spec: str, schedule: str, counts: tuple[int, ...]) -> None:
    """Of the rows: none, fewer than owners, more than all owners have on their way."""
    for n, rows in enumerate(counts):
        run(spec, f"{schedule},grid={2 - n % 2}", rows, order=n)


BACKWARD: list[Case] = [
    ("layernorm.bwd:d=64,dtype=bf16", "form=tma,threads=4,rows_per_block=128,vec=8,stages=2,cached_weights=yes,"
                                      "tma_store=yes", (0, 1)),
    ("layernorm.bwd:d=64,dtype=bf16", "form=tma,threads=2,rows_per_block=128,vec=8,stages=3,single_launch=yes", (300,)),
    ("layernorm.bwd:d=64,dtype=bf16", "form=cp_async,threads=4,rows_per_block=128,vec=8,stages=2,cached_weights=yes,"
                                      "single_launch=yes", (0, 130)),
    ("layernorm.bwd:d=31,dtype=f32", "form=cp_async,threads=8,rows_per_block=64,vec=1,stages=2", (5,)),
    ("layernorm.bwd:d=1000,dtype=f32", "form=tma,threads=32,rows_per_block=4,vec=4,stages=2,single_launch=yes", (17,)),
    ("rmsnorm.bwd:d=1002,dtype=bf16", "form=cp_async,threads=64,rows_per_block=8,vec=2,stages=2,"
                                      "single_launch=yes", (9,)),
    ("rmsnorm.bwd:d=1000,dtype=f16,weight=f32", "form=tma,threads=64,rows_per_block=8,vec=8,stages=4,"
                                                "cached_weights=yes", (9,)),
    ("layernorm.bwd:d=768,dtype=f32,out=bf16", "form=tma,threads=32,rows_per_block=16,vec=8,stages=2,"
                                               "tma_store=yes", (17,)),
    ("layernorm.bwd:d=1001,dtype=bf16", "form=tma_unaligned,threads=64,rows_per_block=8,vec=1,stages=2,tma_store=yes,"
                                        "cached_weights=yes", (9,)),
    ("rmsnorm.bwd:d=1001,dtype=f32", "form=tma_unaligned,threads=32,rows_per_block=4,stages=2,tma_store=yes,"
                                     "single_launch=yes", (5,)),
    ("rmsnorm.bwd:d=8191,dtype=bf16", "form=tma_unaligned,threads=256,rows_per_block=1,vec=1,stages=2,"
                                      "tma_store=yes", (3,)),
    # Row groups that are a block each, on every form that has them; not all of them are there.
    ("rmsnorm.bwd:d=8192,dtype=bf16", "form=tma,threads=256,rows_per_block=1,vec=8,stages=2,cached_weights=yes,"
                                      "tma_store=yes", (1, 3)),
    ("rmsnorm.bwd:d=8192,dtype=bf16,blocks=4", "form=tma,threads=256,rows_per_block=1,vec=8,stages=3,"
                                               "single_launch=yes", (0, 5)),
    ("rmsnorm.bwd:d=8192,dtype=bf16,blocks=4", "form=cp_async,threads=256,rows_per_block=1,vec=8,stages=2,"
                                               "single_launch=yes", (3,)),
    ("rmsnorm.bwd:d=8191,dtype=bf16,blocks=2", "form=registers,threads=256,rows_per_block=1,vec=1,prefetch=yes", (7,)),
    ("layernorm.bwd:d=8200,dtype=bf16,blocks=2", "form=multipass,threads=256,rows_per_block=1,vec=8", (0, 7, 17)),
    ("layernorm.bwd:d=16384,dtype=bf16,blocks=2", "form=tma,threads=256,rows_per_block=1,vec=8,stages=2,"
                                                  "cluster=4", (3,)),
    # Clusters that share rows.
    ("rmsnorm.bwd:d=8192,dtype=f16,blocks=1", "form=tma,threads=64,rows_per_block=4,vec=8,stages=2,cluster=4,"
                                              "cached_weights=yes", (1, 9)),
    ("layernorm.bwd:d=5120,dtype=bf16,blocks=2",
     "form=tma,threads=64,rows_per_block=4,vec=8,stages=2,cluster=2,cached_weights=yes,row_in_registers=yes,"
     "early_release=yes,acquire_shared=yes", (33,)),
    ("layernorm.bwd:d=1000,dtype=bf16,blocks=3", "form=tma,threads=64,rows_per_block=8,vec=8,stages=2,"
                                                 "row_in_registers=yes,early_release=yes", (90,)),
    ("rmsnorm.bwd:d=96,dtype=f16,blocks=2", "form=tma,threads=4,rows_per_block=128,vec=8,stages=2,"
                                            "row_in_registers=yes,early_release=yes", (900,)),
    ("rmsnorm.bwd:d=8200,blocks=1", "form=tma,threads=64,rows_per_block=2,vec=4,stages=2,cluster=4,"
                                    "single_launch=yes", (6,)),
    ("layernorm.bwd:d=16384,dtype=bf16", "form=tma,threads=256,rows_per_block=1,vec=8,stages=3,cluster=2,"
                                         "cached_weights=yes", (3,)),
    ("rmsnorm.bwd:d=5000,blocks=4", "form=tma,threads=128,rows_per_block=1,vec=4,stages=2,cluster=2,"
                                    "single_launch=yes", (5,)),
    ("layernorm.bwd:d=12296,dtype=f32", "form=tma,threads=256,rows_per_block=1,vec=4,stages=2,cluster=4,"
                                        "tma_store=yes", (3,)),
    ("rmsnorm.bwd:d=8200,dtype=f64,blocks=4", "form=tma,threads=128,vec=2,stages=2,cluster=4,"
                                              "single_launch=yes", (0, 2)),
    # So many columns that a thread of the finish has several; the last tile is not full. Not where units are not whole.
    ("rmsnorm.bwd:d=33000,dtype=bf16", "form=tma,threads=128,rows_per_block=2,vec=8,stages=2,cluster=8", (0, 5)),
    ("rmsnorm.bwd:d=32800,dtype=f64", "form=multipass,threads=512,rows_per_block=1,vec=2", (3,)),
    ("rmsnorm.bwd:d=33002,dtype=bf16", "form=multipass,threads=512,rows_per_block=1,vec=2", (3,)),
    # Without column sums, and without row sums.
    ("layernorm.bwd:d=768,dtype=bf16,wrt=x", "form=tma,threads=32,rows_per_block=2,vec=8,stages=2,grid=2,"
                                             "cached_weights=yes", (9,)),
    ("layernorm.bwd:d=768,dtype=bf16,wrt=x", "form=cp_async,threads=32,rows_per_block=2,vec=8,stages=3,grid=1", (9,)),
    ("layernorm.bwd:d=768,dtype=f32,wrt=beta", "form=tma,threads=32,rows_per_block=8,vec=4,stages=2,"
                                               "single_launch=yes", (33,)),
    ("layernorm.bwd:d=768,dtype=f32,wrt=beta", "form=cp_async,threads=32,rows_per_block=8,vec=4,stages=2", (33,)),
    ("layernorm.bwd:d=768,dtype=bf16,save=none", "form=tma,threads=32,rows_per_block=16,vec=8,stages=2,"
                                                 "cached_weights=yes", (17,)),
    # Rows in registers, the column sums finished behind a grid barrier.
    ("layernorm.bwd:d=1000,dtype=bf16", "form=registers,threads=64,rows_per_block=8,vec=8,prefetch=yes,"
                                        "single_launch=yes", (0, 17)),
    ("layernorm.bwd:d=1,dtype=f32", "form=registers,threads=1,rows_per_block=64,vec=1,single_launch=yes", (130,)),
]  # fmt: skip


@sampling.grid(("spec", "schedule", "counts"), BACKWARD + held(BACKWARD), factors, strength=1)
def test_backward(spec: str, schedule: str, counts: tuple[int, ...]) -> None:
    """A column sum has many owners: a row for each of their stages is too many to run here."""
    for n, rows in enumerate(counts):
        run(spec, schedule, rows, order=n)


@pytest.mark.full
def test_a_ring_that_goes_round() -> None:
    """More rows than all stages of 66 owners take at once."""
    schedule = "form=tma,threads=256,rows_per_block=1,vec=8,stages=2,cached_weights=yes,tma_store=yes"
    run("rmsnorm.bwd:d=12352,dtype=bf16", schedule, 66 * 3 + 1)


def test_strides_and_the_order_of_blocks() -> None:
    """Rows at a distance that bulk copies allow: a multiple of 16 bytes."""
    strides = {"x": 1024, "y": 1040}
    for form in ("tma,tma_store=yes", "cp_async"):
        for order in (1, 2):
            schedule = f"form={form},threads=64,rows_per_block=2,vec=8,stages=2,grid=2"
            run("layernorm.fwd:d=1000,dtype=bf16", schedule, 9, strides=strides, offset=8, order=order)


def test_asynchronous_copies_of_rows_that_are_not_aligned() -> None:
    schedule = "form=cp_async,threads=64,rows_per_block=2,vec=1,stages=2,grid=2"
    run("layernorm.fwd:d=1000,dtype=f32", schedule, 9, strides={"x": 1001, "y": 1003}, offset=1)


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_asynchronous_copies_on_other_arches(arch: str) -> None:
    run(
        "layernorm.bwd:d=1000,dtype=bf16",
        "form=cp_async,threads=64,rows_per_block=8,vec=8,stages=2,single_launch=yes",
        9,
        arch=arch,
    )


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
        ("fwd", {}, "form=tma,threads=128,rows_per_block=1,vec=8,stages=2,grid=2,cluster=2,tma_store=yes"),
        ("bwd", {"blocks": 3}, "form=tma,threads=128,rows_per_block=1,vec=8,stages=2,cluster=2,single_launch=yes"),
    ):
        spec = make_spec(Definition("scaled", scaled), direction, {"d": 8200, "dtype": "bf16"} | options)
        run(spec, schedule, 5)


def test_maxima_and_sums_that_end_one_phase() -> None:
    for direction, options in (("fwd", {}), ("bwd", {"blocks": 3})):
        spec = make_spec(Definition("peaked", peaked), direction, {"d": 8200, "dtype": "bf16"} | options)
        run(spec, "form=tma,threads=128,rows_per_block=1,vec=8,stages=2,grid=2,cluster=2,tma_store=yes", 7)
        run(spec, "form=cp_async,threads=128,rows_per_block=2,vec=8,stages=2,grid=1", 3)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_what_is_widened_once_is_not_widened_again(dtype: str) -> None:
    """An element of x, dy and gamma, in a backward of two phases that holds them."""
    spec = parse_spec(f"layernorm.bwd:d=4096,dtype={dtype}")
    schedule = parse_schedule(
        "form=tma,threads=128,rows_per_block=2,vec=8,stages=3,cached_weights=yes,row_in_registers=yes", BASE
    )
    plan = lower(spec, schedule)
    entry = parse(compile_ptx(emit(plan), "sm_90")).entries[plan.kernels[0].name]
    elements, widened = 4096 // 128, [i.opcode for i in entry.instructions].count("cvt.f32.f16")
    assert 3 * elements <= widened < 2 * 3 * elements if dtype == "f16" else widened == 0
    assert [i.opcode for i in entry.instructions].count("sub.rn.f32") == 2 * elements, "xc and what dy is centred by"


@pytest.mark.parametrize(
    "schedule", ["form=tma,threads=64,rows_per_block=8,vec=8,stages=2", "form=registers,threads=64,rows_per_block=8"]
)
def test_partial_rows_stay_in_l2(schedule: str) -> None:
    """Both column sums, and nothing else; where there are no policies they are stored plainly."""
    plan = lower(parse_spec("layernorm.bwd:d=1024,dtype=bf16"), parse_schedule(schedule, BASE))
    rows = parse(compile_ptx(emit(plan), "sm_90")).entries[plan.kernels[0].name]
    stores = [i.opcode for i in rows.instructions if i.opcode.startswith("st.global")]
    stay = [o for o in stores if o == "st.global.L2::cache_hint.v4.u32"]
    assert len(stay) >= 2
    assert len(stay) < len(stores), "dx may leave"
    assert not any("cache_hint" in o for o in stores if o not in stay)
    policies = {i.opcode for i in rows.instructions if i.opcode.startswith("createpolicy")}
    assert policies == {"createpolicy.fractional.L2::evict_last.b64"}
    if "registers" in schedule:
        assert "cache_hint" not in compile_ptx(emit(plan), "sm_75")


PRELOADED = {  # what is loaded before the first rows are requested, and after
    "layernorm.bwd:d=7168,dtype=bf16": (("mean_next_ = load_scalar<EarlyLoad4>(", "EarlyLoad16>(gamma_cached_"), ()),
    "layernorm.fwd:d=7168,dtype=bf16": (("EarlyLoad16>(gamma_cached_", "EarlyLoad16>(beta_cached_"), ()),
    "layernorm.fwd:d=7168,dtype=f32": ((), ("EarlyLoad16>(gamma_cached_", "EarlyLoad16>(beta_cached_")),
    "layernorm.fwd:d=7168,dtype=bf16,weight=f32": ((), ("EarlyLoad16>(gamma_cached_",)),
}
PRIME, LOOP = "stream_.prime(fill_stage_);", "while (stream_.next()) {"


def _source(text: str, schedule: str) -> str:
    """The CUDA text of a staged kernel that keeps its weights, with the widest accesses."""
    spec = parse_spec(text)
    parsed = parse_schedule(f"form=tma,cached_weights=yes,{schedule}", BASE)
    return emit(lower(spec, replace(parsed, vec=problem(spec.graph(), spec.d).run)))


@pytest.mark.parametrize("text", PRELOADED)
def test_what_is_needed_first_is_loaded_first(text: str) -> None:
    """Memory answers in order: what comes after the rows waits for all of them."""
    grid = "" if text.startswith("layernorm.bwd") else ",grid=132"
    source = _source(text, f"threads=256,rows_per_block=1,stages=3,row_in_registers=yes{grid}")
    before, after = source.split(PRIME)
    after = after[: after.index(LOOP)]
    first, later = PRELOADED[text]
    assert all(load in before and load not in after for load in first)
    assert all(load in after and load not in before for load in later)


def test_what_clusters_load_and_wait_for() -> None:
    """Rows that clusters share leave loads of numbers to the compiler; without column sums L1 need not be emptied."""
    back = _source("layernorm.bwd:d=8192,dtype=bf16", "threads=64,rows_per_block=4,stages=3,cluster=4")
    first = back.index("mean_next_ = load_scalar<ReadOnlyLoad>(")
    assert first < back.index("EarlyLoad16>(gamma_cached_") < back.index(PRIME)
    alone = _source("layernorm.bwd:d=4096,dtype=bf16", "threads=128,rows_per_block=2,stages=3")
    assert "mean_next_ = load_scalar<EarlyLoad4>(" in alone
    assert "AcquireAll>" in back
    assert "AcquireShared" not in back
    forward = _source("layernorm.fwd:d=32768,dtype=bf16", "threads=128,rows_per_block=1,stages=3,cluster=4,grid=30")
    shared = _source(
        "layernorm.bwd:d=8192,dtype=bf16", "threads=64,rows_per_block=4,stages=3,cluster=4,acquire_shared=yes"
    )
    assert all("AcquireShared>" in source for source in (forward, shared))


@pytest.mark.parametrize(
    ("text", "schedule", "widened"),
    [
        (
            "layernorm.fwd:d=8192,dtype=f16",
            "threads=128,rows_per_block=1,stages=3,blocks_per_sm=2,grid=264,row_in_registers=yes",
            True,
        ),
        ("layernorm.bwd:d=1024,dtype=f16", "threads=64,rows_per_block=8,stages=2", True),
        (
            "rmsnorm.fwd:d=8192,dtype=bf16,weight=f16",
            "threads=128,rows_per_block=1,stages=3,grid=132,dynamic=yes,row_in_registers=yes",
            True,
        ),
        (
            "layernorm.fwd:d=8192,dtype=bf16",
            "threads=128,rows_per_block=1,stages=3,grid=132,row_in_registers=yes",
            False,
        ),
        (
            "layernorm.fwd:d=12288,dtype=f16",
            "threads=128,rows_per_block=1,stages=3,blocks_per_sm=3,grid=396,row_in_registers=yes",
            False,
        ),
        (
            "layernorm.fwd:d=1024,dtype=f64,weight=f16",
            "threads=128,rows_per_block=1,stages=3,grid=132,row_in_registers=yes",
            False,
        ),
    ],
)
def test_halves_that_are_kept_are_widened_once(text: str, schedule: str, widened: bool) -> None:
    """Of f16, if registers hold them widened; the compiler does so itself with bf16."""
    before, loop = _source(text, schedule).split(LOOP)
    assert ("widen_row<Row>(gamma_wide_, gamma_cached_);" in before) == widened
    assert ("= gamma_wide_[v_][i_];" in loop) == widened
    assert ("(gamma_cached_[v_]" in loop) != widened


@pytest.mark.parametrize("cached", ["no", "yes"])
def test_what_is_loaded_before_the_rows_is_waited_for_before_them(cached: str) -> None:
    """No wait for it is left to the loop, where it would be one for the next row's numbers, too."""
    schedule = parse_schedule(
        f"form=tma,threads=256,rows_per_block=1,vec=8,stages=4,cached_weights={cached},row_in_registers=yes", BASE
    )
    text = emit(lower(parse_spec("layernorm.bwd:d=7168,dtype=f16"), schedule))
    before, loop = re.sub(r"\s+", " ", text).split(LOOP)
    settled = re.search(
        r"stream_\.parity \^= \((.*?)\) & static_cast<unsigned>\(rows_ >> 63\);", before[before.index(PRIME) :]
    )
    assert settled
    assert all(f"bits_of({number}_next_)" in settled[1] for number in ("mean", "rstd"))
    assert ("vector_bits<Row>(gamma_cached_)" in settled[1]) == (cached == "yes")
    assert "parity" not in loop
    forward = parse_schedule("form=tma,threads=256,rows_per_block=1,vec=8,stages=4,grid=132,cached_weights=yes", BASE)
    assert "bits_of" not in emit(lower(parse_spec("layernorm.fwd:d=7168,dtype=f16"), forward)), (
        "it loads nothing by row"
    )
