"""If these fail, a key of a spec is taken wrongly, or what is refused is not said in the right words."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import lngen
from lngen.check.inputs import random_inputs
from lngen.errors import SpecError, VerifyError
from lngen.graphs import GRAPHS, Definition, GraphBuilder
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


@pytest.mark.parametrize(("describe", "message"), [
    (
        lambda b: b.flag("fast-er", True),
        "an option is expected to be called by words of letters and digits, one underscore between two, got "
        "'fast-er'.",
    ),
    (
        lambda b: b.option("two__words", 1.0),
        "an option is expected to be called by words of letters and digits, one underscore between two, got "
        "'two__words'.",
    ),
    (
        lambda b: b.option("way", "a", ("a", "b-c")),
        "the values of 'way' are expected to be lower-case words of letters and digits, one underscore between "
        "two, got 'b-c'.",
    ),
    (
        lambda b: b.option("way", "A", ("A",)),
        "the values of 'way' are expected to be lower-case words of letters and digits, one underscore between "
        "two, got 'A'.",
    ),
    (lambda b: b.option("way", "c", ("a", "b")), "the default of 'way' is expected to be one of a, b, got 'c'."),
    (lambda b: b.option("size", "two"), "the default of 'size' is expected to be a number, got 'two'."),
    (lambda b: b.option("size", 1e31), "the default of 'size' is expected to be a number, got 1e+31."),
    (lambda b: (b.flag("twice", True), b.option("twice", 1.0)),
     "the option 'twice' is declared twice; give one another name."),
    (lambda b: (b.optional_input("z", D), b.flag("z", True)),
     "the option 'z' is declared twice; give one another name."),
])  # fmt: skip
def test_a_wrong_declaration(describe: Describe, message: str) -> None:
    with pytest.raises(VerifyError) as error:
        own(describe)
    assert str(error.value) == f"graph @own_fwd: {message}"


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_every_graph_is_no_option(key: str) -> None:
    with pytest.raises(SpecError) as error:
        own(lambda b: b.option(key, 1.0))
    assert str(error.value) == (
        f"graph 'own' has an option called '{key}', which is expected to be none of {', '.join(KEYS)}: these are "
        "options of every graph; choose another name."
    )


def test_a_value_in_a_spec_made_by_hand_is_checked() -> None:
    spec = own(lambda b: b.option("way", "a", ("a", "b")))
    by_hand = Spec(spec.definition, "fwd", 8, spec.dtype, spec.weight, spec.out, chosen=(("way", "../c"),))
    with pytest.raises(SpecError) as error:
        by_hand.graph()
    assert str(error.value) == "graph 'own': 'way' is expected to be one of a, b, got '../c'."


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

LAYERNORM = "d, dtype, weight, out, eps, save, order, strides, zero_centred, gamma, beta"

TEXTS = [
    ("layernorm.fwd:d=8,gamma=maybe", "there is no gamma 'maybe', expected one of yes, no."),
    (
        "rmsnorm.fwd:d=8,casts=lama",
        "there is no casts 'lama', expected one of once, llama, gemma, t5; did you mean 'llama'?",
    ),
    ("softmax.fwd:d=8,scale=big", "'scale' is expected to be a number, got 'big'."),
    ("softmax.fwd:d=8,scale=nan", "'scale' is expected to be a number, got 'nan'."),
    ("softmax.fwd:d=8,scale=--1", "'scale' is expected to be a number, got '--1'."),
    ("layernorm.fwd:d=8,save=x", "there is no save 'x', expected one of stats, none, y, mean, rstd."),
    (
        "layernorm.fwd:d=8,save=mean+none",
        "there is no save 'none', expected one of stats, none, y, mean, rstd; did you mean 'none'?",
    ),
    ("layernorm.fwd:d=8,casts=t5", f"there is no key 'casts', expected one of {LAYERNORM}."),
    ("layernorm.fwd:d=8,accumulate=gamma", f"there is no key 'accumulate', expected one of {LAYERNORM}."),
    ("layernorm.fwd:d=8,grad=f32", f"there is no key 'grad', expected one of {LAYERNORM}."),
    ("layernorm.fwd:d=8,of=y", f"there is no key 'of', expected one of {LAYERNORM}."),
    (
        "layernorm.bwd:d=8,accumulate=delta",
        "there is no accumulate 'delta', expected one of x, gamma, beta; did you mean 'beta'?",
    ),
    ("layernorm.bwd:d=8,wrt=x,accumulate=gamma", "there is no accumulate 'gamma', expected one of x."),
    ("layernorm.bwd:d=8,grad=f23", "there is no grad 'f23', expected one of f16, bf16, f32, f64; did you mean 'f32'?"),
    ("layernorm.bwd:d=8,of=rsdt", "there is no of 'rsdt', expected one of y, mean, rstd; did you mean 'rstd'?"),
    ("layernorm.bwd:d=8,save=none,of=rstd", "there is no of 'rstd', expected one of y."),
    ("layernorm.bwd:d=8,of=y+n", "there is no of 'n', expected one of y, mean, rstd."),
    ("cross_entropy.bwd:d=8,wrt=target", "there is no wrt 'target', expected one of x."),
    ("layernorm.bwd:d=0", "'d' is expected to be a whole number from 1 to 1073741824, got '0'."),
    ("layernorm.bwd:d=8,blocks=5000", "'blocks' is expected to be a whole number from 1 to 4096, got '5000'."),
    ("layernorm.bwd:d=8,eps=1", "'eps' is expected to be a number from 0 to 1, or run, got '1'."),
    ("layernorm.bwd:d=8,order=v0", "there is no order 'v0', expected one of v1."),
    ("layernorm.bwd:d=8,d=9", "'d' is given twice."),
    ("layernorm.bwd:d", "expected 'key=value', got 'd'."),
    ("layernorm.bwd:", "'d', the number of features per row, is missing; add for example d=4096."),
    ("layernorm.bwt:d=8", "there is no direction 'bwt', expected one of fwd, bwd; did you mean 'bwd'?"),
    (
        "layernom.bwd:d=8",
        f"there is no graph 'layernom', expected one of {', '.join(GRAPHS)}; did you mean 'layernorm'?",
    ),
]


@pytest.mark.parametrize(("text", "message"), TEXTS)
def test_a_wrong_text(text: str, message: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_spec(text)
    assert str(error.value) == f"spec '{text}': {message}"


@pytest.mark.parametrize(("name", "keys", "message"), [
    ("layernorm", {"gamma": None}, "'gamma' is expected to be yes or no, got None; gamma=no leaves it out."),
    ("rmsnorm", {"casts": None}, "'casts' is expected to be one of once, llama, gemma, t5, got None."),
    ("softmax", {"scale": None}, "'scale' is expected to be a number, got None."),
    ("layernorm", {"wrt": ()}, "'wrt' is expected to be one of x, gamma, beta at least, got none."),
    ("layernorm", {"accumulate": []}, "'accumulate' is expected to be one of x, gamma, beta at least, got none."),
    *(
        ("layernorm", {key: np.array(3)}, f"there is no {key} '3', expected one of {known}.")
        for key, known in (
            ("wrt", "x, gamma, beta"), ("accumulate", "x, gamma, beta"), ("of", "y, mean, rstd"),
            ("save", "stats, none, y, mean, rstd"),
        )
    ),
    ("layernorm", {"save": np.array([1, 2])}, "there is no save '[1 2]', expected one of stats, none, y, mean, rstd."),
    ("layernorm", {"blocks": 10**5000}, "'blocks' is expected to be a whole number from 1 to 4096, got '<int>'."),
    ("layernorm", {"wrt": b"x"}, "there is no wrt 'b'x'', expected one of x, gamma, beta."),
    ("layernorm", {"gamma": "n" * 201}, f"there is no gamma '{'n' * 197}...', expected one of yes, no."),
])  # fmt: skip
def test_a_wrong_object(name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as error:
        lngen.compile(name, d=8, **keys)
    assert str(error.value).partition("': ")[2] == message


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        (name, keys, "without residual, x1, rowscale and colscale there is no sum; use the norm alone.")
        for name in ("add_layernorm", "add_rmsnorm", "parallel_layernorm", "parallel_rmsnorm")
        for keys in ("residual=no",)
    ]
    + [
        (name, keys, "two norms of one sum without weights are the same; use a graph with one output.")
        for name, keys in (
            ("parallel_layernorm", "gamma=no,beta=no,gamma1=no,beta1=no"),
            ("parallel_rmsnorm", "gamma=no,gamma1=no"),
        )
    ]
    + [
        (name, "gamma=no,zero_centred=yes", "1 + gamma needs gamma; leave gamma=no or zero_centred=yes away.")
        for name in ("layernorm", "rmsnorm", "add_layernorm", "gated_rmsnorm", "layernorm_act", "rmsnorm_sigmoid_mul")
    ]
    + [
        (
            "parallel_rmsnorm",
            "gamma1=no,zero_centred=yes",
            "1 + gamma1 needs gamma1; leave gamma1=no or zero_centred=yes away.",
        ),
        (
            "add_rmsnorm",
            "casts=gemma,zero_centred=yes",
            "casts=gemma multiplies by 1 + gamma already; leave zero_centred=yes away.",
        ),
    ],
)
def test_options_that_exclude_each_other(name: str, keys: str, message: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_spec(f"{name}.fwd:d=8,{keys}").graph()
    assert str(error.value) == f"graph '{name}': {message}"


def test_a_dtype_wider_than_the_graph_computes_in() -> None:
    """The residual of an f64 stream would be rounded on the way in."""
    with pytest.raises(SpecError) as error:
        parse_spec("add_rmsnorm.fwd:d=8,residual_dtype=f64")
    assert "there is no residual_dtype 'f64', expected one of dtype, f16, bf16, f32" in str(error.value)


GIVEN = """graph @given_fwd(%x: f32[M, D], %gamma: f32[D]) -> (f32[M, D]) {
  %y : f32[M, D] = mul %x, %gamma
  return %y
}"""


def test_a_graph_as_given_has_its_dtypes() -> None:
    definition = Definition.from_graph(parse(GIVEN))
    for keys in ({"dtype": "bf16"}, {"eps": 0.5}, {"weight": "f16"}):
        with pytest.raises(SpecError) as error:
            make_spec(definition, "fwd", {"d": 8, **keys})
        assert str(error.value).partition("': ")[2] == (
            "graph 'given' is given with its dtypes and constants (dtype=f32, weight=f32, out=f32); leave the keys "
            "dtype, weight, out and eps away, or change the graph."
        )


# ---- results that stand for inputs ----


@pytest.mark.parametrize(("text", "needed", "equation"), [
    ("gated_layernorm.bwd:d=8,save=y", "'x', 'z'", "%gated : f32[M, D] = mul %y32, %gate"),
    ("rmsnorm_act.bwd:d=8,save=y", "'x'", "%y32 : f32[M, D] = silu %scaled"),
    ("add_layernorm.bwd:d=8,save=y,rowscale=yes,h=no", "'x'", "%total : f32[M, D] = add %x_rows, %residual32"),
    ("add_rmsnorm.bwd:d=8,save=y,rowscale=yes,residual=no,h=no", "'x'", "%x_rows : f32[M, D] = mul %x32, %rowscale32"),
    ("rmsnorm_sigmoid_mul.bwd:d=8,save=y", "'x'", "%gated : f32[M, D] = mul %x32, %sigmoid_scaled"),
])  # fmt: skip
def test_a_result_that_cannot_stand_for_an_input(text: str, needed: str, equation: str) -> None:
    """A factor of the row is none of the weights: where it is 0, as stochastic depth has it, the row is lost."""
    with pytest.raises(SpecError) as error:
        parse_spec(text).graph()
    assert str(error.value) == (
        f"save=y: 'y' cannot stand for {needed}, which backward needs: this equation cannot be undone with weights and "
        f"saved statistics alone; save other results.\n    {equation}"
    )


@pytest.mark.parametrize("name", ["gated_layernorm", "gated_rmsnorm", "rmsnorm_act", "rmsnorm_sigmoid_mul"])
def test_a_forward_that_saves_what_no_backward_can_use_is_refused_alike(name: str) -> None:
    said = []
    for direction in ("fwd", "bwd"):
        with pytest.raises(SpecError, match=r"^save=y: 'y' cannot stand for 'x'.*, which backward needs") as error:
            parse_spec(f"{name}.{direction}:d=8,save=y").graph()
        said.append(str(error.value))
    assert said[0] == said[1]


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
