"""Ragged rows: bulk copies for rows that begin anywhere; bits, findings, what is legal and who may call them."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count, product
from types import SimpleNamespace
from typing import Any

import pytest

from lngen.aot.manifest import entry
from lngen.check.inputs import random_inputs, same_bits
from lngen.errors import ArrayError, ScheduleError
from lngen.interpret import interpret
from lngen.ir import WIDE, DType
from lngen.lower import Plan, lower
from lngen.ptx import run_plan
from lngen.runtime import call
from lngen.runtime.call import Call
from lngen.schedule import Schedule, check, is_legal, problem, ranked
from lngen.spec import Spec, parse_spec

LENGTHS = (17, 31, 37, 1001, 1002, 4093)
DTYPES = ("bf16", "f16", "f32", "f64", "bf16,out=f32", "f16,weight=f32", "f32,out=bf16", "f64,out=f16")


def spec_of(graph: str, direction: str, d: int, dtype: str, more: str = "") -> Spec:
    """Few blocks share the rows of column sums: fewer to run, more rows each."""
    blocks = ",blocks=2" if direction == "bwd" else ""
    return parse_spec(f"{graph}.{direction}:d={d},dtype={dtype}{blocks}{more}")


def schedules(spec: Spec) -> list[Schedule]:
    """Every legal ragged schedule of the spec with the widest accesses and at most three owners."""
    p, flags = problem(spec.graph(), spec.d), (False, True)
    vec = next(v for v in (8, 4, 2, 1) if spec.d % v == 0 and p.chunk % v == 0)
    owners = (0,) if p.column_sums else (1, 2, 3)
    rows = (p.groups,) if p.column_sums else (1, 2, 3, 4, 8)
    threads = [1 << n for n in range(11)]
    return [
        s
        for t, r, stages, o, keep, one, hold in product(threads, rows, (2, 3, 4), owners, flags, flags, flags)
        for s in [Schedule("ragged", t, r, vec, 1, False, stages, 1, o, bool(p.output_sizes), keep, one, hold)]
        if is_legal(s, p)
    ]


def run(plan: Plan, rows: int, order: int = 0) -> None:
    """Bits are compared; no findings, so nothing out of bounds and nothing left out, are expected."""
    pytest.importorskip("cupy")
    inputs = random_inputs(plan.spec, rows)
    outcome = run_plan(plan, inputs, order=order)
    for name, want in interpret(plan.graph, inputs).items():
        assert same_bits(outcome.results[name], want).all(), name
    assert outcome.findings == (), "\n".join(map(str, outcome.findings))


def in_turn(s: Schedule, spec: Spec) -> int:
    """Rows that are on their way at a time."""
    return s.stages * s.rows * (s.owners or problem(spec.graph(), spec.d).blocks)


NUMBER = count()
CASES = [
    (text, found[next(NUMBER) * 7919 % len(found)])
    for direction, graph, dtype, d in product(("fwd", "bwd"), ("layernorm", "rmsnorm"), DTYPES, LENGTHS)
    for text in [str(spec_of(graph, direction, d, dtype))]
    for found in [schedules(parse_spec(text))]
    if found
]


def test_the_cases_differ_in_everything() -> None:
    schedules_ = [s for _, s in CASES]
    assert {s.stages for s in schedules_} == {2, 3, 4}
    assert {s.keep for s in schedules_} == {s.one_launch for s in schedules_} == {False, True}
    assert {s.hold for s in schedules_} == {False, True}
    assert {s.rows > 1 for s in schedules_} == {s.threads > 32 for s in schedules_} == {False, True}
    for direction in ("fwd", "bwd"):
        mine = [text for text, _ in CASES if f".{direction}" in text]
        assert all(any(f"d={d}," in text for text in mine) for d in LENGTHS)


@pytest.mark.parametrize(("text", "s"), CASES, ids=[f"{text}-{s.slug}" for text, s in CASES])
def test_bits(text: str, s: Schedule) -> None:
    """Each time one row number: one, two, more than are on their way at a time."""
    spec = parse_spec(text)
    plan = lower(spec, s)
    most = in_turn(s, spec) + s.rows + 1
    run(plan, 1)
    run(plan, min(most, 2 + 90000 // spec.d))
    run(plan, 2, order=1)


@pytest.mark.parametrize(("dtype", "d"), [("bf16", 37), ("f16", 1002), ("f32", 31), ("f64", 17), ("f32,out=bf16", 37)])
def test_rows_begin_everywhere(dtype: str, d: int) -> None:
    """Within 16 bytes, at every multiple of what D elements and 16 bytes have in common."""
    spec = spec_of("layernorm", "fwd", d, dtype)
    plan = lower(spec, Schedule("ragged", 32, 1, math.gcd(d, 2), 1, False, 2, 1, 2, True))
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
    run(lower(spec, Schedule("ragged", 64, p.groups, 1, 1, False, 2, 1, 0 if p.column_sums else 2, True)), rows)


@pytest.mark.parametrize("more", [",wrt=x", ",wrt=gamma+beta", ",save=none"])
def test_what_leaves_differs(more: str) -> None:
    """Column sums or none, [M, D] results or none."""
    spec = spec_of("layernorm", "bwd", 1001, "bf16", more)
    s = schedules(spec)[11]
    assert s.bulk_store == ("gamma" not in more)
    run(lower(spec, s), 11)


GOOD = Schedule("ragged", 32, 1, 1, 1, False, 2, 1, 2, True)


@pytest.mark.parametrize(
    ("text", "s", "message"),
    [
        ("d=1000,dtype=bf16", GOOD, "ragged rows end within a chunk of 8, .*got D=1000, threads=32"),
        ("d=15,dtype=bf16", GOOD, "have at least 16 elements, twice 16 bytes of the narrowest, .*got D=15"),
        ("d=1001,dtype=bf16", replace(GOOD, threads=8, rows=4), "and as many threads, got D=1001, threads=8"),
        # A result narrower than what the chunks go by.
        ("d=1001,dtype=f64,out=bf16", replace(GOOD, threads=8, rows=4), "at least 16 elements.* threads=8"),
        ("d=13,dtype=f32,out=f16", GOOD, "at least 16 elements.* got D=13"),
        ("d=1001,dtype=bf16", replace(GOOD, bulk_store=False), "leave in bulk: bulk_store is yes for 1 .* results"),
        ("d=1001,dtype=bf16", replace(GOOD, stages=1), "stages is from 2 to 8 with form=bulk or ragged or async"),
        ("d=1001,dtype=bf16", replace(GOOD, stages=9), "stages is from 2 to 8 .* got 9"),
        ("d=1001,dtype=bf16", replace(GOOD, owners=0), "owners is at least 1 with form=bulk or ragged or async"),
        ("d=1001,dtype=bf16", replace(GOOD, vec=2), r"vec divides both the chunk \(8\) and D \(1001\), got 2"),
        ("d=1001,dtype=bf16", replace(GOOD, cluster=2), "a cluster is of .* else 1, got 2 with form=ragged"),
        ("d=1001,dtype=bf16", replace(GOOD, one_launch=True), "one_launch belongs to column sums"),
        ("d=1001,dtype=bf16", replace(GOOD, prefetch=True), "prefetch belongs to form=registers"),
        ("d=1001,dtype=bf16,gamma=no,beta=no", replace(GOOD, keep=True), r"keep belongs to a \[D\] input"),
        ("d=20001,dtype=f32", replace(GOOD, threads=256), "a block has 232448 bytes of shared memory, got 3"),
    ],
)  # fmt: skip
def test_what_is_not_legal(text: str, s: Schedule, message: str) -> None:
    spec = parse_spec(f"layernorm.fwd:{text}")
    with pytest.raises(ScheduleError, match=message):
        check(s, problem(spec.graph(), spec.d))


def test_without_a_result_nothing_leaves_in_bulk() -> None:
    spec = spec_of("layernorm", "bwd", 1001, "bf16", ",wrt=gamma+beta")
    p = problem(spec.graph(), 1001)
    s = Schedule("ragged", 64, p.groups, 1, 1, False, 2)
    check(s, p)
    with pytest.raises(ScheduleError, match=r"bulk_store is no for 0 \[M, D\] results"):
        check(replace(s, bulk_store=True), p)


@pytest.mark.parametrize(
    ("text", "s", "number"),
    [("d=1004,dtype=f32,out=bf16", Schedule("bulk", 32, 1, 4, 1, False, 2, 1, 2, True), 2008),
     ("d=16392,dtype=f32,out=bf16", Schedule("bulk", 128, 1, 4, 1, False, 2, 8, 2, True), 4104)],
)  # fmt: skip
def test_narrow_results_of_bulk_rows(text: str, s: Schedule, number: int) -> None:
    """Their rows, or a block's pieces of them, are no multiples of 16 bytes: they may leave in another way only."""
    spec = parse_spec(f"layernorm.fwd:{text}")
    with pytest.raises(ScheduleError, match=f"rows that leave in bulk.* multiples of 16 bytes, got {number}"):
        check(s, problem(spec.graph(), spec.d))
    run(lower(spec, replace(s, bulk_store=False)), 5)


# ---- what arrays have to be like ----


def test_alignment() -> None:
    def aligned(text: str, s: Schedule) -> dict[str, int]:
        plan = lower(parse_spec(f"layernorm.fwd:{text}"), s)
        return {v.name: plan.alignment(v) for v in (*plan.inputs, *plan.outputs) if v.type.axes}

    ragged = aligned("d=1001,dtype=bf16,weight=f32", GOOD)
    assert ragged == {"x": 16, "gamma": 4, "beta": 4, "y": 16, "mean": 4, "rstd": 4}
    bulk = Schedule("bulk", 32, 1, 4, 1, False, 2, 1, 2)
    assert aligned("d=1008,dtype=f32,out=bf16", bulk)["y"] == 8
    assert aligned("d=1008,dtype=f32,out=bf16", replace(bulk, bulk_store=True))["y"] == 16


def test_the_manifest_asks_for_contiguous_rows() -> None:
    tensors = {t["name"]: t for t in entry(lower(parse_spec("layernorm.fwd:d=1001,dtype=bf16"), GOOD), {})["tensors"]}
    for name in "xy":
        described = tensors[name]
        assert (described["alignment"], described["row_stride_multiple"]) == (16, 1001)
        assert described["layout"] == "contiguous: row stride 1001"
    assert tensors["gamma"]["alignment"] == 2


class Launches:
    """A library of arrays without a GPU, and launchers that note the plan they were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, text: str, schedule: str) -> None:
        self.call = Call(parse_spec(text), schedule)
        self.forms: list[tuple[str, int]] = []
        monkeypatch.setattr(call, "device_arch", lambda device: "sm_90")
        monkeypatch.setattr(call, "compile_plan", lambda plan, arch: SimpleNamespace(image=b""))
        monkeypatch.setattr(call, "Launcher", lambda plan, image, device: FakeLauncher(plan, self.forms))
        monkeypatch.setattr(call, "library_of", lambda array, name: self)

    def __call__(self, strides: dict[str, int], pointers: dict[str, int], rows: int = 5) -> tuple[str, int]:
        """The form and access width of a call with those row strides and addresses."""
        d = self.call.spec.d
        arrays = []
        for v in (*self.call.inputs, *self.call.outputs):
            shape = v.type.shape((rows,), d)
            step = (strides.get(v.name, d), 1) if v.type.axes == WIDE else (1,) * len(shape)
            apart = len(arrays) << 24
            arrays.append(((str(v.type.dtype), shape, step, 0), apart + pointers.get(v.name, 1 << 20)))
        count = len(self.call.inputs)
        self.call(arrays[:count], tuple(arrays[count:]))
        return self.forms[-1]

    def describe(self, arrays: list[Any]) -> tuple[list[int], list[Any]]:
        return [pointer for _, pointer in arrays], [layout for layout, _ in arrays]

    def in_elements(self, layout: Any) -> Any:
        return layout

    def dtype(self, name: str) -> DType:
        return DType(name)

    def maker(self, *what: Any) -> Any:
        return lambda: None

    def stream(self, device: int) -> int:
        return 0


class FakeLauncher:
    def __init__(self, plan: Plan, forms: list[tuple[str, int]]) -> None:
        self.plan, self.forms, self.workspace_bytes = plan, forms, 0

    def bind(self, rows: int, strides: dict[str, int]) -> FakeLauncher:
        return self

    def __call__(self, pointers: list[int], workspace: int, stream: int) -> None:
        self.forms.append((self.plan.schedule.form, self.plan.schedule.vec))
        assert not self.plan.contiguous or all(p % 16 == 0 for p in pointers[:1])


RAGGED = "form=ragged,threads=32,rows=1,stages=2,owners=128,bulk_store=yes"


def test_calls_of_ragged_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """One behind the other and from a multiple of 16 bytes on, or in another way."""
    pytest.importorskip("cupy")
    go = Launches(monkeypatch, "layernorm.fwd:d=1002,dtype=bf16", RAGGED + ",vec=2")
    assert go({}, {}) == ("ragged", 2)
    odd = 1 << 20
    for strides, pointers, vec in [
        ({"x": 1004}, {}, 2), ({"y": 1008}, {}, 2), ({"x": 1005}, {}, 1), ({"x": 0}, {}, 2), ({"x": -1002}, {}, 2),
        ({}, {"x": odd + 8}, 2), ({}, {"y": odd + 4}, 2), ({}, {"y": odd + 2}, 1), ({"y": 1003}, {"x": odd + 2}, 1),
    ]:  # fmt: skip
        form, width = go(strides, pointers)
        assert form not in ("bulk", "ragged"), (strides, pointers)
        assert width <= vec, (strides, pointers)
    # [D] and [M] arrays are read as ever; a single row has no stride; the first call's plan is still there.
    assert go({}, {"gamma": odd + 4, "beta": odd + 12, "mean": odd + 4}) == ("ragged", 2)
    assert go({}, {"gamma": odd + 2})[0] not in ("bulk", "ragged")
    assert go({"x": 1005}, {}, rows=1) == ("ragged", 2)
    assert go({}, {}) == ("ragged", 2)
    with pytest.raises(ArrayError, match="not a multiple of its element size"):
        go({}, {"x": odd + 1})


def test_calls_of_bulk_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result narrower than the inputs leaves in bulk from multiples of 16 bytes only."""
    pytest.importorskip("cupy")
    text = "form=bulk,threads=32,rows=1,vec=4,stages=2,owners=128"
    go = Launches(monkeypatch, "layernorm.fwd:d=1008,dtype=f32,out=bf16", text + ",bulk_store=yes")
    assert go({}, {}) == go({"y": 1016}, {}) == go({"x": 1012}, {}) == ("bulk", 4)
    assert go({"y": 1012}, {})[0] != "bulk"
    assert go({}, {"y": (1 << 20) + 8})[0] != "bulk"
    go = Launches(monkeypatch, "layernorm.fwd:d=1008,dtype=f32,out=bf16", text)
    assert go({"y": 1012}, {}) == go({}, {"y": (1 << 20) + 8}) == ("bulk", 4)
    assert go({"x": 1010}, {})[0] != "bulk"


def test_narrow_accesses_are_never_ragged() -> None:
    p = problem(spec_of("layernorm", "fwd", 1001, "bf16").graph(), 1001)
    assert any(s.form == "ragged" for s in ranked(p))
    for vec in (1, 2, 4, 8):
        assert {s.form for s in ranked(p, vec=vec)} <= {"registers", "async", "stream"}
