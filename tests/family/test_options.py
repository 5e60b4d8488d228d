"""If these fail, a key of a spec is taken wrongly."""

from collections.abc import Callable

import numpy as np
import pytest

import lngen
from lngen.check.inputs import random_inputs
from lngen.errors import SpecError
from lngen.graphs import Definition, GraphBuilder
from lngen.interpret import interpret
from lngen.ir import D, M, parse
from lngen.spec import KEYS, Spec, make_spec, parse_spec

Describe = Callable[[GraphBuilder], object]


def own(describe: Describe, direction: str = "fwd", **keys: object) -> Spec:
    """The spec of a graph that ``describe`` adds to -x."""

    def whole(b: GraphBuilder) -> None:
        describe(b)
        b.output("y", b.neg("minus", b.input("x", M, D)))

    return make_spec(Definition("own", whole), direction, {"d": 8, **keys})


# ---- what a description declares ----


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_every_graph_is_no_option(key: str) -> None:
    with pytest.raises(SpecError) as error:
        own(lambda b: b.option(key, 1.0))
    assert str(error.value) == (
        f"graph 'own' has an option called '{key}', which is expected to be none of {', '.join(KEYS)}: these are "
        "options of every graph; choose another name."
    )


def test_what_a_description_gets() -> None:
    """The value that is given, or the default; a number as a number."""
    got: list[object] = []

    def describe(b: GraphBuilder) -> None:
        got[:] = b.flag("fast", False), b.option("way", "a", ("a", "b")), b.option("size", 2.0)

    for keys, values in (
        ({}, [False, "a", 2.0]),
        ({"fast": "yes", "way": "b", "size": "-0.5"}, [True, "b", -0.5]),
        ({"fast": True, "size": 3}, [True, "a", 3.0]),
    ):
        own(describe, **keys).forward()
        assert got == values
        assert [type(value) for value in got] == [bool, str, float]


def test_an_output_that_is_optional() -> None:
    def describe(b: GraphBuilder) -> None:
        b.optional_output("twice", b.add("sum", *[b.input("z", M, D)] * 2), default=False)

    for keys, names in (({}, ["y"]), ({"twice": "yes"}, ["twice", "y"])):
        assert [r.name for r in own(describe, **keys).forward().results] == names


# ---- texts ----


GIVEN = """graph @given_fwd(%x: f32[M, D], %gamma: f32[D]) -> (f32[M, D]) {
  %y : f32[M, D] = mul %x, %gamma
  return %y
}"""


# ---- results that stand for inputs ----


def test_a_forward_may_save_for_a_backward_of_some_gradients() -> None:
    """With a factor of the row, y stands for x where only gamma has a gradient."""
    keys = "d=8,save=y,rowscale=yes,h=no"
    assert {p.name for p in parse_spec(f"add_layernorm.bwd:{keys},wrt=gamma").graph().params} >= {"dy", "y"}
    assert [r.name for r in parse_spec(f"add_layernorm.fwd:{keys}").graph().results] == ["y", "mean", "rstd"]
    lngen.compile("add_layernorm", d=8, save="y", rowscale=True, h=False, wrt="gamma")


def test_a_result_stands_for_an_input_that_is_not_cast() -> None:
    spec = make_spec(Definition.from_graph(parse(GIVEN)), "bwd", {"d": 8, "save": "y"})
    assert [p.name for p in spec.graph().params] == ["dy", "gamma", "y"]
    inputs = random_inputs(spec, 4)
    found = interpret(spec.graph(), inputs)
    np.testing.assert_allclose(found["dgamma"], (inputs["dy"] * inputs["y"] / inputs["gamma"]).sum(0), rtol=1e-5)


def undone(op: str, first: bool) -> Definition:
    """y = op(x, gamma) or op(gamma, x), and a gradient of gamma that needs x."""

    def describe(b: GraphBuilder) -> None:
        x, gamma, scale = b.input("x", M, D), b.input("gamma", D), b.input("scale", D)
        moved = b.mul("moved", x, scale)
        moved = (
            b.neg("minus", moved) if op == "neg" else b.emit(op, "moved", (moved, gamma) if first else (gamma, moved))
        )
        b.output("y", moved)

    return Definition("own", describe)


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "neg"])
@pytest.mark.parametrize("first", [True, False])
def test_every_operation_with_a_weight_is_undone(op: str, first: bool) -> None:
    """The gradient of ``scale`` is that of a backward that has x."""
    found = []
    for save in ("y", "stats"):
        spec = make_spec(undone(op, first), "bwd", {"d": 8, "save": save, "wrt": "scale"})
        assert ("x" in {p.name for p in spec.graph().params}) == (save == "stats")
        inputs = random_inputs(spec, 5)
        found.append(interpret(spec.graph(), inputs)["dscale"])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_where_a_weight_is_0_the_rest_of_the_gradient_is_right() -> None:
    """Only the division is guarded; the runtime refuses such weights, ahead of time nobody looks."""
    spec = parse_spec("layernorm.bwd:d=16,save=y")
    inputs = {name: a.copy() for name, a in random_inputs(spec, 4).items()}
    inputs["gamma"][5] = 0
    inputs["y"][:, 5] = inputs["beta"][5]
    found = interpret(spec.graph(), inputs)
    assert all(np.isfinite(a).all() for a in found.values())
    assert found["dgamma"][5] == 0
    np.testing.assert_allclose(found["dbeta"], inputs["dy"].sum(0), rtol=1e-5)


def test_saved_names_are_in_their_order() -> None:
    """Names that say what the default says are the default."""
    for save, text in (
        ("rstd+mean", ""), ("mean+rstd", ""), ("stats", ""), ("none", ",save=none"), ("rstd", ",save=rstd"),
        ("y", ",save=y"), ("rstd+y", ",save=y+rstd"),
    ):  # fmt: skip
        assert str(parse_spec(f"layernorm.bwd:d=8,save={save}")) == f"layernorm.bwd:d=8,dtype=f32{text}"
    assert parse_spec("add_rmsnorm.bwd:d=8,save=h").save == "stats"
    assert parse_spec("add_rmsnorm.bwd:d=8,save=rstd").save == "rstd"
