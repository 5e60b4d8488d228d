"""Rows claimed from a counter: bits under every order of blocks, and a counter that is fit for the next launch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lngen.check.inputs import mismatches, random_inputs
from lngen.emit import emit
from lngen.errors import ScheduleError
from lngen.graphs import Definition
from lngen.interpret import interpret
from lngen.lower import Plan, lower
from lngen.ptx import run_plan
from lngen.schedule import Schedule, check, parse_schedule, problem, ranked, static_shared
from lngen.spec import make_spec, parse_spec
from test_staged import peaked, scaled

pytest.importorskip("cupy")

BASE = Schedule("registers", 32, 1, 1)
CLAIM = "hold=yes,claim=yes"

# Rows that a cluster shares: one meeting a row and two, that tell the row; sums and a maximum at once.
SHARED = "form=bulk,threads=64,vec=8,owners=2,cluster=2"
CLUSTERS = [
    ("layernorm.fwd:d=8200,dtype=bf16", f"{SHARED},rows=2,stages=2,keep=yes,soon=yes,{CLAIM}"),
    ("rmsnorm.fwd:d=8200,dtype=f16", f"{SHARED},rows=1,stages=3,claim=yes"),
]

# Row groups of a warp and of several, one and several a block; bulk and ragged; results that leave in bulk; numbers of
# a row among the inputs.
CASES = [
    ("layernorm.fwd:d=256,dtype=bf16", f"form=bulk,threads=32,rows=2,vec=8,stages=2,owners=2,keep=yes,{CLAIM}"),
    ("layernorm.fwd:d=520,dtype=f32", f"form=bulk,threads=64,rows=1,vec=4,stages=3,owners=3,keep=yes,{CLAIM}"),
    ("layernorm.fwd:d=520,dtype=f64", f"form=bulk,threads=64,rows=2,vec=2,stages=2,owners=1,{CLAIM}"),
    ("rmsnorm.fwd:d=256,dtype=f16", "form=bulk,threads=32,rows=4,vec=8,stages=2,owners=1,bulk_store=yes,claim=yes"),
    ("layernorm.fwd:d=333,dtype=bf16", f"form=ragged,threads=32,rows=2,vec=1,stages=3,owners=2,bulk_store=yes,{CLAIM}"),
    ("layernorm.fwd:d=333,dtype=f32", "form=ragged,threads=64,rows=1,vec=1,stages=2,owners=3,bulk_store=yes,claim=yes"),
    ("layernorm.bwd:d=256,dtype=f16,wrt=x", f"form=bulk,threads=32,rows=2,vec=8,stages=3,owners=2,{CLAIM}"),
    ("layernorm.fwd:d=256,dtype=f16", f"form=bulk,threads=32,rows=2,vec=8,stages=2,owners=2,keep=yes,soon=yes,{CLAIM}"),
    ("layernorm.bwd:d=264,dtype=f32,wrt=x", "form=bulk,threads=64,rows=1,vec=4,stages=2,owners=2,claim=yes"),
    *CLUSTERS,
]  # fmt: skip


@pytest.mark.parametrize(("spec", "schedule"), CASES)
@pytest.mark.parametrize("times", [1, 3])
def test_bits_and_nothing_found(spec: str, schedule: str, times: int) -> None:
    """Fewer rows than groups, as many as they begin with, a few more, many more; blocks in several orders; launches
    that find the counter as the one before has left it."""
    plan = lower(parse_spec(spec), parse_schedule(schedule, BASE))
    s = plan.schedule
    own = s.stages * s.owners * s.rows
    for order, rows in enumerate((1, own - 1, own, own + 1, own + s.rows * s.owners, 4 * own + 1)):
        assert_nothing_found(plan, rows, order, times)


def assert_nothing_found(plan: Plan, rows: int, order: int, times: int) -> None:
    """The interpreter's bits, and no finding, with blocks in that order, after so many launches."""
    inputs = random_inputs(plan.spec, rows)
    outcome = run_plan(plan, inputs, order=order, times=times)
    assert mismatches(outcome.results, interpret(plan.graph, inputs)) == [], (rows, order)
    assert outcome.findings == (), "\n".join(map(str, outcome.findings[:3]))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # It would start where it ended.
        ("else if (coming == rows + OWNERS * ROWS - 1) set_zero(claimed_ptr);", ""),
        # Two have the same row, and some are left out.
        ("coming = own + count_up(claimed_ptr);", "coming = own + *claimed_ptr + group;"),
        ("const long long own = STAGES * step;", "const long long own = STAGES * step + 1;"),
        # The row of the stage before is taken for that of this one.
        ("taken[stage][group] = row;", "taken[stage == 0 ? STAGES - 1 : stage - 1][group] = row;"),
        # Groups share the place of their row.
        ("taken[stage][group] = row;", "taken[stage][0] = row;"),
        # A stage is filled while it is still read.
        ("bring_next(stage == 0 ? STAGES - 1 : stage - 1);", "bring_next(stage);"),
        # The end of the rows is never said.
        ("else arrive(&landed[stage][group]);", ""),
        ("ended = coming >= rows;", "ended = coming >= rows - 1;"),
    ],
)  # fmt: skip
def test_mutants_are_found(old: str, new: str) -> None:
    assert_found(CASES[0], old, new, rows=29)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # Every block claims for itself, or for all.
        ("if (rows > own && lane == 0 && cluster_rank() == 0)", "if (rows > own && lane == 0)"),
        ("if (cluster_rank() == 0) claim();", "claim();"),
        ("if (lane >= 32 || cluster_rank() != 0) return;", "if (lane >= 32) return;"),
        # The row is read before it has come, or from where the one before it was.
        ("if (lane == 0) expect_more(barrier, sizeof(long long));", ""),
        ("coming = told[(meetings - 1) % 2][group];", "coming = told[meetings % 2][group];"),
        # Groups share the place of what they are told; blocks are left out.
        ("send(&told[meetings % 2][group], row, barrier, lane)", "send(&told[meetings % 2][0], row, barrier, lane)"),
        ("if (lane < CLUSTER) send(&told", "if (lane == 0) send(&told"),
    ],
)  # fmt: skip
def test_mutants_of_clusters_are_found(old: str, new: str) -> None:
    assert_found(CLUSTERS[0], old, new, rows=21)


def assert_found(case: tuple[str, str], old: str, new: str, rows: int) -> None:
    plan = lower(parse_spec(case[0]), parse_schedule(case[1], BASE))
    source = emit(plan)
    assert old in source
    inputs = random_inputs(plan.spec, rows)
    outcome = run_plan(plan, inputs, source=source.replace(old, new), times=2)
    assert outcome.findings or mismatches(outcome.results, interpret(plan.graph, inputs))


def test_the_counter_is_64_bits_zeroed_and_an_argument() -> None:
    plan = lower(parse_spec(CASES[0][0]), parse_schedule(CASES[0][1], BASE))
    (buffer,) = plan.workspace
    assert (buffer.name, buffer.element, buffer.zeroed, buffer.bytes(10)) == ("claimed", "u64", True, 256)
    assert plan.kernels[0].arguments[-1].declaration == "unsigned long long* __restrict__ claimed_ptr"
    without = lower(parse_spec(CASES[0][0]), dataclasses.replace(plan.schedule, claim=False))
    assert without.workspace == ()


def test_nothing_is_said_that_is_not_called() -> None:
    """What a buffer tells of values that all blocks have seen is of the columns; the counter of rows has none."""
    for spec, schedule in CASES:
        assert "bits_of" not in emit(lower(parse_spec(spec), parse_schedule(schedule, BASE))), (spec, schedule)


def test_the_row_of_each_stage_has_its_place() -> None:
    p = problem(parse_spec("layernorm.fwd:d=1024,dtype=bf16").graph(), 1024)
    s = parse_schedule(f"form=bulk,threads=64,rows=2,vec=8,stages=3,owners=2,{CLAIM}", BASE)
    assert static_shared(s, p) - static_shared(dataclasses.replace(s, claim=False), p) == 8 * 2 * 3
    wide = problem(parse_spec("layernorm.fwd:d=8200,dtype=bf16").graph(), 8200)
    s = dataclasses.replace(s, cluster=2)
    assert static_shared(s, wide) - static_shared(dataclasses.replace(s, claim=False), wide) == 8 * 2 * (3 + 2)


@pytest.mark.parametrize(
    ("spec", "schedule", "message"),
    [
        ("layernorm.bwd:d=1024,dtype=bf16", "form=bulk,threads=64,rows=8,vec=8,stages=2", "without column sums"),
        ("layernorm.fwd:d=1024,dtype=bf16", "form=async,threads=64,rows=2,vec=8,stages=2,owners=2", "form=bulk or"),
        ("layernorm.fwd:d=1024,dtype=bf16", "form=registers,threads=64,rows=2,vec=8", "form=bulk or ragged"),
        ("layernorm.fwd:d=256,dtype=bf16", "form=bulk,threads=16,rows=2,vec=8,stages=2,owners=2", "got 16"),
    ],
)  # fmt: skip
def test_illegal(spec: str, schedule: str, message: str) -> None:
    parsed = parse_spec(spec)
    with pytest.raises(ScheduleError, match=message):
        check(parse_schedule(f"{schedule},claim=yes", BASE), problem(parsed.graph(), parsed.d))


def test_two_meetings_end_a_phase() -> None:
    """Blocks meet twice before they are told the next row."""
    spec = make_spec(Definition("peaked", peaked), "fwd", {"d": 8200, "dtype": "bf16"})
    plan = lower(spec, parse_schedule(f"{SHARED},rows=2,stages=2,soon=yes,{CLAIM}", BASE))
    for order, rows in enumerate((3, 23)):
        assert_nothing_found(plan, rows, order, times=2)


def test_a_cluster_that_does_not_meet_cannot_claim() -> None:
    """No row is summed: its blocks have nothing to tell each other."""
    spec = make_spec(Definition("scaled", scaled), "fwd", {"d": 8192})
    s = parse_schedule("form=bulk,threads=128,rows=1,vec=4,stages=2,owners=2,cluster=2", BASE)
    check(s, problem(spec.graph(), spec.d))
    with pytest.raises(ScheduleError, match="row sums if a cluster shares the rows"):
        check(dataclasses.replace(s, claim=True), problem(spec.graph(), spec.d))


@pytest.mark.parametrize(
    ("d", "dtype", "megabytes", "claims"),
    [
        (8192, "bf16", 64, True),
        (8192, "bf16", 8, False),  # rows enough for one round or two
        (3072, "bf16", 64, False),  # short rows: the counter would be asked too often
        (4096, "f32", 64, True),
        (4096, "f32", 256, False),  # blocks that come and go keep the order as well
        (7168, "bf16", 256, True),
        (7168, "f32", 256, True),
        (16384, "bf16", 64, True),  # long rows, one at a time
        (16384, "bf16", 32, False),
        (13824, "f16", 64, True),  # two of a block
        (14336, "f16", 64, True),  # by pairs of blocks
        (15360, "f16", 64, True),  # by a block that has one at a time
        (20001, "bf16", 256, True),  # ragged: no cluster shares them
        (20001, "bf16", 64, False),
        (12289, "f32", 64, True),
        (32768, "bf16", 64, True),  # shared by a cluster
        (32768, "bf16", 16, False),
        (32768, "f32", 64, True),
        (65536, "bf16", 64, True),  # by a larger one
        (65536, "bf16", 32, False),
        (131072, "bf16", 64, False),  # by the largest, where rows are endless
        (131072, "bf16", 256, True),
        (131072, "f32", 32, True),  # or pieces large
    ],
)
def test_where_the_model_claims(d: int, dtype: str, megabytes: int, claims: bool) -> None:
    spec = parse_spec(f"layernorm.fwd:d={d},dtype={dtype}")
    rows = megabytes * 2**20 // (4 if dtype == "f32" else 2) // d
    assert ranked(problem(spec.graph(), d), 90, None, rows)[0].claim is claims


def test_kept_weights_stay_packed_where_registers_are_few() -> None:
    """Forty-eight elements a thread and 128 registers; with 255 they are widened once."""
    text = "form=bulk,threads=%d,rows=1,vec=8,resident=%d,stages=3,owners=264,keep=yes,hold=yes,claim=yes"
    spec = parse_spec("layernorm.fwd:d=12288,dtype=bf16")
    few, many = (lower(spec, parse_schedule(text % shape, BASE)) for shape in ((256, 2), (256, 1)))
    assert "leave_packed(gamma);" in emit(few)
    assert "leave_packed" not in emit(many)
    for plan in (few, many):
        inputs = random_inputs(spec, 3)
        outcome = run_plan(plan, inputs)
        assert mismatches(outcome.results, interpret(plan.graph, inputs)) == []
        assert outcome.findings == ()
        assert np.isfinite(outcome.results["mean"]).all()
