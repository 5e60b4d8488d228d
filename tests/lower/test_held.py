"""What stays in registers from loop to loop: if these fail, values are computed or widened again, or spilled."""

import re
from dataclasses import replace

import numpy as np
import pytest

from lngen.emit import emit
from lngen.graphs import Definition, GraphBuilder
from lngen.ir import D, M
from lngen.lower import Plan, lower
from lngen.lower.phases import MOST_KEPT
from lngen.problem import Schedule, problem
from lngen.ptx import parse
from lngen.spec import make_spec, parse_spec
from lngen.toolchain import compile_ptx
from plans import plan_of, run_checked
from schedules import multipass, registers, tma

REGISTERS = registers(32, 1, 8)
BACKWARD = registers(32, 8, 8)
TMA = tma(32, 8, 8, 2)
MULTIPASS = multipass(32, 8)


def kept(plan: Plan) -> list[str]:
    return [t.name for kernel in plan.kernels for phase in kernel.phases for r in phase.reduces for t in r.kept]


@pytest.mark.parametrize(("spec", "schedule", "names"), [
    ("softmax.fwd:d=1024,dtype=bf16", REGISTERS, ["e"]),
    ("softmax.bwd:d=1024,dtype=bf16", REGISTERS, ["p"]),
    ("rmsnorm_act.bwd:d=1024,dtype=bf16", BACKWARD, ["slope"]),
    ("rmsnorm_act.bwd:d=1024,dtype=bf16", TMA, ["slope"]),
    ("rmsnorm_act.bwd:d=1024,dtype=bf16", replace(TMA, row_in_registers=True), ["slope"]),
    ("gated_layernorm.bwd:d=1024,dtype=bf16", TMA, ["gate"]),
    # Once in a row, or of little arithmetic.
    ("rmsnorm_act.fwd:d=1024,dtype=bf16", REGISTERS, []),
    ("log_softmax.fwd:d=1024,dtype=bf16", REGISTERS, []),
    ("layernorm.bwd:d=1024,dtype=bf16", BACKWARD, []),
    ("parallel_layernorm.bwd:d=1024,dtype=bf16", registers(32, 4, 8), []),
    # A kernel that reads rows in several passes has no registers for a whole one.
    ("softmax.fwd:d=1024,dtype=bf16", MULTIPASS, []),
])  # fmt: skip
def test_what_is_kept(spec: str, schedule: Schedule, names: list[str]) -> None:
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
    names = kept(lower(spec, REGISTERS))
    assert len(names) == MOST_KEPT
    assert set(names) < {"f0", "f1", "f2", "f3"}


# ---- weights ----

LOOP = "while (stream_.next()) {"


def held(text: str, schedule: Schedule) -> Plan:
    """A plan that keeps its weights, with the widest accesses."""
    spec = parse_spec(text)
    return lower(spec, replace(schedule, cached_weights=True, vec=problem(spec.graph(), spec.d).run))


@pytest.mark.parametrize(("text", "schedule", "widened"), [
    ("layernorm.fwd:d=8192,dtype=f16", tma(128, 1, 1, 3, "regs", blocks_per_sm=2, grid=264), True),
    ("layernorm.bwd:d=1024,dtype=f16", tma(64, 8, 1, 2), True),
    ("rmsnorm.fwd:d=8192,dtype=bf16,weight=f16", tma(128, 1, 1, 3, "regs dynamic", grid=132), True),
    ("layernorm.fwd:d=8192,dtype=bf16", tma(128, 1, 1, 3, "regs", grid=132), False),
    ("layernorm.fwd:d=12288,dtype=f16", tma(128, 1, 1, 3, "regs", blocks_per_sm=3, grid=396), False),
    ("layernorm.fwd:d=1024,dtype=f64,weight=f16", tma(128, 1, 1, 3, "regs", grid=132), False),
])  # fmt: skip
def test_halves_that_are_kept_are_widened_once(text: str, schedule: Schedule, widened: bool) -> None:
    """Of f16, if registers hold them widened; the compiler does so itself with bf16."""
    before, loop = emit(held(text, schedule)).split(LOOP)
    assert ("widen_row<Row>(gamma_wide_, gamma_cached_);" in before) == widened
    assert ("= gamma_wide_[v_][i_];" in loop) == widened
    assert ("(gamma_cached_[v_]" in loop) != widened


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_what_is_widened_once_is_not_widened_again(dtype: str) -> None:
    """An element of x, dy and gamma, in a backward of two phases that holds them."""
    spec = parse_spec(f"layernorm.bwd:d=4096,dtype={dtype}")
    schedule = tma(128, 2, 8, 3, "cached regs")
    plan = lower(spec, schedule)
    entry = parse(compile_ptx(emit(plan), "sm_90")).entries[plan.kernels[0].name]
    elements, widened = 4096 // 128, [i.opcode for i in entry.instructions].count("cvt.f32.f16")
    assert 3 * elements <= widened < 2 * 3 * elements if dtype == "f16" else widened == 0
    assert [i.opcode for i in entry.instructions].count("sub.rn.f32") == 2 * elements, "xc and what dy is centred by"


@pytest.mark.full
def test_kept_weights_stay_packed_where_registers_are_few() -> None:
    """Forty-eight elements a thread and 128 registers; with 255 they are widened once."""
    spec = parse_spec("layernorm.fwd:d=12288,dtype=bf16")
    few, many = (lower(spec, tma(256, 1, 8, 3, "cached regs dynamic", blocks_per_sm=n, grid=264)) for n in (2, 1))
    assert "packed(gamma_cached_[v_]);" in emit(few)
    assert "packed(" not in emit(many)
    for plan in (few, many):
        assert np.isfinite(run_checked(plan, 3).results["mean"]).all()
