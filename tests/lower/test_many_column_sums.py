"""Column sums that registers do not hold well: more of them than the family has, or of many row groups.

Many sums leave few row groups to a block, and large totals to the finish. Sums for which a block has no registers are
added by a kernel of their own, with the row groups that the graph has.
"""

import sampling
from lngen.emit import emit
from lngen.graphs import Definition, GraphBuilder
from lngen.ir import D, M
from lngen.lower import lower
from lngen.problem import Schedule, problem
from lngen.schedule import ranked
from lngen.spec import Spec, make_spec, parse_spec
from lngen.toolchain import compile_cubin
from number_graphs import columns, has_bits, spec_of
from spills import REPORTED


def sums(count: int, d: int, dtype: str) -> Spec:
    """The sums of each column, scaled by 1 to ``count``."""

    def describe(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        for n in range(count):
            b.output(f"sum{n}", b.reduce_sum(f"s{n}", x * (1.0 + n), axis=M))

    return make_spec(Definition(f"sums{count}", describe), "fwd", {"d": d, "dtype": dtype})


MANY = [(8, 1, "f32"), (9, 2, "f64"), (13, 1, "f64"), (33, 1, "f32"), (33, 37, "f64")]


@sampling.grid(
    ("count", "d", "dtype", "single_launch"),
    [(*case, single) for case in MANY for single in (False, True)],
    lambda *values: (values[:3], values[3]),
    strength=1,
)
def test_many_column_sums_have_the_bits_and_fit_the_gpu(count: int, d: int, dtype: str, single_launch: bool) -> None:
    spec = sums(count, d, dtype)
    graph = spec.graph()
    schedule = next(s for s in ranked(problem(graph, d)) if s.single_launch == single_launch)
    compile_cubin(emit(lower(spec, schedule, graph)), "sm_90")  # an error if a block has not the shared memory
    has_bits(spec, schedule, 37, graph)


# Row groups of a block, and a spec: from two row groups to 128, of rows of whole vectors and not, of eight-byte sums.
GROUPS = {
    2: "layernorm.bwd:d=4096,dtype=bf16",
    4: "layernorm.bwd:d=1500,dtype=f32,blocks=2",
    8: "rmsnorm.bwd:d=381,dtype=f64,blocks=3",
    16: REPORTED[2][0],
    32: "parallel_layernorm.bwd:d=96,dtype=f32,x1=yes,colscale=yes,blocks=2",
    64: REPORTED[1][0],
    128: f"{REPORTED[0][0]},blocks=2",
}


@sampling.rotating(("groups", "text"), GROUPS.items())
def test_multipass_has_the_row_groups_of_the_graph(groups: int, text: str) -> None:
    spec = parse_spec(text)
    graph = spec.graph()
    facts = problem(graph, spec.d)
    assert facts.groups == groups
    schedule = Schedule("multipass", 32, 1, facts.run)
    finish = lower(spec, schedule, graph).kernels[-1].finish
    assert (finish.partials, finish.rows_per_term, finish.rows_per_block) == (facts.blocks, 1, groups)
    for rows in (0, 1, groups, min(2 * facts.blocks * groups + 5, 300)):  # the last number is of no whole round
        has_bits(spec, schedule, rows, graph)


def test_multipass_has_column_maxima_of_row_groups() -> None:
    spec = spec_of(columns, d=200, dtype="f32")
    facts = problem(spec.graph(), spec.d)
    assert facts.groups == 8
    for rows in (0, 1, 99):
        has_bits(spec, Schedule("multipass", 32, 1, facts.run), rows)
