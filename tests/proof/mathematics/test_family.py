"""If these fail, a member of the family does not compute its formula in torch, or rounds more than it may."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm

import numpy as np
import pytest

import sampling
from family import CONSTANTS, FORMULAS, Keys, gradients, keys_of, results
from graph_names import whole_heads
from lngen.compiler.graphs import GRAPHS
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import Graph
from lngen.compiler.ir.evaluate import evaluate
from lngen.compiler.ir.numerics import Array
from lngen.compiler.spec import Spec, parse_spec
from lngen.proof.check.differences import gradient_excess, result_excess
from lngen.proof.check.inputs import random_inputs
from lngen.proof.check.oracles import SLACK, excess

ROWS, D = 4, 7
RELATIVE = 1e-9

SUMS = (
    "", "h=no", "x1=yes", "residual=no,x1=yes", "rowscale=yes", "colscale=yes,residual=no", "gamma=no",
    "x1=yes,rowscale=yes,colscale=yes", "zero_centred=yes", "round_sum=no,dtype=bf16",
    "residual_dtype=f32,dtype=bf16", "residual_dtype=bf16,round_sum=no,rowscale=yes",
    "residual_dtype=bf16,rowscale=yes", "save=none",
    "save=none,rowscale=yes,colscale=yes,x1=yes", "h=no,save=rstd", "eps=0.3,x1=yes",
)  # fmt: skip
GATED = (
    "", "gate_first=yes", "act=sigmoid", "act=gelu", "act=gelu_tanh", "gate_first=yes,act=gelu", "gamma=no",
    "gate_first=yes,act=sigmoid,zero_centred=yes", "gate_first=yes,gamma=no", "beta=no", "beta=yes",
    "save=none", "gate_first=yes,save=none", "gate_first=yes,act=gelu_tanh", "eps=0.3",
)  # fmt: skip

HEADS = (
    "", "k_heads=3,head=16", "k_heads=1,head=64,eps=0.3", "head=32", "head_weights=own,head=32", "zero_centred=yes",
    "head_weights=own,zero_centred=yes,head=16", "k_heads=4,head=32,zero_centred=yes", "k_heads=1,head=96", "save=none",
)  # fmt: skip

ROTATIONS = (
    "head=16", "head=32,rotate=pairs", "head=96,rotary=32", "head=64,rotate=pairs,rotary=32,positions=i32",
    "head=16,positions=i64,table_dtype=bf16", "head=16,rotate=pairs,rotate_in=x,dtype=bf16,table_dtype=f16",
)  # fmt: skip
ROTATED = tuple(k if "rotate=" in k else f"{k},rotate=halves" for k in (*ROTATIONS, "head=32,rotate_in=norm,dtype=f16"))

# The keys of each member beside d. Every option and each of its values is in one of them.
KEYS: dict[str, tuple[str, ...]] = {
    "layernorm": (
        "", "beta=no", "gamma=no", "gamma=no,beta=no", "zero_centred=yes", "zero_centred=yes,beta=no", "eps=0.3",
        "save=none", "save=mean", "save=rstd", "save=y", "save=y,zero_centred=yes", "save=y,beta=no", "save=y,gamma=no",
        "save=y,gamma=no,beta=no", "casts=nemotron", "casts=nemotron,gamma=no", "save=y,casts=nemotron,dtype=bf16",
    ),
    "rmsnorm": (
        "", "beta=yes", "gamma=no", "gamma=no,beta=yes", "zero_centred=yes", "casts=gemma", "casts=llama,dtype=bf16",
        "casts=t5,dtype=bf16,weight=f32", "casts=t5,dtype=f32,weight=bf16", "casts=gemma,beta=yes", "eps=0.3",
        "save=none", "save=y", "save=y,beta=yes", "save=y,zero_centred=yes", "save=y,casts=gemma",
        "casts=gemma,gamma=no",
    ),
    "l2norm": ("", "guard=max", "eps=0.3", "guard=max,eps=0.3", "save=none", "guard=max,save=none"),
    "add_layernorm": (*SUMS, "beta=no", "gamma=no,beta=no"),
    "add_rmsnorm": (*SUMS, "beta=yes", "casts=gemma", "casts=llama,dtype=bf16", "casts=t5,dtype=bf16"),
    "parallel_layernorm": (*SUMS, "gamma1=no", "beta=no,gamma1=no", "beta1=no", "gamma=no,beta=no,beta1=no"),
    "parallel_rmsnorm": (*(k for k in SUMS if k != "gamma=no"), "gamma1=no", "gamma=no", "beta=yes", "beta1=yes"),
    "gated_layernorm": GATED,
    "gated_rmsnorm": (
        *GATED, "casts=gemma", "casts=llama,dtype=bf16", "casts=llama,gate_first=yes,dtype=bf16", "casts=t5,dtype=bf16",
        "casts=t5,gamma=no,dtype=bf16",
    ),
    **dict.fromkeys(
        ("layernorm_sigmoid_mul", "rmsnorm_sigmoid_mul"),
        ("", "gamma=no", "beta=no", "beta=yes", "zero_centred=yes", "save=none", "eps=0.3"),
    ),
    **dict.fromkeys(
        ("layernorm_act", "rmsnorm_act"),
        (
            "", "act=gelu", "act=gelu_tanh", "act=sigmoid", "act=relu", "gamma=no", "zero_centred=yes,act=gelu",
            "beta=no", "beta=yes", "save=none", "act=relu,save=none", "eps=0.3,act=gelu",
        ),
    ),
    "dyt": ("", "beta=no", "gamma=no", "gamma=no,beta=no", "dtype=bf16,weight=f32"),
    "softmax": ("", "scale=0.125", "scale=-2", "save=none", "save=y", "save=rowsum"),
    "log_softmax": ("", "scale=0.125", "scale=-2", "save=none", "save=y", "save=rowmax"),
    "cross_entropy": (
        "", "scale=0.125", "save=none", "save=rowmax", *(f"target=index{more}" for more in (
            "", ",target_dtype=i32,reduction=mean", ",ignore_index=2,lse=yes", ",class_weight=yes,reduction=sum",
            ",class_weight=yes,reduction=mean,label_smoothing=0.1", ",label_smoothing=1,softcap=2,scale=0.5",
            ",class_weight=yes,label_smoothing=0.1,z_loss=0.01,softcap=3,reduction=mean,ignore_index=1,lse=yes",
            ",z_loss=0.01,save=none,reduction=mean",
        )),
    ),
    "qk_layernorm": (
        *HEADS, "beta=no", "gamma=no", "gamma=no,k_heads=1,head=16", "k_heads=2,head=32,beta=no",
        "casts=nemotron,k_heads=3,head=16", "casts=nemotron,head_weights=own,head=32,dtype=bf16",
        "casts=eager,head_weights=own,head=32,dtype=bf16", *ROTATED,
    ),
    "qk_rmsnorm": (
        *HEADS, "gamma=no", "beta=yes", "k_heads=1,head=64,beta=yes,gamma=no", "casts=gemma,k_heads=2,head=16",
        "casts=llama,head=64,k_heads=1,dtype=bf16", "casts=t5,head=64,k_heads=1,dtype=bf16,weight=f32",
        "casts=gemma,gamma=no", *ROTATED, "k_heads=3,head=16,rotate=halves,positions=i64,rotary=8",
    ),
    "rope": ("", *ROTATIONS),
    **dict.fromkeys(
        ("ada_layernorm", "ada_rmsnorm"),
        (
            "", "shift=no", "gate=yes,residual=yes", "residual=yes,round_sum=no", "gamma=yes,beta=yes", "save=none",
            "modulation=row", "modulation=row,gate=yes,residual=yes", "eps=0.3", "modulation_dtype=f16,dtype=f16",
            "modulation_dtype=bf16,dtype=bf16,weight=f32,gamma=yes", "modulation_dtype=f32,dtype=bf16",
            "casts=norm,gamma=yes,dtype=bf16", "casts=eager,gate=yes,residual=yes,dtype=bf16",
            "casts=eager,modulation=row,gamma=yes,beta=yes,dtype=f16",
        ),
    ),
}  # fmt: skip
CASES = [(name, keys) for name, listed in KEYS.items() for keys in listed]


def text(name: str, way: str, keys: str, d: int = D) -> str:
    head = re.search(r"\bhead=(\d+)", keys)
    features = lcm(whole_heads(name, d), int(head[1]) if head else 1)
    return f"{name}.{way}:" + ",".join(filter(None, (f"d={features}", keys)))


def backward_of(name: str, keys: str, d: int = D) -> Spec:
    """The backward of a member."""
    return parse_spec(text(name, "bwd", keys, d))


def own_keys(spec: Spec) -> Keys:
    return keys_of({"eps": spec.eps, **{k: "yes" if v is True else v for k, v in spec.chosen}})


@dataclass(frozen=True)
class Exact:
    """A spec's inputs, not rounded to any dtype, and what the formula makes of them."""

    spec: Spec
    inputs: dict[str, Array]
    results: dict[str, Array]
    cotangents: dict[str, Array]

    @classmethod
    def of(cls, spec: Spec, rows: int = ROWS, seed: int = 3) -> Exact:
        rng, forward = np.random.default_rng(seed), spec.with_direction("fwd").forward()
        rows += 2 * spec.by_sets  # three sets of two rows
        shapes, classes = {p.name: p.type.shape(rows, spec.d) for p in forward.params}, spec.classes
        inputs = {
            n: rng.integers(spec.d, size=s) if n in classes else rng.normal(0.5, 1.0, s) for n, s in shapes.items()
        }
        if "positions" in inputs:
            inputs["positions"] = rng.integers(rows, size=rows)
        found = results(spec.definition.name, own_keys(spec), inputs)
        return cls(spec, inputs, found, {n: rng.normal(0.3, 1.0, a.shape) for n, a in found.items()})

    def backward(self, graph: Graph, of: tuple[str, ...]) -> dict[str, Array]:
        """The results of a backward graph with the cotangents of the results ``of``."""
        known = {**self.inputs, **self.results, **{f"d{n}": self.cotangents[n] for n in of}}
        return {n: r.value for n, r in evaluate(graph, {p.name: known[p.name] for p in graph.params}).items()}

    def gradients(self, of: tuple[str, ...]) -> dict[str, Array]:
        """Those of the formula."""
        name, wrt = self.spec.definition.name, self.spec.differentiates
        return gradients(name, own_keys(self.spec), self.inputs, {n: self.cotangents[n] for n in of}, wrt)


def distance(got: dict[str, Array], want: dict[str, Array]) -> float:
    """The largest error of a result, relative to the largest number in it; infinite for a wrong shape and a NaN."""
    assert got.keys() <= want.keys(), got.keys() - want.keys()
    wrong = [0.0]
    for name, array in got.items():
        if array.shape != want[name].shape:
            return float("inf")
        error = np.abs(array - want[name]).max() / np.abs(want[name]).max(initial=1e-3)
        wrong.append(float(np.nan_to_num(error, nan=np.inf)))
    return max(wrong)


# ---- mathematics ----


def test_every_member_has_a_formula() -> None:
    assert FORMULAS.keys() == KEYS.keys() == GRAPHS.keys()
    assert len(CASES) == len({*CASES}) >= 190


@pytest.mark.parametrize("name", GRAPHS)
def test_every_value_of_every_option_is_in_a_case(name: str) -> None:
    """Both sides of a flag, each word, and a number that is not the default."""
    used = {part for keys in KEYS[name] for part in keys.split(",")}
    named = {part.partition("=")[0] for part in used}
    spec = parse_spec(text(name, "fwd", ""))
    for key, option in spec.definition.builder(spec.options).declared.items():
        if option.of_forward:
            continue  # tests/compiler/bits/test_quant_keys.py has those
        if key in ("vocabulary", "classes"):
            continue  # and tests/compiler/family/test_class_targets.py these
        if key in ("gamma", "beta", "gamma1", "beta1") and name.startswith("parallel"):
            continue
        words = [w for w in option.choices if w != option.default and (key, w) != ("residual_dtype", "f16")]
        assert {f"{key}={word}" for word in words} <= used, key
        assert key in named, key
    inputs = spec.definition.differentiable(spec.options)
    assert {p.name for p in spec.forward().params} - {*inputs} <= {*CONSTANTS.get(name, ())}


def parts(spec: Spec, keys: str) -> Iterator[Spec]:
    """The backward for all cotangents together, for each alone, and for those of statistics, which move no weight."""
    outputs = spec.differentiated
    yield spec
    if len(outputs) > 1:
        yield from (replace(spec, of=(name,)) for name in outputs)
    detached = "save=" in keys or "target=index" in keys
    for statistic in () if detached else spec.definition.statistics(spec.options):
        yield replace(spec, of=(*outputs, statistic))
        yield replace(spec, of=(statistic,), wrt=("x",))


@sampling.grid(("name", "keys"), CASES, lambda name, keys: (name, keys.partition("=")[0]), strength=1)
def test_results_and_gradients_are_the_formula_s(name: str, keys: str) -> None:
    forward, backward = parse_spec(text(name, "fwd", keys)), backward_of(name, keys)
    exact = Exact.of(backward)
    found = {n: r.value for n, r in evaluate(forward.forward(), exact.inputs).items()}
    assert {*forward.definition.outputs(forward.options)} <= found.keys()
    assert distance(found, exact.results) < RELATIVE
    for spec in parts(backward, keys):
        of = spec.differentiated
        found, want = exact.backward(spec.trace()["cse"], of), replace(exact, spec=spec).gradients(of)
        assert found.keys() == {f"d{n}" for n in spec.differentiates}
        assert distance(found, want) < RELATIVE, of
        if of[:-1] == backward.differentiated:  # the statistic's part is not lost
            assert distance(want, exact.gradients(of[:-1])) > 1e-3


def test_a_row_of_zeros_has_the_gradients_of_torch() -> None:
    """A root of 0 has no derivative; what guards the divisor keeps it away, dy / eps is left."""
    for keys in ("guard=max,eps=0.25", "eps=0.25"):
        spec = parse_spec(text("l2norm", "bwd", keys))
        exact = Exact.of(spec)
        exact.inputs["x"][1] = 0
        exact.inputs["x"][2] *= 1e-3  # shorter than eps
        found = Exact(spec, exact.inputs, results("l2norm", own_keys(spec), exact.inputs), exact.cotangents)
        assert distance(found.backward(spec.trace()["cse"], ("y",)), found.gradients(("y",))) < RELATIVE
        rounded = {
            n: a.astype(np.float32) for n, a in {**found.inputs, **found.results, "dy": exact.cotangents["y"]}.items()
        }
        dx = interpret(spec.graph(), {p.name: rounded[p.name] for p in spec.graph().params})["dx"]
        np.testing.assert_allclose(dx, found.gradients(("y",))["dx"], rtol=1e-4, atol=1e-5)


# ---- rounding ----


def bounded(spec: Spec, rows: int = ROWS) -> dict[str, float]:
    """The interpreter's results, of rounded inputs and of what forward saves, against the formula, in its bound.

    The bound is of the rounded evaluation of the graph; saved values have the errors that they have.
    """
    inputs = random_inputs(spec, rows)
    known = {**random_inputs(spec.with_direction("fwd"), rows), **inputs}
    name, keys = spec.definition.name, own_keys(spec)
    forward = {p.name: known[p.name].astype(np.float64) for p in spec.with_direction("fwd").forward().params}
    exact, graph = results(name, keys, forward), spec.forward()
    wanted, errors = exact, {}
    if spec.direction == "bwd":
        graph = spec.trace()["cse"]
        cotangents = {n: inputs[f"d{n}"].astype(np.float64) for n in spec.differentiated if f"d{n}" in inputs}
        wanted = gradients(name, keys, forward, cotangents, spec.differentiates)
        errors = {n: np.abs(inputs[n] - exact[n]) for n in inputs if n in exact}
    at = {p.name: exact[p.name] if p.name in errors else known[p.name] for p in graph.params}
    allowed = {n: SLACK * r.error for n, r in evaluate(graph, at, errors).items()}
    return {n: excess(a, wanted[n], allowed[n]) for n, a in interpret(spec.graph(), inputs).items()}


ROUNDED = [
    (name, keys if "dtype=" in keys.split(",")[0] or ",dtype=" in keys else f"{keys},dtype={dtype}".strip(","))
    for number, (name, keys) in enumerate(CASES)
    for dtype in (("f32", "bf16", "f16") if not keys else (("f32", "bf16", "f16")[number % 3],))
]


@sampling.rotating(("name", "keys"), ROUNDED)
def test_rounded_results_are_the_formula_s(name: str, keys: str) -> None:
    """Forward, and backward from what forward saves; and what ``lngen check`` says without torch."""
    for spec in (parse_spec(text(name, "fwd", keys, 96)), backward_of(name, keys, 96)):
        found = bounded(spec)
        assert max(found.values()) <= 1, found
        if keys.startswith("dtype="):
            inputs = random_inputs(spec, ROWS)
            assert max(result_excess(spec, inputs, interpret(spec.graph(), inputs)).values()) <= 1
            assert spec.direction == "fwd" or max(gradient_excess(spec).values()) <= 1
