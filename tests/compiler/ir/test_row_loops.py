"""If these fail, the interpreter's blocks of rows have other bits than whole arrays."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bit_graphs import DEFINITIONS
from lngen.compiler import interpret as interpreter
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import Graph, parse
from lngen.compiler.ir.row_loops import numbers, row_loops
from lngen.compiler.spec import parse_spec
from lngen.errors import ArrayError, LngenError
from lngen.proof.check.inputs import mismatches, random_inputs
from random_graphs import KINDS, draw_case
from whole_arrays import by_whole_arrays

GRAPHS = 300


@pytest.fixture(params=[1, 100], autouse=True)
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one row, and of some; the last block of a loop has fewer."""
    monkeypatch.setattr(interpreter, "BLOCK", request.param)


def random_cases() -> Iterator[tuple[Graph, dict[str, np.ndarray]]]:
    """Graphs of every kind on the numbers of their kind: of many sizes, of few bits, what is no number."""
    seed = found = 0
    while found < GRAPHS:
        rng = random.Random(seed)
        case = draw_case(rng, KINDS[seed % len(KINDS)])
        seed += 1
        if any(step.op == "copysign" for step in case.recipe.steps):  # it has no derivative
            continue
        try:
            graph = case.spec().graph()
        except LngenError:
            continue
        found += 1
        yield graph, case.inputs(graph)


def test_random_graphs() -> None:
    for n, (graph, inputs) in enumerate(random_cases()):
        try:
            want = by_whole_arrays(graph, inputs)
        except ArrayError:  # no input says how long an axis is
            continue
        assert not mismatches(interpret(graph, inputs), want), (n, graph)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_graphs_of_bits(name: str) -> None:
    spec = parse_spec(f"{name}.fwd:d=768,dtype=f32", {name: DEFINITIONS[name]})
    for rows in (1, 7):
        inputs = random_inputs(spec, rows)
        assert not mismatches(interpret(spec.graph(), inputs), by_whole_arrays(spec.graph(), inputs))


CENTRED = parse("""
graph @centred(%x: f32[M, D], %w: f32[D]) -> (f32[M, D], f32[D], f32[]) {
  %sum    : f32[D]    = reduce_sum %x {axis=M, blocks=3, groups=2, interleave=2}
  %moved  : f32[M, D] = sub %x, %sum
  %y      : f32[M, D] = mul %moved, %w
  %square : f32[D]    = reduce_dot %moved, %x {axis=M, blocks=3, groups=2, interleave=2}
  %most   : f32[D]    = reduce_max %moved {axis=M}
  %top    : f32[D]    = add %most, %square
  %all    : f32[]     = reduce_sum %top {axis=D}
  return %y, %top, %all
}
""")


def test_what_reads_a_sum_over_the_rows_is_in_the_next_loop() -> None:
    first, second, third = row_loops(CENTRED)
    names = {n: v.name for v, n in numbers(CENTRED).items()}
    found = [[names[s.out] for s in (*loop.before, *loop.rows)] for loop in (first, second, third)]
    assert found == [["sum"], ["moved", "y", "square", "most"], ["top", "all"]]
    assert [names[n] for n in second.kept] == ["y"]
    assert [len(loop.buffers) for loop in (first, second, third)] == [0, 1, 0], "moved, until its last reader"


@pytest.mark.parametrize("rows", [0, 1, 5, 6, 40])
def test_rows_that_are_read_twice(rows: int) -> None:
    rng = np.random.default_rng(rows)
    inputs = {"x": rng.standard_normal((rows, 12), np.float32), "w": rng.standard_normal(12, np.float32)}
    assert not mismatches(interpret(CENTRED, inputs), by_whole_arrays(CENTRED, inputs))


def test_threads_have_their_own_arrays() -> None:
    spec = parse_spec("layernorm.bwd:d=96,dtype=f32")
    given = [random_inputs(spec, 40, seed) for seed in range(4)] * 5
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda inputs: interpret(spec.graph(), inputs), given)]
    for inputs, results in zip(given, found, strict=True):
        assert not mismatches(results, by_whole_arrays(spec.graph(), inputs))
