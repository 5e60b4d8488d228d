"""If these fail, ``lngen explain`` prints a derivation with a step that is not true, or leaves out what acted.

Every statement is evaluated as it is printed, in float64 on random inputs: both sides of each identity, the derivative
of each equation against differences of that equation, each gradient against differences of the forward.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest

from graph_names import HEADS
from lngen.compiler.graphs import GRAPHS, Definition, GraphBuilder
from lngen.compiler.ir import D, M
from lngen.compiler.ir.evaluate import evaluate
from lngen.compiler.ir.numerics import Array
from lngen.compiler.passes.simplify import Simplifier
from lngen.compiler.spec import make_spec, parse_spec
from lngen.errors import ValidationError
from lngen.lab.explain import statements
from lngen.lab.explain.derivation import derivation
from lngen.lab.explain.history import IDENTITIES
from lngen.lab.explain.statements import false_equations, same, value
from lngen.proof.check.differences import along
from set_cases import OF_SETS

OPTIONS = [  # with ops and identities that no graph has by default
    "layernorm.bwd:d=8,dtype=f32,save=y",
    "rmsnorm.bwd:d=8,dtype=bf16,casts=llama,save=none",
    "l2norm.bwd:d=8,dtype=f32,guard=max",
    "gated_layernorm.bwd:d=8,dtype=f32,gate_first=yes,act=gelu",
    "gated_rmsnorm.bwd:d=8,dtype=f32,gate_first=yes,act=gelu_tanh",
    "layernorm_act.bwd:d=8,dtype=f32,act=relu,eps=run",
    "add_layernorm.bwd:d=8,dtype=bf16,rowscale=yes,colscale=yes,x1=yes",
]
OF_HEADS = ("qk_rmsnorm.bwd:d=48,dtype=f32,head=16,k_heads=1", "qk_layernorm.bwd:d=32,dtype=bf16,head=16")
SPECS = [*(f"{name}.bwd:d=8,dtype=f32" for name in GRAPHS if name not in OF_SETS | HEADS.keys()), *OPTIONS]


@cache
def data_of(text: str) -> Mapping[str, Any]:
    """What ``--json`` prints."""
    return dict(json.loads(json.dumps(dict(derivation(parse_spec(text)).data))))


@cache
def numbers(text: str) -> tuple[dict[str, Array], dict[str, Array]]:
    """Random inputs of a backward, and the values of all names in its texts."""
    return statements.numbers(parse_spec(text), data_of(text)["names"])


def faults(data: Mapping[str, Any], text: str) -> Iterator[str]:
    """The statements of ``data``, about the backward called ``text``, that are not true."""
    known = numbers(text)[1]
    yield from false_equations(data, known)
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
        if inputs[wrt].size != known[wrt].size:  # it repeats along its base
            continue
        found[name] = np.broadcast_to(value(closed, found), known[wrt].shape)
        one = along(rng, results, primals, wrt, found[name].reshape(inputs[wrt].shape), cotangents, 1e-4)
        if one.error > 1e-7 * one.size + one.doubt:
            yield f"gradient: {name} = {closed}"


@pytest.mark.parametrize("text", SPECS)
def test_every_statement_is_true(text: str) -> None:
    assert [*faults(data_of(text), text)] == []


@pytest.mark.parametrize("text", OF_HEADS)
def test_what_is_said_of_derived_axes_is_true(text: str) -> None:
    """A sum to heads is not one of the row, and one over heads not one to them."""
    data, (_, known) = data_of(text), numbers(text)
    assert [*false_equations(data, known), *wrong_gradients(data, text)] == []
    for said in ("mean_D_H", "sum_D_E"):
        wrong = json.loads(json.dumps(data).replace(said, said[:-2]))
        assert [*false_equations(wrong, known)] != [], said


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
    """The history says what acted, not what would have been right: here every sum of one factor is dropped."""
    text = "layernorm.bwd:d=8,dtype=f32"
    numbers(text)
    monkeypatch.setattr(Simplifier, "_centred", lambda self, product, axis, to: True)
    with pytest.raises(ValidationError, match="behind the pass 'simplify' the gradient is not that of the forward"):
        derivation(parse_spec(text))
    monkeypatch.setattr("lngen.compiler.passes.validate", lambda *args: None)
    with pytest.raises(ValidationError, match=r"a step of the derivation of layernorm.* is false: dbeta = 0; "):
        derivation(parse_spec(text))


def test_what_is_said_of_a_derivation() -> None:
    """A gradient that is stopped, the known closed form of LayerNorm, what the passes changed in a forward."""

    def stopped(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        b.output("y", x * b.stop_gradient(b.mean(x)))

    section = derivation(make_spec(Definition("own", stopped), "bwd", {"d": 8, "dtype": "f32"}))
    assert "The gradient is not that of the forward: the cotangents of stopped_mean_x are stopped" in str(section)
    section = derivation(parse_spec("layernorm.bwd:d=4096,dtype=bf16"))
    assert section.data["gradients"]["dx"] == "rstd * (g - mean_D(g) - xhat * mean_D(g * xhat))"
    assert section.data["shared"] == {"g": "dy * gamma"}
    assert "sum_D(g), sum_D(g * xhat): none waits for another, so they are one reduction phase" in str(section)
    assert str(section).count("\n") <= 50
    section = derivation(parse_spec("layernorm.fwd:d=4096,dtype=f32"))
    assert section.data["passes"]["compensate"] == ["mean", "var_sum"]
    assert "rstd = 1 / sqrt(veps)" in str(section)
    assert "lngen explain layernorm.bwd" in str(section)
    assert "q = scaled / q_scale" in str(derivation(parse_spec("rmsnorm.fwd:d=64,dtype=bf16,quant=e4m3")))
