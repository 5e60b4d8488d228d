"""The device-sized order of column sums: an option that is written in the graph."""

from __future__ import annotations

import numpy as np
import pytest

import lngen
import sampling
from lngen.errors import SpecError
from lngen.interpret import interpret
from lngen.ir.numerics import NUMPY_DTYPE, column_sum
from lngen.lower import lower
from lngen.ptx import run_plan
from lngen.schedule import Schedule, is_legal, parse_schedule, problem
from lngen.spec import parse_spec

BASE = Schedule("registers", threads=1, rows_per_block=1, vec=1)


def test_the_number_of_blocks_is_part_of_the_graph_and_of_the_name() -> None:
    spec = parse_spec("layernorm.bwd:d=4096,dtype=bf16,blocks=108")
    assert str(spec) == "layernorm.bwd:d=4096,dtype=bf16,blocks=108"
    assert spec.slug.endswith("_blocks108")
    assert "blocks=108" in str(spec.graph())
    assert problem(spec.graph(), 4096).blocks == 108
    assert "blocks=108" not in str(parse_spec("layernorm.bwd:d=4096,dtype=bf16").graph())


def test_a_forward_has_no_blocks() -> None:
    with pytest.raises(SpecError, match="there is no key 'blocks'"):
        parse_spec("layernorm.fwd:d=8,blocks=3")


@pytest.mark.parametrize("value", ["0", "4097", "many"])
def test_blocks_is_a_whole_number(value: str) -> None:
    with pytest.raises(SpecError, match=f"'blocks' is expected to be a whole number from 1 to 4096, got '{value}'"):
        parse_spec(f"layernorm.bwd:d=8,blocks={value}")


@sampling.rotating(
    ("spec", "schedule"),
    [
        ("d=8192,blocks=5", "form=tma,threads=256,rows_per_block=1,vec=8,stages=3,cached_weights=yes"),
        (
            "d=8192,blocks=6",
            "form=tma,threads=256,rows_per_block=1,vec=8,stages=3,cached_weights=yes,single_launch=yes",
        ),
        ("d=4096,blocks=3", "form=tma,threads=256,rows_per_block=2,vec=8,stages=3,tma_store=yes"),
        ("d=1024,blocks=2", "form=registers,threads=64,rows_per_block=8,vec=8,prefetch=yes"),
    ],
)
def test_kernels_keep_to_it(spec: str, schedule: str) -> None:
    built = parse_spec(f"layernorm.bwd:{spec},dtype=bf16")
    chosen = parse_schedule(schedule, BASE)
    assert is_legal(chosen, problem(built.graph(), built.d))
    rng = np.random.default_rng(0)
    assert built.blocks
    rows = 3 * built.blocks * problem(built.graph(), built.d).groups + 1
    inputs = {
        p.name: rng.normal(size=p.type.shape(rows, built.d)).astype(np.float32).astype(NUMPY_DTYPE[p.type.dtype])
        for p in built.graph().params
    }
    want = interpret(built.graph(), inputs)
    got = run_plan(lower(built, chosen), inputs)
    assert got.findings == ()
    for name, array in want.items():
        assert got.results[name].tobytes() == array.tobytes(), name


def test_other_blocks_are_other_bits() -> None:
    x = np.random.default_rng(1).normal(size=(64, 3)).astype(np.float32)
    orders = [column_sum(x, groups=1, blocks=b, interleave=4) for b in (3, 4)]
    assert orders[0].tobytes() != orders[1].tobytes()


def test_compile_takes_it_for_the_backward() -> None:
    norm = lngen.compile("layernorm", d=64, blocks=7)
    assert norm.spec("bwd").blocks == 7
    assert norm.spec("fwd").blocks is None
