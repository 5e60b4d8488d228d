"""If these fail, a derivative is wrong, is refused, or is not validated when a graph of a gradient is made."""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

import graph_texts
from fuzz import CASES
from lngen.compiler import passes
from lngen.compiler.graphs import Definition, GraphBuilder
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import RUN, D, Graph, M, Value, values_of
from lngen.compiler.ir.evaluate import evaluate
from lngen.compiler.ir.places import downstream, upstream
from lngen.compiler.passes import simplify
from lngen.compiler.passes.edit import dce, substitute
from lngen.compiler.passes.polynomial import AxisSum, Term
from lngen.compiler.spec import Spec, make_spec, parse_spec
from lngen.errors import DerivativeError, ValidationError
from lngen.proof.check.differences import gradient_excess
from lngen.proof.check.inputs import same_bits
from own_graphs import TRAPS, own
from smooth_graphs import smooth_graph


@pytest.mark.parametrize("name", TRAPS)
def test_a_gradient_is_that_of_differences(name: str) -> None:
    """They share nothing with the derivation."""
    spec = own(name, "bwd", d=5, dtype="f32")
    found = gradient_excess(spec)
    assert list(found) == [f"d{p.name}" for p in spec.forward().params]
    assert max(found.values()) < 1


@pytest.mark.parametrize(("fused", "parts"), [
    ("y = fma x, w, w; return y", "p = mul x, w; y = add p, w; return y"),
    (
        "s = reduce_dot x, w {axis=D}; y = mul x, s; return y",
        "p = mul x, w; s = reduce_sum p {axis=D}; y = mul x, s; return y",
    ),
])  # fmt: skip
def test_what_is_fused_has_the_derivative_of_its_parts(fused: str, parts: str) -> None:
    found, expected = (passes.vjp(graph_texts.graph("x f32[M, D], w f32[M]", g), ("x", "w")) for g in (fused, parts))
    rng = np.random.default_rng(0)
    inputs = {p.name: rng.normal(0.7, 1, p.type.shape(5, 9)).astype("f4") for p in expected.params}
    simplified = interpret(simplify(found, found.params[0].name), inputs)
    for name, value in interpret(expected, inputs).items():
        np.testing.assert_allclose(interpret(found, inputs)[name], value, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(simplified[name], value, rtol=1e-5, atol=1e-6)


# ---- what is held for a constant ----


def with_detached(seed: int) -> Spec:
    """A graph of x and z with some value detached, whose effects may or may not cancel."""

    def describe(b: GraphBuilder) -> None:
        rng = random.Random(seed)
        x, z = b.input("x", M, D), b.input("z", M, D)
        of = rng.choice([x, z, x * z])
        kept = rng.choice([of, b.mean(of), b.reduce_max("most", of, axis=D)]).detach()
        pool: list[Value] = [x, z, x - kept, x + kept, z * kept.exp(), x * (-kept).exp()]
        for _ in range(rng.randint(1, 3)):
            left, right = rng.choice(pool), rng.choice(pool)
            power = (left * 0.25).exp() if rng.random() < 0.5 else left.exp()
            total = b.sum(power + x * 0.0)  # of a number per row, too
            more = [left - right, left - kept, right + kept, left * right, power, power / total, total.log()]
            pool += rng.sample(more, 3)
        last = rng.choice(pool[6:])
        b.output("y", last + x if rng.random() < 0.5 else last * x)

    return make_spec(Definition(f"random{seed}", describe), "bwd", {"d": 4})


def test_random_graphs_with_a_detached_value_have_the_gradient_of_their_differences_or_are_refused() -> None:
    done = Counter[str]()
    for seed in range(200):
        spec = with_detached(seed)
        used = any(e.op == "detach" for e in spec.forward().eqns)
        try:
            spec.graph()
        except DerivativeError:
            done["refused"] += 1
            continue
        assert max(gradient_excess(spec).values()) < 1, seed
        done["cancels" if used else "unused"] += 1
    assert done["refused"] > 20, done
    assert done["cancels"] > 10, done


def test_a_stopped_gradient_is_zero_by_definition() -> None:
    """Differences hold the stopped value."""
    spec = own("rounded", "bwd", d=5)
    assert "%stopped_rint_x_minus_x" in str(spec.forward())
    assert " = stop_gradient %" in str(spec.forward())
    x = np.linspace(-2, 2, 10, dtype="f4").reshape(2, 5)
    found = interpret(spec.graph(), {"dy": np.ones((2, 5), "f4"), "x": x, "scale": np.full(5, 3, "f4")})
    assert (found["dx"] == 3).all()
    np.testing.assert_array_equal(found["dscale"], np.rint(x).sum(0))
    assert max(gradient_excess(spec).values()) < 1


def test_the_maximum_of_a_softmax_needs_no_detach() -> None:
    rng = np.random.default_rng(1)
    inputs = {"x": rng.integers(-1, 2, (4, 5)).astype("f4"), "dy": rng.normal(size=(4, 5)).astype("f4")}
    specs = [own(name, "bwd", d=5) for name in ("softmax", "softmax, detached")]
    left, right = (interpret(spec.graph(), inputs)["dx"] for spec in specs)
    assert same_bits(left, right).all()
    assert "select_eq" not in str(specs[0].graph())


# ---- random graphs, and passes that are wrong: the validation has to see each, and name it ----


def spec_of(seed: int, d: int = 64, dtype: str = "f32", functions: bool = True) -> Spec:
    """A backward of a random graph, of some of its results and by some of its inputs."""
    rng = random.Random(seed)
    keys = {"d": d, "dtype": dtype, "save": rng.choice(("stats", "stats", "none"))}
    whole = replace(make_spec(smooth_graph(seed, functions), "bwd", keys), eps=rng.choice((1e-5, 0.3, RUN)))
    graph = whole.forward()
    of = [r for r in graph.results if rng.random() < 0.7] or [graph.results[0]]
    live = upstream(graph.eqns, of)
    wrt = [p for p in graph.tensors if p in live and rng.random() < 0.8] or [p for p in graph.tensors if p in live]
    return replace(whole, of=tuple(r.name for r in of), wrt=tuple(p.name for p in wrt))


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(1000, 2500 if CASES > 1000 else 1060), marks=pytest.mark.fuzz)]
)
def test_random_graphs_have_the_derivative_that_is_defined(seeds: range) -> None:
    for seed in seeds:
        spec_of(seed).trace()


def without_mean(s: AxisSum, terms: frozenset[Term]) -> AxisSum:
    """The defect that once was: the mean in which a product completes itself becomes a sum."""
    return AxisSum(s.axis, terms)


save = passes.save


def without_a_term(graph: Graph, *args: object, **keys: object) -> Graph:
    """A pass that drops the second term of a cotangent."""
    graph = save(graph, *args, **keys)  # type: ignore[arg-type]
    linear = downstream(graph.eqns, (p for p in graph.params if p.name.startswith("d")))
    for eqn in graph.eqns:
        if eqn.op in ("add", "sub") and {*eqn.args} <= linear and eqn.args[0].type == eqn.out.type:
            return dce(substitute(graph, {eqn.out: eqn.args[0]}))
    return graph


def all_maxima(graph: Graph, *args: object) -> set[Value]:
    """Every maximum taken for a constant, whether or not its effects cancel."""
    return {e.out for e in graph.eqns if e.op == "reduce_max"}


@pytest.mark.parametrize(("place", "mutant", "blamed"), [
    ("lngen.compiler.passes.polynomial.replace", without_mean, "simplify"),
    ("lngen.compiler.passes.save", without_a_term, "save"),
    ("lngen.compiler.passes.constants", all_maxima, "vjp"),
    ("lngen.compiler.passes.cse", lambda graph: without_a_term(graph, graph, ()), "cse"),
])  # fmt: skip
def test_a_pass_that_changes_the_mathematics_is_named(
    monkeypatch: pytest.MonkeyPatch, place: str, mutant: object, blamed: str
) -> None:
    monkeypatch.setattr(place, mutant)
    found = set()
    for seed in range(25):
        try:
            spec_of(seed).trace()
        except ValidationError as error:
            found.add(str(error).split("'")[1])
    assert found == {blamed}


def test_a_wrong_derivative_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lngen.compiler.passes.save", without_a_term)
    with pytest.raises(ValidationError) as error:
        parse_spec("layernorm.bwd:d=4096,dtype=bf16").graph()
    assert error.value.exit_code == 70
    assert str(error.value).startswith(
        "internal error of lngen: graph @layernorm_bwd: behind the pass 'save' the gradient is not that of the "
        "forward, dx["
    )


def test_a_derivative_is_validated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr("lngen.compiler.passes.validate", lambda *args: calls.append(args))
    spec = parse_spec("rmsnorm.bwd:d=64")
    assert [spec.graph(), spec.trace()["cse"]]
    assert len(calls) == 1


# ---- the passes behind it, at the length of the spec ----


def numbers(spec: Spec, graph: Graph, rows: int) -> Mapping[str, np.ndarray]:
    rng = np.random.default_rng(1)
    drawn = {p.name: rng.normal(0.5, 1.0, p.type.shape(rows, spec.d)) for p in graph.tensors}
    return drawn | values_of(graph, spec.eps_or_default)


@pytest.mark.parametrize("d", [64, 9000, 20000])
def test_the_passes_that_order_sums_change_no_number(d: int) -> None:
    """Graphs without functions, which become bits of f32; long rows have segments and Chan's formula."""
    compared = 0
    for seed in range(4):
        spec = spec_of(seed, d=d, functions=False)
        trace = dict(spec.trace())
        first, *others = list(trace)[list(trace).index("cse") :]
        inputs = numbers(spec, trace[first], 2)
        wanted = evaluate(trace[first], inputs, wide=True)
        for name in others:
            graph = trace[name]
            found = evaluate(graph, {p.name: inputs[p.name] for p in graph.params}, wide=True)
            found |= {result: found[same] for result, same in graph.shared.items()}
            for result, want in wanted.items():
                distance = np.abs(found[result].value - want.value)
                allowed = want.error + found[result].error
                assert (~(distance > allowed)).all(), (seed, name, result)
                compared += 1
    assert compared > 10


def test_simplify_keeps_its_own_sums() -> None:
    """The unit of the repair: a mean that absorbs a factor is still divided by its length."""
    trace = own("mean in a product", "bwd", d=64).trace()
    folds = [e.op for e in simplify(trace["vjp"], "dy").eqns if e.op.startswith("reduce")]
    assert folds == ["reduce_mean", "reduce_mean"]
