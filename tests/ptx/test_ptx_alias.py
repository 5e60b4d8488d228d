"""A result over an input has other bits, under a schedule that says it may lie there, if these fail."""

from itertools import pairwise

import pytest

import sampling
from lngen.check.inputs import mismatches, random_inputs
from lngen.graphs import Definition, GraphBuilder
from lngen.interpret import interpret
from lngen.ir import D, M
from lngen.lower import Plan, lower
from lngen.problem import Schedule, parse_schedule
from lngen.ptx import Outcome, run_plan
from lngen.spec import Spec, make_spec, parse_spec

pytest.importorskip("cupy")

BASE = Schedule("registers", 32, 1, 1)
ROWS = 7


def plan_of(spec: str | Spec, schedule: str) -> Plan:
    return lower(parse_spec(spec) if isinstance(spec, str) else spec, parse_schedule(schedule, BASE))


def run(plan: Plan, alias: dict[str, tuple[str, int]], **options: int) -> tuple[Outcome, list[str]]:
    """The outcome, and what of it differs from the results that memory of their own gives."""
    inputs = random_inputs(plan.spec, ROWS)
    outcome = run_plan(plan, inputs, alias=alias, **options)
    return outcome, mismatches(outcome.results, interpret(plan.graph, inputs))


def mixed(b: GraphBuilder) -> None:
    """One result is known before the row sums, one after them, with an input that only it takes."""
    x, residual, z = (b.input(name, M, D) for name in ("x", "residual", "z"))
    total = b.add("total", x, residual)
    square = b.reduce_mean("square", b.mul("squared", total, total), axis=D)
    b.output("before", total)
    b.output("after", b.add("moved", b.mul("scaled", total, b.rsqrt("rstd", b.add("raised", square, b.eps()))), z))


FORWARD = [
    ("layernorm.fwd:d=1024,dtype=bf16", "form=registers,threads=32,rows_per_block=4,vec=8"),
    ("layernorm.fwd:d=8200,dtype=bf16", "form=registers,threads=256,rows_per_block=1,vec=8,cluster=2"),
    ("rmsnorm.fwd:d=1000,dtype=f32", "form=tma,threads=64,rows_per_block=2,vec=4,stages=3,grid=2"),
    ("layernorm.fwd:d=1000,dtype=f32",
     "form=tma,threads=64,rows_per_block=1,vec=4,stages=2,grid=2,tma_store=yes,cached_weights=yes"),
    ("rmsnorm.fwd:d=64,dtype=bf16",
     "form=tma,threads=4,rows_per_block=8,vec=8,stages=2,grid=2,row_in_registers=yes,early_release=yes"),
    ("layernorm.fwd:d=4096,dtype=bf16", "form=tma,threads=128,rows_per_block=1,vec=8,stages=2,grid=2,dynamic=yes"),
    ("rmsnorm.fwd:d=5000,dtype=f32",
     "form=tma,threads=32,rows_per_block=4,vec=4,stages=2,grid=1,cluster=2,tma_store=yes"),
    ("layernorm.fwd:d=1002,dtype=bf16", "form=cp_async,threads=32,rows_per_block=1,vec=2,stages=3,grid=2"),
    ("layernorm.fwd:d=1001,dtype=bf16",
     "form=tma_unaligned,threads=32,rows_per_block=2,vec=1,stages=2,grid=2,tma_store=yes"),
    ("layernorm.fwd:d=1000,dtype=bf16", "form=multipass,threads=32,rows_per_block=1,vec=8"),
]  # fmt: skip
BACKWARD = [
    ("layernorm.bwd:d=1000,dtype=bf16", "form=registers,threads=64,rows_per_block=8,vec=8"),
    ("layernorm.bwd:d=1000,dtype=bf16,blocks=2",
     "form=registers,threads=64,rows_per_block=8,vec=8,prefetch=yes,single_launch=yes"),
    ("rmsnorm.bwd:d=1000,dtype=f16,weight=f32",
     "form=tma,threads=64,rows_per_block=8,vec=8,stages=2,cached_weights=yes"),
    ("layernorm.bwd:d=96,dtype=f16,blocks=1",
     "form=tma,threads=4,rows_per_block=128,vec=8,stages=2,row_in_registers=yes,early_release=yes"),
    ("rmsnorm.bwd:d=8200,blocks=1", "form=tma,threads=64,rows_per_block=2,vec=4,stages=2,cluster=4,single_launch=yes"),
    ("rmsnorm.bwd:d=1002,dtype=bf16", "form=cp_async,threads=64,rows_per_block=8,vec=2,stages=2,single_launch=yes"),
    ("layernorm.bwd:d=1001,dtype=bf16",
     "form=tma_unaligned,threads=64,rows_per_block=8,vec=1,stages=2,tma_store=yes,cached_weights=yes"),
    ("layernorm.bwd:d=1000,dtype=bf16,wrt=x", "form=multipass,threads=32,rows_per_block=1,vec=8"),
]  # fmt: skip
OVER = [(*case, "y", "x") for case in FORWARD] + [(*case, "dx", over) for case in BACKWARD for over in ("dy", "x")]


def factors(spec: str, schedule: str, result: str, over: str) -> tuple[object, ...]:
    """What differs in kind from case to case."""
    return (schedule.partition(",")[0], result), over, "dtype=f32" in spec


@sampling.grid(("spec", "schedule", "result", "over"), OVER, factors, strength=1)
def test_a_result_over_an_input(spec: str, schedule: str, result: str, over: str) -> None:
    """Every element is read for the last time before its place is written; reads of others go unused."""
    plan = plan_of(spec, schedule)
    assert plan.in_place
    outcome, different = run(plan, {result: (over, 0)})
    assert different == []
    assert {f.kind for f in outcome.findings} <= {"global-race", "async-read", "proxy"}


def test_every_call_begins_with_the_inputs() -> None:
    assert run(plan_of(*FORWARD[0]), {"y": ("x", 0)}, times=2, order=1)[1] == []


@pytest.mark.parametrize("over", ["dy", "x"])
def test_a_streamed_backward_reads_again_what_it_wrote_over(over: str) -> None:
    """The kernel of the column sums comes after the one that stores dx."""
    plan = plan_of("layernorm.bwd:d=8200,dtype=bf16,blocks=2", "form=multipass,threads=256,rows_per_block=1,vec=8")
    assert not plan.in_place
    assert [text.split(":")[0] for text in run(plan, {"dx": (over, 0)})[1]] == ["dgamma", "dbeta"][: 1 + (over == "dy")]


@pytest.mark.parametrize("schedule", [
    "form=registers,threads=32,rows_per_block=2,vec=8",
    "form=tma,threads=32,rows_per_block=2,vec=8,stages=2,grid=2",
    "form=cp_async,threads=32,rows_per_block=2,vec=8,stages=2,grid=2",
    "form=multipass,threads=32,rows_per_block=1,vec=8",
])  # fmt: skip
def test_two_results_over_two_inputs(schedule: str) -> None:
    """A row of several passes is read again after the first result was stored."""
    plan = plan_of(make_spec(Definition("mixed", mixed), "fwd", {"d": 1000, "dtype": "bf16"}), schedule)
    assert plan.in_place == ("multipass" not in schedule)
    first, second = (v.name for v in plan.outputs)
    for one, other in pairwise(("x", "residual", "z", "x")):
        different = run(plan, {first: (one, 0), second: (other, 0)})[1]
        assert [text.split(":")[0] for text in different] == [second] * ("multipass" in schedule)


@pytest.mark.parametrize("shift", [-1024, -8, 8, 1024])
def test_a_part_over_an_input_is_a_race(shift: int) -> None:
    outcome, _ = run(plan_of(*FORWARD[0]), {"y": ("x", shift)})
    assert "global-race" in {f.kind for f in outcome.findings}


def test_a_part_over_an_input_changes_results() -> None:
    """Blocks in turn: each reads what the one before it has stored, a row on."""
    plan = plan_of("layernorm.fwd:d=8192,dtype=bf16", "form=registers,threads=1024,rows_per_block=1,vec=8")
    inputs = random_inputs(plan.spec, 40)
    outcome = run_plan(plan, inputs, alias={"y": ("x", 8192)})
    assert mismatches(outcome.results, interpret(plan.graph, inputs)) != []
