"""If these fail, a key of a spec is taken wrongly, or an eps by value gives other bits than one baked in."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import lngen
from lngen.compiler.graphs import GRAPHS, Definition, GraphBuilder, Options
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import RULES, RUN, ByValue, D, DType, Graph, M, is_over_segments, parse, values_of
from lngen.compiler.ir.numerics import Array
from lngen.compiler.passes.edit import substitute
from lngen.compiler.spec import KEYS as EVERY
from lngen.compiler.spec import Spec, make_spec, parse_spec
from lngen.errors import SpecError
from lngen.proof.check.inputs import mismatches, random_inputs
from lngen.proof.check.oracles import layernorm_forward
from plans import own_spec
from test_family import KEYS, text

Describe = Callable[[GraphBuilder], object]


def own(describe: Describe, direction: str = "fwd", **keys: object) -> Spec:
    """The spec of a graph that ``describe`` adds to -x."""

    def whole(b: GraphBuilder) -> None:
        describe(b)
        b.output("y", b.neg("minus", b.input("x", M, D)))

    return make_spec(Definition("own", whole), direction, {"d": 8, **keys})


# ---- what a description declares ----


@pytest.mark.parametrize("key", EVERY)
def test_a_key_of_every_graph_is_no_option(key: str) -> None:
    with pytest.raises(SpecError) as error:
        own(lambda b: b.option(key, 1.0))
    assert str(error.value) == (
        f"graph 'own' has an option called '{key}', which is expected to be none of {', '.join(EVERY)}: these are "
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
    for save, said in (
        ("rstd+mean", ""), ("mean+rstd", ""), ("stats", ""), ("none", ",save=none"), ("rstd", ",save=rstd"),
        ("y", ",save=y"), ("rstd+y", ",save=y+rstd"),
    ):  # fmt: skip
        assert str(parse_spec(f"layernorm.bwd:d=8,save={save}")) == f"layernorm.bwd:d=8,dtype=f32{said}"
    assert parse_spec("add_rmsnorm.bwd:d=8,save=h").save == "stats"
    assert parse_spec("add_rmsnorm.bwd:d=8,save=rstd").save == "rstd"


F32 = DType.F32
NAMES = [n for n, graph in GRAPHS.items() if graph.builder(Options(F32, F32, F32)).takes_eps]
WAYS = ("fwd", "bwd")
LONG = 70000  # elements of a row that has segments
ODD = 0.0123  # an eps that no other constant of a graph equals


def run_time(spec: str) -> Spec:
    return parse_spec(f"{spec},eps=run")


def baked(spec: Spec, eps: float) -> Spec:
    """The same spec with an eps; a spec's text has none below zero."""
    return replace(spec, eps=eps)


def with_parameters(graph: Graph, eps: float, by_value: tuple[ByValue, ...]) -> Graph:
    """``graph`` with its constants of ``eps`` replaced by the parameters."""
    constants = {e.out: v for e in graph.eqns for v in by_value if e.op == "const" and e.out.name == v.name}
    assert all(graph.producers()[c].value == RULES[v.rule].of(eps) for c, v in constants.items())
    kept = replace(graph, eqns=tuple(e for e in graph.eqns if e.out not in constants))
    return substitute(kept, dict(constants))


# ---- graphs ----


def test_all_graphs_but_those_without_eps_take_it_at_run_time() -> None:
    assert set(GRAPHS) - set(NAMES) == {"dyt", "rope", "softmax", "log_softmax", "cross_entropy"}


@pytest.mark.parametrize("name", NAMES)
def test_the_graph_is_the_baked_one_with_parameters_for_constants(name: str) -> None:
    """Whatever the options, forward and backward, of short and of long rows: so the bits are those of any eps."""
    taken = set()
    for n, (keys, way) in enumerate(product((k for k in KEYS[name] if "eps=" not in k), WAYS)):
        spec = run_time(text(name, way, keys, (7, 7, LONG, LONG)[n % 4]))
        graph, same = spec.graph(), baked(spec, ODD).graph()
        assert graph.tensors == same.params, spec
        moved = with_parameters(same, ODD, graph.by_value)
        assert (graph.eqns, graph.results, graph.attrs) == (moved.eqns, moved.results, moved.attrs), spec
        taken |= {(way, v.rule) for v in graph.by_value}
    assert {("fwd", "eps"), ("bwd", "eps")} <= taken
    assert (("bwd", "eps_squared") in taken) == (name == "l2norm")


@pytest.mark.parametrize("spec", ["layernorm.bwd:d=64", "add_rmsnorm.bwd:d=64", "l2norm.bwd:d=64"])
def test_a_backward_that_needs_no_eps_takes_none(spec: str) -> None:
    assert run_time(spec).graph().by_value == ()
    assert [v.rule for v in run_time(f"{spec},save=none").graph().by_value] == ["eps"]


def test_the_text_of_a_spec_and_its_graph_say_so() -> None:
    spec = run_time("l2norm.bwd:d=64,guard=max,dtype=f64,save=none")
    assert str(spec) == "l2norm.bwd:d=64,dtype=f64,guard=max,eps=run,save=none"
    assert parse_spec(str(spec)) == spec
    assert spec.slug == "l2norm_bwd__f64_d64_epsrun_savenone_set_guard_max"
    assert "(%dy: f64[M, D], %x: f64[M, D], %eps2: f64[] by value of eps_squared) ->" in str(spec.graph())
    assert all(parse(str(graph)) == graph for graph in spec.trace().values())


# ---- where a baked eps of 0 gives another graph ----

LAYERNORMS = [n for n in NAMES if "layernorm" in n]


@pytest.mark.parametrize("name", NAMES)
def test_only_long_rows_of_layernorms_depend_on_whether_eps_is_zero(name: str) -> None:
    """Their elements are measured from the mean of the row, or under eps=run from those of the segments."""
    for d in (128, 70016) if name.startswith("qk_") else (7, LONG):  # a head of q and k has 128 features
        for way in ("fwd:", "bwd:wrt=x,save=none,"):
            spec = parse_spec(f"{name}.{way}d={d},eps=run")
            differs = [eps for eps in (0.0, 1e-46, 7e-46, 1e-45, 1e-12, 0.9) if is_other(spec, eps)]
            here = name in LAYERNORMS and d == LONG and rescales(spec)
            assert differs == ([0.0, 1e-46, 7e-46] if here else [])


def is_other(spec: Spec, eps: float) -> bool:
    """Whether a baked eps gives other equations than one that is passed; constants that are equal count once."""
    made = baked(spec, eps).graph()
    return [e.op for e in made.eqns if e.op != "const"] != [e.op for e in spec.graph().eqns if e.op != "const"]


def rescales(spec: Spec) -> bool:
    """Whether scaled elements are computed from those of segments."""
    return any(e.op == "mul" and e.out.name.startswith("shift") for e in spec.graph().eqns)


@pytest.mark.parametrize("eps", [0.0, 1e-46])
def test_long_rows_with_an_eps_of_zero_are_right_all_the_same(eps: float) -> None:
    spec = run_time(f"layernorm.fwd:d={LONG}")
    inputs = random_inputs(spec, 3, eps=eps)
    run, fixed = interpret(spec.graph(), inputs), interpret(baked(spec, eps).graph(), without_numbers(spec, inputs))
    assert any(is_over_segments(e.out) for e in spec.graph().eqns)
    assert mismatches(run, fixed)  # the one case in which the bits are others
    want = layernorm_forward(*(inputs[n].astype(np.float64) for n in ("x", "gamma", "beta")), eps)[0]
    for found in (run, fixed):
        np.testing.assert_allclose(found["y"], want, rtol=2e-6, atol=2e-6)


# ---- bits ----


def without_numbers(spec: Spec, inputs: Mapping[str, Array]) -> dict[str, Array]:
    return {v.name: inputs[v.name] for v in spec.graph().tensors}


def test_numbers_are_rounded_once_from_the_double_that_the_rule_gives() -> None:
    """What a float of eps would give: the square of 1e-7 in f32 is another float."""
    graph = run_time("l2norm.fwd:d=8,guard=max").graph()
    (value,) = values_of(graph, 0.1).values()
    assert (value.dtype, value.shape) == (np.float32, ())
    assert value == np.float32(0.1 * 0.1) != np.float32(0.1) * np.float32(0.1)
    assert values_of(graph, 0.0)["eps2"] == np.float32(2.0**-126)
    assert values_of(graph, 1e200)["eps2"] == np.inf


# ---- graphs of one's own ----


def weights_first(b: GraphBuilder) -> None:
    """Linear in all of its parameters, if eps is one of them, and in none that is an array."""
    gamma, x = b.input("gamma", D), b.input("x", M, D)
    h = x + b.eps()
    b.output("y", h * gamma * b.sum(x))
    b.output("columns", b.sum(h, M), dtype="f32")


def test_eps_decides_no_order_of_sums() -> None:
    """It is no cotangent: rows are shared by as many blocks as with a constant."""
    run, fixed = (own_spec(weights_first, d=8192, eps=eps).graph() for eps in (RUN, ODD))
    assert [e.attrs for e in run.eqns] == [e.attrs for e in fixed.eqns if e.out.name != "eps"]


def test_the_text_of_a_graph_has_its_numbers() -> None:
    """Without and with the key, which says nothing new."""
    graph = run_time("layernorm.fwd:d=8").forward()
    given = Definition.from_graph(graph)
    spec = make_spec(given, "bwd", {"d": 8, "save": "none"})
    assert [v.rule for v in spec.graph().by_value] == ["eps"]
    assert str(spec).endswith(":d=8,dtype=f32,eps=run,save=none")
    assert make_spec(given, "bwd", {"d": 8, "save": "none", "eps": "run"}) == spec
