"""Graphs of one's own: if these fail, one that kernels can compute is refused or wrong, or one they cannot is taken."""

from collections.abc import Callable

import numpy as np
import pytest

from lngen.check.inputs import random_inputs
from lngen.compile import Compilation
from lngen.errors import LowerError
from lngen.graphs import Definition, GraphBuilder
from lngen.interpret import interpret
from lngen.ir import Axis, D, M, S
from lngen.lower import lower
from lngen.problem import Schedule, problem
from lngen.runtime import compile
from lngen.schedule import ranked
from lngen.spec import make_spec
from plans import best, gated, own_spec, run_checked
from schedules import multipass, registers, tma


def test_columns_read_in_several_passes_have_no_segments() -> None:
    def columns(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        far = b.sub("far", x, b.segment_sum("parts", x))
        b.output("y", b.reduce_sum("column", far, axis=M))

    spec = make_spec(Definition("own", columns), "fwd", {"d": 40000})
    with pytest.raises(LowerError):
        lower(spec, Schedule("multipass", 256, 1, 4))
    assert Compilation(spec).refusal is None, "of other forms"


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
