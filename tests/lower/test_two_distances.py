"""Rows at two distances: if these fail, a form of kernel reads or stores some rows elsewhere, or divides too often."""

import re
from collections.abc import Sequence
from functools import cache
from itertools import product

import pytest

from lngen.check.inputs import mismatches, random_inputs
from lngen.compile import Compilation
from lngen.emit import emit
from lngen.errors import ScheduleError
from lngen.graphs import Definition, GraphBuilder
from lngen.headers import bundled
from lngen.interpret import interpret
from lngen.ir import D, M
from lngen.launch.kernels import Distance
from lngen.lower import Plan, lower
from lngen.problem import Schedule, check, problem
from lngen.ptx import parse, run_plan
from lngen.schedule import attempts
from lngen.schedule.space import space
from lngen.spec import make_spec, parse_spec
from lngen.toolchain import compile_ptx
from plans import plan_of
from schedules import multipass, registers, unaligned

pytest.importorskip("cupy")

# ---- the bits, on the PTX executor ----


def two(text: str, schedule: Schedule) -> Plan:
    return plan_of(f"{text},strides=2", schedule)


# ---- what has to be wrong ----

WRONG = {
    "the remainder is left out": ("remainder(row - row / inner * inner)", "remainder(0)"),
    "the quotient is left out": ("quotient(row / inner)", "quotient(0)"),
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
