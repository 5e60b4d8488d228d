"""If these fail, gradients have more sums or phases than one would write by hand, lose accuracy, or take too long."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from lngen import passes
from lngen.check.inputs import same_bits
from lngen.compile import Compilation, KernelSet
from lngen.graphs import GraphBuilder
from lngen.interpret import interpret
from lngen.ir import F64, Axis, Builder, D, Graph, M, Value, is_sum
from lngen.ir.numerics import NUMPY_DTYPE, Array
from lngen.lower import lower
from lngen.passes import upstream
from lngen.problem import depths
from lngen.ptx import run_plan
from plans import own_spec

Describe = Callable[[GraphBuilder], None]


def layernorm_of(b: GraphBuilder, h: Value) -> Value:
    """LayerNorm of a value; the statistics are kept."""
    xc = h - b.statistic(b.mean(h), "mean")
    xhat = xc * b.statistic((b.mean(xc * xc) + b.eps()).rsqrt(), "rstd")
    return xhat * b.input("gamma", D) + b.input("beta", D)


def rmsnorm_of(b: GraphBuilder, h: Value) -> Value:
    """RMSNorm of a value, without a weight."""
    return h * b.statistic((b.mean(h * h) + b.eps()).rsqrt(), "rms")


def gate(z: Value) -> Value:
    """z / sqrt(1 + z^2)."""
    return z * (z * z + 1).rsqrt()


def colscale(b: GraphBuilder) -> None:
    """A residual, scaled by column."""
    x, scale, residual = b.input("x", M, D), b.input("colscale", D), b.input("residual", M, D)
    b.output("y", layernorm_of(b, x * scale + residual))


def bias_and_colscale(b: GraphBuilder) -> None:
    """A bias before it is scaled."""
    x, bias, scale = b.input("x", M, D), b.input("bias", D), b.input("colscale", D)
    b.output("y", layernorm_of(b, (x + bias) * scale + b.input("residual", M, D)))


def rowscale(b: GraphBuilder) -> None:
    """A residual, scaled by row."""
    x, scale, residual = b.input("x", M, D), b.input("rowscale", M), b.input("residual", M, D)
    b.output("y", layernorm_of(b, x * scale + residual))


def halved(b: GraphBuilder) -> None:
    """A residual of which half is taken away; one sum is for both gradients."""
    x, scale, residual = b.input("x", M, D), b.input("colscale", D), b.input("residual", M, D)
    b.output("y", layernorm_of(b, x * scale - residual * 0.5))


def gated(b: GraphBuilder) -> None:
    """RMSNorm, weighted and gated."""
    x, z, gamma = b.input("x", M, D), b.input("z", M, D), b.input("gamma", D)
    b.output("y", rmsnorm_of(b, x) * gamma * gate(z))


def gated_before(b: GraphBuilder) -> None:
    """RMSNorm of what is gated."""
    x, z, gamma = b.input("x", M, D), b.input("z", M, D), b.input("gamma", D)
    b.output("y", rmsnorm_of(b, x * gate(z)) * gamma)


def norm_of_norm(b: GraphBuilder) -> None:
    """LayerNorm of a weighted RMSNorm."""
    x, weight = b.input("x", M, D), b.input("weight", D)
    b.output("y", layernorm_of(b, rmsnorm_of(b, x) * weight))


def quadratic(b: GraphBuilder) -> None:
    """What is normalised, and its square."""
    x, square = b.input("x", M, D), b.input("square", D)
    h = rmsnorm_of(b, x - b.mean(x))
    b.output("y", h + h * h * square)


# Column sums, the phase of each row sum (none waits for another of the gradient), and equations.
SUMS: dict[Describe, tuple[int, list[int], int]] = {
    colscale: (3, [0, 0], 27), bias_and_colscale: (4, [0, 0], 32), rowscale: (2, [0, 0, 0, 0, 0], 35),
    halved: (3, [0, 0], 34), gated: (1, [0], 28), gated_before: (1, [0], 33), norm_of_norm: (3, [0, 0, 0, 0], 44),
    quadratic: (1, [0, 1, 1], 27),
}  # fmt: skip


@pytest.mark.parametrize("describe", SUMS)
def test_sums_of_several_terms_stay_whole(describe: Describe) -> None:
    g = own_spec(describe, "bwd", d=512, dtype="bf16").graph()
    levels = depths(g)
    rows = sorted(max(levels[a] for a in e.args) for e in g.eqns if is_sum(e, D))
    assert (sum(is_sum(e, M) for e in g.eqns), rows, len(g.eqns)) == SUMS[describe]


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


@pytest.mark.parametrize("describe", SUMS)
def test_the_gradient_is_kept(describe: Describe) -> None:
    trace = own_spec(describe, "bwd", d=9, dtype="f64", save="none").trace()
    assert assert_same_gradient(trace["vjp"], trace["simplify"], draw(trace["vjp"], 5, 9)) == len(trace["vjp"].results)


def test_terms_cancel_before_they_are_summed_over_rows() -> None:
    """dy is around 1000 and its gradient around 1; sums of single terms lost four times as many digits."""
    forward, backward = (own_spec(colscale, way, d=64, dtype="f32").graph() for way in ("fwd", "bwd"))
    dy = 1000 + np.random.default_rng(1).normal(size=(2048, 64)).astype(np.float32)
    inputs = {**draw(forward, 2048, 64), "gamma": np.ones(64, np.float32), "dy": dy}
    found = interpret(backward, {**inputs, **interpret(forward, inputs)})["dcolscale"]
    inputs = {name: a.astype(np.float64) for name, a in inputs.items()}
    raw = own_spec(colscale, "bwd", d=64, dtype="f64").trace()["vjp"]
    exact = interpret(raw, inputs)["dcolscale"]
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert 0 < error < 7e-5


def test_a_scaled_residual_fits_into_registers() -> None:
    pytest.importorskip("cupy")
    spec = own_spec(colscale, "bwd", d=4096, dtype="bf16")
    built = KernelSet(lower(spec, Compilation(spec).schedule("sm_90"))).cubin("sm_90")
    assert not any(r.spills for r in built.resources.values())


def test_kernels_have_the_same_bits() -> None:
    """The gradient of a bias before the norm was a sum over rows of what has no D, which no kernel takes."""
    pytest.importorskip("cupy")
    spec = own_spec(bias_and_colscale, "bwd", d=40, dtype="f32")
    inputs = draw(spec.graph(), 9, 40)
    outcome = run_plan(lower(spec, Compilation(spec).schedule("sm_90")), inputs)
    assert outcome.findings == ()
    for name, value in interpret(spec.graph(), inputs).items():
        assert same_bits(outcome.results[name], value).all(), name


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
    return raw, passes.simplify(raw, raw.params[0].name)


@pytest.mark.parametrize("of", [M, D])
@pytest.mark.parametrize("over", [M, D])
def test_what_is_centred_sums_to_zero_along_its_own_axis_alone(of: Axis, over: Axis) -> None:
    b = Builder("centred_fwd")
    x, w = b.param("x", F64, M, D), b.param("w", F64, M if over is D else D)
    centred = b.sub("xc", x, b.reduce_mean("mean", x, axis=of))
    raw, simplified = lengths(b.build(b.cast("y", b.reduce_sum("s", b.mul("p", centred, w), axis=over), to=F64)))
    assert_same_gradient(raw, simplified, draw(raw, 3, 4))
    (dw,) = (r for r in simplified.results if r.name == "dw")
    sums = [e for e in simplified.eqns if e.op == "reduce_sum" and e.attr("axis") is over and e.args == (centred,)]
    assert bool(sums) is (of is not over), dw


@pytest.mark.parametrize("step", DEEP)
def test_a_deep_graph_takes_as_many_equations_as_it_has(step: str) -> None:
    grow, most = DEEP[step]
    for steps in (3, 30):
        b = Builder("deep_fwd")
        x, z = b.param("x", F64, M, D), b.param("z", F64, M, D)
        for _ in range(steps):
            x = grow(b, x, z)
        raw, simplified = lengths(b.build(b.cast("y", x, to=F64)))
        assert len(simplified.eqns) <= most * len(passes.cse(raw).eqns)
        inputs = draw(raw, 2, 3)
        assert_same_gradient(raw, simplified, inputs)


def random_forward(seed: int, steps: int) -> Graph:
    """A graph of random equations over inputs of every shape; divisors and roots stay off zero."""
    rng = random.Random(seed)
    b = Builder("random_fwd")
    values = [b.param("x", F64, M, D), b.param("z", F64, M, D), b.param("g", F64, D), b.param("w", F64, M)]
    for _ in range(steps):
        a, c = rng.choice(values), rng.choice(values)
        match rng.choice(
            ["add", "sub", "mul", "mul", "mul", "div", "neg", "reduce", "root", "number", "expand", "centre"]
        ):
            case "add" | "sub" | "mul" as op:
                values.append(b.emit(op, op, (a, c)))
            case "div":
                values.append(b.div("q", a, b.add("below", b.mul("square", c, c), b.const("one", 1.0, F64))))
            case "neg":
                values.append(b.neg("minus", a))
            case "reduce" if a.type.axes:
                op, axis = rng.choice(["reduce_sum", "reduce_mean"]), rng.choice(a.type.axes)
                values.append(b.emit(op, "total", (a,), axis=axis))
            case "root":
                below = b.add("below", b.mul("square", a, a), b.const("one", 1.0, F64))
                values.append(b.emit(rng.choice(["sqrt", "rsqrt"]), "root", (below,)))
            case "centre" if a.type.axes == (M, D):
                values.append(b.sub("c", a, b.reduce_mean("mean", a, axis=rng.choice([M, D, D]))))
            case "number":
                values.append(b.const("number", rng.choice([2.0, 0.5, -1.0]), F64))
            case "expand" if len(a.type.axes) == 1:
                values.append(b.expand("wide", a, axis=M if a.type.axes == (D,) else D))
    result = next(v for v in reversed(values) if v.type.axes == (M, D))
    return b.build(b.cast("y", result, to=F64))


@pytest.mark.parametrize("block", range(2))
def test_no_graph_grows_and_its_gradient_is_kept(block: int) -> None:
    compared = 0
    for seed in range(150 * block, 150 * block + 150):
        raw, simplified = lengths(random_forward(seed, 1 + seed % 30))
        assert len(simplified.eqns) <= 4 * len(passes.cse(raw).eqns) + 10
        compared += assert_same_gradient(raw, simplified, {k: 0.5 * a for k, a in draw(raw, 3, 4, seed).items()})
    assert compared > 200
