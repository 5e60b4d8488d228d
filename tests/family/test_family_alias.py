"""If these fail, a result in an input's place (h over residual, dx over dy, a sum) is wrong on the PTX executor."""

import numpy as np
import pytest

import lngen
import sampling
from fake_gpu import FakeGpu
from lngen.check.inputs import mismatches, random_inputs
from lngen.compile import Compilation
from lngen.errors import ArrayError
from lngen.interpret import interpret
from lngen.lower import Plan, lower
from lngen.problem import Schedule, parse_schedule
from lngen.ptx import run_plan
from lngen.spec import parse_spec

pytest.importorskip("cupy")

BASE = Schedule("registers", 32, 1, 1)
ROWS = 7
RACES = {"global-race", "async-read", "proxy"}  # of elements that are read and not used


def plan_of(spec: str, schedule: str) -> Plan:
    return lower(parse_spec(spec), parse_schedule(schedule, BASE))


def wrong(plan: Plan, alias: dict[str, str], times: int = 1) -> list[str]:
    """The results that differ from those in memory of their own; no finding but reads that go unused."""
    inputs = random_inputs(plan.spec, ROWS)
    outcome = run_plan(plan, inputs, alias={name: (over, 0) for name, over in alias.items()}, times=times)
    assert {f.kind for f in outcome.findings} <= RACES, outcome.findings
    return mismatches(outcome.results, interpret(plan.graph, inputs))


FORMS = [
    "form=registers,threads=32,rows_per_block=2,vec=8",
    "form=tma,threads=32,rows_per_block=2,vec=8,stages=2,grid=2",
    "form=tma,threads=64,rows_per_block=1,vec=8,stages=2,grid=2,tma_store=yes",
    "form=cp_async,threads=32,rows_per_block=2,vec=8,stages=2,grid=2",
    "form=multipass,threads=32,rows_per_block=1,vec=8",
]
SUMS = [
    "add_layernorm.fwd:d=1000,dtype=bf16",
    "add_rmsnorm.fwd:d=1000,dtype=bf16,round_sum=no",
    "add_rmsnorm.fwd:d=1000,dtype=f16,x1=yes,rowscale=yes",
    "parallel_layernorm.fwd:d=1000,dtype=bf16",
]


@sampling.grid(("spec", "schedule"), [(spec, schedule) for spec in SUMS for schedule in FORMS], strength=1)
def test_the_stream_over_the_residual(spec: str, schedule: str) -> None:
    """A row of several passes is read again after h was stored, so that y is lost there."""
    plan = plan_of(spec, schedule)
    assert plan.in_place == ("multipass" not in schedule)
    if plan.in_place:
        assert wrong(plan, {"h": "residual"}) == []
        assert wrong(plan, {"h": "x", "y": "residual"}) == []
    else:
        assert [text.partition(":")[0] for text in wrong(plan, {"h": "residual"})][:1] == ["y"]


@pytest.mark.parametrize("spec", SUMS)
def test_the_stream_over_the_residual_on_a_gpu(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused for the schedules that are not in place, with the message of any other graph."""
    gpu, parsed = FakeGpu(monkeypatch), parse_spec(spec)
    keys = dict(part.split("=") for part in spec.partition(":")[2].split(","))
    for schedule in FORMS:
        norm = lngen.compile(parsed.definition.name, schedule={"fwd": schedule}, **{**keys, "d": 1000})
        given = {p.name: gpu.array(str(p.type.dtype), *p.type.shape(ROWS, 1000)) for p in parsed.forward().params}
        outputs = norm.spec().graph().results
        out = tuple(given["residual"] if r.name == "h" else None for r in outputs)
        if plan_of(spec, schedule).in_place:
            results, saved = norm.forward(**given, out=out)
            assert results[-1] is given["residual"]
            assert saved.overwritten == ("residual",)
        else:
            with pytest.raises(ArrayError) as error:
                norm.forward(**given, out=out)
            assert str(error.value) == (
                "'h' takes the place of 'residual', which kernels with form=multipass read again after they have "
                "written to it; pass an array of its own, or compile with another schedule."
            )


ADDED = [
    ("layernorm.bwd:d=1000,dtype=bf16,accumulate=gamma+beta", "form=registers,threads=64,rows_per_block=8,vec=8"),
    ("layernorm.bwd:d=1000,dtype=bf16,accumulate=gamma+beta,blocks=2",
     "form=registers,threads=64,rows_per_block=8,vec=8,prefetch=yes,single_launch=yes"),
    ("add_rmsnorm.bwd:d=1000,dtype=bf16,accumulate=gamma",
     "form=tma,threads=64,rows_per_block=8,vec=8,stages=2,cached_weights=yes"),
    ("add_rmsnorm.bwd:d=1000,dtype=bf16,accumulate=gamma,blocks=2",
     "form=cp_async,threads=64,rows_per_block=8,vec=8,stages=2,single_launch=yes"),
    ("rmsnorm.bwd:d=8200,dtype=bf16,accumulate=gamma,blocks=2", "form=multipass,threads=256,rows_per_block=1,vec=8"),
    ("gated_rmsnorm.bwd:d=1000,dtype=f16,accumulate=gamma,blocks=2",
     "form=registers,threads=64,rows_per_block=8,vec=8,single_launch=yes"),
]  # fmt: skip


@sampling.rotating(("spec", "schedule"), ADDED)
def test_sums_are_added_in_place(spec: str, schedule: str) -> None:
    """The bits of an addition afterwards, in f32; every element is read before it is written."""
    plan = plan_of(spec, schedule)
    names = [f"d{name}" for name in plan.spec.accumulate]
    assert wrong(plan, {name: f"{name}_in" for name in names}) == []
    inputs = random_inputs(plan.spec, ROWS)
    text = ",".join(part for part in spec.split(",") if not part.startswith("accumulate"))
    alone = interpret(parse_spec(f"{text},grad=f32").graph(), inputs)
    both = interpret(plan.graph, inputs)
    for name in names:
        assert both[name].dtype == alone[name].dtype == np.float32
        np.testing.assert_array_equal(both[name], inputs[f"{name}_in"] + alone[name])


@pytest.mark.parametrize("times", [1, 2])
def test_sums_are_added_by_one_launch(times: int) -> None:
    """A second call begins with the inputs again, and with counters that the first one left."""
    spec, schedule = ADDED[1]
    assert wrong(plan_of(spec, schedule), {"dgamma": "dgamma_in", "dbeta": "dbeta_in"}, times) == []


@pytest.mark.parametrize(("d", "schedule"), [
    (1000, "form=registers,threads=64,rows_per_block=4,vec=4"),
    (8200, "form=multipass,threads=256,rows_per_block=1,vec=4"),
])  # fmt: skip
def test_a_gradient_with_rows_is_added_in_place(d: int, schedule: str) -> None:
    plan = plan_of(f"add_rmsnorm.bwd:d={d},accumulate=residual,blocks=2", schedule)
    assert wrong(plan, {"dresidual": "dresidual_in"}) == []


GRADIENTS = [
    ("add_layernorm", "dx", "dy"), ("add_rmsnorm", "dx", "dh"), ("parallel_rmsnorm", "dx", "dy1"),
    ("gated_layernorm", "dx", "dy"), ("gated_rmsnorm", "dz", "dy"), ("layernorm_sigmoid_mul", "dx", "dy"),
    ("rmsnorm_act", "dx", "x"), ("l2norm", "dx", "dy"), ("softmax", "dx", "dy"), ("log_softmax", "dx", "dy"),
    ("cross_entropy", "dx", "x"),
]  # fmt: skip


@sampling.rotating(("name", "result", "over"), GRADIENTS)
def test_a_gradient_over_a_cotangent(name: str, result: str, over: str) -> None:
    """Under the default schedule, and streamed without column sums, which read rows again."""
    spec = parse_spec(f"{name}.bwd:d=1000,dtype=bf16")
    default = plan_of(str(spec), str(Compilation(spec).schedule()))
    streamed = plan_of(f"{spec},wrt={result[1:]}", "form=multipass,threads=128,rows_per_block=1,vec=8")
    for plan in (default, streamed):
        assert plan.in_place
        assert wrong(plan, {result: over}) == []
