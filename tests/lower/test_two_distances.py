"""Rows at two distances: if these fail, a form of kernel reads or stores some rows elsewhere, or divides too often."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product

import pytest

import sampling
from lngen.check.inputs import mismatches, random_inputs
from lngen.compile import Compilation
from lngen.emit import emit
from lngen.errors import ScheduleError
from lngen.graphs import Definition, GraphBuilder
from lngen.headers import bundled
from lngen.interpret import interpret
from lngen.ir import WIDE, D, M
from lngen.launch.kernels import Distance
from lngen.lower import Plan, lower
from lngen.problem import Schedule, check, problem
from lngen.ptx import parse, run_plan
from lngen.schedule import attempts
from lngen.schedule.space import space
from lngen.spec import make_spec, parse_spec
from lngen.toolchain import compile_ptx
from plans import best, plan_of, run_checked
from schedules import cp_async, multipass, registers, tma, unaligned

pytest.importorskip("cupy")

# ---- the bits, on the PTX executor ----

# A spec, a schedule, and a number of rows with a number of inner rows: none, one, some that are left over, one each.
Case = tuple[str, Schedule, tuple[tuple[int, int], ...]]

FORWARD: list[Case] = [
    ("rmsnorm.fwd:d=64,dtype=f16", registers(2, 64, 8), ((0, 4), (1, 3), (7, 3))),
    ("layernorm.fwd:d=1000,dtype=bf16", registers(128, 1, 8, "cached"), ((5, 1), (5, 5))),
    ("layernorm.fwd:d=99,dtype=f16", registers(16, 4, 1), ((9, 4), (6, 1))),
    ("layernorm.fwd:d=12288,dtype=bf16", registers(128, 1, 8, cluster=2), ((5, 2),)),
    ("rmsnorm.bwd:d=1024,dtype=bf16,wrt=x", registers(64, 1, 8), ((5, 2),)),
    ("add_layernorm.fwd:d=96,dtype=f32", registers(32, 2, 4), ((7, 3),)),
    ("layernorm.fwd:d=1000,dtype=bf16", cp_async(64, 2, 8, 2, "cached", grid=2), ((0, 1), (1, 4), (9, 4))),
    ("rmsnorm.fwd:d=31,dtype=f64", cp_async(16, 2, 1, 2, grid=1), ((9, 2),)),
    ("layernorm.fwd:d=1000,dtype=bf16", tma(64, 2, 8, 2, "store", grid=2), ((0, 1), (1, 4), (9, 4))),
    ("layernorm.fwd:d=1000,dtype=f32", tma(64, 2, 4, 3, "cached regs early", grid=1), ((9, 2),)),
    ("layernorm.fwd:d=1024,dtype=bf16", tma(32, 1, 8, 2, "regs dynamic", grid=2), ((9, 4),)),
    ("layernorm.fwd:d=12288,dtype=bf16", tma(128, 1, 8, 2, "store cached", cluster=2, grid=1), ((5, 2),)),
    ("layernorm.fwd:d=12288,dtype=bf16", tma(256, 1, 8, 2, "regs early dynamic", cluster=2, grid=1), ((5, 3),)),
    ("layernorm.fwd:d=9000,dtype=bf16", multipass(128, 8), ((0, 1), (5, 2))),
]
BACKWARD: list[Case] = [
    ("layernorm.bwd:d=513,dtype=f32,blocks=3", registers(64, 8, 1, "prefetch"), ((0, 1), (7, 3))),
    ("layernorm.bwd:d=1000,dtype=bf16,blocks=2", registers(64, 8, 8, "single"), ((0, 1), (17, 5))),
    ("layernorm.bwd:d=777,dtype=bf16,wrt=beta,blocks=2", registers(64, 8, 1), ((11, 4),)),
    ("add_rmsnorm.bwd:d=96,dtype=f32,blocks=2", registers(8, 64, 4, "prefetch"), ((40, 3),)),
    ("rmsnorm.bwd:d=1002,dtype=bf16,blocks=2", cp_async(64, 8, 2, 2, "single"), ((19, 6),)),
    ("layernorm.bwd:d=1000,dtype=f32,blocks=2", cp_async(64, 4, 4, 2, "regs"), ((9, 2),)),
    ("layernorm.bwd:d=64,dtype=bf16,blocks=1", tma(4, 128, 8, 2, "store cached"), ((0, 1), (130, 7))),
    ("layernorm.bwd:d=1000,dtype=bf16,blocks=2", tma(64, 8, 8, 2, "regs early single"), ((19, 4),)),
    ("layernorm.bwd:d=16384,dtype=bf16,blocks=1", tma(256, 1, 8, 2, "cached", cluster=4), ((3, 2),)),
    ("layernorm.bwd:d=8200,dtype=bf16,blocks=2", multipass(256, 8), ((0, 1), (7, 3))),
    ("rmsnorm.bwd:d=9001,dtype=f32,blocks=2,save=none", multipass(256, 1), ((5, 2),)),
]


def distances(plan: Plan, inner: int, unit: int) -> dict[str, Distance]:
    """Distances of which no two tensors have the same, all multiples of ``unit``: packed with gaps, or inner first."""
    d, found = -(-plan.spec.d // unit) * unit, dict[str, Distance]()
    for n, v in enumerate(v for v in (*plan.inputs, *plan.outputs) if v.type.axes == WIDE):
        near, many = d + (n + 1) * unit, 200  # more than the outer rows of any case
        found[v.name] = (inner * near + (2 * n + 1) * unit, near) if n % 2 == 0 else (near, many * near + n * unit)
    return found


def two(text: str, schedule: Schedule) -> Plan:
    return plan_of(f"{text},strides=2", schedule)


def factors(spec: str, s: Schedule, counts: object) -> tuple[object, ...]:
    """What differs in kind from case to case: each is there in every run."""
    head = spec.partition(":")[0]
    return head, (s.form, s.cluster > 1, s.dynamic), s.tma_store, s.prefetch, s.single_launch, s.row_in_registers


@sampling.grid(("spec", "schedule", "counts"), FORWARD + BACKWARD, factors, strength=1)
def test_bits(spec: str, schedule: Schedule, counts: tuple[tuple[int, int], ...]) -> None:
    plan = two(spec, schedule)
    unit = max(plan.alignment(v) // v.type.dtype.size for v in (*plan.inputs, *plan.outputs))
    for order, (rows, inner) in enumerate(counts):
        run_checked(plan, rows, strides=distances(plan, inner, unit), inner=inner, order=order)


def rows_of_numbers(b: GraphBuilder) -> None:
    """No [M, D] tensor at all, but a kernel for rows."""
    b.output("y", b.mul("p", b.input("u", M), b.input("w", M)))


def result_alone(b: GraphBuilder) -> None:
    """An [M, D] result without such an input."""
    b.output("y", b.mul("p", b.input("u", M), b.input("gamma", D)))


@pytest.mark.parametrize("graph", [rows_of_numbers, result_alone])
def test_kernels_that_read_no_matrix(graph: Callable[[GraphBuilder], None]) -> None:
    spec = make_spec(Definition(graph.__name__, graph), "fwd", {"d": 64, "strides": 2})
    plan = best(spec)
    assert ("inner" in {a.kind for a in plan.kernels[0].arguments}) == (graph is result_alone)
    run_checked(plan, 7, strides={"y": (400, 96)}, inner=3)


def test_rows_at_one_distance_lie_at_two_as_well() -> None:
    plan = two("rmsnorm.fwd:d=64,dtype=f16", registers(2, 64, 8))
    for inner in (1, 2, 7):
        run_checked(plan, 5, strides={"x": 72}, inner=inner)


def test_any_address_and_odd_distances() -> None:
    plan = two("layernorm.fwd:d=100,dtype=f16", registers(32, 1, 1))
    run_checked(plan, 7, strides={"x": (407, 101), "y": (309, 103)}, inner=3, offset=1)


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
