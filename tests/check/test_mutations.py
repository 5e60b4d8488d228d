"""If these fail, the bounds of LayerNorm and RMSNorm are so wide that a plausible mistake in their graphs is within."""

from itertools import product

import sampling
from graph_mutants import survivors
from lngen.interpret import interpret
from lngen.ir import BF16, F32, DType, Graph
from lngen.ir.numerics import Array
from lngen.passes import finish
from lngen.spec import parse_spec
from test_mathematics import draw, truth

EPS = 0.1  # large enough that a misplaced eps shows
D = ROWS = 13  # square, so that a row sum could pass for a column sum


@sampling.grid(("norm", "way", "dtype"), product(("layernorm", "rmsnorm"), ("fwd", "bwd"), (F32, BF16)))
def test_every_mutant_is_out_of_its_bound(norm: str, way: str, dtype: DType) -> None:
    spec = parse_spec(f"{norm}.{way}:d={D},dtype={dtype},eps={EPS}" + ",beta=yes" * (norm == "rmsnorm"))
    graph, inputs = spec.trace()["build" if way == "fwd" else "save"], draw(spec, ROWS)
    if way == "bwd":
        inputs |= interpret(spec.with_direction("fwd").graph(), inputs)
    expected = truth(spec, inputs)

    def excess(results: dict[str, Array]) -> float:
        return max(expected[name].excess(value) for name, value in results.items())

    def results(graph: Graph) -> dict[str, Array]:
        return interpret(finish(graph, D), inputs)

    assert excess(results(graph)) <= 1
    assert survivors(graph, results, lambda found: excess(found) > 1.5) == []
