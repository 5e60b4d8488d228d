"""Plans: if these fail, a kernel computes an equation where it cannot, twice or not at all, or buffers do not fit."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from lngen.compile import Compilation
from lngen.config import data_dir
from lngen.contract import described
from lngen.emit import emit
from lngen.errors import ScheduleError
from lngen.graphs import Definition, GraphBuilder
from lngen.ir import D, DType, M
from lngen.lower import Buffer, Extent, Kernel, Plan, lower
from lngen.lower.parts import note
from lngen.lower.plan import Finish
from lngen.lower.policies import leading_dimension
from lngen.problem import Schedule, problem
from lngen.spec import make_spec, parse_spec
from plans import PLANS, SHARED, notes, plan_of, run_checked
from schedules import multipass, registers, tma


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return plan_of(*PLANS[request.param])


def test_every_template_is_covered() -> None:
    used = {k.template for args in PLANS.values() for k in plan_of(*args).kernels}
    used |= {"elementwise.cu.jinja", "numbers.cu.jinja"}  # of no named graph; test_outputs and test_scalars run them
    assert used | SHARED == {p.name for p in data_dir("templates").glob("*.cu.jinja")}


def test_every_equation_is_a_note_of_some_kernel(plan: Plan) -> None:
    found = set().union(*map(notes, plan.kernels))
    assert found == {note(e) for e in plan.graph.eqns}


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
        for sum_ in kernel.accumulators:
            (buffer,) = (b for b in plan.workspace if b.name == f"{sum_.name}_partials_")
            (owners,) = (extent for extent in kernel.grid if extent.limit)
            assert owners.limit
            assert buffer.fixed == owners.limit * leading_dimension(problem(plan.graph, plan.spec.d))


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
        (Extent(per=1, limit=30, times=4), "4 * min(30, rows)", [0, 4, 28, 120]),
        (Extent(per=8, limit=3, least=1), "max(1, min(3, ceil(rows / 8)))", [1, 1, 1, 3]),
        (Extent(per=2, times=2, least=2), "max(2, 2 * ceil(rows / 2))", [2, 2, 8, 1000]),
    ],
)
def test_extents(extent: Extent, text: str, blocks: list[int]) -> None:
    assert str(extent) == text
    assert [extent(rows) for rows in (0, 1, 7, 1000)] == blocks


def finish_of(kernel: Kernel) -> Finish:
    assert kernel.finish is not None
    return kernel.finish


def test_a_large_finish_has_sixteen_bytes_of_columns_a_thread() -> None:
    """Of f32 four columns, of f64 two; 128 threads, so that 4 strands have 128 columns and 64, 16 strands 16."""
    wide = {
        "rmsnorm.bwd:d=32768,dtype=bf16": (4, 128, 256),
        "rmsnorm.bwd:d=33000,dtype=f32": (4, 128, 258),
        "rmsnorm.bwd:d=32768,dtype=f64": (2, 64, 512),
        "rmsnorm.bwd:d=8192,dtype=bf16,blocks=126": (4, 32, 256),
        "rmsnorm.bwd:d=33002,dtype=bf16": (1, 32, 1032),  # not whole units
        "rmsnorm.bwd:d=32760,dtype=bf16": (1, 32, 1024),  # not as large
    }
    for spec, (side, columns, blocks) in wide.items():
        vec = 2 if "33002" in spec or "f64" in spec else 4
        *_, finish = plan_of(spec, multipass(256, vec)).kernels
        found = finish_of(finish)
        assert (found.columns_per_thread, found.columns, finish.grid[0](1)) == (side, columns, blocks), spec
        assert finish.block == columns // side * found.interleave


@pytest.mark.parametrize(("rows", "cluster", "apart"), [(4, 4, 1), (1, 4, 4), (1, 2, 4), (1, 1, 4)])
def test_row_groups_are_side_by_side_or_apart(rows: int, cluster: int, apart: int) -> None:
    """The graph has four row groups in each of 30 clusters; alone they leave a partial row each, folded in the end."""
    schedule = tma(64, rows, 8, 2, cluster=cluster)
    found = plan_of("layernorm.bwd:d=8192,dtype=bf16", schedule)
    finish = finish_of(found.kernels[1])
    assert f"/* grid */ {30 * apart}," in found.kernels[0].policies[-1]
    assert (finish.partials, finish.rows_per_term, finish.rows_per_block) == (30 * apart, apart, rows)
    assert {b.fixed for b in found.workspace} == {30 * apart * 8192}


@pytest.mark.parametrize(
    ("more", "blocks", "batch"),
    [("", 128, 8), ("", 63, 8), (",wrt=beta", 63, 16), ("", 300, 8), ("", 5, 2), ("", 2, 1)],
)
def test_a_strand_waits_for_all_its_partial_rows_at_once(more: str, blocks: int, batch: int) -> None:
    """A strand in 16, or of less than 64 blocks in 4, has so many of them; 16 numbers are on their way at most."""
    text = f"layernorm.bwd:d=1000,dtype=f32,blocks={blocks}{more}"
    finish = plan_of(text, "form=registers,threads=64,rows_per_block=4").kernels[-1]
    assert finish_of(finish).batch == batch


@pytest.mark.parametrize(("text", "pitch", "unit"), [("d=1001,dtype=bf16", 1004, 4), ("d=15,dtype=f64", 16, 2)])
@pytest.mark.parametrize(
    "form", ["form=registers,threads=8,rows_per_block={}", "form=multipass,threads=32,rows_per_block=1"]
)
def test_partial_rows_are_whole_units(text: str, pitch: int, unit: int, form: str) -> None:
    """However long a row is, its column sums are moved 16 bytes at a time."""
    spec = parse_spec(f"layernorm.bwd:{text}")
    if "multipass" in form:
        spec = parse_spec(f"layernorm.bwd:{text.replace('1001', '70001').replace('15', '40009')}")
        pitch = {4: 70004, 2: 40010}[unit]
    groups = problem(spec.graph(), spec.d).groups
    plan = plan_of(str(spec), form.format(groups) + ",vec=1")
    *others, finish = plan.kernels
    assert finish_of(finish).leading == pitch
    assert {k.row.unit for k in others if k.row and k.row.flush} <= {unit}
    assert {b.fixed % pitch for b in plan.workspace if b.fixed} == {0}


def places_of(spec: str, schedule: Schedule) -> tuple[dict[str, int], dict[str, int]]:
    row = plan_of(spec, schedule).kernels[0].row
    assert row is not None
    return {p.name: p.offset for p in row.places}, {p.name: p.offset for p in row.results}


def test_a_result_has_the_place_of_an_input_of_its_size() -> None:
    bulk = tma(128, 1, 8, 2, "store", grid=1)
    assert places_of("layernorm.fwd:d=4096,dtype=bf16", bulk) == ({"x": 0}, {"y": 0})
    assert places_of("layernorm.fwd:d=4096,dtype=bf16,out=f32", bulk) == ({"x": 0}, {"y": 8192})
    assert places_of("layernorm.fwd:d=4096,dtype=bf16", replace(bulk, tma_store=False)) == ({"x": 0}, {})
    backward = tma(256, 2, 8, 2, "store")
    assert places_of("layernorm.bwd:d=4096,dtype=bf16", backward) == ({"dy": 0, "x": 8192}, {"dx": 0})


# ---- one launch ----


def test_one_launch_is_one_kernel_with_a_counter() -> None:
    """Both kernels' arguments, the workspace read and written; as many blocks as finish, with no rows, too."""
    schedule = tma(256, 1, 8, 3, "cached")
    two, one = (plan_of("layernorm.bwd:d=8192,dtype=bf16", replace(schedule, single_launch=o)) for o in (False, True))
    rows, finish = two.kernels
    (kernel,) = one.kernels
    assert (kernel.cooperative, kernel.always, rows.cooperative, rows.always) == (True, True, False, False)
    names = [a.name for a in (*rows.arguments, *finish.arguments)]
    assert [a.name for a in kernel.arguments] == [*dict.fromkeys(names), "arrivals_"]
    assert not any(a.const for a in kernel.arguments if a.kind == "workspace")
    assert one.workspace == (Buffer("arrivals_", DType.F32, fixed=1, zeroed=True), *two.workspace)
    assert [b.element for b in one.workspace] == ["u32", "f32", "f32"]
    assert [kernel.grid[0](n) for n in (0, 1, 3, 1000)] == [120] * 4
    (short,) = plan_of("layernorm.bwd:d=100,dtype=f32", registers(16, 32, 4, "single")).kernels
    assert [short.grid[0](n) for n in (0, 1, 128, 160, 10**6)] == [4, 4, 4, 5, 128]
    (narrow,) = plan_of("rmsnorm.bwd:d=16384,dtype=bf16", tma(64, 4, 8, 2, "single", cluster=8)).kernels
    assert narrow.grid[0](1) == narrow.grid[0](10**6) == 120
    own, alone = finish_of(kernel), finish_of(finish)
    assert (own.statements, own.accumulators) == (alone.statements, alone.accumulators)
    assert kernel.dynamic >= alone.shared * 4
    assert own.totals == "ring_"


def test_one_launch_in_registers_folds_in_the_same_memory() -> None:
    schedule = registers(8, 32, 2, "single")
    (kernel,) = plan_of("layernorm.bwd:d=96,dtype=f64,save=none", schedule).kernels
    assert (finish_of(kernel).totals, kernel.dynamic) == ("sums_buffer_", 0)
    assert kernel.row
    (declared,) = (re.search(r"sums_buffer_\[(\d+)\]", line) for line in kernel.row.objects if "sums_buffer_[" in line)
    assert declared
    assert int(declared[1]) >= finish_of(kernel).shared == 2 * 16 * 32


def scaled_totals(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    b.output("y", b.add("doubled", x, x))
    b.results.append(b.mul("share", b.reduce_sum("total", x, axis=M), b.param("s", b.options.dtype)))


@pytest.mark.parametrize("schedule", [registers(8, 1, 4, "single"), tma(8, 1, 4, 2, "single")])
def test_the_finish_of_one_launch_has_what_only_it_needs(schedule: Schedule) -> None:
    spec = make_spec(Definition("scaled_totals", scaled_totals), "fwd", {"d": 96})
    (kernel,) = lower(spec, replace(schedule, rows_per_block=problem(spec.graph(), 96).groups)).kernels
    assert kernel.finish
    assert [t.name for t in kernel.finish.scalars] == ["s"]
    assert [t.name for t in kernel.scalars] == []


def halved(b: GraphBuilder) -> None:
    x, s = b.input("x", M, D), b.cast("s32", b.param("s", b.options.weight), to=b.compute)
    total = b.reduce_dot("total", b.cast("x32", x, to=b.compute), s, axis=M)
    b.results.append(b.mul("scaled", total, s))


def test_the_finish_of_one_launch_declares_no_number_again() -> None:
    """What both halves compute from a scalar is declared once, whatever the dtype of the scalar."""
    spec = make_spec(Definition("halved", halved), "fwd", {"d": 96, "dtype": "bf16", "weight": "f16"})
    one = lower(spec, registers(8, problem(spec.graph(), 96).groups, 4, "single"))
    assert len(re.findall(r"const float s32 = ", emit(one))) == 1
    run_checked(one, 37)


def test_alignment_is_that_of_an_access() -> None:
    found = plan_of("layernorm.fwd:d=1000,dtype=bf16,weight=f32", "threads=32,rows_per_block=4,blocks_per_sm=1,vec=4")
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


def test_the_plan_s_text_shows_shared_memory_and_clusters() -> None:
    text = str(plan_of(*PLANS["bulk, a cluster for each"]))
    for line in (
        "launch    grid 4 * min(30, rows), block 256, clusters of 4, 98304 bytes of dynamic shared memory; "
        "no launch for rows = 0",
        "stage     x at byte 0",
        "leaving   y at byte 0",
        "cached    gamma, beta",
        "shared    98304 bytes of stages",
        "policy    Exchange = ClusterExchange<Row, float, /* values */ 4, AcquireShared>",
    ):
        assert f"\n  {line}\n" in text
    once = str(plan_of(*PLANS["row_columns, one launch"]))
    assert "workspace arrivals_: u32[1], zero before the first call\n" in once
    assert ", cooperative\n" in once
    assert re.search(r"\n  columns   dgamma dbeta\n", once)


def test_an_illegal_schedule_is_not_lowered() -> None:
    with pytest.raises(ScheduleError, match="threads is a power of two, got 33"):
        plan_of("layernorm.fwd:d=4096", "threads=33")


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


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("layernorm.fwd:d=64", {"x", "y"}),
        ("layernorm.bwd:d=64", {"x", "dy", "dx"}),
        ("layernorm.bwd:d=64,wrt=gamma", set()),  # no [M, D] result
        ("layernorm.bwd:d=64,accumulate=gamma", {"x", "dy", "dx", "dgamma", "dgamma_in"}),
        ("add_rmsnorm.fwd:d=64", {"x", "residual", "y", "h"}),
        ("add_rmsnorm.fwd:d=64,dtype=bf16,residual_dtype=f32", {"x", "residual", "y", "h"}),
    ],
)
def test_pointers_that_may_be_the_same_are_not_declared_to_differ(text: str, shared: set[str]) -> None:
    """Those are all for which the manifest permits it, or undefined behaviour would follow."""
    spec = parse_spec(text)
    plan = lower(spec, Compilation(spec).schedule())
    arguments = [a for k in plan.kernels for a in k.arguments if a.kind in ("input", "output")]
    assert not re.search(rf"<Row, ReadOnlyLoad>\(({'|'.join(shared) or 'none'})_ptr_", emit(plan))
    assert {a.tensor for a in arguments if "__restrict__" not in a.declaration} == shared
    pairs = described(plan)["in_place"]["outputs"]
    assert {name for output, inputs in pairs.items() for name in (output, *inputs)} <= shared
