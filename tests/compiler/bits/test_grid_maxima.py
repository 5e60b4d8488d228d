"""Maxima over all rows that the kernel of the rows completes: if these fail, an amax is wrong, or costs a kernel."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lngen.compiler.contract import described
from lngen.compiler.emit import emit
from lngen.compiler.graphs import GraphBuilder
from lngen.compiler.headers import bundled
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import D, M
from lngen.compiler.lower import lower
from lngen.compiler.problem import Schedule
from lngen.compiler.spec import Spec, parse_spec
from lngen.proof.check.inputs import mismatches, random_inputs
from lngen.proof.ptx import call as ptx_call
from lngen.proof.ptx import run_plan
from lngen.proof.ptx.call import _workspace
from lngen.proof.ptx.memory import Allocation
from number_graphs import amax, everything, loss, schedules, spec_of, weights
from plans import best
from schedules import cp_async, multipass, registers, tma, unaligned

pytest.importorskip("cupy")

OF_ELEMENTS, OF_ROWS, OF_BLOCKS = "scales=tensor", "scales=row", "scales=block,block_size=32"
SHORT, RAGGED, LONG = "d=520,dtype=bf16", "d=1001,dtype=f32", "d=16384,dtype=bf16"
CASES: list[tuple[str, str, Schedule]] = [
    (SHORT, OF_ELEMENTS, registers(32, 4, 8)),
    (SHORT, OF_ROWS, registers(8, 16, 8)),
    (SHORT, OF_ROWS, registers(128, 1, 8)),
    (SHORT, OF_ELEMENTS, cp_async(32, 4, 8, 3, "cached", grid=3)),
    (SHORT, OF_ROWS, cp_async(64, 1, 8, 2, grid=2)),
    (SHORT, OF_ELEMENTS, tma(32, 4, 8, 2, "cached regs", grid=1)),
    (SHORT, OF_ROWS, tma(128, 1, 8, 2, "cached regs early dynamic", grid=3)),
    (SHORT, OF_ELEMENTS, multipass(64, 8)),
    (SHORT, OF_ROWS, multipass(64, 8)),
    (RAGGED, OF_ELEMENTS, unaligned(32, 2, 1, 2, "regs", grid=3)),
    (RAGGED, OF_ROWS, unaligned(32, 2, 1, 2, "dynamic", grid=2)),
    (LONG, OF_ROWS, registers(256, 1, 8)),
    (LONG, OF_ELEMENTS, registers(128, 1, 8, cluster=2)),
    (LONG, OF_ROWS, tma(256, 1, 8, 2, "cached", cluster=2, grid=2)),
    (LONG, OF_BLOCKS, tma(256, 1, 8, 2, "cached", cluster=2, grid=2)),
]


def check(spec: Spec, schedule: Schedule, rows: int, before: float, spice: float = 0.5, **options: object) -> None:
    """One kernel has the interpreter's bits; ``before`` is what the array has, ``spice`` an element."""
    plan, inputs = lower(spec, schedule), random_inputs(spec, rows)
    inputs["amax_in"] = np.array(before, np.float32)
    inputs["x"][rows // 2 : rows // 2 + 1, -1] = spice
    assert [k.role for k in plan.kernels] == ["rows"]
    outcome = run_plan(plan, inputs, rows=rows, **options)  # type: ignore[arg-type]
    assert outcome.findings == ()
    assert mismatches(outcome.results, interpret(spec.graph(), inputs)) == []
    largest = outcome.results["amax"]
    assert not np.isnan(largest) or largest.view(np.uint32) == 0x7FC00000


@pytest.mark.parametrize(("keys", "scales", "schedule"), CASES, ids=str)
def test_every_schedule_has_the_bits(keys: str, scales: str, schedule: Schedule) -> None:
    """Without rows, of one row and of many, also in the place of what was there, and in any order of blocks."""
    spec = parse_spec(f"rmsnorm.fwd:{keys},quant=e4m3,amax=yes,{scales}")
    check(spec, schedule, 0, 0.001)
    check(spec, schedule, 1, 1e6)
    check(spec, schedule, 7, 0.001, times=2, alias={"amax": ("amax_in", 0)}, order=1)


@pytest.mark.parametrize("scales", [OF_ELEMENTS, OF_ROWS, OF_BLOCKS])
@pytest.mark.parametrize("before", [0.001, 1e6, -0.0, -2.0, np.nan, np.inf])
def test_the_result_is_the_larger_one_and_a_nan_wins(scales: str, before: float) -> None:
    spec = parse_spec(f"rmsnorm.fwd:d=64,dtype=f32,quant=int8,amax=yes,{scales}")
    for rows, spice, arch in ((0, 0.5, "sm_75"), (5, 0.5, "sm_75"), (5, np.nan, "sm_75"), (5, -np.inf, "sm_90")):
        check(spec, registers(16, 2, 4), rows, before, spice, arch=arch)


MUTANTS = {
    "none": ("", ""),
    "nothing to begin with": ("begin_maximum(amax_ptr_, amax);", ""),
    "no release": ("st.release.gpu.global.u32", "st.relaxed.gpu.global.u32"),
    "no acquire": ("ld.acquire.gpu.global.u32", "ld.relaxed.gpu.global.u32"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_blocks_join_what_the_first_one_has_begun(mutant: str) -> None:
    spec, (old, new) = parse_spec("rmsnorm.fwd:d=64,dtype=f32,quant=int8,amax=yes"), MUTANTS[mutant]
    plan = lower(spec, registers(16, 2, 4))
    text = bundled(emit(plan))
    assert old in text
    inputs = random_inputs(spec, 40)
    found = [run_plan(plan, inputs, source=text.replace(old, new), order=n).findings for n in range(4)]
    assert any(found) is (mutant != "none")


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_the_words_tell_a_call_from_the_one_before(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its blocks would not wait for the first of them."""
    held: dict[str, Allocation] = {}

    def workspace(*given: Any) -> dict[str, Allocation]:
        held.update(_workspace(*given))
        return held

    monkeypatch.setattr(ptx_call, "_workspace", workspace)
    spec = parse_spec("rmsnorm.fwd:d=64,dtype=f32,quant=int8,amax=yes")
    run_plan(lower(spec, registers(16, 2, 4)), random_inputs(spec, 40), times=calls)
    found = [int(held[name].data[:4].view(np.uint32)[0]) for name in ("arrivals_", "begun_")]
    assert found == ([1 << 31, 1] if calls % 2 else [0, 2])


def halved(b: GraphBuilder) -> None:
    """Half of every element, and the largest one; only the maximum reduces rows."""
    x = b.input("x", M, D)
    b.output("y", x * 0.5)
    b.output("most", b.max(b.max(abs(x)), axis=M))


@pytest.mark.parametrize("rows", [0, 70])
@pytest.mark.parametrize("schedule", schedules(spec_of(halved)), ids=str)
def test_a_graph_of_ones_own_has_its_maximum_with_any_reduction(schedule: Schedule, rows: int) -> None:
    spec = spec_of(halved)
    inputs = random_inputs(spec, rows)
    outcome = run_plan(lower(spec, schedule), inputs, rows=rows)
    assert outcome.findings == ()
    assert outcome.results["most"] == (np.abs(inputs["x"]).max() if rows else -np.inf)


def signed(b: GraphBuilder) -> None:
    """Numbers whose bits are in no order."""
    x = b.input("x", M, D)
    b.output("y", x * 0.5)
    b.output("most", b.max(b.max(x), axis=M))


def scaled(b: GraphBuilder) -> None:
    """A result that is no maximum itself."""
    x = b.input("x", M, D)
    b.output("y", x * 0.5)
    b.output("scale", b.max(b.max(abs(x)), axis=M) / 448)


def larger(b: GraphBuilder) -> None:
    """The larger one of two maxima."""
    x = b.input("x", M, D)
    b.output("y", x * 0.5)
    b.output("most", b.max(b.max(abs(x)), axis=M).maximum(b.max(b.sum(abs(x)), axis=M)))


def waiting(b: GraphBuilder) -> None:
    """A maximum that waits for another one."""
    row = b.max(abs(b.input("x", M, D)))
    b.output("rows", row)
    b.output("far", b.max(row - b.max(row, axis=M), axis=M))


ROLES: dict[str, tuple[Callable[[], Spec], list[str]]] = {
    "maxima alone": (lambda: spec_of(halved), ["rows"]),
    "two results": (lambda: parse_spec("parallel_rmsnorm.fwd:d=64,quant=e4m3,scales=tensor,amax=yes"), ["rows"]),
    "of any sign": (lambda: spec_of(signed), ["rows", "numbers"]),
    "what follows from one": (lambda: spec_of(scaled), ["rows", "numbers"]),
    "of two": (lambda: spec_of(larger), ["rows", "numbers"]),
    "in f64": (lambda: spec_of(halved, dtype="f64"), ["rows", "numbers"]),
    "and means": (lambda: spec_of(everything), ["rows", "finish", "numbers"]),
    "and columns": (lambda: spec_of(amax), ["rows", "finish", "numbers"]),
    "sums": (lambda: spec_of(loss), ["rows", "numbers"]),
    "no rows": (lambda: spec_of(weights), ["numbers"]),
    "one after the other": (lambda: spec_of(waiting), ["rows", "numbers"]),
}


@pytest.mark.parametrize("what", ROLES)
def test_the_kernel_of_the_rows_completes_what_are_maxima_alone(what: str) -> None:
    spec, roles = ROLES[what]
    assert [k.role for k in best(spec()).kernels] == roles


def test_two_results_have_a_maximum_each() -> None:
    spec = parse_spec("parallel_rmsnorm.fwd:d=64,quant=e4m3,scales=tensor,amax=yes")
    inputs = random_inputs(spec, 5)
    outcome = run_plan(best(spec), inputs)
    assert mismatches(outcome.results, interpret(spec.graph(), inputs)) == []
    assert outcome.results["amax"] != outcome.results["amax1"]


def test_a_launcher_sees_a_kernel_that_runs_without_rows_and_words_that_begin_at_zero() -> None:
    spec = parse_spec("rmsnorm.fwd:d=16384,dtype=bf16,quant=e4m3,amax=yes")
    found = described(lower(spec, registers(128, 1, 8, cluster=2)))
    (kernel,) = found["kernels"]
    assert (kernel["launch_for_no_rows"], kernel["grid"]["x"]["least"]) == (True, 2)
    assert [(b["name"], b["dtype"], b["fixed"], b["zeroed"]) for b in found["workspace"]["buffers"]] == [
        ("arrivals_", "u32", 1, True), ("begun_", "u32", 1, True),
    ]  # fmt: skip
    assert found["in_place"]["outputs"]["amax"] == ["amax_in"]


@pytest.mark.parametrize("scales", [OF_ELEMENTS, OF_BLOCKS])
def test_an_amax_of_elements_reduces_no_row(scales: str) -> None:
    """So a norm has the schedule, and the phases, that it has without amax."""
    text = f"rmsnorm.fwd:d=4096,dtype=bf16,quant=e4m3,{scales}"
    with_amax, without = (best(parse_spec(text + more)) for more in (",amax=yes", ""))
    assert with_amax.schedule == without.schedule
    assert [[s.name for r in p.reduces for s in r.sums] for p in with_amax.kernels[0].phases] == [
        [s.name for r in p.reduces for s in r.sums] for p in without.kernels[0].phases
    ]
