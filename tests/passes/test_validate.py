"""If these fail, a pass may change the mathematics of a backward and nobody looks at the graph at hand."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from fuzz import CASES
from lngen import passes
from lngen.errors import ValidationError
from lngen.graphs import Definition, GraphBuilder
from lngen.ir import RUN, D, Graph, M, Value, values_of
from lngen.ir.evaluate import evaluate
from lngen.passes import downstream, simplify, upstream
from lngen.passes.edit import dce, substitute
from lngen.passes.polynomial import AxisSum, Term
from lngen.spec import Spec, make_spec, parse_spec
from smooth_graphs import smooth_graph


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


def found_in(seeds: range) -> list[str]:
    """The passes that are blamed for wrong derivatives of graphs."""
    found = []
    for seed in seeds:
        try:
            spec_of(seed).trace()
        except ValidationError as error:
            found.append(str(error).split("'")[1])
    return found


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(1000, 2500), marks=pytest.mark.fuzz)])
def test_random_graphs_have_the_derivative_that_is_defined(seeds: range) -> None:
    for seed in seeds if CASES > 1000 else seeds[:60]:
        spec_of(seed).trace()


def gate(b: GraphBuilder) -> None:
    """The gradient that lost a factor 1/D: a product that forward names completes itself in a mean."""
    x = b.input("x", M, D)
    b.output("y", x * (b.mean(x * x) + b.eps()).rsqrt() * (x + 1.5))


def seednorm(b: GraphBuilder) -> None:
    """Self-rescaled normalisation (arXiv 2510.22777)."""
    x, alpha, beta, gamma = b.input("x", M, D), *(b.input(name, D) for name in ("alpha", "beta", "gamma"))
    b.output("y", (b.sum(x * beta).tanh() * alpha + gamma) * (x * (b.mean(x * x) + b.eps()).rsqrt()))


@pytest.mark.parametrize("describe", [gate, seednorm])
def test_a_mean_in_a_product_stays_a_mean(describe: Callable[[GraphBuilder], None]) -> None:
    """Differences of the forward say so, which share nothing with the derivation."""
    from lngen.check.differences import gradient_excess

    assert max(gradient_excess(make_spec(Definition("own", describe), "bwd", {"d": 64, "dtype": "f32"})).values()) < 1


# ---- mutants: the validation has to see each, and name its pass ----


def without_mean(s: AxisSum, terms: frozenset[Term]) -> AxisSum:
    """The defect that once was: the mean in which a product completes itself becomes a sum."""
    return AxisSum(s.axis, terms)


def without_a_term(graph: Graph, *args: object, **keys: object) -> Graph:
    """A pass that drops the second term of a cotangent."""
    graph = save(graph, *args, **keys)  # type: ignore[arg-type]
    linear = downstream(graph.eqns, (p for p in graph.params if p.name.startswith("d")))
    for eqn in graph.eqns:
        if eqn.op in ("add", "sub") and {*eqn.args} <= linear and eqn.args[0].type == eqn.out.type:
            return dce(substitute(graph, {eqn.out: eqn.args[0]}))
    return graph


save = passes.save


def all_maxima(graph: Graph, *args: object) -> set[Value]:
    """Every maximum taken for a constant, whether or not its effects cancel."""
    return {e.out for e in graph.eqns if e.op == "reduce_max"}


@pytest.mark.parametrize(
    ("place", "mutant", "blamed"),
    [
        ("lngen.passes.polynomial.replace", without_mean, "simplify"),
        ("lngen.passes.save", without_a_term, "save"),
        ("lngen.passes.constants", all_maxima, "vjp"),
        ("lngen.passes.cse", lambda graph: without_a_term(graph, graph, ()), "cse"),
    ],
)
def test_a_pass_that_changes_the_mathematics_is_named(
    monkeypatch: pytest.MonkeyPatch, place: str, mutant: object, blamed: str
) -> None:
    monkeypatch.setattr(place, mutant)
    assert set(found_in(range(25))) == {blamed}


def test_a_wrong_derivative_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lngen.passes.save", without_a_term)
    with pytest.raises(ValidationError) as error:
        parse_spec("layernorm.bwd:d=4096,dtype=bf16").graph()
    assert error.value.exit_code == 70
    assert str(error.value).startswith(
        "internal error of lngen: graph @layernorm_bwd: behind the pass 'save' the gradient is not that of the "
        "forward, dx["
    )


def test_a_derivative_is_validated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr("lngen.passes.validate", lambda *args: calls.append(args))
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
    trace = make_spec(Definition("own", gate), "bwd", {"d": 64, "dtype": "f32"}).trace()
    folds = [e.op for e in simplify(trace["vjp"], "dy").eqns if e.op.startswith("reduce")]
    assert folds == ["reduce_mean", "reduce_mean"]
