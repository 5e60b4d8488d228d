"""The PTX of a plan gives other bits than the interpreter, for some schedule, stride or arch, if these fail."""

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

import sampling
from lngen.aot.catalog import plans
from lngen.check.inputs import random_inputs, same_bits
from lngen.emit import emit
from lngen.interpret import interpret
from lngen.ir import D, M
from lngen.lower import Plan, lower
from lngen.problem import Schedule, is_legal, problem
from lngen.ptx import Outcome, parse, run_plan
from lngen.schedule.space import space
from lngen.spec import parse_spec
from lngen.toolchain import compile_ptx

pytest.importorskip("cupy")

DTYPES = ("f16", "bf16", "f32", "f64", "bf16,weight=f32", "f32,weight=bf16")


def run(plan: Plan, rows: int, **options: object) -> Outcome:
    """The outcome, after its bits are compared; no findings are expected."""
    inputs = random_inputs(plan.spec, rows)
    outcome = run_plan(plan, inputs, **options)  # type: ignore[arg-type]
    for name, want in interpret(plan.graph, inputs).items():
        assert same_bits(outcome.results[name], want).all(), name
    assert outcome.findings == (), "\n".join(map(str, outcome.findings))
    return outcome


def plan_of(text: str, number: int = 0, vec: int | None = None) -> Plan:
    """A plan under the schedule of that number, among all legal ones, counted with a stride that varies them.

    With ``vec`` they are those that take rows from any address on.
    """
    spec = parse_spec(text)
    facts = problem(spec.graph(), spec.d)
    listed = (s if vec is None else replace(s, vec=vec) for s in space(facts))
    aligned = () if vec is None else ("tma", "tma_unaligned")
    schedules = [s for s in listed if is_legal(s, facts) and s.form not in aligned]
    return lower(spec, schedules[number * 7919 % len(schedules)])


@sampling.rotating("plan", plans(), ids=lambda p: p.name)
def test_goldens(plan: Plan) -> None:
    run(plan, 20)


SIZES = ((1, 3, "sm_75"), (31, 17, "sm_90"), (96, 1, "sm_80"), (1000, 5, "sm_120"))  # D, rows, arch


@sampling.grid(
    ("graph", "direction", "dtype", "size"),
    product(("layernorm", "rmsnorm"), ("fwd", "bwd"), DTYPES, SIZES),
    lambda graph, direction, dtype, size: ((graph, direction), (direction, size), dtype),
    strength=1,
)
def test_dtypes_and_lengths(graph: str, direction: str, dtype: str, size: tuple[int, int, str]) -> None:
    d, rows, arch = size
    few = ",blocks=3" if direction == "bwd" else ""
    run(plan_of(f"{graph}.{direction}:d={d},dtype={dtype}{few}", SIZES.index(size) + d), rows, arch=arch)


@pytest.mark.parametrize("rows", [0, 1, 3, 133])
@pytest.mark.parametrize("text", ["layernorm.bwd:d=255,dtype=bf16,blocks=7", "rmsnorm.fwd:d=64,dtype=f32"])
def test_rows(text: str, rows: int) -> None:
    run(plan_of(text, 3), rows, order=rows)


@pytest.mark.parametrize("text", ["layernorm.fwd:d=100,dtype=f16", "layernorm.bwd:d=513,dtype=f32,blocks=3"])
def test_strides_and_unaligned_pointers(text: str) -> None:
    plan = plan_of(text, 5, vec=1)
    wide = [v.name for v in (*plan.inputs, *plan.outputs) if v.type.axes == (M, D)]
    strides = {name: plan.spec.d + n for n, name in enumerate(wide)}
    for offset in (1, 3):
        run(plan, 6, strides=strides, offset=offset, order=2)


@pytest.mark.parametrize("text", ["layernorm.fwd:d=1536,dtype=bf16", "rmsnorm.bwd:d=1536,dtype=f16,blocks=3"])
def test_schedules_agree(text: str) -> None:
    for number in range(4):
        run(plan_of(text, number), 4)


def test_nan_and_infinity() -> None:
    plan = plan_of("layernorm.fwd:d=64,dtype=f32", 1)
    inputs = random_inputs(plan.spec, 4)
    inputs["x"][0, 3], inputs["x"][1, 5], inputs["x"][2] = np.nan, np.inf, 1e-42
    outcome = run_plan(plan, inputs)
    for name, want in interpret(plan.graph, inputs).items():
        assert same_bits(outcome.results[name], want).all()


@cache
def small() -> Plan:
    return lower(parse_spec("layernorm.fwd:d=256,dtype=bf16"), Schedule("registers", 32, 4, 8))


def test_traffic_is_what_the_algorithm_needs() -> None:
    plan = small()
    traffic = run(plan, 8).traffic
    (kernel,) = traffic.tensors
    x, y = (traffic.tensors[kernel][n] for n in "xy")
    assert x["bytes_read"] == y["bytes_written"] == 8 * 256 * 2
    assert x["sectors_read"] == y["sectors_written"] == 8 * 256 * 2 // 32
    assert traffic.instructions[kernel]["sqrt.rn.f32"] == 8
    assert traffic.shared[kernel]["accesses"] == traffic.barriers[kernel] == 0
    block = lower(plan.spec, Schedule("registers", 32, 1, 8))
    wide = lower(parse_spec("layernorm.fwd:d=4096,dtype=bf16"), Schedule("registers", 128, 1, 8))
    traffic = run(wide, 2).traffic
    (kernel,) = traffic.tensors
    assert traffic.barriers[kernel] == 2 * 4 * 2  # rows, warps, sums
    assert traffic.shared[kernel]["bank_conflicts"] == 0
    assert problem(block.graph, 256).run == 8


def test_ptx_of_several_entries() -> None:
    plan = plan_of("layernorm.bwd:d=64,dtype=f32", 0)
    text = compile_ptx(emit(plan), "sm_90", lines=True)
    module = parse(text)
    assert list(module.entries) == [k.name for k in plan.kernels]
    assert module.target == "sm_90"
    entry = module.entries[plan.kernels[0].name]
    assert len(entry.params) == len(plan.kernels[0].arguments)
    lines = text.splitlines()
    assert all(i.opcode in lines[i.line - 1] for i in entry.instructions)
    assert any(i.loc.inlined_at for i in entry.instructions)
    plain = parse(compile_ptx(emit(plan), "sm_90")).entries[entry.name]
    assert [i.text for i in plain.instructions] == [i.text for i in entry.instructions]
