"""Rows that begin anywhere or lie at two distances: if these fail, some are read elsewhere or wrongly refused."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product

import pytest

import lngen
from fake_arrays import FakeArray
from fake_gpu import FakeGpu
from lngen.compiler.compile import Compilation
from lngen.compiler.contract import described
from lngen.compiler.emit import emit
from lngen.compiler.graphs import Definition, GraphBuilder
from lngen.compiler.headers import bundled
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import D, M
from lngen.compiler.lower import Plan, lower
from lngen.compiler.problem import Schedule, check, problem
from lngen.compiler.schedule import attempts
from lngen.compiler.schedule.space import space
from lngen.compiler.spec import make_spec, parse_spec
from lngen.compiler.toolchain import compile_ptx
from lngen.errors import ArrayError, ScheduleError
from lngen.launch.runtime import Norm
from lngen.proof.check.inputs import mismatches, random_inputs
from lngen.proof.ptx import parse, run_plan
from lngen.rules import Distance
from mutants import edited, source_of, twin
from plans import plan_of
from schedules import multipass, registers, unaligned

pytest.importorskip("cupy")

GOOD = Schedule("tma_unaligned", 32, 1, 1, 1, False, 2, 1, 2, True)


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
        assert (found["alignment"], found["stride_multiple"]) == (16, 1001)
        assert found["strides"] == ["D", "1"]
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
    for module in ("lngen.compiler.problem.footprint", "lngen.compiler.lower.rows"):
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


# ---- the bits, on the PTX executor ----


def two(text: str, schedule: Schedule) -> Plan:
    return plan_of(f"{text},strides=2", schedule)


# ---- what has to be wrong ----

WRONG = {
    "the remainder is left out": ("remainder(row - quotient * inner)", "remainder(0)"),
    "the quotient is left out": ("quotient(quotient)", "quotient(0)"),
    "distances exchanged": (
        "place.quotient * outer + place.remainder * stride",
        "place.quotient * stride + place.remainder * outer",
    ),
    "the row after": ("place_(stream_.row_or_last(), inner_)", "place_(stream_.row_or_last() + 1, inner_)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_place_is_seen(name: str) -> None:
    """Bits differ, or the bytes between rows are read: of rows between which lie bytes of no row."""
    old, new = WRONG[name]
    plan = two("rmsnorm.fwd:d=64,dtype=f16", registers(2, 64, 8))
    source = bundled(emit(plan))
    assert source.count(old) == 1
    inputs = random_inputs(plan.spec, 6)
    strides: dict[str, Distance] = {"x": (512, 128), "y": (256, 64)}
    done = run_plan(plan, inputs, source=source.replace(old, new), strides=strides, inner=3)
    assert done.findings or mismatches(done.results, interpret(plan.graph, inputs))


@pytest.mark.parametrize("edge", ["from row to row", "from outer row to outer row"])
def test_bytes_between_the_rows_are_no_elements(edge: str) -> None:
    """A kernel that reads one vector further is seen at each kind of gap, and the finding has both distances."""
    plan = two("rmsnorm.fwd:d=64,dtype=f16", registers(2, 64, 8))
    source = bundled(emit(plan)).replace("place.remainder * stride;", "place.remainder * stride + 8;")
    inner = 3 if edge == "from row to row" else 1
    strides: dict[str, Distance] = {"x": (512, 72), "y": (192, 64)}
    done = run_plan(plan, random_inputs(plan.spec, 6), source=source, strides=strides, inner=inner)
    found = [f.message for f in done.findings if f.kind == "out-of-bounds"]
    text = "between the rows of 'x' (row stride 144 bytes, and 1024 bytes from outer row to outer row, rows of 128)"
    assert any(text in message for message in found), done.findings


# ---- the text ----


@cache
def divisions(text: str, schedule: Schedule) -> list[str]:
    """The divisions of 64 bits in the kernel that processes rows."""
    plan = plan_of(text, schedule)
    entry = parse(compile_ptx(emit(plan), "sm_90")).entries[plan.kernels[0].name]
    return [i.text for i in entry.instructions if re.match(r"(div|rem)\.[su]64", i.opcode)]


@pytest.mark.parametrize(("text", "schedule", "count"), [
    ("layernorm.fwd:d=4096,dtype=bf16", registers(128, 1, 8), 1),
    ("rmsnorm.fwd:d=128,dtype=bf16", registers(4, 16, 8), 1),
    ("add_layernorm.fwd:d=128,dtype=f32", registers(16, 8, 4), 1),
    ("layernorm.bwd:d=9001,dtype=f32,blocks=2", multipass(256, 1), 1),
    ("layernorm.bwd:d=513,dtype=f32,blocks=3", registers(64, 8, 1), 2),  # the prefetch of the first row
])  # fmt: skip
def test_one_division_for_all_tensors_of_a_row(text: str, schedule: Schedule, count: int) -> None:
    assert len(divisions(f"{text},strides=2", schedule)) == count
    assert divisions(text, schedule) == []


# ---- the spec, and what fits it ----


def test_the_key_is_part_of_the_text_and_of_both_names() -> None:
    plain = parse_spec("rmsnorm.bwd:d=64,strides=1")
    assert (str(plain), plain.slug, plain.strides) == ("rmsnorm.bwd:d=64,dtype=f32", "rmsnorm_bwd__f32_d64", 1)
    spec = parse_spec("rmsnorm.bwd:d=64,strides=2")
    assert str(spec) == "rmsnorm.bwd:d=64,dtype=f32,strides=2"
    assert parse_spec(str(spec)) == spec
    assert spec.slug == spec.file_slug == "rmsnorm_bwd__f32_d64_strides2"
    assert spec.with_direction("fwd").strides == 2
    assert spec.graph() == plain.graph(), "it changes no bit"


def test_an_input_of_that_name_has_another_slug() -> None:
    def own(b: GraphBuilder) -> None:
        b.output("y", b.mul("h", b.input("x", M, D), b.input("strides2", M, D)))

    keys = ({"wrt": "x+strides2"}, {"wrt": "x", "strides": 2}, {"wrt": "strides2"})
    specs = [make_spec(Definition("own", own), "bwd", {"d": 8, **given}) for given in keys]
    assert len({s.slug for s in specs}) == len({s.file_slug for s in specs}) == len(specs)


def test_unaligned_bulk_copies_refuse_it() -> None:
    """The rule is one of legality, so neither the default nor another schedule is of this form."""
    one, other = (Compilation(parse_spec(f"layernorm.fwd:d=8193,dtype=bf16{s}")).problem for s in ("", ",strides=2"))
    first = [next(iter(attempts(p, ("sm_90",)))).form for p in (one, other)]
    assert first[0] == "tma_unaligned" != first[1]
    assert "tma_unaligned" in {s.form for s in space(one)}
    assert "tma_unaligned" not in {s.form for s in space(other)}


@pytest.mark.parametrize(("d", "direction"), [*product((128, 4096), ("fwd", "bwd"))])
def test_the_default_is_that_of_one_distance(d: int, direction: str) -> None:
    """What is known of schedules holds for it."""
    text = f"layernorm.{direction}:d={d},dtype=bf16"
    chosen: Sequence[Schedule] = [
        next(iter(attempts(Compilation(parse_spec(t)).problem, ("sm_90",)))) for t in (text, f"{text},strides=2")
    ]
    assert chosen[0] == chosen[1]


def test_facts_that_a_caller_computes_take_the_distances_of_the_spec() -> None:
    spec = parse_spec("layernorm.fwd:d=1001,dtype=bf16,strides=2")
    facts = problem(spec.graph(), spec.d)
    check(unaligned(32, 2, 1, 2, grid=4), facts)
    with pytest.raises(ScheduleError):
        lower(spec, unaligned(32, 2, 1, 2, grid=4), facts=facts)
