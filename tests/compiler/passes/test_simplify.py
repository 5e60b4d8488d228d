"""If these fail, gradients have more sums or phases than one would write by hand, lose accuracy, or take too long."""

from collections.abc import Callable

import numpy as np
import pytest

from lngen.compiler import passes
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import F64, Axis, Builder, D, Graph, M, Value
from lngen.compiler.ir.functions import ULPS
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array
from lngen.compiler.ir.places import upstream
from lngen.compiler.spec import make_spec
from own_graphs import layernorm_of, own, rms
from plans import best, run_checked
from smooth_graphs import smooth_graph
from test_passes import phases

# Column sums, the phase of each row sum (none waits for another of the gradient), and equations.
SUMS: dict[str, tuple[int, list[int], int]] = {
    "colscale": (3, [0, 0], 27), "bias_and_colscale": (4, [0, 0], 32), "rowscale": (2, [0, 0, 0, 0, 0], 35),
    "halved": (3, [0, 0], 34), "gated_norm": (1, [0], 28), "gated_before": (1, [0], 33),
    "norm_of_norm": (3, [0, 0, 0, 0], 44), "quadratic": (1, [0, 1, 1], 27), "gate of its norm": (0, [0], 55),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_several_terms_stay_whole(name: str) -> None:
    g = own(name, "bwd", d=512, dtype="bf16").graph()
    assert (len(phases(g, M)), phases(g, D), len(g.eqns)) == SUMS[name]


@pytest.mark.parametrize("op", [op for op in ULPS if op != "log"])
def test_a_function_behind_a_norm_adds_no_row_sum(op: str) -> None:
    of_layernorm = own(lambda b, x: b.emit(op, "f", (layernorm_of(b, x),)), "bwd", d=512)
    of_rmsnorm = own(lambda b, x, gamma=D: b.emit(op, "f", (x * rms(b, x) * gamma,)), "bwd", d=512)
    assert [phases(spec.graph(), D) for spec in (of_layernorm, of_rmsnorm)] == [[0, 0], [0]]


def draw(g: Graph, rows: int, d: int, seed: int = 0) -> dict[str, Array]:
    """Random inputs of a graph."""
    rng = np.random.default_rng(seed)
    return {p.name: rng.normal(0.5, 1, p.type.shape(rows, d)).astype(NUMPY_DTYPE[p.type.dtype]) for p in g.params}


def assert_same_gradient(raw: Graph, simplified: Graph, inputs: dict[str, Array]) -> int:
    """How many finite gradients were compared."""
    with np.errstate(all="ignore"):
        expected, found = interpret(raw, inputs), interpret(simplified, inputs)
    finite = [name for name, value in expected.items() if np.isfinite(value).all()]
    for name in finite:
        scale = np.abs(expected[name]).max() + 1
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-9 * scale, err_msg=name)
    return len(finite)


def test_terms_cancel_before_they_are_summed_over_rows() -> None:
    """dy is around 1000 and its gradient around 1; sums of single terms lost four times as many digits."""
    forward, backward = (own("colscale", way, d=64, dtype="f32").graph() for way in ("fwd", "bwd"))
    dy = 1000 + np.random.default_rng(1).normal(size=(2048, 64)).astype(np.float32)
    inputs = {**draw(forward, 2048, 64), "gamma": np.ones(64, np.float32), "dy": dy}
    found = interpret(backward, {**inputs, **interpret(forward, inputs)})["dcolscale"]
    inputs = {name: a.astype(np.float64) for name, a in inputs.items()}
    exact = interpret(own("colscale", "bwd", d=64, dtype="f64").trace()["vjp"], inputs)["dcolscale"]
    assert 0 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < 7e-5


def test_kernels_have_the_same_bits() -> None:
    """The gradient of a bias before the norm was a sum over rows of what has no D, which no kernel takes."""
    pytest.importorskip("cupy")
    run_checked(best(own("bias_and_colscale", "bwd", d=40, dtype="f32")), 9)


OPERATORS: dict[str, Callable[[Builder, Value, Value, Value], Value]] = {  # of values that depend on seeds
    "add": lambda b, u, v, w: b.add("r", b.mul("p", u, w), v),
    "sub": lambda b, u, v, w: b.sub("r", b.mul("p", u, w), v),
    "sub, from a sum": lambda b, u, v, w: b.sub("r", b.add("p", u, v), b.mul("q", v, w)),
    "neg": lambda b, u, v, w: b.sub("r", b.neg("p", u), b.neg("q", b.mul("s", v, w))),
    "div": lambda b, u, v, w: b.div("r", b.sub("p", u, v), w),
    "reduce_sum": lambda b, u, v, w: b.mul("r", b.reduce_sum("s", b.sub("p", u, v), axis=D), w),
    "reduce_mean": lambda b, u, v, w: b.mul("r", b.reduce_mean("s", b.sub("p", v, u), axis=D), w),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_of_seeds_is_read_as_what_it_is(name: str) -> None:
    b = Builder("seeds")
    u, v, w = (b.param(one, F64, M, D) for one in "uvw")
    raw = b.build(b.cast("y", OPERATORS[name](b, u, v, w), to=F64))
    assert assert_same_gradient(raw, passes.simplify(raw, "u", "v"), draw(raw, 3, 5)) == 1


# ---- deep graphs ----


def normalised(b: Builder, x: Value, z: Value) -> Value:
    xc = b.sub("xc", x, b.reduce_mean("mu", x, axis=D))
    return b.add("h", x, b.mul("p", xc, b.mul("q", z, b.reduce_sum("s", b.mul("x2", xc, z), axis=D))))


def crossed(b: Builder, x: Value, z: Value) -> Value:
    """Sums over the rows of sums over the features, and so on."""
    h = b.mul("h", b.mul("p", x, b.reduce_sum("s", b.mul("u", x, z), axis=D)), z)
    return b.add("v", h, b.mul("q", x, b.reduce_sum("t", b.mul("w", h, z), axis=M)))


def another(b: Builder) -> Value:
    return b.param(f"v{len(b.params)}", F64, M, D)


# One more step of a graph, and the most equations of the simplified gradient for each of the raw one.
DEEP: dict[str, tuple[Callable[[Builder, Value, Value], Value], float]] = {
    "squared": (lambda b, x, z: b.mul("h", x, x), 1),
    "one more factor": (lambda b, x, z: b.mul("h", x, another(b)), 5),
    "one more sum": (lambda b, x, z: b.mul("h", x, b.add("s", z, another(b))), 4),
    "twice as many paths": (lambda b, x, z: b.add("h", b.mul("p", x, z), b.mul("q", b.mul("x2", x, x), z)), 4),
    "horner": (lambda b, x, z: b.add("h", b.mul("p", x, z), z), 2),
    "normalised": (normalised, 4),
    "crossed": (crossed, 3),
    "scaled up": (lambda b, x, z: b.mul("h", x, b.const("factor", 1e40, F64)), 1),
}


def lengths(forward: Graph) -> tuple[Graph, Graph]:
    """The gradient of every input that matters, raw and simplified."""
    live = upstream(forward.eqns, forward.results)
    raw = passes.vjp(forward, tuple(p.name for p in forward.params if p in live))
    return raw, passes.simplify(raw, *(p.name for p in raw.params if p.name.startswith("d")))


@pytest.mark.parametrize("of", [M, D])
@pytest.mark.parametrize("over", [M, D])
def test_what_is_centred_sums_to_zero_along_its_own_axis_alone(of: Axis, over: Axis) -> None:
    b = Builder("centred_fwd")
    x, w = b.param("x", F64, M, D), b.param("w", F64, M if over is D else D)
    centred = b.sub("xc", x, b.reduce_mean("mean", x, axis=of))
    raw, simplified = lengths(b.build(b.cast("y", b.reduce_sum("s", b.mul("p", centred, w), axis=over), to=F64)))
    assert_same_gradient(raw, simplified, draw(raw, 3, 4))
    sums = [e for e in simplified.eqns if e.op == "reduce_sum" and e.attr("axis") is over and e.args == (centred,)]
    assert bool(sums) is (of is not over)


@pytest.mark.parametrize("step", DEEP)
def test_a_deep_graph_takes_as_many_equations_as_it_has(step: str) -> None:
    grow, most = DEEP[step]
    for steps in (3, 20):
        b = Builder("deep_fwd")
        x, z = b.param("x", F64, M, D), b.param("z", F64, M, D)
        for _ in range(steps):
            x = grow(b, x, z)
        raw, simplified = lengths(b.build(b.cast("y", x, to=F64)))
        assert len(simplified.eqns) <= most * len(passes.cse(raw).eqns)
        assert_same_gradient(raw, simplified, draw(raw, 2, 3))


def test_no_graph_grows_and_its_gradient_is_kept() -> None:
    compared = 0
    for seed in range(100):
        spec = make_spec(smooth_graph(seed, functions=False), "fwd", {"d": 4, "dtype": "f64"})
        raw, simplified = lengths(spec.forward())
        assert len(simplified.eqns) <= 4 * len(passes.cse(raw).eqns) + 10
        inputs = draw(raw, 3, 4, seed)
        compared += assert_same_gradient(raw, simplified, {k: 0.5 * a for k, a in inputs.items()})
    assert compared > 150
