"""Graphs of one's own: if these fail, one that kernels can compute is refused or wrong, or one they cannot is taken."""

import re
from collections.abc import Callable

import numpy as np
import pytest

import lngen
from lngen.check.inputs import random_inputs
from lngen.compile import Compilation
from lngen.errors import LowerError
from lngen.graphs import Definition, GraphBuilder
from lngen.interpret import interpret
from lngen.ir import F64, Axis, D, M, S
from lngen.lower import lower
from lngen.problem import Schedule, problem
from lngen.runtime import compile
from lngen.schedule import ranked
from lngen.spec import make_spec
from plans import best, gated, own_spec, run_checked
from schedules import multipass, registers, tma

# ---- what cannot be lowered ----


def column_centred(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    b.output("y", b.sub("xc", x, b.reduce_sum("total", x, axis=M)))


def sum_of_sums(b: GraphBuilder) -> None:
    total = b.reduce_sum("total", b.input("x", M, D), axis=M)
    b.output("y", b.reduce_sum("again", b.expand("wide", total, axis=M), axis=M))


def sum_of_weights(b: GraphBuilder) -> None:
    x, gamma = b.input("x", M, D), b.input("gamma", D)
    b.output("y", b.mul("q", x, b.reduce_sum("weights", gamma, axis=D)))


def two_dtypes(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    narrow = b.reduce_sum("narrow", x, axis=D)
    wide = b.reduce_sum("wide", b.cast("x64", x, to=F64), axis=D)
    b.output("y", b.mul("q", narrow, b.cast("wide32", wide, to=b.compute)))


def input_as_result(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    b.output("y", x)
    b.statistic(b.params[0])


def column_scaled(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    b.output("y", b.div("scaled", x, b.reduce_max("most", b.reduce_max("widest", x, axis=D), axis=M)))


def sum_of_maxima(b: GraphBuilder) -> None:
    most = b.reduce_max("most", b.input("x", M, D), axis=M)
    b.output("y", b.reduce_sum("again", b.expand("wide", most, axis=M), axis=M))


def maximum_of_sums(b: GraphBuilder) -> None:
    total = b.reduce_sum("total", b.input("x", M, D), axis=M)
    b.output("y", b.reduce_max("again", b.expand("wide", total, axis=M), axis=M))


def rows_of_the_mean(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    mean = b.reduce_mean("mean", b.reduce_mean("row", x, axis=D), axis=M)
    far = b.sub("far", x, mean)
    b.output("y", b.reduce_sum("total", b.reduce_dot("square", far, far, axis=D), axis=M))


def rows_of_weights(b: GraphBuilder) -> None:
    x, weight = b.input("x", M, D), b.reduce_sum("weight", b.input("gamma", D), axis=D)
    b.output("y", b.reduce_sum("total", b.reduce_sum("row", b.mul("q", x, weight), axis=D), axis=M))


def statistic_of_weights(b: GraphBuilder) -> None:
    x, weight = b.input("x", M, D), b.reduce_sum("weight", b.input("gamma", D), axis=D)
    b.output("y", b.mul("q", b.reduce_sum("row", x, axis=D), weight))


def sum_of_lengths(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    b.output("y", b.mul("q", x, b.reduce_sum("length", b.segment_size("n", b.compute), axis=S)))


def sum_of_scaled_lengths(b: GraphBuilder) -> None:
    scaled = b.mul("scaled", b.input("u", M), b.segment_size("n", b.compute))
    b.output("y", b.mul("q", b.input("x", M, D), b.reduce_sum("length", scaled, axis=S)))


def lengths_of_columns(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    b.output("y", b.neg("minus", x))
    b.output("total", b.mul("scaled", b.reduce_sum("column", x, axis=M), b.segment_size("n", b.compute)))


LOWER_ERRORS: list[tuple[Callable[[GraphBuilder], None], str]] = [
    (column_centred, "the row result '%y' depends on a sum over rows; "
     "that takes two graphs, one for the sum and one for the result."),
    (input_as_result, "the result '%x' is an input; leave it out, the caller has it."),
    (column_scaled, "the row result '%y' depends on a maximum over rows; "
     "that takes two graphs, one for the maximum and one for the result."),
    (sum_of_sums, "'%again' is a sum over rows of sums over rows."),
    (sum_of_maxima, "'%again' is a sum over rows of maxima over rows."),
    (maximum_of_sums, "'%again' is a maximum over rows of sums over rows."),
    (rows_of_the_mean, "'%far' takes whole rows and depends on '%mean_sum', a sum over rows; "
     "that takes two graphs, one for '%mean_sum' and one for what depends on it."),
    *(
        (graph, f"'%{name}' reduces over D a value that has no rows, and rows depend on it; pass it as an input.")
        for graph, name in ((sum_of_weights, "weights"), (rows_of_weights, "weight"), (statistic_of_weights, "weight"))
    ),
    (sum_of_lengths, "'%length' reduces over D a value that has no rows; pass it as an input."),
    (sum_of_scaled_lengths, "'%length' adds over S values that depend on no sum of segments; pass it as an input."),
    (
        lengths_of_columns,
        "'%n' varies along S, and a result without rows needs it; such results are elementwise in column sums and "
        "numbers.",
    ),
    (two_dtypes, "reduces in f32 and in f64; cast the operands to one dtype."),
]  # fmt: skip


@pytest.mark.parametrize(("describe", "message"), LOWER_ERRORS)
def test_what_cannot_be_lowered_hears_why(describe: Callable[[GraphBuilder], None], message: str) -> None:
    spec = make_spec(Definition("own", describe), "fwd", {"d": 64})
    schedule = ranked(problem(spec.graph(), spec.d))[0]
    with pytest.raises(LowerError) as error:
        lower(spec, schedule)
    colon = "" if message.startswith("reduces in") else ":"
    assert str(error.value) == f"graph @own_fwd{colon} {message}"
    with pytest.raises(LowerError, match=re.escape(str(error.value))):
        lngen.compile(spec.definition, d=64)


def test_columns_read_in_several_passes_have_no_segments() -> None:
    def columns(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        far = b.sub("far", x, b.segment_sum("parts", x))
        b.output("y", b.reduce_sum("column", far, axis=M))

    spec = make_spec(Definition("own", columns), "fwd", {"d": 40000})
    with pytest.raises(LowerError) as error:
        lower(spec, Schedule("multipass", 256, 1, 4))
    assert str(error.value) == (
        "graph @own_fwd: '%parts' varies along S, and a sum over rows needs it; with form=multipass, that takes two "
        "graphs, one for the values and one for their sum."
    )
    assert Compilation(spec).refusal is None, "of other forms"
    with pytest.raises(LowerError, match=re.escape(str(error.value))):
        lngen.compile(spec.definition, d=2_000_000)


# ---- graphs of one's own ----


def apart(b: GraphBuilder) -> None:
    """Each row times the squares of distances from its segments' means, without the sum of the row."""
    x = b.input("x", M, D)
    centre = b.div("centre", b.segment_sum("parts", x), b.segment_size("n", b.compute))
    far = b.sub("far", x, centre)
    squares = b.reduce_sum("apart", b.segment_dot("squares", far, far), axis=S)
    b.output("y", b.mul("p", b.add("moved", x, centre), squares))


def exchanged_twice(b: GraphBuilder) -> None:
    """A sum over S reads sums of segments of which some depend on another sum over S; maxima of rows among them."""
    x, z = b.input("x", M, D), b.input("z", M, D)
    parts = b.segment_sum("parts", x)
    far = b.sub("far", x, b.reduce_sum("total", parts, axis=S))
    again = b.segment_dot("again", far, b.add("near", z, parts))
    both = b.reduce_sum("both", b.fma("term", parts, b.segment_dot("squares", far, far), again), axis=S)
    most = b.reduce_max("most", b.mul("scaled", b.sub("lower", far, b.reduce_max("top", far, axis=D)), both), axis=D)
    b.output("y", b.sub("p", far, most))
    b.statistic(both)


def crossed(b: GraphBuilder) -> None:
    """Two tensors that are centred, each scaled by the reciprocal standard deviation of the other."""
    centred, rstd = {}, {}
    for name in ("x", "z"):
        value = b.input(name, M, D)
        centred[name] = b.sub(f"{name}c", value, b.reduce_mean(f"{name}_mean", value, axis=D))
    for name, other in (("z", "x"), ("x", "z")):  # the variance of x comes after its elements are scaled
        square = b.mul(f"{name}_square", centred[name], centred[name])
        rstd[name] = b.rsqrt(
            f"{name}_rstd", b.add(f"{name}_veps", b.reduce_mean(f"{name}_var", square, axis=D), b.eps())
        )
        b.output(f"{other}_scaled", b.mul(f"{other}_hat", centred[other], rstd[name]))


@pytest.mark.parametrize("schedule", [multipass(256, 4), registers(256, 1, 4, cluster=4)])
def test_a_row_is_scaled_by_the_variance_of_another_tensor(schedule: Schedule) -> None:
    """Both variances come from segments, whichever of their uses is first in the graph."""
    spec = make_spec(Definition("crossed", crossed), "fwd", {"d": 32768})
    assert [e.op for e in spec.graph().eqns].count("segment_dot") == 2
    run_checked(lower(spec, schedule), 2)
    inputs = random_inputs(spec, 2)
    expected = interpret(spec.graph(), inputs)
    rows = {name: values.astype(np.float64) for name, values in inputs.items()}
    rstd = {name: 1 / np.sqrt(r.var(1, keepdims=True) + 1e-5) for name, r in rows.items()}
    for name, other in (("x", "z"), ("z", "x")):
        want = (rows[name] - rows[name].mean(1, keepdims=True)) * rstd[other]
        np.testing.assert_allclose(expected[f"{name}_scaled"], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("describe", "d", "schedule"),
    [
        (describe, d, schedule)
        for describe in (apart, exchanged_twice)
        for d, schedule in (
            (96, registers(8, 4, 4)), (8200, multipass(256, 4)), (8200, registers(64, 2, 4, cluster=2)),
            (8200, tma(256, 1, 4, 2, "regs", cluster=2, grid=1)),
        )
    ],
)  # fmt: skip
def test_a_graph_of_segments(describe: Callable[[GraphBuilder], None], d: int, schedule: Schedule) -> None:
    """Rows of one segment and of several, the last shorter."""
    spec = make_spec(Definition(describe.__name__, describe), "fwd", {"d": d})
    run_checked(lower(spec, schedule), 3)


def test_row_and_scalar_inputs_are_lowered() -> None:
    spec = own_spec(gated, dtype="bf16", weight="f32")
    (kernel,) = lower(spec, ranked(problem(spec.graph(), spec.d))[0]).kernels
    assert [t.name for t in kernel.row_inputs] == ["shift"]
    assert [t.name for t in kernel.scalars] == ["scale"]
    assert {s.text.split(" = ")[0] for s in kernel.per_row} == {"const float shift32", "const float factor"}


# ---- what has no effect ----


def without_effect(*axes: Axis) -> Callable[[GraphBuilder], None]:
    def describe(b: GraphBuilder) -> None:
        x, s = b.input("x", M, D), b.input("s", *axes)
        b.output("y", x + (s - s))

    return describe


@pytest.mark.parametrize("wrt", ["s", None])
@pytest.mark.parametrize("axes", [(), (D,), (M,), (M, D)], ids=str)
def test_the_gradient_of_an_input_without_effect_is_zeros(axes: tuple[Axis, ...], wrt: str | None) -> None:
    definition = Definition("without_effect", without_effect(*axes))
    spec = make_spec(definition, "bwd", {"d": 96, **({"wrt": wrt} if wrt else {})})
    outcome = run_checked(best(spec), 3)
    assert outcome.results["ds"].shape == tuple({M: 3, D: 96}[axis] for axis in axes)
    assert not outcome.results["ds"].any()
    norm, inputs = compile(definition, d=96, wrt="s"), random_inputs(spec.with_direction("fwd"), 3, 0)
    y, saved = norm.forward(*inputs.values())
    assert not norm.backward(y, saved)[0].any()
