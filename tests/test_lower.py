"""Plans: every equation where it can be computed, every buffer where it fits; what cannot be lowered."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from lngen.check.inputs import mismatches, random_inputs
from lngen.data import data_dir
from lngen.errors import LowerError, ScheduleError
from lngen.graphs import Definition, GraphBuilder
from lngen.interpret import interpret
from lngen.ir import F64, D, DType, M, parse, print_eqn
from lngen.lower import Buffer, Extent, Kernel, Plan, Statement, lower
from lngen.lower.split import split
from lngen.ptx import run_plan
from lngen.schedule import Schedule, parse_schedule, piece, problem, ranked, stage_bytes
from lngen.spec import Spec, make_spec, parse_spec


def plan_of(spec: str, schedule: str = "") -> Plan:
    """The plan under the best-ranked schedule, some of its keys replaced."""
    s = parse_spec(spec)
    return lower(s, parse_schedule(schedule, ranked(problem(s.graph(), s.d))[0]))


# Every structure, dtype and kind of input; exact and partial rows; one and several segments and row groups.
PLANS: dict[str, tuple[str, str]] = {
    "row": ("layernorm.fwd:d=4096,dtype=bf16", "form=registers,threads=128,rows=1,resident=6"),
    "row, a warp for each": ("rmsnorm.fwd:d=100,dtype=f32,weight=f64", "form=registers,threads=32,rows=4"),
    "row, one thread for each": ("layernorm.fwd:d=1,dtype=f16,save=none", "form=registers,threads=1,rows=32,vec=1"),
    "row, columns asked for early": ("layernorm.fwd:d=1000,dtype=bf16", "form=registers,threads=128,rows=1,keep=yes"),
    "row, two segments": ("layernorm.fwd:d=12288,dtype=bf16", "form=registers,threads=512,rows=1"),
    "row, backward": ("layernorm.bwd:d=1000,dtype=f16,wrt=x", "form=registers,threads=32,rows=1"),
    "row_columns": ("layernorm.bwd:d=4096,dtype=bf16", "form=registers,threads=256,rows=2,prefetch=yes"),
    "row_columns, one row": ("rmsnorm.bwd:d=8192,dtype=f32", "form=registers,threads=256,rows=1"),
    "row_columns, no row sum": ("layernorm.bwd:d=777,dtype=bf16,wrt=beta", "form=registers,threads=64,rows=8,vec=1"),
    "row_columns, f64": ("layernorm.bwd:d=96,dtype=f64,save=none", "form=registers,threads=8,rows=32"),
    "row_columns, one launch": (
        "layernorm.bwd:d=1000,dtype=bf16",
        "form=registers,threads=64,rows=8,prefetch=yes,one_launch=yes",
    ),
    "bulk": ("rmsnorm.fwd:d=512,dtype=bf16", "form=bulk,threads=8,rows=16,stages=3,owners=132"),
    "bulk, results leave in bulk": (
        "layernorm.fwd:d=4096,dtype=bf16,out=f32",
        "form=bulk,threads=128,rows=2,stages=3,owners=132,bulk_store=yes,keep=yes,hold=yes",
    ),
    "bulk, a cluster for each": (
        "layernorm.fwd:d=65536,dtype=bf16",
        "form=bulk,threads=256,rows=1,stages=3,cluster=4,owners=30,bulk_store=yes,keep=yes",
    ),
    "bulk, columns": (
        "layernorm.bwd:d=1024,dtype=bf16",
        "form=bulk,threads=64,rows=8,stages=3,bulk_store=yes,keep=yes,one_launch=yes",
    ),
    "bulk, columns, one row": (
        "layernorm.bwd:d=8192,dtype=bf16",
        "form=bulk,threads=256,rows=1,stages=3,keep=yes",
    ),
    "bulk, columns, a cluster for each, one launch": (
        "rmsnorm.bwd:d=16384,dtype=f16",
        "form=bulk,threads=256,rows=1,stages=3,cluster=2,one_launch=yes",
    ),
    "bulk, columns, a cluster for each": (
        "layernorm.bwd:d=16384,dtype=bf16",
        "form=bulk,threads=256,rows=1,stages=3,cluster=2,keep=yes",
    ),
    "bulk, columns, no row sum": ("layernorm.bwd:d=776,dtype=f16,wrt=beta", "form=bulk,threads=32,rows=8,stages=3"),
    "ragged": ("layernorm.bwd:d=1001,dtype=bf16", "form=ragged,threads=64,rows=8,stages=2,bulk_store=yes"),
    "ragged, held": (
        "layernorm.fwd:d=1001,dtype=bf16",
        "form=ragged,threads=32,rows=2,stages=2,owners=9,bulk_store=yes,hold=yes",
    ),
    "claimed": (
        "layernorm.fwd:d=12288,dtype=bf16",
        "form=bulk,threads=256,rows=1,resident=2,stages=3,owners=264,keep=yes,hold=yes,claim=yes",
    ),
    "claimed, ragged": (
        "layernorm.fwd:d=1001,dtype=f32",
        "form=ragged,threads=32,rows=2,stages=2,owners=9,bulk_store=yes,claim=yes",
    ),
    "async": ("layernorm.fwd:d=1000,dtype=bf16", "form=async,threads=32,rows=4,stages=3,owners=264,keep=yes"),
    "async, columns": ("rmsnorm.bwd:d=1000,dtype=f32", "form=async,threads=64,rows=4,stages=2,hold=yes"),
    "async, columns, one row": (
        "rmsnorm.bwd:d=8192,dtype=bf16",
        "form=async,threads=256,rows=1,stages=3,one_launch=yes",
    ),
    "row_stream": ("layernorm.fwd:d=70000,dtype=f16,out=f32", "form=stream,threads=512,rows=1"),
    "columns": ("layernorm.bwd:d=70000,dtype=bf16", "form=stream,threads=512,rows=1"),
    "columns, statistics handed on": (
        "layernorm.bwd:d=70001,dtype=f32,save=none",
        "form=stream,threads=512,rows=1",
    ),
    "columns alone": ("layernorm.bwd:d=70000,dtype=bf16,wrt=gamma", "form=stream,threads=512,rows=1"),
}


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return plan_of(*PLANS[request.param])


def statements(kernel: Kernel) -> Iterator[Statement]:
    """Every statement of a kernel."""
    yield from (*kernel.uniform, *kernel.per_row)
    finish = kernel.finish
    yield from finish.uniform if finish else ()
    for phase in (*kernel.phases, *(finish.phases if finish else ())):
        yield from (*phase.statements, *phase.after)


def notes(kernel: Kernel) -> set[str]:
    """The equations that statements and sums of a kernel stand for."""
    sums = (*kernel.accumulators, *(s for phase in kernel.phases for f in phase.folds for s in (*f.sums, *f.named)))
    return {s.note for s in (*statements(kernel), *sums) if s.note}


def test_every_template_is_covered() -> None:
    used = {k.template for args in PLANS.values() for k in plan_of(*args).kernels}
    used |= {"narrow.cu.jinja"}  # of no named graph; test_outputs runs it
    assert used | {"module.cu.jinja"} == {p.name for p in data_dir("templates").glob("*.cu.jinja")}


def test_every_equation_is_a_note_of_some_kernel(plan: Plan) -> None:
    found = set().union(*map(notes, plan.kernels))
    assert found == {print_eqn(e) for e in plan.graph.eqns}


STAGED_TEMPLATES = ("row_stream.cu.jinja", "row_staged.cu.jinja", "row_claimed.cu.jinja")


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
            tiles = phase.tiles if kernel.template in STAGED_TEMPLATES else kernel.tiles
            copied = re.fullmatch(r"_copy_(wide_|packed_|)columns.cuh.jinja", kernel.sections.columns) is not None
            held = (*kernel.sections.held, *kernel.sections.begun)
            assert copied == ("_held_columns.cuh.jinja" in held), "loaded twice, or not at all"
            columns = kernel.columns if copied or kernel.template == "columns.cu.jinja" else phase.columns
            here = known | {t.name for t in (*tiles, *columns)}
            for statement in phase.statements:
                here = defined(statement, here, names)
            known |= {s.name for f in phase.folds for s in f.named}
            for statement in phase.after:
                known = defined(statement, known, names)
            assert {o.name for o in phase.outputs} <= here
            assert {o.name for o in phase.row_outputs} <= known
        if kernel.finish:
            here = {t.name for t in (*kernel.scalars, *kernel.finish.scalars)}
            here |= {s.name for s in kernel.finish.accumulators}
            for statement in (*kernel.uniform, *kernel.finish.uniform, *kernel.finish.phases[0].statements):
                here = defined(statement, here, set(plan.graph.values()))


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
            (owners,) = (extent for extent in kernel.grid if extent.limit)
            assert owners.limit
            assert buffer.fixed == owners.limit * constants(kernel)["PITCH"]


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


def test_constants_and_launch_of_a_plan_one_can_check_by_hand() -> None:
    schedule = "form=registers,threads=32,rows=4,vec=8,resident=2"
    (kernel,) = plan_of("layernorm.fwd:d=1000,dtype=bf16", schedule).kernels
    assert constants(kernel) == {
        "D": 1000, "CHUNK": 8, "RUN": 8, "JUMP": 1000, "THREADS": 32, "SLOTS": 4, "SEGMENT": 1000, "VEC": 8, "EXACT": 0,
        "ROWS": 4, "SEGMENT_SLOTS": 4, "FIRST": 4 * 132,
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
    exact = plan_of("layernorm.fwd:d=1024,dtype=bf16", "form=registers,threads=32,rows=4").kernels[0]
    assert constants(exact)["EXACT"] == 1


def constants(kernel: Kernel) -> dict[str, int]:
    return {c.name: c.value for c in kernel.constants}


def test_constants_and_launch_of_a_cluster_one_can_check_by_hand() -> None:
    """A row of 32 KiB in eight segments, four a block; two rows of two tensors on their way; each group a cluster."""
    schedule = "form=bulk,threads=256,rows=1,vec=8,stages=2,cluster=2"
    rows, finish = plan_of("layernorm.bwd:d=16384,dtype=bf16", schedule).kernels
    assert constants(rows) == {
        "D": 16384, "CHUNK": 8, "RUN": 8, "JUMP": 2048, "THREADS": 256, "SLOTS": 4, "SEGMENT": 2048, "VEC": 8,
        "EXACT": 1, "ROWS": 1, "SEGMENT_SLOTS": 1, "CLUSTER": 2, "STAGES": 2,
        "STAGE_BYTES": 2 * 8192 * 2, "BOUND": 2**31 - 1, "PIECE": 8192,
        "OWNERS": 60, "UNIT": 4, "PITCH": 16384,
    }  # fmt: skip
    assert (rows.cluster, rows.dynamic, rows.exchanged) == (2, 2 * 2 * 8192 * 2, 2 * 8)
    assert rows.launch_rule() == (
        "grid 2 * min(60, rows), block 256, clusters of 2, 65536 bytes of dynamic shared memory; no launch for rows = 0"
    )
    assert (rows.owner, rows.first_column) == ("blockIdx.x / CLUSTER", "cluster_rank() * PIECE")
    assert constants(finish) == {
        "D": 16384, "SUMS": 2, "COLUMNS": 32, "ABREAST": 1, "STRANDS": 4, "PARTIALS": 60, "APART": 4, "PITCH": 16384,
        "BATCH": 2, "PER_PARTIAL": 1,
    }  # fmt: skip
    assert (finish.cluster, finish.dynamic, finish.launch_rule()) == (1, 0, "grid 512, block 128")


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
        *_, finish = plan_of(spec, f"form=stream,threads=256,rows=1,vec={vec}").kernels
        numbers = constants(finish)
        assert (numbers["ABREAST"], numbers["COLUMNS"], finish.grid[0](1)) == (side, columns, blocks), spec
        assert finish.block == columns // side * numbers["STRANDS"]


def test_every_block_writes_a_partial_row() -> None:
    found = plan_of("layernorm.bwd:d=7168,dtype=bf16", "form=bulk,stages=3,threads=256,rows=1,vec=8")
    numbers = constants(found.kernels[1])
    assert (numbers["PARTIALS"], numbers["APART"], numbers["PER_PARTIAL"]) == (126, 1, 1)
    assert {b.fixed for b in found.workspace} == {126 * 7168}


@pytest.mark.parametrize(("rows", "cluster", "apart"), [(4, 4, 1), (1, 4, 4), (1, 2, 4), (1, 1, 4)])
def test_row_groups_are_side_by_side_or_apart(rows: int, cluster: int, apart: int) -> None:
    """The graph has four row groups in each of 30 clusters; alone they leave a partial row each, folded in the end."""
    schedule = f"form=bulk,stages=2,threads=64,rows={rows},vec=8,cluster={cluster}"
    found = plan_of("layernorm.bwd:d=8192,dtype=bf16", schedule)
    first, finish = (constants(k) for k in found.kernels)
    assert first["OWNERS"] == finish["PARTIALS"] == 30 * apart
    assert (finish["APART"], finish["PER_PARTIAL"]) == (apart, rows)
    assert {b.fixed for b in found.workspace} == {30 * apart * 8192}


@pytest.mark.parametrize(
    ("more", "blocks", "batch"),
    [("", 128, 8), ("", 63, 8), (",wrt=beta", 63, 16), ("", 300, 8), ("", 5, 2), ("", 2, 1)],
)
def test_a_strand_waits_for_all_its_partial_rows_at_once(more: str, blocks: int, batch: int) -> None:
    """A strand in 16, or of less than 64 blocks in 4, has so many of them; 16 numbers are on their way at most."""
    text = f"layernorm.bwd:d=1000,dtype=f32,blocks={blocks}{more}"
    finish = plan_of(text, "form=registers,threads=64,rows=4").kernels[-1]
    assert constants(finish)["BATCH"] == batch


@pytest.mark.parametrize(("text", "pitch", "unit"), [("d=1001,dtype=bf16", 1004, 4), ("d=15,dtype=f64", 16, 2)])
@pytest.mark.parametrize("form", ["form=registers,threads=8,rows={}", "form=stream,threads=32,rows=1"])
def test_partial_rows_are_whole_units(text: str, pitch: int, unit: int, form: str) -> None:
    """However long a row is, its column sums are moved 16 bytes at a time."""
    spec = parse_spec(f"layernorm.bwd:{text}")
    if "stream" in form:
        spec = parse_spec(f"layernorm.bwd:{text.replace('1001', '70001').replace('15', '40009')}")
        pitch = {4: 70004, 2: 40010}[unit]
    groups = problem(spec.graph(), spec.d).groups
    plan = plan_of(str(spec), form.format(groups) + ",vec=1")
    found = [constants(k)["PITCH"] for k in plan.kernels if "PITCH" in constants(k)]
    assert set(found) == {pitch}
    assert {constants(k)["UNIT"] for k in plan.kernels if "UNIT" in constants(k)} <= {unit}
    assert {b.fixed % pitch for b in plan.workspace if b.fixed} == {0}


def test_places_of_a_stage(plan: Plan) -> None:
    """Each input has its own lines of 128 bytes; a result has its own, or those of an input of its size."""
    for kernel in plan.kernels:
        if not kernel.places:
            assert (kernel.dynamic, kernel.results) == (0, ())
            continue
        facts = problem(plan.graph, plan.spec.d)
        size = {v.name: v.type.dtype.size for v in (*plan.inputs, *plan.outputs)}
        ends = {
            p.name: (p.offset, p.offset + piece(plan.schedule, facts) * size[p.name])
            for p in (*kernel.places, *kernel.results)
        }
        assert all(begin % 128 == 0 and end <= stage_bytes(plan.schedule, facts) for begin, end in ends.values())
        assert [p.name for p in kernel.places] == [t.name for t in kernel.tiles]
        for names in ([p.name for p in kernel.places], [p.name for p in kernel.results]):
            listed = sorted(ends[name] for name in names)
            assert all(end <= begin for (_, end), (begin, _) in pairwise(listed)), "two overlap"
        for result in kernel.results:
            over = [
                p
                for p in kernel.places
                if ends[p.name][0] < ends[result.name][1] and ends[result.name][0] < ends[p.name][1]
            ]
            assert all(size[p.name] == size[result.name] and p.offset == result.offset for p in over)
        stages = plan.schedule.stages * plan.schedule.rows * stage_bytes(plan.schedule, facts)
        assert kernel.dynamic >= stages == constants(kernel)["STAGE_BYTES"] * plan.schedule.stages * plan.schedule.rows


def places_of(spec: str, schedule: str) -> tuple[dict[str, int], dict[str, int]]:
    kernel = plan_of(spec, schedule).kernels[0]
    return {p.name: p.offset for p in kernel.places}, {p.name: p.offset for p in kernel.results}


def test_a_result_has_the_place_of_an_input_of_its_size() -> None:
    bulk = "form=bulk,threads=128,rows=1,vec=8,stages=2,bulk_store=yes,owners=1"
    assert places_of("layernorm.fwd:d=4096,dtype=bf16", bulk) == ({"x": 0}, {"y": 0})
    assert places_of("layernorm.fwd:d=4096,dtype=bf16,out=f32", bulk) == ({"x": 0}, {"y": 8192})
    assert places_of("layernorm.fwd:d=4096,dtype=bf16", bulk.replace("bulk_store=yes,", "")) == ({"x": 0}, {})
    backward = "form=bulk,threads=256,rows=2,vec=8,stages=2,bulk_store=yes"
    assert places_of("layernorm.bwd:d=4096,dtype=bf16", backward) == ({"dy": 0, "x": 8192}, {"dx": 0})


# ---- one launch ----


def test_one_launch_is_one_kernel_with_a_counter() -> None:
    """Both kernels' arguments, the workspace read and written; as many blocks as finish, with no rows, too."""
    schedule = "form=bulk,threads=256,rows=1,vec=8,stages=3,keep=yes"
    two, one = (plan_of("layernorm.bwd:d=8192,dtype=bf16", f"{schedule},one_launch={o}") for o in ("no", "yes"))
    rows, finish = two.kernels
    (kernel,) = one.kernels
    assert (kernel.cooperative, kernel.always, rows.cooperative, rows.always) == (True, True, False, False)
    names = [a.name for a in (*rows.arguments, *finish.arguments)]
    assert [a.name for a in kernel.arguments] == [*dict.fromkeys(names), "arrivals_ptr"]
    assert not any(a.const for a in kernel.arguments if a.kind == "workspace")
    assert one.workspace == (Buffer("arrivals", DType.F32, fixed=1, zeroed=True), *two.workspace)
    assert [b.element for b in one.workspace] == ["u32", "f32", "f32"]
    assert [kernel.grid[0](n) for n in (0, 1, 3, 1000)] == [120] * 4
    (short,) = plan_of("layernorm.bwd:d=100,dtype=f32", "form=registers,threads=16,rows=32,one_launch=yes").kernels
    assert [short.grid[0](n) for n in (0, 1, 128, 160, 10**6)] == [4, 4, 4, 5, 128]
    (narrow,) = plan_of(
        "rmsnorm.bwd:d=16384,dtype=bf16", "form=bulk,threads=64,rows=4,stages=2,cluster=8,one_launch=yes"
    ).kernels
    assert narrow.grid[0](1) == narrow.grid[0](10**6) == 120
    assert kernel.finish
    assert kernel.finish.phases == finish.phases
    assert kernel.finish.accumulators == finish.accumulators
    assert kernel.dynamic >= finish.shared * 4
    assert kernel.totals == "reinterpret_cast<real*>(staged)"


def test_one_launch_in_registers_folds_in_the_same_memory() -> None:
    schedule = "form=registers,threads=8,rows=32,vec=2,one_launch=yes"
    (kernel,) = plan_of("layernorm.bwd:d=96,dtype=f64,save=none", schedule).kernels
    assert (kernel.totals, kernel.dynamic) == ("scratch", 0)
    assert kernel.shared >= 2 * 16 * 32


def scaled_totals(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    b.output("y", b.add("doubled", x, x))
    b.results.append(b.mul("share", b.reduce_sum("total", x, axis=M), b.param("s", b.options.dtype)))


@pytest.mark.parametrize("form", ["form=registers,threads=8,rows={}", "form=bulk,threads=8,rows={},stages=2"])
def test_the_finish_of_one_launch_has_what_only_it_needs(form: str) -> None:
    spec = make_spec(Definition("scaled_totals", scaled_totals), "fwd", {"d": 96})
    base = Schedule("registers", 8, problem(spec.graph(), 96).groups, 4, one_launch=True)
    schedule = parse_schedule(form.format(base.rows) + ",one_launch=yes", base)
    (kernel,) = lower(spec, schedule).kernels
    assert kernel.finish
    assert [t.name for t in kernel.finish.scalars] == ["s"]
    assert [t.name for t in kernel.scalars] == []


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


def test_the_plan_s_text_shows_shared_memory_and_clusters() -> None:
    text = str(plan_of(*PLANS["bulk, a cluster for each"]))
    for line in (
        "launch    grid 4 * min(30, rows), block 256, clusters of 4, 98304 bytes of dynamic shared memory; "
        "no launch for rows = 0",
        "stage     x at byte 0",
        "leaving   y at byte 0",
        "held      gamma, beta",
        "shared    1024 of float to fold in, 16 a row from the blocks of the cluster, 98304 bytes of stages",
    ):
        assert f"\n  {line}\n" in text
    once = str(plan_of(*PLANS["row_columns, one launch"]))
    assert "workspace arrivals: u32[1], zero before the first call\n" in once
    assert ", cooperative\n" in once
    assert re.search(r"phase after the grid barrier\n(    .*\n)*    store      dgamma dbeta\n", once)


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


@pytest.mark.parametrize("written", ["%c : f32[M, D] = segment_mean %x {axis=D, chunk=4, segment=16}",
                                     "%c : f32[M] = reduce_spread %x {axis=D, chunk=4, segment=16}"])  # fmt: skip
def test_segments_are_those_of_a_spread(written: str) -> None:
    """Of one order each: a spread of another is no help."""
    spread = "%v : f32[M] = reduce_spread %x {axis=D, chunk=4, segment=32}"
    kind = "f32[M, D]" if "segment_mean" in written else "f32[M]"
    head = f"graph @f(%x: f32[M, D]) -> (f32[M], {kind}) {{"
    graph = parse("\n".join([head, written, spread, "return %v, %c", "}"]))
    with pytest.raises(LowerError, match="expected to have the order of a reduce_spread of '%x'"):
        split(graph)


def test_a_spread_needs_no_sum_beside_it() -> None:
    """Nobody asks for the sum of the row; rows of one segment and of four, the last shorter."""

    def spread(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        b.output("y", b.mul("p", x, b.reduce_spread("spread", x, axis=D)))

    for d, text in ((96, "form=registers,threads=8,rows=4"), (8200, "form=stream,threads=256,rows=1"),
                    (8200, "form=bulk,threads=256,rows=1,stages=2,cluster=2,owners=1,hold=yes")):  # fmt: skip
        spec = make_spec(Definition("spread", spread), "fwd", {"d": d})
        plan = lower(spec, parse_schedule(text, Schedule("registers", 32, 1, 4)))
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
