"""If these fail, the blocks of a cluster copy, or store, the wrong part of a row that does not begin at 16 bytes.

Each block copies the aligned span around its own columns. Both ends of that are columns of its neighbours.
"""

from functools import cache

import pytest

from lngen.compiler.compile import Compilation
from lngen.compiler.devices import default_device
from lngen.compiler.interpret import interpret
from lngen.compiler.problem import Schedule
from lngen.compiler.problem.footprint import cluster_tile
from lngen.compiler.problem.legal import is_legal
from lngen.compiler.schedule import ranked
from lngen.compiler.schedule.space import in_one_block
from lngen.compiler.spec import parse_spec
from lngen.proof.check.inputs import mismatches, random_inputs
from lngen.proof.ptx import run_plan
from schedules import unaligned, without_store

INDEX = "cross_entropy.fwd:d={},dtype={},target=index"
CASES = {
    "two": ("rmsnorm.fwd:d=16001,dtype=bf16", unaligned(64, 1, 1, 2, cluster=2, grid=2), 5, ""),
    "two, two rows": ("layernorm.fwd:d=16003,dtype=f16", unaligned(64, 2, 1, 2, "cached", cluster=2, grid=1), 6, "y=x"),
    "four bytes": ("softmax.fwd:d=16001,dtype=f32", unaligned(64, 1, 1, 2, cluster=4, grid=2), 5, "y=x"),
    "narrow stores": ("softmax.fwd:d=16006,dtype=f32", without_store(64, 1, 2, 2, cluster=2, grid=2), 4, ""),
    "claimed": ("rmsnorm.fwd:d=33001,dtype=bf16", without_store(128, 1, 1, 2, "dynamic", cluster=8, grid=1), 7, ""),
    "loss": (INDEX.format(50257, "bf16"), without_store(128, 1, 1, 2, cluster=8, grid=2), 5, ""),
    "gradient over x": (INDEX.format(50257, "bf16") + ",x_grad=yes",
     without_store(128, 1, 1, 2, "dynamic", cluster=8, grid=1), 3, "x_grad=x"),
    "longest": (INDEX.format(128255, "f16") + ",x_grad=yes", unaligned(512, 1, 1, 2, cluster=16, grid=1), 2, ""),
    "column sums": ("rmsnorm.bwd:d=33001,dtype=bf16", without_store(256, 2, 1, 2, cluster=4), 36, "dx=dy"),
    "column sums, stored": ("layernorm.bwd:d=33003,dtype=f16", unaligned(256, 1, 1, 2, cluster=8), 17, ""),
}  # fmt: skip


@cache
def compilation(text: str) -> Compilation:
    return Compilation(parse_spec(text))


def agrees(text: str, schedule: Schedule, rows: int, over: str = "", arch: str = "sm_90") -> None:
    """The executor has the interpreter's bits, and finds nothing wrong.

    Over an input a span has elements of a neighbour, which may have stored them: the executor gives it others there.
    """
    found, inputs = compilation(text), random_inputs(parse_spec(text), rows)
    alias = {over.split("=")[0]: (over.split("=")[1], 0)} if over else {}
    outcome = run_plan(found.kernels(schedule).plan, inputs, rows=rows, alias=alias, arch=arch, order=rows)
    assert not outcome.findings, str(outcome.findings[0])
    assert not mismatches(outcome.results, interpret(found.graph, inputs))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", CASES)
def test_bits(name: str) -> None:
    agrees(*CASES[name])


MAXIMA = {
    "one block": ("softmax.fwd:d=1001,dtype=bf16", unaligned(32, 2, 1, 2, grid=2)),
    "few threads": ("log_softmax.fwd:d=171,dtype=f16", unaligned(16, 2, 1, 3, grid=2)),
    "two blocks": (INDEX.format(16001, "bf16"), without_store(128, 2, 1, 2, cluster=2, grid=1)),
    "runs of two": ("softmax.fwd:d=16006,dtype=f16", unaligned(64, 1, 2, 2, cluster=2, grid=1)),
    "blocks of segments": (INDEX.format(33001, "bf16"), without_store(256, 1, 1, 2, cluster=2, grid=1)),
}  # fmt: skip


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", MAXIMA)
def test_the_largest_element_may_be_first_or_last_of_a_block(name: str) -> None:
    """A maximum takes whole units of 16 bytes: the first and the last unit have elements of the block's neighbours."""
    text, schedule = MAXIMA[name]
    found, spec = compilation(text), parse_spec(text)
    tile = cluster_tile(schedule, found.problem)
    ends = [c for begin in range(0, spec.d, tile) for c in (begin, min(begin + tile, spec.d) - 1)]
    rows = 8 * len(ends)
    inputs = random_inputs(spec, rows)
    for row in range(rows):  # eight rows begin at every place of a unit, or every other one
        inputs["x"][row, ends[row // 8]] = 100
    outcome = run_plan(found.kernels(schedule).plan, inputs, rows=rows, order=1)
    assert not outcome.findings, str(outcome.findings[0])
    wanted = interpret(found.graph, inputs)
    assert (wanted["rowmax"] == 100).all()
    assert not mismatches(outcome.results, wanted)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("d", "more"), [(50257, ",x_grad=yes"), (128255, "")])
def test_the_default_of_odd_vocabularies(d: int, more: str) -> None:
    """Rows come by bulk copies, once; on older GPUs, which have none, the bits are the same."""
    text = INDEX.format(d, "bf16") + more
    schedule = compilation(text).schedule("sm_90")
    assert schedule.form == "tma_unaligned", schedule
    assert schedule.cluster > 1
    agrees(text, schedule, 2)
    agrees(text, compilation(text).schedule("sm_80"), 2, arch="sm_80")


def test_clusters_are_for_rows_that_one_block_does_not_hold() -> None:
    for text, held in (("rmsnorm.fwd:d=16001,dtype=bf16", True), ("rmsnorm.fwd:d=50257,dtype=bf16", False)):
        p = compilation(text).problem
        assert in_one_block(p, default_device()) is held
        assert any(s.form == "tma_unaligned" and s.cluster > 1 for s in ranked(p)) is not held
        assert is_legal(unaligned(256, 1, 1, 2, cluster=2, grid=2), p)
