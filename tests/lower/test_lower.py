"""Plans: every equation where it can be computed, every buffer where it fits; what cannot be lowered."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from lngen.aot.manifest import entry
from lngen.check.inputs import mismatches, random_inputs
from lngen.compile import Compilation
from lngen.config import data_dir
from lngen.emit import emit
from lngen.errors import LowerError, ScheduleError
from lngen.graphs import Definition, GraphBuilder
from lngen.interpret import interpret
from lngen.ir import F64, D, DType, M, S
from lngen.lower import Buffer, Extent, Kernel, Plan, Statement, lower
from lngen.lower.parts import Join, note
from lngen.lower.plan import Finish
from lngen.lower.policies import leading_dimension
from lngen.problem import Schedule, parse_schedule, problem
from lngen.problem.footprint import cluster_tile, stage_bytes
from lngen.ptx import run_plan
from lngen.schedule import ranked
from lngen.spec import Spec, make_spec, parse_spec


@cache
def plan_of(spec: str, schedule: str = "") -> Plan:
    """The plan under the best-ranked schedule, some of its keys replaced."""
    s = parse_spec(spec)
    return lower(s, parse_schedule(schedule, ranked(problem(s.graph(), s.d))[0]))


# Every structure, dtype and kind of input; exact and partial rows; one and several segments and row groups.
PLANS: dict[str, tuple[str, str]] = {
    "row": ("layernorm.fwd:d=4096,dtype=bf16", "form=registers,threads=128,rows_per_block=1,blocks_per_sm=6"),
    "row, a warp for each": ("rmsnorm.fwd:d=100,dtype=f32,weight=f64", "form=registers,threads=32,rows_per_block=4"),
    "row, one thread for each": (
        "layernorm.fwd:d=1,dtype=f16,save=none",
        "form=registers,threads=1,rows_per_block=32,vec=1",
    ),
    "row, columns asked for early": (
        "layernorm.fwd:d=1000,dtype=bf16",
        "form=registers,threads=128,rows_per_block=1,cached_weights=yes",
    ),
    "row, two segments": ("layernorm.fwd:d=12288,dtype=bf16", "form=registers,threads=512,rows_per_block=1"),
    "row, backward": ("layernorm.bwd:d=1000,dtype=f16,wrt=x", "form=registers,threads=32,rows_per_block=1"),
    "row_columns": ("layernorm.bwd:d=4096,dtype=bf16", "form=registers,threads=256,rows_per_block=2,prefetch=yes"),
    "row_columns, one row": ("rmsnorm.bwd:d=8192,dtype=f32", "form=registers,threads=256,rows_per_block=1"),
    "row_columns, no row sum": (
        "layernorm.bwd:d=777,dtype=bf16,wrt=beta",
        "form=registers,threads=64,rows_per_block=8,vec=1",
    ),
    "row_columns, f64": ("layernorm.bwd:d=96,dtype=f64,save=none", "form=registers,threads=8,rows_per_block=32"),
    "row_columns, one launch": (
        "layernorm.bwd:d=1000,dtype=bf16",
        "form=registers,threads=64,rows_per_block=8,prefetch=yes,single_launch=yes",
    ),
    "tma": ("rmsnorm.fwd:d=512,dtype=bf16", "form=tma,threads=8,rows_per_block=16,stages=3,grid=132"),
    "bulk, results leave in bulk": (
        "layernorm.fwd:d=4096,dtype=bf16,out=f32",
        "form=tma,threads=128,rows_per_block=2,stages=3,grid=132,tma_store=yes,cached_weights=yes,row_in_registers=yes",
    ),
    "bulk, a cluster for each": (
        "layernorm.fwd:d=65536,dtype=bf16",
        "form=tma,threads=256,rows_per_block=1,stages=3,cluster=4,grid=30,tma_store=yes,cached_weights=yes",
    ),
    "bulk, columns": (
        "layernorm.bwd:d=1024,dtype=bf16",
        "form=tma,threads=64,rows_per_block=8,stages=3,tma_store=yes,cached_weights=yes,single_launch=yes",
    ),
    "bulk, columns, one row": (
        "layernorm.bwd:d=8192,dtype=bf16",
        "form=tma,threads=256,rows_per_block=1,stages=3,cached_weights=yes",
    ),
    "bulk, columns, a cluster for each, one launch": (
        "rmsnorm.bwd:d=16384,dtype=f16",
        "form=tma,threads=256,rows_per_block=1,stages=3,cluster=2,single_launch=yes",
    ),
    "bulk, columns, a cluster for each": (
        "layernorm.bwd:d=16384,dtype=bf16",
        "form=tma,threads=256,rows_per_block=1,stages=3,cluster=2,cached_weights=yes",
    ),
    "bulk, columns, no row sum": (
        "layernorm.bwd:d=776,dtype=f16,wrt=beta",
        "form=tma,threads=32,rows_per_block=8,stages=3",
    ),
    "tma_unaligned": (
        "layernorm.bwd:d=1001,dtype=bf16",
        "form=tma_unaligned,threads=64,rows_per_block=8,stages=2,tma_store=yes",
    ),
    "ragged, held": (
        "layernorm.fwd:d=1001,dtype=bf16",
        "form=tma_unaligned,threads=32,rows_per_block=2,stages=2,grid=9,tma_store=yes,row_in_registers=yes",
    ),
    "claimed": (
        "layernorm.fwd:d=12288,dtype=bf16",
        "form=tma,threads=256,rows_per_block=1,blocks_per_sm=2,stages=3,grid=264,cached_weights=yes,row_in_registers=yes,dynamic=yes",
    ),
    "claimed, ragged": (
        "layernorm.fwd:d=1001,dtype=f32",
        "form=tma_unaligned,threads=32,rows_per_block=2,stages=2,grid=9,tma_store=yes,dynamic=yes",
    ),
    "cp_async": (
        "layernorm.fwd:d=1000,dtype=bf16",
        "form=cp_async,threads=32,rows_per_block=4,stages=3,grid=264,cached_weights=yes",
    ),
    "async, columns": (
        "rmsnorm.bwd:d=1000,dtype=f32",
        "form=cp_async,threads=64,rows_per_block=4,stages=2,row_in_registers=yes",
    ),
    "async, columns, one row": (
        "rmsnorm.bwd:d=8192,dtype=bf16",
        "form=cp_async,threads=256,rows_per_block=1,stages=3,single_launch=yes",
    ),
    "row_stream": ("layernorm.fwd:d=70000,dtype=f16,out=f32", "form=multipass,threads=512,rows_per_block=1"),
    "columns": ("layernorm.bwd:d=70000,dtype=bf16", "form=multipass,threads=512,rows_per_block=1"),
    "columns, statistics handed on": (
        "layernorm.bwd:d=70001,dtype=f32,save=none",
        "form=multipass,threads=512,rows_per_block=1",
    ),
    "columns alone": ("layernorm.bwd:d=70000,dtype=bf16,wrt=gamma", "form=multipass,threads=512,rows_per_block=1"),
}


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return plan_of(*PLANS[request.param])


def statements(kernel: Kernel) -> Iterator[Statement]:
    """Every statement of a kernel."""
    yield from (*kernel.uniform, *kernel.per_row, *kernel.statements)
    if kernel.finish:
        yield from (*kernel.finish.uniform, *kernel.finish.statements)
    for phase in kernel.phases:
        yield from (s for loop in phase.loops for s in (*loop.vector, *loop.element))
        for after in phase.after:
            yield from (after.result, *after.statements) if isinstance(after, Join) else (after,)


def notes(kernel: Kernel) -> set[str]:
    """The equations that statements and sums of a kernel stand for."""
    finished = kernel.finish.accumulators if kernel.finish else ()
    return {s.note for s in (*statements(kernel), *kernel.accumulators, *finished) if s.note}


# In every file, or in several kernels.
SHARED = {f"{part}.cu.jinja" for part in ("module", "kernel", "rows", "phases", "totals")}


def test_every_template_is_covered() -> None:
    used = {k.template for args in PLANS.values() for k in plan_of(*args).kernels}
    used |= {"elementwise.cu.jinja", "numbers.cu.jinja"}  # of no named graph; test_outputs and test_scalars run them
    assert used | SHARED == {p.name for p in data_dir("templates").glob("*.cu.jinja")}


def test_every_equation_is_a_note_of_some_kernel(plan: Plan) -> None:
    found = set().union(*map(notes, plan.kernels))
    assert found == {note(e) for e in plan.graph.eqns}


def test_every_value_is_defined_before_it_is_used(plan: Plan) -> None:
    for kernel in plan.kernels:
        names = set(plan.graph.values())
        finish = kernel.finish
        known = {t.name for t in (*kernel.row_inputs, *kernel.scalars)}
        for statement in (*kernel.uniform, *kernel.per_row, *kernel.statements):
            known = defined(statement, known, names)
        for phase in kernel.phases:
            for loop in phase.loops:
                here = (
                    known
                    | set(loop.inputs)
                    | {s.text.split()[2] for s in loop.vector}
                    | {s.name for s in kernel.accumulators}
                )
                for statement in loop.element:
                    here = defined(statement, here, names)
                if loop is phase.loop:
                    assert {o.name for o in phase.outputs} <= here | set(loop.inputs)
            known |= {s.name for r in phase.reduces if r.results for s in r.sums}
            for after in phase.after:
                known = (
                    known | {after.result.text.split()[-1]} if isinstance(after, Join) else defined(after, known, names)
                )
            assert {o.name for o in phase.row_outputs} <= known
        if finish:
            here = known | {t.name for t in finish.scalars} | {s.name for s in finish.accumulators}
            for statement in (*finish.uniform, *finish.statements):
                here = defined(statement, here, names)


def defined(statement: Statement, known: set[str], names: set[str]) -> set[str]:
    """``known`` and what the statement defines; its operands must be known."""
    target, _, value = statement.text.partition(" = ")
    used = set(re.findall(r"[A-Za-z]\w*", value)) & names
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
        named = [a for a in kernel.arguments[1:] if a.tensor != a.name]
        assert all(f"{a.tensor}_{'stride' if a.kind == 'stride' else 'ptr'}_" == a.name for a in named)
        assert kernel.arguments[0].name == "rows_"


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


def test_policies_and_launch_of_a_plan_one_can_check_by_hand() -> None:
    schedule = "form=registers,threads=32,rows_per_block=4,vec=8,blocks_per_sm=2"
    (kernel,) = plan_of("layernorm.fwd:d=1000,dtype=bf16", schedule).kernels
    assert kernel.policies == (
        "using Row = PartialRowLayout<Block</* threads */ 32, /* rows */ 4>, /* D */ 1000, /* segment */ 1000, "
        "/* vector */ 8, /* run */ 8, /* access */ 8>;",
        "using Reduce = WarpReduce<Row>;",
        "using Stream = OneRow<Row>;",
    )
    assert (kernel.block, kernel.launch_rule()) == (128, "grid ceil(rows / 4), block 128; no launch for rows = 0")
    assert [a.declaration for a in kernel.arguments[:4]] == [
        "const long long rows_",
        "const bf16* x_ptr_",
        "const long long x_stride_",
        "const bf16* __restrict__ gamma_ptr_",
    ]
    exact = plan_of("layernorm.fwd:d=1024,dtype=bf16", "form=registers,threads=64,rows_per_block=4").kernels[0]
    assert exact.policies[:2] == (
        "using Row = RowLayout<Block</* threads */ 64, /* rows */ 4>, /* D */ 1024, /* segment */ 1024, "
        "/* vector */ 8, /* access */ 8>;",
        "using Reduce = BlockReduce<Row, float, /* values */ 1>;",
    )


def test_policies_and_launch_of_a_cluster_one_can_check_by_hand() -> None:
    """A row of 32 KiB in eight segments, four a block; two rows of two tensors on their way; each group a cluster."""
    schedule = "form=tma,threads=256,rows_per_block=1,vec=8,stages=2,cluster=2"
    rows, finish = plan_of("layernorm.bwd:d=16384,dtype=bf16", schedule).kernels
    assert rows.policies == (
        "using Row = RowLayout<Cluster</* blocks */ 2, /* threads */ 256, /* rows */ 1>, /* D */ 16384, "
        "/* segment */ 2048, /* vector */ 8, /* access */ 8>;",
        "using Reduce = BlockReduce<Row, float, /* values */ 8>;",
        "using Exchange = ClusterExchange<Row, float, /* values */ 8, AcquireAll>;",
        f"using Stream = TmaStream<Row, /* grid */ 60, /* stages */ 2, /* stage bytes */ {2 * 8192 * 2}, "
        "/* early release */ false>;",
    )
    assert (rows.cluster, rows.dynamic) == (2, 2 * 2 * 8192 * 2)
    assert rows.launch_rule() == (
        "grid 2 * min(60, rows), block 256, clusters of 2, 65536 bytes of dynamic shared memory; no launch for rows = 0"
    )
    found = finish_of(finish)
    assert (found.d, found.leading, found.partials, found.rows_per_block, found.rows_per_term) == (
        16384, 16384, 60, 1, 4,
    )  # fmt: skip
    assert (found.interleave, found.columns, found.columns_per_thread, found.batch) == (4, 32, 1, 2)
    assert (finish.cluster, finish.dynamic, finish.launch_rule()) == (1, 0, "grid 512, block 128")


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
        *_, finish = plan_of(spec, f"form=multipass,threads=256,rows_per_block=1,vec={vec}").kernels
        found = finish_of(finish)
        assert (found.columns_per_thread, found.columns, finish.grid[0](1)) == (side, columns, blocks), spec
        assert finish.block == columns // side * found.interleave


def test_every_block_writes_a_partial_row() -> None:
    found = plan_of("layernorm.bwd:d=7168,dtype=bf16", "form=tma,stages=3,threads=256,rows_per_block=1,vec=8")
    finish = finish_of(found.kernels[1])
    assert (finish.partials, finish.rows_per_term, finish.rows_per_block) == (126, 1, 1)
    assert {b.fixed for b in found.workspace} == {126 * 7168}


@pytest.mark.parametrize(("rows", "cluster", "apart"), [(4, 4, 1), (1, 4, 4), (1, 2, 4), (1, 1, 4)])
def test_row_groups_are_side_by_side_or_apart(rows: int, cluster: int, apart: int) -> None:
    """The graph has four row groups in each of 30 clusters; alone they leave a partial row each, folded in the end."""
    schedule = f"form=tma,stages=2,threads=64,rows_per_block={rows},vec=8,cluster={cluster}"
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


def test_places_of_a_stage(plan: Plan) -> None:
    """Each input has its own lines of 128 bytes; a result has its own, or those of an input of its size."""
    for kernel in plan.kernels:
        row = kernel.row
        if row is None or not row.places:
            assert (kernel.dynamic, row.results if row else ()) == (0, ())
            continue
        facts = problem(plan.graph, plan.spec.d)
        size = {v.name: v.type.dtype.size for v in (*plan.inputs, *plan.outputs)}
        ends = {
            p.name: (p.offset, p.offset + cluster_tile(plan.schedule, facts) * size[p.name])
            for p in (*row.places, *row.results)
        }
        assert all(begin % 128 == 0 and end <= stage_bytes(plan.schedule, facts) for begin, end in ends.values())
        assert [p.name for p in row.places] == [t.name for t in kernel.wide_inputs]
        for names in ([p.name for p in row.places], [p.name for p in row.results]):
            listed = sorted(ends[name] for name in names)
            assert all(end <= begin for (_, end), (begin, _) in pairwise(listed)), "two overlap"
        for result in row.results:
            over = [
                p
                for p in row.places
                if ends[p.name][0] < ends[result.name][1] and ends[result.name][0] < ends[p.name][1]
            ]
            assert all(size[p.name] == size[result.name] and p.offset == result.offset for p in over)
        stage = stage_bytes(plan.schedule, facts)
        assert kernel.dynamic >= plan.schedule.stages * plan.schedule.rows_per_block * stage
        assert f"/* stage bytes */ {stage}" in kernel.policies[-1]


def places_of(spec: str, schedule: str) -> tuple[dict[str, int], dict[str, int]]:
    row = plan_of(spec, schedule).kernels[0].row
    assert row is not None
    return {p.name: p.offset for p in row.places}, {p.name: p.offset for p in row.results}


def test_a_result_has_the_place_of_an_input_of_its_size() -> None:
    bulk = "form=tma,threads=128,rows_per_block=1,vec=8,stages=2,tma_store=yes,grid=1"
    assert places_of("layernorm.fwd:d=4096,dtype=bf16", bulk) == ({"x": 0}, {"y": 0})
    assert places_of("layernorm.fwd:d=4096,dtype=bf16,out=f32", bulk) == ({"x": 0}, {"y": 8192})
    assert places_of("layernorm.fwd:d=4096,dtype=bf16", bulk.replace("tma_store=yes,", "")) == ({"x": 0}, {})
    backward = "form=tma,threads=256,rows_per_block=2,vec=8,stages=2,tma_store=yes"
    assert places_of("layernorm.bwd:d=4096,dtype=bf16", backward) == ({"dy": 0, "x": 8192}, {"dx": 0})


# ---- one launch ----


def test_one_launch_is_one_kernel_with_a_counter() -> None:
    """Both kernels' arguments, the workspace read and written; as many blocks as finish, with no rows, too."""
    schedule = "form=tma,threads=256,rows_per_block=1,vec=8,stages=3,cached_weights=yes"
    two, one = (plan_of("layernorm.bwd:d=8192,dtype=bf16", f"{schedule},single_launch={o}") for o in ("no", "yes"))
    rows, finish = two.kernels
    (kernel,) = one.kernels
    assert (kernel.cooperative, kernel.always, rows.cooperative, rows.always) == (True, True, False, False)
    names = [a.name for a in (*rows.arguments, *finish.arguments)]
    assert [a.name for a in kernel.arguments] == [*dict.fromkeys(names), "arrivals_"]
    assert not any(a.const for a in kernel.arguments if a.kind == "workspace")
    assert one.workspace == (Buffer("arrivals_", DType.F32, fixed=1, zeroed=True), *two.workspace)
    assert [b.element for b in one.workspace] == ["u32", "f32", "f32"]
    assert [kernel.grid[0](n) for n in (0, 1, 3, 1000)] == [120] * 4
    (short,) = plan_of(
        "layernorm.bwd:d=100,dtype=f32", "form=registers,threads=16,rows_per_block=32,single_launch=yes"
    ).kernels
    assert [short.grid[0](n) for n in (0, 1, 128, 160, 10**6)] == [4, 4, 4, 5, 128]
    (narrow,) = plan_of(
        "rmsnorm.bwd:d=16384,dtype=bf16", "form=tma,threads=64,rows_per_block=4,stages=2,cluster=8,single_launch=yes"
    ).kernels
    assert narrow.grid[0](1) == narrow.grid[0](10**6) == 120
    own, alone = finish_of(kernel), finish_of(finish)
    assert (own.statements, own.accumulators) == (alone.statements, alone.accumulators)
    assert kernel.dynamic >= alone.shared * 4
    assert own.totals == "ring_"


def test_one_launch_in_registers_folds_in_the_same_memory() -> None:
    schedule = "form=registers,threads=8,rows_per_block=32,vec=2,single_launch=yes"
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


@pytest.mark.parametrize(
    "form", ["form=registers,threads=8,rows_per_block={}", "form=tma,threads=8,rows_per_block={},stages=2"]
)
def test_the_finish_of_one_launch_has_what_only_it_needs(form: str) -> None:
    spec = make_spec(Definition("scaled_totals", scaled_totals), "fwd", {"d": 96})
    base = Schedule("registers", 8, problem(spec.graph(), 96).groups, 4, single_launch=True)
    schedule = parse_schedule(form.format(base.rows_per_block) + ",single_launch=yes", base)
    (kernel,) = lower(spec, schedule).kernels
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
    base = Schedule("registers", 8, problem(spec.graph(), 96).groups, 4)
    one = lower(spec, replace(base, single_launch=True))
    assert len(re.findall(r"const float s32 = ", emit(one))) == 1
    inputs = random_inputs(spec, 37, seed=1)
    assert not mismatches(run_plan(one, inputs, rows=37).results, interpret(one.graph, inputs))


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


def two_dtypes(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    narrow = b.reduce_sum("narrow", x, axis=D)
    wide = b.reduce_sum("wide", b.cast("x64", x, to=F64), axis=D)
    b.output("y", b.mul("q", narrow, b.cast("wide32", wide, to=b.compute)))


def input_as_result(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    b.output("y", x)
    b.statistic(b.params[0])


def column_scaled(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    b.output("y", b.div("scaled", x, b.reduce_max("most", b.reduce_max("widest", x, axis=D), axis=M)))


def sum_of_maxima(b: GraphBuilder) -> None:
    most = b.reduce_max("most", b.input("x", M, D), axis=M)
    b.output("y", b.reduce_sum("again", b.expand("wide", most, axis=M), axis=M))


def maximum_of_sums(b: GraphBuilder) -> None:
    total = b.reduce_sum("total", b.input("x", M, D), axis=M)
    b.output("y", b.reduce_max("again", b.expand("wide", total, axis=M), axis=M))


def rows_of_the_mean(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    mean = b.reduce_mean("mean", b.reduce_mean("row", x, axis=D), axis=M)
    far = b.sub("far", x, mean)
    b.output("y", b.reduce_sum("total", b.reduce_dot("square", far, far, axis=D), axis=M))


def rows_of_weights(b: GraphBuilder) -> None:
    x, weight = b.input("x", M, D), b.reduce_sum("weight", b.input("gamma", D), axis=D)
    b.output("y", b.reduce_sum("total", b.reduce_sum("row", b.mul("q", x, weight), axis=D), axis=M))


def statistic_of_weights(b: GraphBuilder) -> None:
    x, weight = b.input("x", M, D), b.reduce_sum("weight", b.input("gamma", D), axis=D)
    b.output("y", b.mul("q", b.reduce_sum("row", x, axis=D), weight))


def sum_of_lengths(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    b.output("y", b.mul("q", x, b.reduce_sum("length", b.segment_size("n", b.compute), axis=S)))


def sum_of_scaled_lengths(b: GraphBuilder) -> None:
    scaled = b.mul("scaled", b.input("u", M), b.segment_size("n", b.compute))
    b.output("y", b.mul("q", b.input("x", M, D), b.reduce_sum("length", scaled, axis=S)))


def lengths_of_columns(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    b.output("y", b.neg("minus", x))
    b.output("total", b.mul("scaled", b.reduce_sum("column", x, axis=M), b.segment_size("n", b.compute)))


LOWER_ERRORS: list[tuple[Callable[[GraphBuilder], None], str]] = [
    (
        column_centred,
        "the row result '%y' depends on a sum over rows; "
        "that takes two graphs, one for the sum and one for the result.",
    ),
    (input_as_result, "the result '%x' is an input; leave it out, the caller has it."),
    (
        column_scaled,
        "the row result '%y' depends on a maximum over rows; "
        "that takes two graphs, one for the maximum and one for the result.",
    ),
    (sum_of_sums, "'%again' is a sum over rows of sums over rows."),
    (sum_of_maxima, "'%again' is a sum over rows of maxima over rows."),
    (maximum_of_sums, "'%again' is a maximum over rows of sums over rows."),
    (
        rows_of_the_mean,
        "'%far' takes whole rows and depends on '%mean_sum', a sum over rows; "
        "that takes two graphs, one for '%mean_sum' and one for what depends on it.",
    ),
    *(
        (graph, f"'%{name}' reduces over D a value that has no rows, and rows depend on it; pass it as an input.")
        for graph, name in ((sum_of_weights, "weights"), (rows_of_weights, "weight"), (statistic_of_weights, "weight"))
    ),
    (sum_of_lengths, "'%length' reduces over D a value that has no rows; pass it as an input."),
    (sum_of_scaled_lengths, "'%length' adds over S values that depend on no sum of segments; pass it as an input."),
    (
        lengths_of_columns,
        "'%n' varies along S, and a result without rows needs it; such results are elementwise in column sums and "
        "numbers.",
    ),
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


def test_columns_read_in_several_passes_have_no_segments() -> None:
    def columns(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        far = b.sub("far", x, b.segment_sum("parts", x))
        b.output("y", b.reduce_sum("column", far, axis=M))

    spec = make_spec(Definition("own", columns), "fwd", {"d": 40000})
    with pytest.raises(LowerError) as error:
        lower(spec, Schedule("multipass", 256, 1, 4))
    assert str(error.value) == (
        "graph @own_fwd: '%parts' varies along S, and a sum over rows needs it; with form=multipass, that takes two "
        "graphs, one for the values and one for their sum."
    )


# ---- graphs of one's own ----


def apart(b: GraphBuilder) -> None:
    """Each row times the squares of distances from its segments' means, without the sum of the row."""
    x = b.input("x", M, D)
    centre = b.div("centre", b.segment_sum("parts", x), b.segment_size("n", b.compute))
    far = b.sub("far", x, centre)
    squares = b.reduce_sum("apart", b.segment_dot("squares", far, far), axis=S)
    b.output("y", b.mul("p", b.add("moved", x, centre), squares))


def exchanged_twice(b: GraphBuilder) -> None:
    """A sum over S reads sums of segments of which some depend on another sum over S; maxima of rows among them."""
    x, z = b.input("x", M, D), b.input("z", M, D)
    parts = b.segment_sum("parts", x)
    far = b.sub("far", x, b.reduce_sum("total", parts, axis=S))
    again = b.segment_dot("again", far, b.add("near", z, parts))
    both = b.reduce_sum("both", b.fma("term", parts, b.segment_dot("squares", far, far), again), axis=S)
    most = b.reduce_max("most", b.mul("scaled", b.sub("lower", far, b.reduce_max("top", far, axis=D)), both), axis=D)
    b.output("y", b.sub("p", far, most))
    b.statistic(both)


def crossed(b: GraphBuilder) -> None:
    """Two tensors that are centred, each scaled by the reciprocal standard deviation of the other."""
    centred, rstd = {}, {}
    for name in ("x", "z"):
        value = b.input(name, M, D)
        centred[name] = b.sub(f"{name}c", value, b.reduce_mean(f"{name}_mean", value, axis=D))
    for name, other in (("z", "x"), ("x", "z")):  # the variance of x comes after its elements are scaled
        square = b.mul(f"{name}_square", centred[name], centred[name])
        rstd[name] = b.rsqrt(
            f"{name}_rstd", b.add(f"{name}_veps", b.reduce_mean(f"{name}_var", square, axis=D), b.eps())
        )
        b.output(f"{other}_scaled", b.mul(f"{other}_hat", centred[other], rstd[name]))


@pytest.mark.parametrize("cluster", [1, 4])
def test_a_row_is_scaled_by_the_variance_of_another_tensor(cluster: int) -> None:
    """Both variances come from segments, whichever of their uses is first in the graph."""
    spec = make_spec(Definition("crossed", crossed), "fwd", {"d": 32768})
    assert [e.op for e in spec.graph().eqns].count("segment_dot") == 2
    schedule = f"form=multipass,threads=256,rows_per_block=1,cluster={cluster}"
    if cluster > 1:
        schedule = f"form=registers,threads=256,rows_per_block=1,cluster={cluster}"
    plan = lower(spec, parse_schedule(schedule, Schedule("registers", 32, 1, 4)))
    inputs = random_inputs(spec, 2)
    expected = interpret(spec.graph(), inputs)
    outcome = run_plan(plan, inputs, rows=2)
    assert not outcome.findings
    assert not mismatches(outcome.results, expected)
    rows = {name: values.astype(np.float64) for name, values in inputs.items()}
    rstd = {name: 1 / np.sqrt(r.var(1, keepdims=True) + 1e-5) for name, r in rows.items()}
    for name, other in (("x", "z"), ("z", "x")):
        want = (rows[name] - rows[name].mean(1, keepdims=True)) * rstd[other]
        np.testing.assert_allclose(expected[f"{name}_scaled"], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("describe", "d", "schedule"),
    [
        (describe, d, schedule)
        for describe in (apart, exchanged_twice)
        for d, schedule in (
            (96, "form=registers,threads=8,rows_per_block=4"),
            (8200, "form=multipass,threads=256,rows_per_block=1"),
            (8200, "form=registers,threads=64,rows_per_block=2,cluster=2"),
            (8200, "form=tma,threads=256,rows_per_block=1,stages=2,cluster=2,grid=1,row_in_registers=yes"),
        )
    ],
)
def test_a_graph_of_segments(describe: Callable[[GraphBuilder], None], d: int, schedule: str) -> None:
    """Rows of one segment and of several, the last shorter."""
    spec = make_spec(Definition(describe.__name__, describe), "fwd", {"d": d})
    plan = lower(spec, parse_schedule(schedule, Schedule("registers", 32, 1, 4)))
    inputs = random_inputs(spec, 3)
    outcome = run_plan(plan, inputs, rows=3)
    assert not outcome.findings
    assert not mismatches(outcome.results, interpret(spec.graph(), inputs))


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
    pairs = entry(plan, {})["in_place"]["outputs"]
    assert {name for output, inputs in pairs.items() for name in (output, *inputs)} <= shared
