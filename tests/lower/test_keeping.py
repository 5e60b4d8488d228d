"""Values that are long to compute are computed once in a row, and stay in registers for later loops."""

from __future__ import annotations

import re

import pytest

from lngen.compile import KernelSet
from lngen.emit import emit
from lngen.graphs import Definition, GraphBuilder
from lngen.ir import D, M
from lngen.lower import Plan, lower
from lngen.lower.phases import MOST_KEPT
from lngen.problem import ANY, parse_schedule
from lngen.spec import make_spec, parse_spec

REGISTERS = "form=registers,threads=32,rows_per_block=1,vec=8"
BACKWARD = "form=registers,threads=32,rows_per_block=8,vec=8"
TMA = "form=tma,threads=32,rows_per_block=8,vec=8,stages=2"
MULTIPASS = "form=multipass,threads=32,rows_per_block=1,vec=8"


def plan_of(spec: str, schedule: str) -> Plan:
    return lower(parse_spec(spec), parse_schedule(schedule, ANY))


def kept(plan: Plan) -> list[str]:
    return [t.name for kernel in plan.kernels for phase in kernel.phases for r in phase.reduces for t in r.kept]


@pytest.mark.parametrize(
    ("spec", "schedule", "names"),
    [
        ("softmax.fwd:d=1024,dtype=bf16", REGISTERS, ["e"]),
        ("softmax.bwd:d=1024,dtype=bf16", REGISTERS, ["p"]),
        ("rmsnorm_act.bwd:d=1024,dtype=bf16", BACKWARD, ["slope"]),
        ("rmsnorm_act.bwd:d=1024,dtype=bf16", TMA, ["slope"]),
        ("rmsnorm_act.bwd:d=1024,dtype=bf16", f"{TMA},row_in_registers=yes", ["slope"]),
        ("gated_layernorm.bwd:d=1024,dtype=bf16", TMA, ["gate"]),
        # Once in a row, or of little arithmetic.
        ("rmsnorm_act.fwd:d=1024,dtype=bf16", REGISTERS, []),
        ("log_softmax.fwd:d=1024,dtype=bf16", REGISTERS, []),
        ("layernorm.bwd:d=1024,dtype=bf16", BACKWARD, []),
        ("parallel_layernorm.bwd:d=1024,dtype=bf16", "form=registers,threads=32,rows_per_block=4,vec=8", []),
        # A kernel that reads rows in several passes has no registers for a whole one.
        ("softmax.fwd:d=1024,dtype=bf16", MULTIPASS, []),
    ],
)
def test_what_is_kept(spec: str, schedule: str, names: list[str]) -> None:
    assert kept(plan_of(spec, schedule)) == names


def test_a_kept_value_is_computed_once() -> None:
    for schedule, times in ((REGISTERS, 1), (MULTIPASS, 2)):
        text = emit(plan_of("softmax.fwd:d=1024,dtype=bf16", schedule))
        body = text[text.index("pdl_wait();") :]
        assert len(re.findall(r"const float e = ", body)) == times, schedule


def test_of_several_the_first_saves_most_and_there_are_few() -> None:
    def several(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        values = [b.named(f"f{n}", (x * float(n + 1)).tanh()) for n in range(4)]
        total = b.sum(values[0] + values[1] + values[2] + values[3])
        b.output("y", values[0] * values[1] * values[2] * values[3] * total)

    spec = make_spec(Definition("several", several), "fwd", {"d": 1024, "dtype": "bf16"})
    names = kept(lower(spec, parse_schedule(REGISTERS, ANY)))
    assert len(names) == MOST_KEPT
    assert set(names) < {"f0", "f1", "f2", "f3"}


def test_kept_values_leave_no_spills() -> None:
    pytest.importorskip("cupy")
    assert KernelSet(plan_of("softmax.fwd:d=1024,dtype=bf16", REGISTERS)).spilled("sm_90") == 0
