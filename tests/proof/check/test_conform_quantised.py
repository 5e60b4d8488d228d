"""If these fail, ``lngen conform`` passes a quantising norm that breaks the rule of its spec, or fails a right one."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import call
from lngen.compiler.ir import DType
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array
from lngen.compiler.spec import parse_spec
from lngen.proof.check.conform import CASES, QUANTISED_CASES, Outcome, cases_of, conform_graph, select
from lngen.proof.check.conform.implementations import LngenTarget, NumpyTarget, Signature
from lngen.proof.check.conform.suites import GraphSuite

# ---- models of other people's kernels, each with the rule of one of them ----

F32 = np.float32


def normalised(x: Array, gamma: Array, eps: float) -> Array:
    x32 = x.astype(F32)
    mean = (x32 * x32).mean(axis=1, keepdims=True, dtype=F32)
    return np.asarray(x32 * (1 / np.sqrt(mean + F32(eps))) * gamma.astype(F32))


def amax_of(v: Array) -> Array:
    return np.asarray(np.abs(v).max(axis=1, keepdims=True))


def scale_of(amax: Array, most: float, least: float = 2.0**-126) -> Array:
    return np.maximum(amax / F32(most), F32(least))


def saturated(v: Array, to: DType) -> Array:
    """A NaN stays, in int8 it is 0."""
    if to is DType.INT8:
        return np.rint(np.clip(np.nan_to_num(v, nan=0, posinf=np.inf, neginf=-np.inf), -128, 127)).astype(np.int8)
    return np.clip(v, -to.largest, to.largest).astype(NUMPY_DTYPE[to])


def clamped(v: Array, to: DType) -> Array:
    """fmax(-Q, fmin(v, Q)), of which neither keeps a NaN."""
    return saturated(np.fmax(-F32(to.largest), np.fmin(v, F32(to.largest))), to)


def dynamic(
    x: Array,
    gamma: Array,
    eps: float,
    *,
    to: DType = DType.E4M3,
    amax: Callable[[Array], Array] = amax_of,
    scale: Callable[[Array, float], Array] = scale_of,
    stored: Callable[[Array], Array] = lambda s: s,
    apply: Callable[[Array, Array], Array] = np.divide,
    cast: Callable[[Array, DType], Array] = saturated,
    norm: Callable[[Array, Array, float], Array] = normalised,
) -> tuple[Array, Array]:
    """A scale for each row: of its largest number."""
    v = norm(x, gamma, eps)
    s = scale(amax(v), to.largest)
    return cast(apply(v, s), to), stored(s)[:, 0]


def in_blocks(x: Array, gamma: Array, eps: float, *, spread: bool = False) -> tuple[Array, Array]:
    """A scale for each 16 features; ``spread``: a NaN reaches all scales of its row."""
    v = normalised(x, gamma, eps).reshape(len(x), -1, 16)
    amax = np.abs(v).max(axis=2, keepdims=True)
    s = scale_of(amax + 0 * amax.max(axis=1, keepdims=True) if spread else amax, 448)
    return saturated(v / s, DType.E4M3).reshape(x.shape), s[..., 0]


def static(x: Array, gamma: Array, q_scale: Array, eps: float, *, cast: Callable[..., Array] = saturated) -> Array:
    """One scale that is given."""
    return cast(normalised(x, gamma, eps) / q_scale, DType.E4M3)


def power(s: Array) -> Array:
    return np.asarray(np.exp2(np.ceil(np.log2(s))))


def two_roundings(x: Array, gamma: Array, eps: float) -> Array:
    """The product with gamma is one of 16 bits, in vLLM."""
    xhat = normalised(x, np.ones_like(gamma), eps).astype(x.dtype)
    return (xhat * gamma).astype(F32)


def outcomes(model: Callable[..., Any], keys: str, cases: str = "") -> dict[str, Outcome]:
    spec = parse_spec(f"rmsnorm.fwd:d=64,dtype=bf16,{keys}")
    suite = GraphSuite(NumpyTarget("mine", model, signature=Signature.of(spec)), spec)
    return {o.name: o for o in conform_graph(suite, select(cases.split(), QUANTISED_CASES))}


by_reciprocal = partial(dynamic, apply=lambda v, s: v * (1 / s))
VLLM = 1 / (448 * 512)
RIGHT: dict[str, tuple[Callable[..., Any], str]] = {
    "row": (dynamic, "quant=e4m3"),
    "e5m2": (partial(dynamic, to=DType.E5M2), "quant=e5m2"),
    "int8": (partial(dynamic, to=DType.INT8), "quant=int8"),
    "by the reciprocal": (by_reciprocal, "quant=e4m3,apply=mul"),
    "vLLM: least scale": (partial(dynamic, scale=partial(scale_of, least=VLLM)), f"quant=e4m3,scale_min={VLLM}"),
    "SGLang: least amax": (
        partial(by_reciprocal, amax=lambda v: np.maximum(amax_of(v), F32(1e-10))),
        "quant=e4m3,apply=mul,amax_min=1e-10",
    ),
    "vLLM: y is rounded twice": (partial(dynamic, norm=two_roundings), "quant=e4m3,casts=llama,quantised=y"),
    "powers of two": (partial(dynamic, scale=lambda a, most: power(scale_of(a, most))), "quant=e4m3,scale_pow2=up"),
    "given": (static, "quant=e4m3,scales=tensor"),
    "blocks": (in_blocks, "quant=e4m3,scales=block,block_size=16"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_quantiser_passes(name: str) -> None:
    model, keys = RIGHT[name]
    found = outcomes(model, keys)
    assert {o.status for o in found.values()} <= {"pass", "skipped"}, found
    assert sum(o.status == "pass" for o in found.values()) == len(QUANTISED_CASES) - 1


# By name: the model, the keys of the rule that it should have, and the cases that it fails, of all.
WRONG: dict[str, tuple[Callable[..., Any], str, str]] = {
    "amax drops a NaN": (
        partial(dynamic, amax=lambda v: np.fmax.reduce(np.abs(v), axis=1, keepdims=True)),
        "quant=e4m3", "q-nan q-infinity",
    ),
    "a clamp turns NaN into 448": (partial(dynamic, cast=clamped), "quant=e4m3", "q-nan q-infinity"),
    "the same with a given scale": (
        partial(static, cast=clamped), "quant=e4m3,scales=tensor", "q-nan q-infinity",
    ),
    "0 times 1 / 0": (
        partial(by_reciprocal, scale=lambda a, most: a / F32(most)), "quant=e4m3,apply=mul", "q-zeros q-tiny",
    ),
    "a power of two is stored, another scale applied": (
        partial(dynamic, stored=power), "quant=e4m3,scale_pow2=up", "q-division q-scale q-tiny q-huge q-last",
    ),
    "int8 by the reciprocal": (partial(by_reciprocal, to=DType.INT8), "quant=int8", "q-division"),
    "e4m3 by the reciprocal": (by_reciprocal, "quant=e4m3", "q-division"),
    "a division in place of the reciprocal": (dynamic, "quant=e4m3,apply=mul", "q-division"),
    "times a rounded 1 / 448": (
        partial(dynamic, scale=lambda a, most: np.maximum(a * F32(1 / most), F32(2.0**-126))),
        "quant=e4m3", "q-scale q-division q-tiny q-huge",
    ),
    "another least scale": (dynamic, "quant=e4m3,scale_min=1e-5", "q-zeros q-tiny"),
    "ties away from zero": (
        partial(dynamic, cast=lambda v, to: saturated(np.nextafter(v, 2 * v), to)),
        "quant=e4m3", "q-ties q-division q-scale q-tiny q-huge",
    ),
    "no subnormal numbers": (
        partial(dynamic, cast=lambda v, to: saturated(np.where(np.abs(v) < 2**-6, 0 * v, v), to)),
        "quant=e4m3", "q-numbers q-ties q-division q-zeros q-nan q-huge q-last",
    ),
    "no signs of zeros": (
        partial(dynamic, cast=lambda v, to: saturated(np.where(v == 0, F32(0), v), to)),
        "quant=e4m3", "q-zeros q-infinity",
    ),
    "no saturation": (
        partial(static, cast=lambda v, to: v.astype(NUMPY_DTYPE[to])),
        "quant=e4m3,scales=tensor", "q-saturation q-infinity q-tiny",
    ),
    "a NaN beyond its block": (
        partial(in_blocks, spread=True), "quant=e4m3,scales=block,block_size=16", "q-nan q-infinity",
    ),
    "the tail is not looked at": (
        partial(dynamic, amax=lambda v: amax_of(v[:, : v.shape[1] // 8 * 8])), "quant=e4m3", "q-last",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_quantiser_fails_its_cases(name: str) -> None:
    model, keys, cases = WRONG[name]
    assert {name for name, o in outcomes(model, keys).items() if o.status == "fail"} == {*cases.split()}


def test_what_differs_is_told_beside_the_rule() -> None:
    found = outcomes(partial(dynamic, cast=clamped), "quant=e4m3", "q-nan q-zeros")
    nan, zeros = found["q-nan"], found["q-zeros"]
    assert nan.detail == "66560 of q differ in 131200 numbers; first q 448 (0x7e), by the rule nan (0x7f)"
    assert nan.measured == {"q": 66560}
    assert zeros.detail == "65600 numbers as by the rule, such as q -0 -0 -0 -0; q_scale 1.17549e-38"


# ---- lngen ----

CHOSEN = "q-saturation q-division q-scale"
# By spec, those of CHOSEN that do not apply.
SPECS = {
    "rmsnorm.fwd:d=64,dtype=bf16,quant=e4m3,scales=block,block_size=16,apply=ratio": "q-saturation",
    "layernorm.fwd:d=64,dtype=f16,quant=e5m2,amax_max=yes,scale_pow2=up": "",
    "add_rmsnorm.fwd:d=64,dtype=f32,quant=int8,amax_min=1e-4,scale_min=1e-6": "q-saturation",
    "parallel_layernorm.fwd:d=64,dtype=bf16,quant=e4m3,y=yes,quantised=y": "q-saturation",
    "rmsnorm.fwd:d=64,dtype=bf16,weight=f32,quant=int8,scales=tensor,apply=mul": "q-scale",
    "rmsnorm.fwd:d=64,dtype=bf16,quant=e4m3,scales=tensor,tensor_scale=multiply,eps=run": "q-scale",
    "rmsnorm.fwd:d=64,dtype=bf16,quant=e4m3,gamma=no": CHOSEN,
    "gated_rmsnorm.fwd:d=64,dtype=bf16,quant=e4m3": CHOSEN,
}


@pytest.mark.parametrize("text", SPECS)
def test_lngen_keeps_its_rules(text: str) -> None:
    """Cases that do not apply say why: no gamma, a gate, a scale that is given or that follows from the row."""
    spec = parse_spec(text)
    cases = cases_of(spec)
    assert [c.name for c in cases] == [c.name for c in (*CASES, *QUANTISED_CASES)]
    found = [*conform_graph(GraphSuite(LngenTarget(spec, gpu=False), spec), cases[len(CASES) :])]
    assert not [o for o in found if o.status == "fail"]
    skipped = {o.name for o in found if o.status == "skipped"}
    assert skipped & {*CHOSEN.split()} == {*SPECS[text].split()}
    assert skipped == {*SPECS[text].split()} or SPECS[text] == CHOSEN


def test_a_norm_that_is_not_quantised_has_no_such_cases() -> None:
    """Nor a backward, which is the same with these keys and without them."""
    assert cases_of(parse_spec("rmsnorm.fwd:d=64")) == cases_of(parse_spec("rmsnorm.bwd:d=64,quant=e4m3")) == CASES


# ---- the command line ----

MODULE = """
import numpy as np
import ml_dtypes

def norm(x, gamma, eps):
    x = x.astype(np.float32)
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + np.float32(eps)) * gamma.astype(np.float32)

def mine(x, gamma, eps):
    v = norm(x, gamma, eps)
    s = np.maximum(np.abs(v).max(axis=1, keepdims=True) / np.float32(448), np.float32(2.0**-126))
    return np.clip(v / s, -448, 448).astype(ml_dtypes.float8_e4m3fn), s[:, 0]

def by_torch(x, gamma, eps):
    import torch
    v = x.float() * torch.rsqrt((x.float() ** 2).mean(-1, keepdim=True) + eps) * gamma.float()
    s = (v.abs().amax(-1, keepdim=True) / 448).clamp(min=2.0**-126)
    return (v / s).to(torch.float8_e4m3fn), s[:, 0]

def alone(x, gamma, eps):
    return norm(x, gamma, eps)
"""
SPEC = "rmsnorm.fwd:d=64,dtype=bf16,quant=e4m3"


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_quantisers.py").write_text(MODULE)


@pytest.mark.parametrize("name", ["mine", "by_torch --torch"])
def test_a_function_is_judged_by_the_rule_of_a_spec(name: str) -> None:
    if "torch" in name:
        pytest.importorskip("torch")
    cases = "ordinary,rows-alone,shape-and-dtype,inputs-unmodified,q-division,q-zeros,q-nan"
    done = call("conform", SPEC, "--callable", *f"my_quantisers:{name}".split(), "--cases", cases, "--json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert (data["target"], data["norm"], data["passed"]) == (f"my_quantisers:{name.split()[0]}", "rmsnorm", 7)
    done = call("conform", f"{SPEC},apply=ratio", "--callable", *f"my_quantisers:{name}".split(), "--cases", cases)
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (1, "6 passed, 1 failed, 0 skipped")


def test_a_function_of_any_graph_takes_its_inputs_in_order() -> None:
    """A plain norm, by its closed form, and without beta."""
    done = call("conform", "rmsnorm.fwd:d=64", "--callable", "my_quantisers:alone", "--cases", "ordinary,ulps")
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "2 passed, 0 failed, 0 skipped"), done.output
    done = call("conform", SPEC, "--callable", "my_quantisers:alone", "--cases", "q-ties")
    assert "the function is expected to return a tuple (q, q_scale), got ndarray." in " ".join(done.stdout.split())
