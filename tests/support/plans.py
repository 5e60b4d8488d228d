"""Plans of every structure, dtype and kind of input; what they compute, and that a plan keeps its bits."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from lngen.compiler.devices import default_device
from lngen.compiler.graphs import Definition, GraphBuilder
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import D, M
from lngen.compiler.lower import Kernel, Plan, Statement, lower
from lngen.compiler.lower.cuda.fragments import Join
from lngen.compiler.problem import Problem, Schedule, parse_schedule, problem
from lngen.compiler.schedule import ranked
from lngen.compiler.schedule.space import space
from lngen.compiler.spec import Spec, make_spec, parse_spec
from lngen.proof.check.inputs import mismatches, random_inputs
from lngen.proof.ptx import Outcome, run_plan
from schedules import cp_async, multipass, registers, tma, unaligned


@cache
def plan_of(spec: str, schedule: Schedule | str = "") -> Plan:
    """The plan under a schedule, or under the best-ranked one, some of its keys replaced."""
    s = parse_spec(spec)
    if isinstance(schedule, str):
        schedule = parse_schedule(schedule, ranked(problem(s.graph(), s.d))[0])
    return lower(s, schedule)


FORWARD, BACKWARD = "layernorm.fwd:d=4096,dtype=bf16", "layernorm.bwd:d=4096,dtype=bf16"
H200 = default_device()
ROWS = Schedule("registers", 128, 1, 8, blocks_per_sm=4)
STAGED = Schedule("tma", 128, 1, 8, blocks_per_sm=4, stages=3, grid=528, cached_weights=True)


def problem_of(spec: str) -> Problem:
    """The problem of a spec, for schedules."""
    parsed = parse_spec(spec)
    return problem(parsed.graph(), parsed.d)


# Every structure, dtype and kind of input; exact and partial rows; one and several segments and row groups.
PLANS: dict[str, tuple[str, Schedule]] = {
    "row": ("layernorm.fwd:d=4096,dtype=bf16", registers(128, 1, 8, blocks_per_sm=6)),
    "row, a warp for each": ("rmsnorm.fwd:d=100,dtype=f32,weight=f64", registers(32, 4, 4)),
    "row, one thread for each": ("layernorm.fwd:d=1,dtype=f16,save=none", registers(1, 32, 1)),
    "row, columns asked for early": ("layernorm.fwd:d=1000,dtype=bf16", registers(128, 1, 8, "cached")),
    "row, two segments": ("layernorm.fwd:d=12288,dtype=bf16", registers(512, 1, 8)),
    "row, backward": ("layernorm.bwd:d=1000,dtype=f16,wrt=x", registers(32, 1, 8)),
    "row_columns": ("layernorm.bwd:d=4096,dtype=bf16", registers(256, 2, 8, "prefetch")),
    "row_columns, one row": ("rmsnorm.bwd:d=8192,dtype=f32", registers(256, 1, 4)),
    "row_columns, no row sum": ("layernorm.bwd:d=777,dtype=bf16,wrt=beta", registers(64, 8, 1)),
    "row_columns, f64": ("layernorm.bwd:d=96,dtype=f64,save=none", registers(8, 32, 2)),
    "row_columns, one launch": ("layernorm.bwd:d=1000,dtype=bf16", registers(64, 8, 8, "prefetch single")),
    "tma": ("rmsnorm.fwd:d=512,dtype=bf16", tma(8, 16, 8, 3, grid=132)),
    "bulk, results leave in bulk": ("layernorm.fwd:d=4096,dtype=bf16,out=f32",
     tma(128, 2, 8, 3, "store cached regs", grid=132)),
    "bulk, a cluster for each": ("layernorm.fwd:d=65536,dtype=bf16",
     tma(256, 1, 8, 3, "store cached", cluster=4, grid=30)),
    "bulk, columns": ("layernorm.bwd:d=1024,dtype=bf16", tma(64, 8, 8, 3, "store cached single")),
    "bulk, columns, one row": ("layernorm.bwd:d=8192,dtype=bf16", tma(256, 1, 8, 3, "cached")),
    "bulk, columns, a cluster for each, one launch": ("rmsnorm.bwd:d=16384,dtype=f16",
     tma(256, 1, 8, 3, "single", cluster=2)),
    "bulk, columns, a cluster for each": ("layernorm.bwd:d=16384,dtype=bf16", tma(256, 1, 8, 3, "cached", cluster=2)),
    "bulk, columns, no row sum": ("layernorm.bwd:d=776,dtype=f16,wrt=beta", tma(32, 8, 8, 3)),
    "tma_unaligned": ("layernorm.bwd:d=1001,dtype=bf16", unaligned(64, 8, 1, 2)),
    "ragged, held": ("layernorm.fwd:d=1001,dtype=bf16", unaligned(32, 2, 1, 2, "regs", grid=9)),
    "claimed": ("layernorm.fwd:d=12288,dtype=bf16",
     tma(256, 1, 8, 3, "cached regs dynamic", blocks_per_sm=2, grid=264)),
    "claimed, ragged": ("layernorm.fwd:d=1001,dtype=f32", unaligned(32, 2, 1, 2, "dynamic", grid=9)),
    "cp_async": ("layernorm.fwd:d=1000,dtype=bf16", cp_async(32, 4, 8, 3, "cached", grid=264)),
    "async, columns": ("rmsnorm.bwd:d=1000,dtype=f32", cp_async(64, 4, 4, 2, "regs")),
    "async, columns, one row": ("rmsnorm.bwd:d=8192,dtype=bf16", cp_async(256, 1, 8, 3, "single")),
    "row_stream": ("layernorm.fwd:d=70000,dtype=f16,out=f32", multipass(512, 8)),
    "columns": ("layernorm.bwd:d=70000,dtype=bf16", multipass(512, 8)),
    "columns, statistics handed on": ("layernorm.bwd:d=70001,dtype=f32,save=none", multipass(512, 1)),
    "columns alone": ("layernorm.bwd:d=70000,dtype=bf16,wrt=gamma", multipass(512, 8)),
}  # fmt: skip


def statements(kernel: Kernel) -> Iterator[Statement]:
    """Every statement of a kernel."""
    yield from (*kernel.uniform, *kernel.per_row)
    if kernel.finish:
        yield from (*kernel.finish.uniform, *kernel.finish.statements)
    for phase in kernel.phases:
        yield from (s for loop in phase.loops for s in loop.every)
        for after in phase.after:
            yield from (after.result, *after.statements) if isinstance(after, Join) else (after,)


def notes(kernel: Kernel) -> set[str]:
    """The equations that statements and sums of a kernel stand for."""
    finished = kernel.finish.accumulators if kernel.finish else ()
    return {s.note for s in (*statements(kernel), *kernel.accumulators, *finished) if s.note}


# In every file, or in several kernels.
SHARED = {f"{part}.cu.jinja" for part in ("module", "kernel", "rows", "phases", "staged", "totals")}


def gated(b: GraphBuilder) -> None:
    x, z, shift = b.input("x", M, D), b.input("z", M, D), b.input("shift", M)
    scale = b.cast("scale32", b.param("scale", b.options.weight), to=b.compute)
    p = b.mul("p", b.mul("xz", x, z), b.add("factor", shift, scale))
    ms = b.reduce_mean("ms", b.mul("p2", p, p), axis=D)
    b.output("y", b.mul("xhat", p, b.statistic(b.rsqrt("rstd", b.add("mseps", ms, b.eps())))))


def own_spec(describe: Callable[[GraphBuilder], None], way: str = "fwd", **keys: object) -> Spec:
    return make_spec(Definition(describe.__name__, describe), way, {"d": 96, **keys})


def run_checked(plan: Plan, rows: int, seed: int = 0, **options: Any) -> Outcome:
    """What the PTX executor makes of a plan: the interpreter's bits, and no finding."""
    inputs = random_inputs(plan.spec, rows, seed)
    outcome = run_plan(plan, inputs, rows=rows, **options)
    case = str(plan.spec), str(plan.schedule), rows, options.get("order")
    assert not outcome.findings, (case, *map(str, outcome.findings[:3]))
    assert not mismatches(outcome.results, interpret(plan.graph, inputs)), case
    return outcome


def best(spec: Spec) -> Plan:
    return lower(spec, ranked(problem(spec.graph(), spec.d))[0])


def by_largest(b: GraphBuilder) -> None:
    """Each row over its largest element."""
    x = b.input("x", M, D)
    b.output("y", b.div("scaled", x, b.reduce_max("largest", x, axis=D)))


def maxima(b: GraphBuilder) -> None:
    """Column maxima, and the largest and the mean of them."""
    most = b.reduce_max("most", b.input("x", M, D), axis=M)
    b.output("largest", b.reduce_max("number", most, axis=D))
    b.output("mean", b.reduce_mean("m", most, axis=D))
    b.output("columns", most)


def weights_alone(b: GraphBuilder) -> None:
    """What has no rows."""
    b.output("y", b.neg("minus", b.input("gamma", D)))


@cache
def plans_of_every_template() -> tuple[Plan, ...]:
    """Plans that take every template between them."""
    claimed = tma(256, 1, 8, 2, "cached regs dynamic", blocks_per_sm=2, grid=264)
    more = [
        ("layernorm.fwd:d=10,dtype=f32", registers(4, 8, 2, "cached")),
        ("layernorm.bwd:d=1001,dtype=bf16", unaligned(32, 8, 1, 2, "cached")),
        ("layernorm.fwd:d=1001,dtype=bf16", unaligned(32, 8, 1, 2, "cached regs dynamic", grid=3)),
        ("layernorm.fwd:d=12288,dtype=bf16", claimed),
        ("layernorm.fwd:d=12288,dtype=bf16", replace(claimed, early_release=True)),
        ("layernorm.fwd:d=32768,dtype=f32", tma(64, 3, 4, 2, "cached regs early dynamic", cluster=8, grid=15)),
        ("layernorm.bwd:d=4096,dtype=bf16", tma(128, 2, 8, 2, "regs early")),
        ("layernorm.bwd:d=768,dtype=f16", registers(32, 16, 8)),
        ("layernorm.bwd:d=768,dtype=f16", multipass(32, 8)),
        ("layernorm.bwd:d=1024,dtype=f16", tma(64, 8, 8, 2, "cached")),
        ("layernorm.bwd:d=768,dtype=f16,strides=2", registers(32, 16, 8)),
        ("ada_layernorm.bwd:d=1024,dtype=bf16", registers(128, 8, 8)),
        ("ada_layernorm.bwd:d=1024,dtype=bf16", tma(128, 8, 8, 3)),
        ("ada_layernorm.bwd:d=1024,dtype=bf16", multipass(128, 8)),
        ("ada_rmsnorm.bwd:d=256,dtype=bf16,gamma=yes", cp_async(32, 32, 8, 3)),
        ("qk_layernorm.bwd:d=640,dtype=bf16,k_heads=1", registers(32, 16, 8)),
        ("qk_rmsnorm.bwd:d=2304,dtype=bf16,k_heads=2", multipass(32, 8)),
    ]
    specs = [parse_spec(f"layernorm.fwd:d=8,dtype=f64,weight={t},out={t}") for t in ("f16", "bf16")]
    specs += [make_spec(Definition(g.__name__, g), "fwd", {"d": 64}) for g in (by_largest, weights_alone, maxima)]
    return (*(plan_of(*args) for args in (*PLANS.values(), *more)), *map(best, specs))


def plan_of_each_form(spec: Spec) -> list[Plan]:
    """Of the schedules of a form, of one with stores by TMA and of one with clusters the last that is legal."""
    forms = {(s.form, s.tma_store, s.cluster > 1): s for s in space(problem(spec.graph(), spec.d))}
    return [lower(spec, schedule) for schedule in forms.values()]
