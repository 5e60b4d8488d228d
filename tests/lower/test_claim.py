"""Rows claimed from a counter: if these fail, an order of blocks or a second launch changes bits."""

import dataclasses

import pytest

import sampling
from lngen.devices import default_device
from lngen.errors import ScheduleError
from lngen.graphs import Definition
from lngen.lower import lower
from lngen.problem import Schedule, check, problem
from lngen.schedule import candidates
from lngen.spec import make_spec, parse_spec
from plans import run_checked
from schedules import tma, unaligned
from test_staged import peaked, scaled

pytest.importorskip("cupy")

# Rows that a cluster shares: one meeting a row and two, that tell the row; sums and a maximum at once.
CLUSTERS = [
    ("layernorm.fwd:d=8200,dtype=bf16", tma(64, 2, 8, 2, "cached regs early dynamic", cluster=2, grid=2)),
    ("rmsnorm.fwd:d=8200,dtype=f16", tma(64, 1, 8, 3, "dynamic", cluster=2, grid=2)),
]

# Row groups of a warp and of several, one and several a block; bulk and ragged; results that leave in bulk; numbers of
# a row among the inputs.
CASES = [
    ("layernorm.fwd:d=256,dtype=bf16", tma(32, 2, 8, 2, "cached regs dynamic", grid=2)),
    ("layernorm.fwd:d=520,dtype=f32", tma(64, 1, 4, 3, "cached regs dynamic", grid=3)),
    ("layernorm.fwd:d=520,dtype=f64", tma(64, 2, 2, 2, "regs dynamic", grid=1)),
    ("rmsnorm.fwd:d=256,dtype=f16", tma(32, 4, 8, 2, "store dynamic", grid=1)),
    ("layernorm.fwd:d=333,dtype=bf16", unaligned(32, 2, 1, 3, "regs dynamic", grid=2)),
    ("layernorm.fwd:d=333,dtype=f32", unaligned(64, 1, 1, 2, "dynamic", grid=3)),
    ("layernorm.bwd:d=256,dtype=f16,wrt=x", tma(32, 2, 8, 3, "regs dynamic", grid=2)),
    ("layernorm.fwd:d=256,dtype=f16", tma(32, 2, 8, 2, "cached regs early dynamic", grid=2)),
    ("layernorm.bwd:d=264,dtype=f32,wrt=x", tma(64, 1, 4, 2, "dynamic", grid=2)),
    *CLUSTERS,
]  # fmt: skip


def factors(spec: str, s: Schedule, times: int) -> tuple[object, ...]:
    """What differs in kind from case to case."""
    return parse_spec(spec).direction, s.form, s.cluster > 1, s.rows_per_block > 1, s.early_release, times


@sampling.grid(
    ("spec", "schedule", "times"), [(*case, 3 - 2 * (n % 2)) for n, case in enumerate(CASES)], factors, strength=1
)
def test_bits_and_nothing_found(spec: str, schedule: Schedule, times: int) -> None:
    """Fewer rows than groups, as many as they begin with, one more, many more; blocks in several orders; launches that
    find the counter as the one before has left it."""
    plan = lower(parse_spec(spec), schedule)
    s = plan.schedule
    own = s.stages * s.grid * s.rows_per_block
    for order, rows in enumerate((1, own, own + 1, 2 * own + 1)):
        run_checked(plan, rows, order=order, times=times)


def test_two_meetings_end_a_phase() -> None:
    """Blocks meet twice before they are told the next row."""
    spec = make_spec(Definition("peaked", peaked), "fwd", {"d": 8200, "dtype": "bf16"})
    plan = lower(spec, tma(64, 2, 8, 2, "regs early dynamic", cluster=2, grid=2))
    for order, rows in enumerate((3, 23)):
        run_checked(plan, rows, order=order, times=2)


def test_a_cluster_that_does_not_meet_cannot_claim() -> None:
    """No row is summed: its blocks have nothing to tell each other."""
    spec = make_spec(Definition("scaled", scaled), "fwd", {"d": 8192})
    s = tma(128, 1, 4, 2, cluster=2, grid=2)
    check(s, problem(spec.graph(), spec.d))
    with pytest.raises(ScheduleError, match="row sums if a cluster shares the rows"):
        check(dataclasses.replace(s, dynamic=True), problem(spec.graph(), spec.d))


@pytest.mark.parametrize(("d", "dtype", "megabytes", "claims"), [
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
    (12289, "f32", 64, True),
    (32768, "bf16", 64, True),  # shared by a cluster
    (32768, "bf16", 16, False),
    (32768, "f32", 64, True),
    (65536, "bf16", 64, True),  # by a larger one
    (65536, "bf16", 32, False),
    (131072, "bf16", 64, False),  # by the largest, where rows are endless
    (131072, "bf16", 256, True),
    (131072, "f32", 32, True),  # or pieces large
])  # fmt: skip
def test_where_rows_are_claimed(d: int, dtype: str, megabytes: int, claims: bool) -> None:
    spec = parse_spec(f"layernorm.fwd:d={d},dtype={dtype}")
    rows = megabytes * 2**20 // (4 if dtype == "f32" else 2) // d
    assert next(candidates(problem(spec.graph(), d), default_device(), rows=rows)).dynamic is claims
