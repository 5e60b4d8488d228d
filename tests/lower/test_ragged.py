"""Ragged rows: if these fail, rows that begin anywhere give other bits, or are taken where they may not be."""

import math
import random
import re
from dataclasses import replace
from functools import partial
from itertools import product

import pytest

import lngen
import sampling
from fake_gpu import FakeArray, FakeGpu
from lngen.check.inputs import random_inputs
from lngen.contract import described
from lngen.errors import ArrayError, ScheduleError
from lngen.ir import WIDE
from lngen.lower import Plan, lower
from lngen.problem import Schedule, check, is_legal, problem
from lngen.ptx import run_plan
from lngen.runtime import Norm
from lngen.spec import Spec, parse_spec
from mutants import edited, source_of, twin
from plans import run_checked

LENGTHS = (17, 31, 37, 1001, 1002, 4093)
DTYPES = ("bf16", "f16", "f32", "f64", "bf16,out=f32", "f16,weight=f32", "f32,out=bf16", "f64,out=f16")


def spec_of(graph: str, direction: str, d: int, dtype: str, more: str = "") -> Spec:
    """Few blocks share the rows of column sums: fewer to run, more rows each."""
    blocks = ",blocks=2" if direction == "bwd" else ""
    return parse_spec(f"{graph}.{direction}:d={d},dtype={dtype}{blocks}{more}")


TRIES = 400  # where one of these is not legal, none is


def drawn(text: str) -> Schedule | None:
    """A legal schedule for unaligned TMA, with the widest accesses and at most three owners; None if there is none."""
    spec, rng = parse_spec(text), random.Random(text)
    p = problem(spec.graph(), spec.d)
    found = (
        Schedule(
            "tma_unaligned",
            threads=1 << rng.randrange(11),
            rows_per_block=p.groups if p.column_sums else rng.choice((1, 2, 3, 4, 8)),
            vec=next(v for v in (8, 4, 2, 1) if spec.d % v == 0 and p.chunk % v == 0),
            stages=rng.choice((2, 3, 4)),
            grid=0 if p.column_sums else rng.choice((1, 2, 3)),
            tma_store=bool(p.output_sizes),
            cached_weights=rng.random() < 0.5,
            single_launch=p.column_sums > 0 and rng.random() < 0.5,
            row_in_registers=rng.random() < 0.5,
        )
        for _ in range(TRIES)
    )
    return next((s for s in found if is_legal(s, p)), None)


def run(plan: Plan, rows: int, order: int = 0) -> None:
    """Bits are compared; no findings, so nothing out of bounds and nothing left out, are expected."""
    pytest.importorskip("cupy")
    run_checked(plan, rows, order=order)


def in_turn(s: Schedule, spec: Spec) -> int:
    """Rows that are on their way at a time."""
    return s.stages * s.rows_per_block * (s.grid or problem(spec.graph(), spec.d).blocks)


# Every length with every dtype, in both directions; the two graphs take turns.
CASES = [
    (text, s)
    for direction, (k, dtype), (n, d) in product(("fwd", "bwd"), enumerate(DTYPES), enumerate(LENGTHS))
    for text in [str(spec_of(("layernorm", "rmsnorm")[(k + n) % 2], direction, d, dtype))]
    for s in [drawn(text)]
    if s is not None
]


def factors(text: str, s: Schedule) -> tuple[object, ...]:
    """What differs in kind from case to case; rows are shorter than a warp's, in one segment, in several."""
    spec = parse_spec(text)
    length, mixed = (spec.d > 32) + (spec.d > 4000), "out=" in text or "weight=" in text
    shape = (s.stages, s.rows_per_block > 1, s.threads > 32)
    return (
        text.partition(".")[0], spec.direction, spec.dtype, mixed, length, *shape, s.cached_weights, s.single_launch,
        s.row_in_registers,
    )  # fmt: skip


@sampling.grid(("text", "s"), CASES, factors, ids=[f"{text}-{s.slug}" for text, s in CASES], strength=1)
def test_bits(text: str, s: Schedule) -> None:
    """Each time one row number: one, two, more than are on their way at a time."""
    spec = parse_spec(text)
    plan = lower(spec, s)
    most = in_turn(s, spec) + s.rows_per_block + 1
    run(plan, 1)
    run(plan, min(most, 2 + 90000 // spec.d))
    run(plan, 2, order=1)


@pytest.mark.parametrize(("dtype", "d"), [("bf16", 37), ("f16", 1002), ("f32", 31), ("f64", 17), ("f32,out=bf16", 37)])
def test_rows_begin_everywhere(dtype: str, d: int) -> None:
    """Within 16 bytes, at every multiple of what D elements and 16 bytes have in common."""
    spec = spec_of("layernorm", "fwd", d, dtype)
    plan = lower(spec, Schedule("tma_unaligned", 32, 1, math.gcd(d, 2), 1, False, 2, 1, 2, True))
    for v in (*plan.inputs, *plan.outputs):
        if v.type.axes == WIDE:
            step = math.gcd(d * v.type.dtype.size, 16)
            assert {row * d * v.type.dtype.size % 16 for row in range(9)} == set(range(0, 16, step))
    run(plan, 9)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_rows(direction: str, rows: int) -> None:
    """None, and groups that have no row in the last turn."""
    spec = spec_of("layernorm", direction, 1001, "f16")
    p = problem(spec.graph(), 1001)
    run(lower(spec, Schedule("tma_unaligned", 64, p.groups, 1, 1, False, 2, 1, 0 if p.column_sums else 2, True)), rows)


@pytest.mark.parametrize("more", [",wrt=x", ",wrt=gamma+beta", ",save=none"])
def test_what_leaves_differs(more: str) -> None:
    """Column sums or none, [M, D] results or none."""
    spec = spec_of("layernorm", "bwd", 1001, "bf16", more)
    s = drawn(str(spec))
    assert s.tma_store == ("gamma" not in more)
    run(lower(spec, s), 11)


GOOD = Schedule("tma_unaligned", 32, 1, 1, 1, False, 2, 1, 2, True)


@pytest.mark.parametrize(
    ("text", "s", "number"),
    [("d=1004,dtype=f32,out=bf16", Schedule("tma", 32, 1, 4, 1, False, 2, 1, 2, True), 2008),
     ("d=16392,dtype=f32,out=bf16", Schedule("tma", 128, 1, 4, 1, False, 2, 8, 2, True), 4104)],
)  # fmt: skip
def test_narrow_results_of_bulk_rows(text: str, s: Schedule, number: int) -> None:
    """Their rows, or a block's pieces of them, are no multiples of 16 bytes: they may leave in another way only."""
    spec = parse_spec(f"layernorm.fwd:{text}")
    with pytest.raises(ScheduleError, match=f"rows, or cluster tiles, .* multiples of 16 bytes, got {number}"):
        check(s, problem(spec.graph(), spec.d))
    run(lower(spec, replace(s, tma_store=False)), 5)


# ---- what arrays have to be like ----


def test_alignment() -> None:
    def aligned(text: str, s: Schedule) -> dict[str, int]:
        plan = lower(parse_spec(text), s)
        return {v.name: plan.alignment(v) for v in (*plan.inputs, *plan.outputs) if v.type.axes}

    ragged = aligned("layernorm.fwd:d=1001,dtype=bf16,weight=f32", GOOD)
    assert ragged == {"x": 16, "gamma": 4, "beta": 4, "y": 16, "mean": 4, "rstd": 4}
    assert aligned("cross_entropy.fwd:d=1001,dtype=bf16", replace(GOOD, tma_store=False)) == {
        "x": 16, "target": 16, "loss": 4, "rowmax": 4, "rowsum": 4,
    }  # fmt: skip
    bulk, text = Schedule("tma", 32, 1, 4, 1, False, 2, 1, 2), "layernorm.fwd:d=1008,dtype=f32,out=bf16"
    assert aligned(text, bulk)["y"] == 8
    assert aligned(text, replace(bulk, tma_store=True))["y"] == 16


def test_the_manifest_asks_for_contiguous_rows() -> None:
    tensors = {t["name"]: t for t in described(lower(parse_spec("layernorm.fwd:d=1001,dtype=bf16"), GOOD))["tensors"]}
    for name in "xy":
        found = tensors[name]
        assert (found["alignment"], found["row_stride_multiple"]) == (16, 1001)
        assert found["layout"] == "contiguous: row stride 1001"
    assert tensors["gamma"]["alignment"] == 2


def went(gpu: FakeGpu, norm: Norm, strides: dict[str, int], shifts: dict[str, int], rows: int = 5) -> tuple[str, int]:
    """The form and access width of a call with those row strides, and addresses shifted by so many bytes."""
    spec, made = norm.spec(), dict[str, FakeArray]()
    dtypes = {"x": spec.dtype, "gamma": spec.weight, "beta": spec.weight, "y": spec.out, "mean": "f32", "rstd": "f32"}
    for n, (name, dtype) in enumerate(dtypes.items(), 1):
        shape, step = ((rows, spec.d), (strides.get(name, spec.d), 1)) if name in "xy" else ((spec.d,), (1,))
        shape = (rows,) if name in ("mean", "rstd") else shape
        made[name] = gpu.array(str(dtype), *shape, strides=step, address=(n << 24) + shifts.get(name, 0))
    norm.forward(*(made[n] for n in ("x", "gamma", "beta")), out=tuple(made[n] for n in ("y", "mean", "rstd")))
    found = gpu.launched[-1].plan.schedule
    return found.form, found.vec


RAGGED = "form=tma_unaligned,threads=32,rows_per_block=1,stages=2,grid=128,tma_store=yes"


def test_calls_of_ragged_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """One behind the other and from a multiple of 16 bytes on, or in another way."""
    norm = lngen.compile("layernorm", d=1002, dtype="bf16", schedule={"fwd": RAGGED + ",vec=2"})
    go = partial(went, FakeGpu(monkeypatch), norm)
    assert go({}, {}) == ("tma_unaligned", 2)
    for strides, shifts, vec in [
        ({"x": 1004}, {}, 2), ({"y": 1008}, {}, 2), ({"x": 1005}, {}, 1), ({"x": 0}, {}, 2), ({"x": -1002}, {}, 2),
        ({}, {"x": 8}, 2), ({}, {"y": 4}, 2), ({}, {"y": 2}, 1), ({"y": 1003}, {"x": 2}, 1),
    ]:  # fmt: skip
        form, width = go(strides, shifts)
        assert form not in ("tma", "tma_unaligned"), (strides, shifts)
        assert width <= vec, (strides, shifts)
    # [D] and [M] arrays are read as ever; a single row has no stride; the first call's plan is still there.
    assert go({}, {"gamma": 4, "beta": 12, "mean": 4}) == ("tma_unaligned", 2)
    assert go({}, {"gamma": 2})[0] not in ("tma", "tma_unaligned")
    assert go({"x": 1005}, {}, rows=1) == go({}, {}) == ("tma_unaligned", 2)
    for name, size, past in (("x", 2, 1), ("mean", 4, 2), ("gamma", 2, 1)):
        message = (
            f"'{name}' is expected at an address that is a multiple of its element size, {size} bytes, got one {past} "
            "bytes past such an address; copy it to a new array."
        )
        with pytest.raises(ArrayError, match=re.escape(message)):
            go({}, {name: past})


def test_calls_of_bulk_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result narrower than the inputs leaves in bulk from multiples of 16 bytes only."""
    gpu, text = FakeGpu(monkeypatch), "form=tma,threads=32,rows_per_block=1,vec=4,stages=2,grid=128"
    bulk, plain = (
        partial(went, gpu, lngen.compile("layernorm", d=1008, dtype="f32", out="bf16", schedule={"fwd": s}))
        for s in (text + ",tma_store=yes", text)
    )
    assert bulk({}, {}) == bulk({"y": 1016}, {}) == bulk({"x": 1012}, {}) == ("tma", 4)
    assert bulk({"y": 1012}, {})[0] != "tma"
    assert bulk({}, {"y": 8})[0] != "tma"
    assert plain({"y": 1012}, {}) == plain({}, {"y": 8}) == ("tma", 4)
    assert plain({"x": 1010}, {})[0] != "tma"


# ---- shared memory ----


def test_a_stage_has_room_for_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 2046 bytes touch up to 2064."""
    pytest.importorskip("cupy")
    spec = parse_spec("layernorm.fwd:d=1023,dtype=bf16")
    s = Schedule("tma_unaligned", 32, 1, 1, stages=2, grid=1, tma_store=True)
    inputs = random_inputs(spec, 9)
    assert run_plan(lower(spec, s), inputs).findings == ()
    for module in ("lngen.problem.footprint", "lngen.lower.policies"):
        monkeypatch.setattr(f"{module}.stage_share", lambda size, s, p: -(-p.d * size // 128) * 128)
    assert run_plan(lower(spec, s), inputs).findings


@pytest.mark.parametrize("name", ["unaligned, pairs", "unaligned, in registers", "unaligned, sums"])
def test_neighbouring_threads_meet_in_no_bank(name: str) -> None:
    """Threads side by side read and store what lies side by side, where whole warps have a row."""
    pytest.importorskip("cupy")
    subject = twin(name)

    def conflicts(source: str) -> int:
        outcome = run_plan(subject.plan, subject.inputs, source=source)
        return sum(t["bank_conflicts"] for t in outcome.traffic.shared.values())

    source, place = source_of(subject.plan), "vector_in_segment(v) * RUN + run + i % RUN"
    assert conflicts(source) < conflicts(edited(source, place, "vector_in_segment(v) * N + i")) / 2
