"""Plans: if these fail, a kernel computes an equation where it cannot, twice or not at all, or buffers do not fit."""

import re

import pytest

from lngen.compile import Compilation
from lngen.config import data_dir
from lngen.contract import described
from lngen.emit import emit
from lngen.graphs import Definition, GraphBuilder
from lngen.ir import D, M
from lngen.lower import Extent, Plan, lower
from lngen.lower.parts import note
from lngen.problem import problem
from lngen.spec import make_spec, parse_spec
from plans import PLANS, SHARED, notes, plan_of, run_checked
from schedules import multipass, registers


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


# ---- one launch ----


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
