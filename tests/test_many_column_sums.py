"""More column sums than the family has: they leave few row groups to a block, and large totals to the finish."""

import pytest

from lngen.emit import emit
from lngen.graphs import Definition, GraphBuilder
from lngen.ir import D, M
from lngen.lower import lower
from lngen.schedule import problem, ranked
from lngen.spec import Spec, make_spec
from lngen.toolchain import compile_cubin
from test_scalars import has_bits


def sums(count: int, d: int, dtype: str) -> Spec:
    """The sums of each column, scaled by 1 to ``count``."""

    def describe(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        for n in range(count):
            b.output(f"sum{n}", b.reduce_sum(f"s{n}", x * (1.0 + n), axis=M))

    return make_spec(Definition(f"sums{count}", describe), "fwd", {"d": d, "dtype": dtype})


@pytest.mark.parametrize(
    ("count", "d", "dtype"), [(8, 1, "f32"), (9, 2, "f64"), (13, 1, "f64"), (33, 1, "f32"), (33, 37, "f64")]
)
@pytest.mark.parametrize("single_launch", [False, True])
def test_many_column_sums_have_the_bits_and_fit_the_gpu(count: int, d: int, dtype: str, single_launch: bool) -> None:
    spec = sums(count, d, dtype)
    graph = spec.graph()
    schedule = next(s for s in ranked(problem(graph, d)) if s.single_launch == single_launch)
    compile_cubin(emit(lower(spec, schedule, graph)), "sm_90")  # an error if a block has not the shared memory
    for rows in (0, 37):
        has_bits(spec, schedule, rows, graph)
