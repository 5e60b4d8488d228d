"""Plans: if these fail, a kernel computes an equation where it cannot, twice or not at all, or buffers do not fit."""

import re

import pytest

from bits import spec_of
from lngen.compile import Compilation
from lngen.config import data_dir
from lngen.contract import described
from lngen.emit import emit
from lngen.errors import LowerError
from lngen.graphs import Definition, GraphBuilder
from lngen.ir import D, M
from lngen.lower import Extent, Plan, lower
from lngen.lower.parts import note
from lngen.problem import Schedule, problem
from lngen.schedule import ranked
from lngen.spec import make_spec, parse_spec
from lngen.toolchain import compile_cubin
from plans import PLANS, SHARED, best, gated, notes, own_spec, plan_of
from schedules import multipass, registers
from spills import REPORTED


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return plan_of(*PLANS[request.param])


def test_every_template_is_covered() -> None:
    used = {k.template for args in PLANS.values() for k in plan_of(*args).kernels}
    used |= {"elementwise.cu.jinja", "numbers.cu.jinja"}  # of no named graph; tests/bits runs them
    assert used | SHARED == {p.name for p in data_dir("templates").glob("*.cu.jinja")}


def test_every_equation_is_a_note_of_some_kernel(plan: Plan) -> None:
    found = set().union(*map(notes, plan.kernels))
    assert found == {note(e) for e in plan.graph.eqns}


@pytest.mark.parametrize(("extent", "text", "blocks"), [
    (Extent(), "1", [1, 1, 1, 1]),
    (Extent(5), "5", [5, 5, 5, 5]),
    (Extent(per=1), "M", [0, 1, 7, 1000]),
    (Extent(per=2), "ceil(M / 2)", [0, 1, 4, 500]),
    (Extent(per=1, limit=132), "min(132, M)", [0, 1, 7, 132]),
    (Extent(per=2, limit=3), "min(3, ceil(M / 2))", [0, 1, 3, 3]),
    (Extent(per=1, limit=30, times=4), "4 * min(30, M)", [0, 4, 28, 120]),
    (Extent(per=8, limit=3, least=1), "max(1, min(3, ceil(M / 8)))", [1, 1, 1, 3]),
    (Extent(per=2, times=2, least=2), "max(2, 2 * ceil(M / 2))", [2, 2, 8, 1000]),
])  # fmt: skip
def test_extents(extent: Extent, text: str, blocks: list[int]) -> None:
    assert str(extent) == text
    assert [extent(rows) for rows in (0, 1, 7, 1000)] == blocks


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
        found = finish.finish
        assert (found.columns_per_thread, found.columns, finish.grid[0](1)) == (side, columns, blocks), spec
        assert finish.block == columns // side * found.interleave


@pytest.mark.parametrize(("more", "blocks", "batch"), [
    ("", 128, 8), ("", 63, 8), (",wrt=beta", 63, 16), ("", 300, 8), ("", 5, 2), ("", 2, 1),
])  # fmt: skip
def test_a_strand_waits_for_all_its_partial_rows_at_once(more: str, blocks: int, batch: int) -> None:
    """A strand in 16, or of less than 64 blocks in 4, has so many of them; 16 numbers are on their way at most."""
    text = f"layernorm.bwd:d=1000,dtype=f32,blocks={blocks}{more}"
    finish = plan_of(text, "form=registers,threads=64,rows_per_block=4").kernels[-1]
    assert finish.finish.batch == batch


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
        "launch    grid 4 * min(30, M), block 256, clusters of 4, at least 98304 bytes of dynamic shared memory; "
        "no launch for M = 0",
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


@pytest.mark.parametrize(("text", "shared"), [
    ("layernorm.fwd:d=64", {"x", "y"}),
    ("layernorm.bwd:d=64", {"x", "dy", "dx"}),
    ("layernorm.bwd:d=64,wrt=gamma", set()),  # no [M, D] result
    ("layernorm.bwd:d=64,accumulate=gamma", {"x", "dy", "dx", "dgamma", "dgamma_in"}),
    ("add_rmsnorm.fwd:d=64", {"x", "residual", "y", "h"}),
    ("add_rmsnorm.fwd:d=64,dtype=bf16,residual_dtype=f32", {"x", "residual", "y", "h"}),
])  # fmt: skip
def test_pointers_that_may_be_the_same_are_not_declared_to_differ(text: str, shared: set[str]) -> None:
    """Those are all for which the manifest permits it, or undefined behaviour would follow."""
    spec = parse_spec(text)
    plan = lower(spec, Compilation(spec).schedule())
    arguments = [a for k in plan.kernels for a in k.arguments if a.kind in ("input", "output")]
    assert not re.search(rf"<Row, ReadOnlyLoad>\(({'|'.join(shared) or 'none'})_ptr_", emit(plan))
    assert {a.tensor for a in arguments if "__restrict__" not in a.declaration} == shared
    pairs = described(plan)["in_place"]["outputs"]
    assert {name for output, inputs in pairs.items() for name in (output, *inputs)} <= shared


# ---- graphs of one's own ----


def test_the_finish_of_one_launch_declares_no_number_again() -> None:
    """What both halves compute from a scalar is declared once, whatever the dtype of the scalar."""
    spec = spec_of("halved.fwd:d=96,dtype=bf16,weight=f16")
    one = lower(spec, registers(8, problem(spec.graph(), 96).groups, 4, "single"))
    assert len(re.findall(r"const float s32 = ", emit(one))) == 1


def test_columns_read_in_several_passes_have_no_segments() -> None:
    def columns(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        far = b.sub("far", x, b.segment_sum("parts", x))
        b.output("y", b.reduce_sum("column", far, axis=M))

    spec = make_spec(Definition("own", columns), "fwd", {"d": 40000})
    with pytest.raises(LowerError):
        lower(spec, Schedule("multipass", 256, 1, 4))
    assert Compilation(spec).refusal is None, "of other forms"


def test_row_and_scalar_inputs_are_lowered() -> None:
    (kernel,) = best(own_spec(gated, dtype="bf16", weight="f32")).kernels
    assert [t.name for t in kernel.row_inputs] == ["shift"]
    assert [t.name for t in kernel.scalars] == ["scale"]
    assert {s.text.split(" = ")[0] for s in kernel.per_row} == {"const float shift32", "const float factor"}


def test_both_variances_of_two_tensors_come_from_segments() -> None:
    """Whichever of their uses is first in the graph."""
    assert [e.op for e in spec_of("crossed.fwd:d=32768").graph().eqns].count("segment_dot") == 2


# ---- column sums that registers do not hold well ----


@pytest.mark.parametrize("spec", ["sums8.fwd:d=1", "sums9.fwd:d=2,dtype=f64", "sums33.fwd:d=37,dtype=f64"])
def test_many_column_sums_fit_the_gpu(spec: str) -> None:
    """Many leave few row groups to a block, and large totals to the finish: a block has the shared memory."""
    pytest.importorskip("cupy")
    made = spec_of(spec)
    schedules = ranked(problem(made.graph(), made.d))
    for single in (False, True):
        compile_cubin(emit(lower(made, next(s for s in schedules if s.single_launch == single))), "sm_90")


@pytest.mark.parametrize(("groups", "text"), [
    (2, "layernorm.bwd:d=4096,dtype=bf16"), (4, "layernorm.bwd:d=1500,dtype=f32,blocks=2"),
    (8, "rmsnorm.bwd:d=381,dtype=f64,blocks=3"), (16, REPORTED[2][0]),
    (32, "parallel_layernorm.bwd:d=96,dtype=f32,x1=yes,colscale=yes,blocks=2"), (64, REPORTED[1][0]),
    (128, f"{REPORTED[0][0]},blocks=2"),
])  # fmt: skip
def test_multipass_has_the_row_groups_of_the_graph(groups: int, text: str) -> None:
    """Sums for which a block has no registers are added by a kernel of their own."""
    spec = parse_spec(text)
    facts = problem(spec.graph(), spec.d)
    assert facts.groups == groups
    finish = lower(spec, Schedule("multipass", 32, 1, facts.run)).kernels[-1].finish
    assert (finish.partials, finish.rows_per_term, finish.rows_per_block) == (facts.blocks, 1, groups)
