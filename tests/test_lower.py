"""Plans: every equation where it can be computed, every buffer where it fits; what cannot be lowered."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from lngen.data import data_dir
from lngen.errors import LowerError, ScheduleError
from lngen.graphs import Definition, GraphBuilder
from lngen.ir import F64, D, DType, M, print_eqn
from lngen.lower import Buffer, Extent, Kernel, Plan, Statement, lower
from lngen.schedule import Schedule, parse_schedule, problem, ranked
from lngen.spec import Spec, make_spec, parse_spec


def plan_of(spec: str, schedule: str = "") -> Plan:
    """The plan under the best-ranked schedule, some of its keys replaced."""
    s = parse_spec(spec)
    return lower(s, parse_schedule(schedule, ranked(problem(s.graph(), s.d))[0]))


# Every structure, dtype and kind of input; exact and partial rows; one and several segments and row groups.
PLANS: dict[str, tuple[str, str]] = {
    "row": ("layernorm.fwd:d=4096,dtype=bf16", ""),
    "row, a warp for each": ("rmsnorm.fwd:d=100,dtype=f32,weight=f64", "threads=32,rows=4,resident=1"),
    "row, one thread for each": ("layernorm.fwd:d=1,dtype=f16,save=none", "threads=1,rows=32,vec=1"),
    "row, two segments": ("layernorm.fwd:d=20000,dtype=bf16", "form=registers,threads=512,resident=1"),
    "row, backward": ("layernorm.bwd:d=1000,dtype=f16,wrt=x", "threads=32,rows=1,resident=1"),
    "row_columns": ("layernorm.bwd:d=4096,dtype=bf16", ""),
    "row_columns, one row": ("rmsnorm.bwd:d=8192,dtype=f32", "resident=1,prefetch=no"),
    "row_columns, no row sum": ("layernorm.bwd:d=777,dtype=bf16,wrt=beta", "vec=1"),
    "row_columns, f64": ("layernorm.bwd:d=96,dtype=f64,save=none", ""),
    "row_stream": ("layernorm.fwd:d=70000,dtype=f16,out=f32", "form=stream,threads=512,resident=1"),
    "columns": ("layernorm.bwd:d=70000,dtype=bf16", "form=stream,threads=512,resident=1"),
    "columns, statistics handed on": (
        "layernorm.bwd:d=70001,dtype=f32,save=none",
        "form=stream,threads=512,resident=1",
    ),
    "columns alone": ("layernorm.bwd:d=70000,dtype=bf16,wrt=gamma", "form=stream,threads=512,resident=1"),
}


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return plan_of(*PLANS[request.param])


def statements(kernel: Kernel) -> Iterator[Statement]:
    """Every statement of a kernel."""
    yield from (*kernel.uniform, *kernel.per_row)
    for phase in kernel.phases:
        yield from (*phase.statements, *phase.after)


def notes(kernel: Kernel) -> set[str]:
    """The equations that statements and sums of a kernel stand for."""
    sums = (*kernel.accumulators, *(s for phase in kernel.phases for f in phase.folds for s in f.sums))
    return {s.note for s in (*statements(kernel), *sums) if s.note}


def test_every_template_is_covered() -> None:
    used = {k.template for args in PLANS.values() for k in plan_of(*args).kernels}
    assert used | {"module.cu.jinja"} == {p.name for p in data_dir("templates").glob("*.cu.jinja")}


def test_every_equation_is_a_note_of_some_kernel(plan: Plan) -> None:
    found = set().union(*map(notes, plan.kernels))
    assert found == {print_eqn(e) for e in plan.graph.eqns}


def test_every_value_is_defined_before_it_is_used(plan: Plan) -> None:
    for kernel in plan.kernels:
        names = set(plan.graph.values())
        known = {t.name for t in (*kernel.row_inputs, *kernel.scalars)}
        if kernel.template == "finish.cu.jinja":
            known |= {s.name for s in kernel.accumulators}
        else:
            names -= {s.name for s in kernel.accumulators}
        for statement in (*kernel.uniform, *kernel.per_row):
            known = defined(statement, known, names)
        for phase in kernel.phases:
            tiles = phase.tiles if kernel.template == "row_stream.cu.jinja" else kernel.tiles
            columns = kernel.columns if kernel.template == "columns.cu.jinja" else phase.columns
            here = known | {t.name for t in (*tiles, *columns)}
            for statement in phase.statements:
                here = defined(statement, here, names)
            known |= {s.name for f in phase.folds for s in f.sums}
            for statement in phase.after:
                known = defined(statement, known, names)
            assert {o.name for o in phase.outputs} <= here
            assert {o.name for o in phase.row_outputs} <= known


def defined(statement: Statement, known: set[str], names: set[str]) -> set[str]:
    """``known`` and what the statement defines; its operands must be known."""
    target, _, value = statement.text.partition(" = ")
    used = set(re.findall(r"[a-z_]\w*", value)) & names
    assert used <= known, statement
    return known | {target.split()[-1]}


def test_every_output_is_written_once_and_partials_before_they_are_read(plan: Plan) -> None:
    written: list[str] = []
    inputs, buffers = {v.name for v in plan.inputs}, {b.name for b in plan.workspace}
    for kernel in plan.kernels:
        names = [a.name for a in kernel.arguments]
        assert len(set(names)) == len(names)
        for a in kernel.arguments:
            if a.kind == "input":
                assert a.const
                assert a.tensor in inputs
            elif a.kind == "workspace":
                assert a.tensor in buffers
                assert not a.const or a.tensor in written
            if a.kind in ("output", "workspace") and not a.const:
                written.append(a.tensor)
    assert sorted(written) == sorted([*(v.name for v in plan.outputs), *buffers])


def test_a_matrix_has_a_stride(plan: Plan) -> None:
    wide = {v.name for v in (*plan.inputs, *plan.outputs) if v.type.axes == (M, D)}
    for kernel in plan.kernels:
        pointers = {a.tensor for a in kernel.arguments if a.kind in ("input", "output")}
        assert {a.tensor for a in kernel.arguments if a.kind == "stride"} == pointers & wide
        assert all(f"{a.tensor}_{'stride' if a.kind == 'stride' else 'ptr'}" == a.name for a in kernel.arguments[1:])
        assert kernel.arguments[0].name == "rows"


@pytest.mark.parametrize("rows", [0, 1, 7, 65, 1000])
def test_buffers_are_aligned_and_do_not_overlap(plan: Plan, rows: int) -> None:
    offsets = plan.workspace_offsets(rows)
    needed = {b.name: (b.fixed + b.per_row * rows) * b.dtype.size for b in plan.workspace}
    assert list(offsets) == list(needed)
    spans = [(start, start + needed[name]) for name, start in offsets.items()]
    assert all(start % 256 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert plan.workspace_bytes(rows) >= max((end for _, end in spans), default=0)
    assert plan.workspace_bytes(rows) % 256 == 0


def test_a_partial_row_for_every_block(plan: Plan) -> None:
    for kernel in plan.kernels:
        for sum_ in kernel.accumulators if kernel.template != "finish.cu.jinja" else ():
            (buffer,) = (b for b in plan.workspace if b.name == f"{sum_.name}_partial")
            blocks = max(extent.limit or 0 for extent in kernel.grid)
            assert buffer.fixed == blocks * plan.spec.d


def test_buffers_round_up() -> None:
    assert [Buffer("b", DType.F32, fixed=n).bytes(9) for n in (0, 1, 64, 65)] == [0, 256, 256, 512]
    assert Buffer("b", DType.F64, fixed=1, per_row=31).bytes(1) == 256
    assert Buffer("b", DType.F64, fixed=1, per_row=31).bytes(2) == 512


@pytest.mark.parametrize(
    ("extent", "text", "blocks"),
    [
        (Extent(), "1", [1, 1, 1, 1]),
        (Extent(5), "5", [5, 5, 5, 5]),
        (Extent(per=1), "rows", [0, 1, 7, 1000]),
        (Extent(per=2), "ceil(rows / 2)", [0, 1, 4, 500]),
        (Extent(per=1, limit=132), "min(132, rows)", [0, 1, 7, 132]),
        (Extent(per=2, limit=3), "min(3, ceil(rows / 2))", [0, 1, 3, 3]),
    ],
)
def test_extents(extent: Extent, text: str, blocks: list[int]) -> None:
    assert str(extent) == text
    assert [extent(rows) for rows in (0, 1, 7, 1000)] == blocks


def test_constants_and_launch_of_a_plan_one_can_check_by_hand() -> None:
    (kernel,) = plan_of("layernorm.fwd:d=1000,dtype=bf16", "threads=32,rows=4,vec=8,resident=2").kernels
    assert {c.name: c.value for c in kernel.constants} == {
        "D": 1000, "CHUNK": 8, "THREADS": 32, "SLOTS": 4, "VEC": 8, "EXACT": 0, "ROWS": 4, "SEGMENT_SLOTS": 64,
    }  # fmt: skip
    assert (kernel.block, kernel.launch_rule()) == (
        128,
        "grid ceil(rows / 4), block 128; no launch for rows = 0",
    )
    assert [a.declaration for a in kernel.arguments[:4]] == [
        "const long long rows",
        "const bf16* __restrict__ x_ptr",
        "const long long x_stride",
        "const bf16* __restrict__ gamma_ptr",
    ]
    exact = plan_of("layernorm.fwd:d=1024,dtype=bf16", "threads=32,rows=4,resident=1").kernels[0]
    assert {c.name: c.value for c in exact.constants}["EXACT"] == 1


def test_alignment_is_that_of_an_access() -> None:
    found = plan_of("layernorm.fwd:d=1000,dtype=bf16,weight=f32", "threads=32,rows=4,resident=1,vec=4")
    assert {v.name: found.alignment(v) for v in (*found.inputs, *found.outputs)} == {
        "x": 8, "gamma": 16, "beta": 16, "y": 8, "mean": 16, "rstd": 16,
    }  # fmt: skip


def test_the_plan_s_text_has_all_of_it(plan: Plan) -> None:
    text = str(plan)
    assert text.startswith(f"plan {plan.name}\n")
    assert str(lower(plan.spec, plan.schedule)) == text
    words = set(re.findall(r"\w+", text))
    assert words >= {e.out.name for e in plan.graph.eqns}
    for kernel in plan.kernels:
        assert f"kernel {kernel.name}\n" in text
        assert kernel.launch_rule() in text
    assert not re.search(r"[ \t]$", text, re.MULTILINE)


def test_an_illegal_schedule_is_not_lowered() -> None:
    with pytest.raises(ScheduleError, match="threads is a power of two, got 33"):
        plan_of("layernorm.fwd:d=4096", "threads=33")


# ---- what cannot be lowered ----


def column_centred(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    b.output("y", b.sub("xc", x, b.reduce_sum("total", x, axis=M)))


def sum_of_sums(b: GraphBuilder) -> None:
    total = b.reduce_sum("total", b.input("x", M, D), axis=M)
    b.output("y", b.reduce_sum("again", b.expand("wide", total, axis=M), axis=M))


def sum_of_weights(b: GraphBuilder) -> None:
    x, gamma = b.input("x", M, D), b.input("gamma", D)
    b.output("y", b.mul("q", x, b.reduce_sum("weights", gamma, axis=D)))


def scalar_result(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    b.output("y", b.neg("minus", x))
    b.output("n", b.size("m_length", M, b.compute))
    b.output("total", b.reduce_sum("column", x, axis=M))


def two_dtypes(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    narrow = b.reduce_sum("narrow", x, axis=D)
    wide = b.reduce_sum("wide", b.cast("x64", x, to=F64), axis=D)
    b.output("y", b.mul("q", narrow, b.cast("wide32", wide, to=b.compute)))


def input_as_result(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    b.output("y", x)
    b.statistic(b.params[0])


def weights_alone(b: GraphBuilder) -> None:
    b.output("y", b.neg("minus", b.input("gamma", D)))


def sum_of_statistics(b: GraphBuilder) -> None:
    mean = b.reduce_mean("mean", b.input("x", M, D), axis=D)
    b.output("y", b.mul("scaled", b.input("gamma", D), b.reduce_sum("total", mean, axis=M)))


LOWER_ERRORS: list[tuple[Callable[[GraphBuilder], None], str]] = [
    (
        column_centred,
        "the row result '%y' depends on a sum over rows; "
        "that takes two graphs, one for the sum and one for the result.",
    ),
    (input_as_result, "the result '%x' is an input; leave it out, the caller has it."),
    (weights_alone, "'%y' has no rows and takes no sum over rows; compute it outside."),
    (sum_of_statistics, "'%total' sums over rows a value without D; add it up outside."),
    (sum_of_sums, "'%again' is a sum over rows of sums over rows."),
    (sum_of_weights, "'%weights' reduces over D a value that has no rows; pass it as an input."),
    (scalar_result, "results without rows are expected to be [D] and elementwise in the column sums."),
    (two_dtypes, "reduces in f32 and in f64; cast the operands to one dtype."),
]


@pytest.mark.parametrize(("describe", "message"), LOWER_ERRORS)
def test_what_cannot_be_lowered_hears_why(describe: Callable[[GraphBuilder], None], message: str) -> None:
    spec = make_spec(Definition("own", describe), "fwd", {"d": 64})
    schedule = ranked(problem(spec.graph(), spec.d))[0]
    with pytest.raises(LowerError) as error:
        lower(spec, schedule)
    colon = "" if message.startswith("reduces in") else ":"
    assert str(error.value) == f"graph @own_fwd{colon} {message}"


# ---- graphs of one's own ----


def own_spec(describe: Callable[[GraphBuilder], None], way: str = "fwd", **keys: object) -> Spec:
    return make_spec(Definition(describe.__name__, describe), way, {"d": 96, **keys})


def gated(b: GraphBuilder) -> None:
    x, z, shift = b.input("x", M, D), b.input("z", M, D), b.input("shift", M)
    scale = b.cast("scale32", b.param("scale", b.options.weight), to=b.compute)
    p = b.mul("p", b.mul("xz", x, z), b.add("factor", shift, scale))
    ms = b.reduce_mean("ms", b.mul("p2", p, p), axis=D)
    b.output("y", b.mul("xhat", p, b.statistic(b.rsqrt("rstd", b.add("mseps", ms, b.eps())))))


def test_row_and_scalar_inputs_are_lowered() -> None:
    spec = own_spec(gated, dtype="bf16", weight="f32")
    (kernel,) = lower(spec, ranked(problem(spec.graph(), spec.d))[0]).kernels
    assert [t.name for t in kernel.row_inputs] == ["shift"]
    assert [t.name for t in kernel.scalars] == ["scale"]
    assert {s.text.split(" = ")[0] for s in kernel.per_row} == {"const float shift32", "const float factor"}


def test_column_results_without_row_results_need_no_row_kernel() -> None:
    found = plan_of(*PLANS["columns alone"])
    assert [k.template for k in found.kernels] == ["columns.cu.jinja", "finish.cu.jinja"]


def test_statistics_are_handed_from_kernel_to_kernel() -> None:
    found = plan_of(*PLANS["columns, statistics handed on"])
    assert [(b.name, b.per_row) for b in found.workspace if b.per_row] == [("mean", 1), ("rstd", 1)]
    assert replace(found, workspace=()).workspace_bytes(10) == 0


def test_the_name_spells_spec_and_schedule() -> None:
    s = Schedule("registers", 256, 2, 8, prefetch=True)
    found = lower(parse_spec("layernorm.bwd:d=4096,dtype=bf16"), s)
    assert found.name == "layernorm_bwd__bf16_d4096__t256_r2_v8_b1_prefetch"
    assert [k.name for k in found.kernels] == [f"{found.name}__rows", f"{found.name}__finish"]
