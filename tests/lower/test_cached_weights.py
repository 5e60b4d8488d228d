"""Weights in registers, whose dtypes differ: 16 bits stay packed two to a register, 32 bits do not."""

from __future__ import annotations

import pytest

from lngen.check.inputs import mismatches, random_inputs
from lngen.compile import KernelSet
from lngen.graphs import Definition, GraphBuilder
from lngen.interpret import interpret
from lngen.ir import BF16, D, M, S
from lngen.lower import lower
from lngen.problem import ANY, parse_schedule
from lngen.ptx import run_plan
from lngen.spec import make_spec

# Rows in registers and many weights of a thread: those of 16 bits stay packed.
SCHEDULE = (
    "form=tma_unaligned,threads=256,rows_per_block=1,vec=1,stages=2,grid=1,cached_weights=yes,row_in_registers=yes"
)


def mixed(b: GraphBuilder) -> None:
    """``x * wide + narrow``: an f32 weight beside a bf16 one, and the sum of a row."""
    x = b.param("x", b.compute, M, D)
    narrow = b.cast("narrow32", b.param("narrow", BF16, D), to=b.compute)
    wide = b.param("wide", b.compute, D)
    y = b.add("sum", b.mul("product", x, wide), narrow)
    b.results.append(b.reduce_sum("total", b.segment_sum("parts", y), axis=S))


@pytest.mark.parametrize("rows", [1, 3])
def test_weights_of_two_sizes(rows: int) -> None:
    spec = make_spec(Definition("mixed", mixed), "fwd", {"d": 20001, "dtype": "f32"})
    plan = lower(spec, parse_schedule(SCHEDULE, ANY))
    kernels = KernelSet(plan)
    inputs = random_inputs(spec, rows)
    outcome = run_plan(plan, inputs, source=kernels.text, ptx=kernels.ptx("sm_90", lines=True), arch="sm_90")
    assert not outcome.findings
    assert not mismatches(outcome.results, interpret(plan.graph, inputs))
