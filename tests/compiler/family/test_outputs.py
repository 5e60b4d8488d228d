"""If these fail, a graph of several outputs has wrong names, cotangents or gradients."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import pytest

import lngen
import sampling
from bit_graphs import centred, chained, two_kinds, two_norms
from bit_graphs import norm_and_sum as add_layernorm
from bit_graphs import norms_apart as apart
from lngen.compiler.compile import Compilation, KernelSet
from lngen.compiler.graphs import Definition, GraphBuilder
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import D, Eqn, Graph, Lengths, M
from lngen.compiler.ir.numerics import Array
from lngen.compiler.lower import lower
from lngen.compiler.passes import backward
from lngen.compiler.passes.order import rule_of, suited_cluster
from lngen.compiler.problem import Schedule
from lngen.compiler.spec import Spec, make_spec, parse_spec
from lngen.lab.inspect.traffic import measure, row_units
from lngen.launch.runtime.direction import Call
from lngen.launch.runtime.norm import Norm
from lngen.proof.check.differences import differences
from lngen.proof.check.inputs import draw, mismatches, random_inputs
from lngen.proof.check.spec_checks import check_spec
from lngen.proof.ptx import run_plan

Describe = Callable[[GraphBuilder], None]
Names = tuple[str, ...]


def spec_of(describe: Describe, direction: str = "fwd", **options: object) -> Spec:
    """The spec of a graph of one's own, of 37 features in f32 unless ``options`` say otherwise."""
    return make_spec(Definition(describe.__name__, describe), direction, {"d": 37, "dtype": "f32", **options})


def runs(spec: Spec, rows: int = 3, schedule: Schedule | None = None) -> None:
    """What the PTX of a spec computes, under its default schedule, has the interpreter's bits and breaks no rule."""
    inputs = random_inputs(spec, rows)
    outcome = run_plan(lower(spec, schedule or Compilation(spec).schedule()), inputs, rows=rows)
    assert not outcome.findings, outcome.findings[0]
    assert not mismatches(outcome.results, interpret(spec.graph(), inputs))


# ---- cotangents ----


def apart_weighted(b: GraphBuilder) -> None:
    """The same, each with a weight."""
    for name in ("x", "z"):
        scaled = b.mul(f"{name}_scaled", centred(b, name, b.input(name, M, D)), b.input(f"gamma_{name}", D))
        b.output(f"y_{name}", scaled)


SEVERAL = [add_layernorm, two_norms, two_kinds, apart, chained]


def arrays_for(norm: Norm, rows: int = 3) -> tuple[dict[str, Array], dict[str, Array]]:
    """Random inputs of a norm, and a cotangent for each of its outputs."""
    forward = norm.spec().graph()
    outputs = norm.spec("bwd").differentiated
    rng = np.random.default_rng(5)
    sizes = Lengths({M: rows, D: norm.spec().d})
    inputs = {v.name: draw(rng, v, sizes, 0.5) for v in forward.params}
    return inputs, {v.name: draw(rng, v, sizes, 0.5) for v in forward.results if v.name in outputs}


@pytest.mark.parametrize("save", ["stats", "none"])
@pytest.mark.parametrize("describe", SEVERAL)
def test_gradients_are_the_differences_of_all_outputs_together(describe: Describe, save: str) -> None:
    norm = lngen.compile(describe, d=7, dtype="f64", save=save)
    inputs, cotangents = arrays_for(norm)
    forward, names = norm.spec().graph(), tuple(cotangents)
    _, saved = norm.forward(**inputs)
    for wanted in product([True, False], repeat=len(names)):
        if not any(wanted):
            continue
        given = tuple(cotangents[n] if w else None for n, w in zip(names, wanted, strict=True))
        gradients = norm.backward(given, saved)
        flat = np.concatenate([(cotangents[n] * w).ravel() for n, w in zip(names, wanted, strict=True)])

        def function(**at: Array) -> Array:
            results = interpret(forward, at)
            return np.concatenate([results[n].ravel() for n in names])

        for p, gradient in zip(forward.params, gradients, strict=True):
            expected = differences(function, inputs, p.name, 1e-3, dy=flat)
            assert gradient.shape == expected.shape
            np.testing.assert_allclose(gradient, expected, rtol=1e-7, atol=1e-9, err_msg=f"{p.name} {wanted}")


def last_step(spec: Spec) -> Eqn:
    """What makes the first gradient, before it is rounded."""
    producers = spec.graph().producers()
    return producers[producers[spec.graph().results[0]].args[0]]


def test_what_passes_a_norm_by_is_added_to_its_whole_gradient() -> None:
    """dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dh: what cancels does so before dh comes."""
    alone, both = spec_of(add_layernorm, "bwd", of="y"), spec_of(add_layernorm, "bwd")
    assert last_step(alone).op == "mul"
    assert last_step(both).op == "fma"
    assert [v.name for v in last_step(both).args[::2]] == ["n_rstd", "dresidual_out"]
    assert len(both.graph().eqns) == len(alone.graph().eqns)


@pytest.mark.parametrize("describe", [add_layernorm, two_norms])
def test_check_holds_every_output_against_the_forward(describe: Describe, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(describe, "bwd")
    results = list(check_spec(spec, on="ptx", rows=(3,)))
    assert {r.what for r in results} >= {"compile", "ptx"}
    assert all(r.ok for r in results)

    def of_the_first(graph: Graph, wrt: Names, saved: Names, of: Names | None, *rest: Any) -> Graph:
        return backward(graph, wrt, saved, (graph.results[0].name,), *rest)

    monkeypatch.setattr("lngen.compiler.passes.backward", of_the_first)
    other = spec_of(describe, "bwd")  # whose graph is not derived yet
    assert not all(r.ok for r in check_spec(other, on="interpreter", rows=(3,)))


def test_traffic_counts_every_cotangent() -> None:
    spec = spec_of(add_layernorm, "bwd", d=512, dtype="bf16", wrt="x")
    plan = lower(spec, Compilation(spec).schedule())
    units = row_units(plan, measure(KernelSet(plan), random_inputs(spec, 8)), 8)
    assert units == pytest.approx(5, rel=0.02)  # dy, dresidual_out, x, residual and dx


def test_what_a_cotangent_that_is_none_takes_is_gone() -> None:
    whole = spec_of(add_layernorm, "bwd")
    assert " ".join(p.name for p in whole.graph().params) == "dy dresidual_out x residual gamma n_mean n_rstd"
    norm_alone = spec_of(add_layernorm, "bwd", of="y").graph()
    assert " ".join(p.name for p in norm_alone.params) == "dy x residual gamma n_mean n_rstd"
    stream_alone = spec_of(add_layernorm, "bwd", of="residual_out", wrt="x").graph()
    assert [p.name for p in stream_alone.params] == ["dresidual_out"]
    assert [e.op for e in stream_alone.eqns] == ["cast"]


def test_the_outputs_a_backward_is_of_are_in_its_name() -> None:
    spec = spec_of(add_layernorm, "bwd", of="y")
    assert str(spec) == f"norm_and_sum@{spec.digest}.bwd:d=37,dtype=f32,of=y"
    assert spec.slug == f"norm_and_sum_{spec.digest}_bwd__f32_d37_of_y"
    assert spec.with_direction("fwd").of is None
    every = spec_of(add_layernorm, "bwd", of="residual_out+y")
    assert str(every) == f"norm_and_sum@{spec.digest}.bwd:d=37,dtype=f32"
    assert every.differentiated == ("y", "residual_out")
    assert parse_spec(str(spec), {"norm_and_sum": spec.definition}) == spec


def test_a_norm_of_one_of_its_outputs_takes_one_cotangent() -> None:
    norm, both = (lngen.compile(add_layernorm, d=16, **options) for options in ({"of": "y"}, {}))
    inputs, cotangents = arrays_for(norm)
    found = norm.backward(cotangents["y"], norm.forward(**inputs)[1])
    expected = both.backward((cotangents["y"], None), both.forward(**inputs)[1])
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    of_y = Compilation(spec_of(add_layernorm, "bwd", d=16, of="y"))
    assert norm.source("bwd") == of_y.kernels(of_y.schedule()).file("sm_90")


def test_the_backward_of_a_subset_is_made_once_by_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = lngen.compile(add_layernorm, d=16)
    inputs, cotangents = arrays_for(norm)
    _, saved = norm.forward(**inputs)
    made: list[Spec] = []

    def slow(spec: Spec) -> Call:
        made.append(spec)
        time.sleep(0.05)
        return Call(spec, "")

    monkeypatch.setattr(norm, "_call_of", slow)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: norm.backward((cotangents["y"], None), saved)[0], range(8)))
    assert [(s.direction, s.of) for s in made] == [("bwd", ("y",))]
    assert all((a == found[0]).all() for a in found)


@pytest.mark.parametrize(("describe", "options", "blocks"), [
    (add_layernorm, {}, 8),
    (add_layernorm, {"of": "y"}, 8),
    (two_norms, {}, 8),
    (two_norms, {"of": "y1"}, 8),
    (apart_weighted, {}, 8),  # no cotangent is in every gradient
    (two_kinds, {}, 8),
    # Statistics that are computed again are summed over a row, too, as they were in the forward.
    (add_layernorm, {"save": "none"}, 2),
    (two_norms, {"save": "none"}, 2),
    (apart_weighted, {"save": "none"}, 2),
    (two_kinds, {"save": "none"}, 2),
])  # fmt: skip
def test_long_rows_are_shared_where_only_cotangents_are_summed(
    describe: Describe, options: dict[str, str], blocks: int
) -> None:
    assert (
        suited_cluster(spec_of(describe, "bwd", d=10248, dtype="bf16", **options).graph(), 10248, rule_of("v1"))
        == blocks
    )


# ---- gradients that vanish ----


def vanishing(b: GraphBuilder) -> None:
    """Nothing moves the result, whatever the axes of an input."""
    x, gamma, w = b.input("x", M, D), b.input("gamma", D), b.input("w", M)
    zeros = b.add("zeros", b.sub("no_x", x, x), b.sub("no_gamma", gamma, gamma))
    b.output("y", b.add("no_w", zeros, b.sub("none", w, w)))


def only_gamma(b: GraphBuilder) -> None:
    """A gradient over features that vanishes beside one that does not."""
    x, gamma, w = b.input("x", M, D), b.input("gamma", D), b.input("w", D)
    b.output("y", b.add("s", b.mul("p", x, gamma), b.sub("none", w, w)))


def where(b: GraphBuilder) -> None:
    """What is compared has no part in the gradient."""
    x, gamma = b.input("x", M, D), b.input("gamma", D)
    b.output("y", b.select_eq("chosen", gamma, gamma, x))


ZEROS = {vanishing: {"x", "gamma", "w"}, only_gamma: {"w"}, where: {"gamma"}}


@sampling.grid(("describe", "dtype"), product(ZEROS, ("f32", "bf16", "f16", "f64")), strength=1)
def test_a_gradient_that_vanishes_is_zeros(describe: Describe, dtype: str) -> None:
    norm = lngen.compile(describe, d=12, dtype=dtype)
    inputs, cotangents = arrays_for(norm)
    _, saved = norm.forward(**inputs)
    gradients = norm.backward(cotangents["y"], saved)
    for (name, primal), gradient in zip(inputs.items(), gradients, strict=True):
        assert (gradient.shape, gradient.dtype) == (primal.shape, primal.dtype)
        assert (name in ZEROS[describe]) == (not gradient.astype(np.float64).any())
    runs(spec_of(describe, "bwd", dtype=dtype))
    for name in ZEROS[describe]:
        runs(spec_of(describe, "bwd", dtype=dtype, wrt=name))


def test_an_input_whose_output_has_no_cotangent_has_zeros() -> None:
    norm = lngen.compile(apart, d=8)
    inputs, cotangents = arrays_for(norm)
    dx, dz = norm.backward((cotangents["x_hat"], None), norm.forward(**inputs)[1])
    assert dx.any()
    assert not dz.any()
    assert dz.shape == inputs["z"].shape
    runs(spec_of(apart, "bwd", of="x_hat"))
    runs(spec_of(apart, "bwd", of="x_hat", wrt="z"), rows=0)


def test_a_length_that_no_gradient_has_is_told_by_an_input() -> None:
    def weights(b: GraphBuilder) -> None:
        x, gamma = b.input("x", M, D), b.input("gamma", D)
        b.output("y", b.neg("minus", x))
        b.output("total", b.reduce_sum("sum", b.expand("wide", gamma, axis=M), axis=M))

    graph = spec_of(weights, "bwd", wrt="gamma", of="total").graph()
    assert [p.name for p in graph.params] == ["dtotal", "x"]
    runs(spec_of(weights, "bwd", wrt="gamma", of="total"))


def test_a_statistic_alone_is_no_output() -> None:
    def own(b: GraphBuilder) -> None:
        x, w = b.input("x", M, D), b.input("w", M)
        b.output("y", b.neg("minus", x))
        b.statistic(b.mul("w2", w, w))

    for save in ("stats", "none"):
        assert spec_of(own, "bwd", save=save, wrt="x").graph()
