"""If these fail, ``lngen explain`` prints a derivation with a step that is not true, or leaves out what acted.

Every statement is evaluated as it is printed, in float64 on random inputs: both sides of each identity, the derivative
of each equation against differences of that equation, each gradient against differences of the forward.
"""

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
from lngen.explain.derivation import derivation
from lngen.graphs import GRAPHS
from lngen.ir import WIDE, Graph, values_of
from lngen.ir.numerics import Array
from lngen.passes import IDENTITIES
from lngen.passes.simplify import _Simplifier
from lngen.spec import parse_spec

LENGTHS = 3, 8  # of M and D
OPTIONS = [  # with ops and identities that no graph has by default
    "layernorm.bwd:d=8,dtype=f32,save=y",
    "rmsnorm.bwd:d=8,dtype=bf16,casts=llama,save=none",
    "l2norm.bwd:d=8,dtype=f32,guard=max",
    "gated_layernorm.bwd:d=8,dtype=f32,gate_first=yes,act=gelu",
    "gated_rmsnorm.bwd:d=8,dtype=f32,gate_first=yes,act=gelu_tanh",
    "layernorm_act.bwd:d=8,dtype=f32,act=relu,eps=run",
    "add_layernorm.bwd:d=8,dtype=bf16,rowscale=yes,colscale=yes,x1=yes",
]
SPECS = [*(f"{name}.bwd:d=8,dtype=f32" for name in GRAPHS), *OPTIONS]


@cache
def data_of(text: str) -> Mapping[str, Any]:
    """What ``--json`` prints."""
    return dict(json.loads(json.dumps(dict(derivation(parse_spec(text)).data))))


def along_axis(place: int, reduce: Any) -> Any:
    def apply(a: Array) -> Array:
        a = np.atleast_2d(a)
        return np.asarray(reduce(np.repeat(a, LENGTHS[place] // a.shape[place], place), axis=place, keepdims=True))

    return apply


MEANINGS: dict[str, Any] = {
    **FUNCTIONS,
    **{name: getattr(np, name) for name in ("sqrt", "abs", "maximum", "minimum", "where")},
    **{f"{r}_{'MD'[p]}": along_axis(p, getattr(np, r)) for r in ("sum", "mean", "max") for p in (0, 1)},
    **dict(zip("MD", LENGTHS, strict=True)),
    "relu": lambda x: np.maximum(x, 0),
}


def value(text: str, known: Mapping[str, Any]) -> Array:
    return np.asarray(eval(text.replace("^", "**"), {"__builtins__": {}}, {**MEANINGS, **known}), np.float64)


def everything(graph: Graph, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Every value of a graph, with length 1 along the axes that it lacks."""
    computed = evaluate(replace(graph, results=tuple(graph.values().values())), inputs)
    places = {v.name: tuple(i for i, a in enumerate(WIDE) if a not in v.type.axes) for v in graph.values().values()}
    return {name: np.expand_dims(real.value, places[name]) for name, real in computed.items()}


@cache
def numbers(text: str) -> tuple[dict[str, Array], dict[str, Array]]:
    """Random inputs of a backward, not rounded, and the values of all names in its texts."""
    spec = parse_spec(text)
    trace, rng, positive = spec.trace(), np.random.default_rng(3), positive_inputs(spec)
    params = trace["vjp"].params
    inputs = {p.name: normal(rng, p.type.shape(*LENGTHS), 0.3, positive=p.name in positive) for p in params}
    inputs |= values_of(trace["build"], spec.eps_or_default)
    raw = everything(trace["vjp"], inputs)
    known = everything(trace["save"], {p.name: raw[p.name].squeeze() for p in trace["save"].params}) | raw
    return inputs, {name: known[v] for name, v in data_of(text)["names"].items()}


def same(a: Array, b: Array) -> bool:
    size = max(np.abs(a).max(), np.abs(b).max(), 1e-3)
    return bool((np.abs(a - b) <= 1e-10 * size).all())


def faults(data: Mapping[str, Any], text: str) -> Iterator[str]:
    """The statements of ``data``, about the backward called ``text``, that are not true."""
    known = numbers(text)[1]
    sides = [(e["name"], e["equation"]) for e in data["forward"]] + [*data["shared"].items()]
    sides += [(c["cotangent"], c[side]) for c in data["cotangents"] for side in ("before", "after")]
    sides += [(s["before"], s["after"]) for s in data["steps"] if "before" in s]
    yield from (f"{left} = {right}" for left, right in sides if not same(value(left, known), value(right, known)))
    moved = [s["on"] for s in data["steps"] if s["identity"] == "maximum"]
    yield from (f"{name} moves a result" for name in moved if not changes_nothing(data, text, name))
    yield from wrong_derivatives(data, known)
    yield from wrong_gradients(data, text)


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
        at = [value(equations[of], {**known, by: known[by] + h * direction}) for h in (-2e-4, -1e-4, 1e-4, 2e-4)]
        slope = float((weights * (at[0] - 8 * at[1] + 8 * at[2] - at[3])).sum()) / 12e-4
        adds = [d["adds"] for d in data["derivatives"] if (d["of"], d["by"]) == (of, by)]
        found = sum(float((value(text, {**known, given: weights}) * direction).sum()) for text in adds)
        if abs(found - slope) > 1e-7 * max(1, abs(slope)):
            yield f"derivative: {of} by {by}: {adds}: {found}, {slope}"


def wrong_gradients(data: Mapping[str, Any], text: str) -> Iterator[str]:
    """The closed forms, against differences of the forward along a direction."""
    spec, (inputs, known) = parse_spec(text), numbers(text)
    forward, rng, found = spec.forward(), np.random.default_rng(5), {**known}
    cotangents = np.concatenate([inputs[f"d{name}"].ravel() for name in spec.differentiated])

    primals = {p.name: inputs[p.name] for p in forward.params}

    def results(**at: Array) -> Array:
        computed = evaluate(forward, at)
        return np.concatenate([computed[name].value.ravel() for name in spec.differentiated])

    for name, closed in data["gradients"].items():
        wrt = name.removeprefix("d")
        found[name] = np.broadcast_to(value(closed, found), known[wrt].shape)
        one = along(rng, results, primals, wrt, found[name].reshape(inputs[wrt].shape), cotangents, 1e-4)
        if one.error > 1e-7 * one.size + one.doubt:
            yield f"gradient: {name} = {closed}"


@pytest.mark.parametrize("text", SPECS)
def test_every_statement_is_true(text: str) -> None:
    assert [*faults(data_of(text), text)] == []


def test_every_identity_acts() -> None:
    assert {s["identity"] for text in SPECS for s in data_of(text)["steps"]} == {*IDENTITIES}


def mutants(data: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """``data`` with the sign of one term of one statement flipped; that of 0 = 0 does not matter."""

    def flipped(text: str) -> str:
        return text.replace(" - ", " + ", 1) if " - " in text else f"-({text})"

    for key in ("forward", "derivatives", "cotangents", "steps"):
        for n, statement in enumerate(data[key]):
            for side in ("equation", "adds", "before", "after"):
                if side in statement and statement.get("after") != "0":
                    changed = {**statement, side: flipped(statement[side])}
                    yield {**data, key: [*data[key][:n], changed, *data[key][n + 1 :]]}
    for name, text in data["gradients"].items():
        yield {**data, "gradients": {**data["gradients"], name: flipped(text)}}


@pytest.mark.parametrize("text", ["layernorm.bwd:d=8,dtype=f32", "softmax.bwd:d=8,dtype=f32"])
def test_a_flipped_sign_is_not_true(text: str) -> None:
    noticed = [any(faults(data, text)) for data in mutants(data_of(text))]
    assert all(noticed)
    assert len(noticed) > 20


def test_a_wrong_identity_is_not_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log says what acted, not what would have been right: here every sum of one factor is dropped."""
    text = "layernorm.bwd:d=8,dtype=f32"
    numbers(text)
    monkeypatch.setattr(_Simplifier, "_centred", lambda self, product, axis: True)
    assert "sum_D(-dy * gamma * rstd) = 0" in "\n".join(faults(derivation(parse_spec(text)).data, text))


def test_the_closed_form_of_layernorm_is_the_known_one() -> None:
    section = derivation(parse_spec("layernorm.bwd:d=4096,dtype=bf16"))
    assert section.data["gradients"]["dx"] == "rstd * (g - mean_D(g) - xhat * mean_D(g * xhat))"
    assert section.data["shared"] == {"g": "dy * gamma"}
    assert "sum_D(g), sum_D(g * xhat): none waits for another, so they are one reduction phase" in str(section)
    assert str(section).count("\n") <= 50


def test_a_forward_says_what_the_passes_changed() -> None:
    section = derivation(parse_spec("layernorm.fwd:d=4096,dtype=f32"))
    assert section.data["passes"]["compensate"] == ["mean", "var_sum"]
    assert "rstd = 1 / sqrt(veps)" in str(section)
    assert "lngen explain layernorm.bwd" in str(section)
