"""If these fail, tests that launch through the fake driver prove nothing: it takes what a GPU refuses, or errs."""

from __future__ import annotations

import pytest

pytest.importorskip("cupy")

from c_launcher import begin, run
from fake_driver import FakeDriver
from lngen.check.inputs import mismatches, random_inputs
from lngen.emit import emit
from lngen.interpret import interpret
from lngen.problem import Schedule
from plans import plan_of
from schedules import cp_async, multipass, registers, tma

CASES: dict[str, tuple[str, Schedule, int]] = {
    "registers": ("layernorm.fwd:d=96,dtype=bf16", registers(8, 4, 8), 5),
    "f64": ("layernorm.bwd:d=96,dtype=f64,save=none,blocks=2", registers(8, 32, 2), 5),
    "one launch": ("layernorm.bwd:d=1000,dtype=bf16,blocks=3", registers(64, 8, 8, "prefetch single"), 20),
    "cp_async": ("layernorm.fwd:d=1000,dtype=bf16", cp_async(32, 4, 8, 3, "cached", grid=3), 5),
    "tma": ("layernorm.fwd:d=256,dtype=bf16", tma(32, 2, 8, 2, "store cached", grid=3), 5),
    "tma, one launch": ("layernorm.bwd:d=1024,dtype=f16,blocks=2", tma(64, 8, 8, 3, "store cached single"), 20),
    "cluster": ("layernorm.fwd:d=16384,dtype=bf16", tma(256, 1, 8, 2, "store cached", cluster=2, grid=4), 2),
    "cluster, one launch": ("rmsnorm.bwd:d=16384,dtype=f16,blocks=2", tma(256, 1, 8, 3, "single", cluster=2), 2),
    "multipass": ("layernorm.bwd:d=256,dtype=f16", multipass(32, 8), 5),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("programmatic", [True, False])
def test_a_plan_gives_the_bits_of_the_interpreter(case: str, programmatic: bool) -> None:
    spec, schedule, rows = CASES[case]
    plan, gpu = plan_of(spec, schedule), FakeDriver()
    inputs = random_inputs(plan.spec, rows)
    begin(gpu)
    results = run(gpu, plan, gpu.made_up(emit(plan)), inputs, rows, programmatic)
    assert not mismatches(results, interpret(plan.graph, inputs))
    assert [done.kernel for done in gpu.launched] == [k.name for k in plan.kernels]
    assert [done.cooperative for done in gpu.launched] == [k.cooperative for k in plan.kernels]
    assert [done.cluster for done in gpu.launched] == [(k.cluster, 1, 1) for k in plan.kernels]
