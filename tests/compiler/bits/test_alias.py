"""A result in the place of an input, or of a part of it, is wrong or passes unseen, if these fail."""

import pytest

from bits import plan_of
from lngen.compiler.interpret import interpret
from lngen.compiler.lower import Plan
from lngen.proof.check.inputs import mismatches, random_inputs
from lngen.proof.ptx import Outcome, run_plan
from schedules import multipass, registers, tma

pytest.importorskip("cupy")


def run(plan: Plan, alias: dict[str, tuple[str, int]], rows: int = 7) -> tuple[Outcome, list[str]]:
    """The outcome, and which results differ from those that memory of their own gives."""
    inputs = random_inputs(plan.spec, rows)
    outcome = run_plan(plan, inputs, alias=alias)
    return outcome, [text.split(":")[0] for text in mismatches(outcome.results, interpret(plan.graph, inputs))]


@pytest.mark.parametrize(("spec", "alias", "lost"), [
    ("add_layernorm.fwd:d=1000,dtype=bf16", {"h": "residual"}, ["y", "mean", "rstd"]),
    ("early_and_late.fwd:d=1000,dtype=bf16", {"before": "x", "after": "residual"}, ["after"]),
    ("early_and_late.fwd:d=1000,dtype=bf16", {"before": "residual", "after": "z"}, ["after"]),
    ("layernorm.bwd:d=8200,dtype=bf16,blocks=2", {"dx": "dy"}, ["dgamma", "dbeta"]),
    ("layernorm.bwd:d=8200,dtype=bf16,blocks=2", {"dx": "x"}, ["dgamma"]),
], ids=str)  # fmt: skip
def test_a_row_of_several_passes_is_read_again(spec: str, alias: dict[str, str], lost: list[str]) -> None:
    """After the first result was stored, or by the kernel of the column sums."""
    plan = plan_of(spec, multipass(256 if "8200" in spec else 32, 8))
    assert not plan.in_place
    assert run(plan, {name: (over, 0) for name, over in alias.items()})[1] == lost


@pytest.mark.parametrize("shift", [-1024, -8, 8, 1024])
def test_a_part_over_an_input_is_a_race(shift: int) -> None:
    outcome, _ = run(plan_of("layernorm.fwd:d=1024,dtype=bf16", registers(32, 4, 8)), {"y": ("x", shift)})
    assert "global-race" in {f.kind for f in outcome.findings}


def test_a_gradient_over_rows_whose_blocks_read_the_element_of_the_class() -> None:
    """Every block of a cluster reads it, and one of them stores there, after all have read it."""
    plan = plan_of("cross_entropy.fwd:d=16384,dtype=bf16,target=index,x_grad=yes", tma(128, 1, 8, 2, cluster=2, grid=2))
    outcome, wrong = run(plan, {"x_grad": ("x", 0)})
    assert plan.in_place
    assert (outcome.findings, wrong) == ((), [])


def test_a_part_over_an_input_changes_results() -> None:
    """Blocks in turn: each reads what the one before it has stored, a row on."""
    assert run(plan_of("layernorm.fwd:d=8192,dtype=bf16", registers(1024, 1, 8)), {"y": ("x", 8192)}, 40)[1]
