"""If these fail, ``lngen explain`` prints a derivation with a step that is not true, or leaves out what acted.

Every statement is evaluated as it is printed, in float64 on random inputs: both sides of each identity, the derivative
of each equation against differences of that equation, each gradient against differences of the forward.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from lngen.check.differences import along
from lngen.check.inputs import normal, positive_inputs
from lngen.check.real import FUNCTIONS, evaluate
from lngen.explain.derivation import derivation_of
from lngen.graphs import GRAPHS
from lngen.ir import Axis, D, Graph, M, values_of
from lngen.ir.numerics import Array
from lngen.passes import IDENTITIES
from lngen.passes.simplify import _Simplifier
from lngen.spec import Spec, parse_spec

ROWS, FEATURES = 3, 8
OPTIONS = [  # with ops and identities that no graph has by default
    "layernorm.bwd:d=8,dtype=f32,save=y",
    "rmsnorm.bwd:d=8,dtype=bf16,casts=llama,save=none",
    "l2norm.bwd:d=8,dtype=f32,guard=max",
    "gated_layernorm.bwd:d=8,dtype=f32,gate=before,act=gelu",
    "gated_rmsnorm.bwd:d=8,dtype=f32,gate=before,act=gelu_tanh",
    "layernorm_act.bwd:d=8,dtype=f32,act=relu,eps=run",
    "add_layernorm.bwd:d=8,dtype=bf16,rowscale=yes,colscale=yes,x1=yes",
]
SPECS = [*(f"{name}.bwd:d=8,dtype=f32" for name in GRAPHS), *OPTIONS]


@cache
def data_of(text: str) -> Mapping[str, Any]:
    """What ``--json`` prints."""
    found: Mapping[str, Any] = json.loads(json.dumps(dict(derivation_of(parse_spec(text)).data)))
    return found


# ---- texts as numbers ----


def reduction(axis: Axis, length: int, reduce: Any) -> Any:
    place = (M, D).index(axis)

    def apply(a: Array) -> Array:
        shape = [*np.atleast_2d(a).shape]
        shape[place] = length
        return np.asarray(reduce(np.broadcast_to(a, shape), axis=place, keepdims=True))

    return apply


MEANINGS: dict[str, Any] = {
    **FUNCTIONS,
    **{name: getattr(np, name) for name in ("sqrt", "abs", "maximum", "minimum", "where", "rint")},
    "relu": lambda x: np.maximum(x, 0),
    "M": ROWS,
    "D": FEATURES,
} | {
    f"{name}_{axis}": reduction(axis, length, reduce)
    for axis, length in ((M, ROWS), (D, FEATURES))
    for name, reduce in (("sum", np.sum), ("mean", np.mean), ("max", np.max))
}


def value(text: str, known: Mapping[str, Any]) -> Array:
    return np.asarray(eval(text.replace("^", "**"), {"__builtins__": {}}, {**MEANINGS, **known}), np.float64)


def everything(graph: Graph, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Every value of a graph, with length 1 along the axes that it lacks."""
    values = graph.values()
    computed = evaluate(replace(graph, results=tuple(values.values())), inputs)
    shapes = {n: [r if axis in v.type.axes else 1 for axis, r in ((M, ROWS), (D, FEATURES))] for n, v in values.items()}
    return {name: computed[name].value.reshape(shapes[name]) for name in values}


@cache
def numbers(text: str) -> tuple[dict[str, Array], dict[str, Array]]:
    """Random inputs of a backward, not rounded, and the values of all its names: of forward, cotangents, shared ones.

    Values come from the graphs before and after simplify.
    """
    spec = parse_spec(text)
    trace, rng, positive = spec.trace(), np.random.default_rng(3), positive_inputs(spec)
    inputs = {
        p.name: normal(rng, p.type.shape(ROWS, FEATURES), 0.3, positive=p.name in positive) for p in trace["vjp"].params
    } | values_of(trace["build"], spec.eps_or_default)
    raw = everything(trace["vjp"], inputs)
    flat = {n: a.squeeze(tuple(i for i, k in enumerate(a.shape) if k == 1)) for n, a in raw.items()}
    given = {p.name: flat[p.name] for p in trace["save"].params}
    known = everything(trace["save"], given) | raw
    return inputs, {name: known[v] for name, v in data_of(text)["names"].items()}


def same(a: Array, b: Array) -> bool:
    size = max(np.abs(a).max(), np.abs(b).max(), 1e-3)
    return bool((np.abs(a - b) <= 1e-10 * size).all())


# ---- the statements that are not true ----


def faults(data: Mapping[str, Any], text: str) -> Iterator[str]:
    """The statements of ``data``, about the backward called ``text``, that are not true."""
    inputs, known = numbers(text)
    for e in data["forward"]:
        if not same(value(e["equation"], known), known[e["name"]]):
            yield f"forward: {e}"
    for name, shared in data["shared"].items():
        if not same(value(shared, known), known[name]):
            yield f"shared: {name} = {shared}"
    for c in data["cotangents"]:
        if not all(same(value(c[side], known), known[c["cotangent"]]) for side in ("before", "after")):
            yield f"cotangent: {c}"
    for step in data["steps"]:
        if "before" in step and not same(value(step["before"], known), value(step["after"], known)):
            yield f"step: {step}"
        if step["identity"] == "maximum" and not changes_nothing(data, text, step["on"]):
            yield f"step: {step}"
    yield from wrong_derivatives(data, known)
    yield from wrong_gradients(data, parse_spec(text), inputs, known)


def changes_nothing(data: Mapping[str, Any], text: str, name: str) -> bool:
    """Whether the differentiated results are the same with a value moved."""
    known = numbers(text)[1]
    moved = {**known, name: known[name] + 0.7}
    for e in data["forward"]:
        moved[e["name"]] = moved[name] if e["name"] == name else value(e["equation"], moved)
    return all(same(moved[result], known[result]) for result in parse_spec(text).differentiated)


def wrong_derivatives(data: Mapping[str, Any], known: Mapping[str, Array]) -> Iterator[str]:
    """What an equation adds to a cotangent, against differences of the equation along a direction."""
    equations, rng = {e["name"]: e["equation"] for e in data["forward"]}, np.random.default_rng(4)
    for of, by, given in dict.fromkeys((d["of"], d["by"], d["given"]) for d in data["derivatives"]):
        direction, weights = rng.normal(size=known[by].shape), rng.normal(size=known[of].shape)

        def at(h: float, of: str = of, by: str = by, v: Array = direction, w: Array = weights) -> float:
            return float((w * value(equations[of], {**known, by: known[by] + h * v})).sum())

        slope = (8 * (at(1e-4) - at(-1e-4)) - (at(2e-4) - at(-2e-4))) / 12e-4
        adds = [d["adds"] for d in data["derivatives"] if (d["of"], d["by"]) == (of, by)]
        found = sum(float((value(text, {**known, given: weights}) * direction).sum()) for text in adds)
        if abs(found - slope) > 1e-7 * max(1, abs(slope)):
            yield f"derivative: {of} by {by}: {adds}: {found}, {slope}"


def wrong_gradients(
    data: Mapping[str, Any], spec: Spec, inputs: Mapping[str, Array], known: Mapping[str, Array]
) -> Iterator[str]:
    """The closed forms, against differences of the forward along a direction."""
    forward, rng = spec.forward(), np.random.default_rng(5)
    cotangents = np.concatenate([inputs[f"d{name}"].ravel() for name in spec.differentiated])
    primals = {p.name: inputs[p.name] for p in forward.params}

    def results(**at: Array) -> Array:
        found = evaluate(forward, at)
        return np.concatenate([found[name].value.ravel() for name in spec.differentiated])

    for name, text in data["gradients"].items():
        wrt = name.removeprefix("d")
        full = np.broadcast_to(value(text, {**known, **gradients_before(data, name, known)}), known[wrt].shape)
        one = along(rng, results, primals, wrt, full.reshape(inputs[wrt].shape), cotangents, 1e-4)
        if one.error > 1e-7 * one.size + one.doubt:
            yield f"gradient: {name} = {text}"


def gradients_before(data: Mapping[str, Any], name: str, known: Mapping[str, Array]) -> dict[str, Array]:
    """A gradient that equals an earlier one is given by that one's name."""
    return {n: value(text, known) for n, text in data["gradients"].items() if n == data["gradients"][name]}


# ---- tests ----


@pytest.mark.parametrize("text", SPECS)
def test_every_statement_is_true(text: str) -> None:
    assert [*faults(data_of(text), text)] == []


def test_every_identity_acts() -> None:
    assert {s["identity"] for text in SPECS for s in data_of(text)["steps"]} == {*IDENTITIES}


def mutants(data: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """``data`` with the sign of one term of one statement flipped."""

    def flipped(text: str) -> str:
        return text.replace(" - ", " + ", 1) if " - " in text else f"-({text})"

    for key, sides in {"forward": ["equation"], "cotangents": ["before", "after"], "derivatives": ["adds"],
                       "steps": ["before", "after"]}.items():  # fmt: skip
        for n, statement in enumerate(data[key]):
            for side in sides:
                if "0" not in (statement.get("before"), statement.get("after")) and side in statement:
                    changed = {**statement, side: flipped(statement[side])}
                    yield f"{key} {changed}", {**data, key: [*data[key][:n], changed, *data[key][n + 1 :]]}
    for name, text in data["gradients"].items():
        yield name, {**data, "gradients": {**data["gradients"], name: flipped(text)}}


@pytest.mark.parametrize("text", ["layernorm.bwd:d=8,dtype=f32", "softmax.bwd:d=8,dtype=f32"])
def test_a_flipped_sign_is_not_true(text: str) -> None:
    assert [what for what, data in mutants(data_of(text)) if not [*faults(data, text)]] == []


def test_a_wrong_identity_is_not_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log says what acted, not what would have been right: here every sum of one factor is dropped."""
    text = "layernorm.bwd:d=8,dtype=f32"
    numbers(text)
    monkeypatch.setattr(_Simplifier, "_centred", lambda self, product, axis: True)
    assert any(fault.startswith("step") for fault in faults(derivation_of(parse_spec(text)).data, text))


def test_the_closed_form_of_layernorm_is_the_known_one() -> None:
    section = derivation_of(parse_spec("layernorm.bwd:d=4096,dtype=bf16"))
    assert section.data["gradients"]["dx"] == "rstd * (g - mean_D(g) - xhat * mean_D(g * xhat))"
    assert section.data["shared"] == {"g": "dy * gamma"}
    assert section.data["phases"] == [["sum_D(g)", "sum_D(g * xhat)"]]
    assert "sum_D(g), sum_D(g * xhat): none waits for another, so they are one reduction phase" in str(section)
    assert str(section).count("\n") <= 50


def test_a_forward_says_what_the_passes_changed() -> None:
    section = derivation_of(parse_spec("layernorm.fwd:d=4096,dtype=f32"))
    assert section.data["passes"]["compensate"] == ["mean", "var_sum"]
    assert "rstd = 1 / sqrt(veps)" in str(section)
    assert "lngen explain layernorm.bwd" in str(section)
