"""If these fail, a derivative takes for a constant what moves a result, or refuses what does not."""

import random
from collections import Counter

import numpy as np
import pytest

from lngen.check.differences import gradient_excess
from lngen.check.inputs import same_bits
from lngen.errors import DerivativeError
from lngen.graphs import Definition, GraphBuilder
from lngen.interpret import interpret
from lngen.ir import D, M, Value
from lngen.spec import Spec, make_spec, parse_spec


def of(describe: object, way: str = "bwd", d: int = 5, **keys: object) -> Spec:
    return make_spec(Definition("own", describe), way, {"d": d, "dtype": "f32", **keys})  # type: ignore[arg-type]


@pytest.mark.parametrize("results", ["y", "rowsum", "rowmax", "y+rowsum", "y+rowmax+rowsum"])
@pytest.mark.parametrize("graph", ["softmax", "log_softmax"])
def test_a_statistic_has_the_gradient_of_its_differences(graph: str, results: str) -> None:
    assert max(gradient_excess(parse_spec(f"{graph}.bwd:d=5,scale=0.5,of={results}")).values()) < 1


def random_graph(seed: int) -> Definition:
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

    return Definition(f"random{seed}", describe)


def test_random_graphs_with_a_detached_value_have_the_gradient_of_their_differences_or_are_refused() -> None:
    done = Counter[str]()
    for seed in range(200):
        spec = make_spec(random_graph(seed), "bwd", {"d": 4})
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


def test_what_is_detached_has_to_cancel() -> None:
    def stopped(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        b.output("y", x * x.detach())

    with pytest.raises(DerivativeError):
        of(stopped).graph()
    of(stopped, "fwd").graph()


def test_effects_cancel_where_only_numbers_show_it() -> None:
    """The entropy of a softmax: the maximum is in a logarithm, in a sum of products and in its divisor."""

    def entropy(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        z = x - b.reduce_max("most", x, axis=D).detach()
        e = z.exp()
        total = b.sum(e)
        b.output("h", total.log() - b.sum(e * z) / total)

    assert max(gradient_excess(of(entropy)).values()) < 1


def test_a_stopped_gradient_is_zero_by_definition() -> None:
    """A straight-through estimator; differences hold the stopped value."""

    def rounded(b: GraphBuilder) -> None:
        x, scale = b.input("x", M, D), b.input("scale", D)
        b.output("y", scale * (x + b.stop_gradient(x.rint() - x)))

    spec = of(rounded)
    assert "%stopped_rint_x_minus_x" in str(spec.forward())
    assert " = stop_gradient %" in str(spec.forward())
    dy = np.ones((2, 5), "f4")
    x = np.linspace(-2, 2, 10, dtype="f4").reshape(2, 5)
    found = interpret(spec.graph(), {"dy": dy, "x": x, "scale": np.full(5, 3, "f4")})
    assert (found["dx"] == 3).all()
    np.testing.assert_array_equal(found["dscale"], np.rint(x).sum(0))
    assert max(gradient_excess(spec).values()) < 1


def test_the_maximum_of_a_softmax_needs_no_detach() -> None:
    def plain(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        e = (x - b.reduce_max("most", x, axis=D)).exp()
        b.output("y", e * (1 / b.sum(e)))

    def detached(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        e = (x - b.reduce_max("most", x, axis=D).detach()).exp()
        b.output("y", e * (1 / b.sum(e)))

    rng = np.random.default_rng(1)
    inputs = {"x": rng.integers(-1, 2, (4, 5)).astype("f4"), "dy": rng.normal(size=(4, 5)).astype("f4")}
    left, right = (interpret(of(describe).graph(), inputs)["dx"] for describe in (plain, detached))
    assert same_bits(left, right).all()
    assert "select_eq" not in str(of(plain).graph())
