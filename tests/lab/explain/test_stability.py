"""Stability: facts hold for random and extreme numbers, hazards go with their guards, and happen where they say."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from explained import subject_of
from graph_names import whole_heads
from lngen.compiler.graphs import GRAPHS, Definition, GraphBuilder
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import F16, D, DType, M, Value, print_eqn, values_of
from lngen.compiler.ir.numerics import Array, round_to
from lngen.compiler.spec import Spec, make_spec, parse_spec
from lngen.dtypes import QUANTISED
from lngen.lab.explain import Section, stability
from lngen.lab.explain.ranges import Facts
from lngen.lab.explain.stability import Hazard, hazards

ROWS = 6
NUMBERS = (0.0, -0.0, 1.0, 1 / 3, -3.3, 1e-30, -1e-38, 1e-45, 1e4, 65504.0, -65504.0, 1e18, -1e25, 3.3e38, -3.3e38)


def numbers(rng: np.random.Generator, kind: str, value: Value, d: int) -> Array:
    shape = value.type.shape(ROWS, d)
    drawn = rng.normal(0.5, 1, shape) if kind == "random" else rng.choice(NUMBERS, shape)
    if kind == "constant" and D in value.type.axes:
        drawn = np.broadcast_to(drawn[..., :1], shape)
    most = 65504.0 if value.type.dtype is F16 else 3.3e38
    return round_to(np.clip(drawn, -most, most), value.type.dtype)


def every_value(spec: Spec, kind: str) -> dict[str, Array]:
    """All values of the spec's graph before ``decompose``; those that forward saves are of its graph there."""
    rng, forward = np.random.default_rng(5), spec.with_direction("fwd")
    known, found = values_of(forward.forward(), spec.eps_or_default), {}
    for graph in [s.trace()["cse"] for s in dict.fromkeys((forward, spec))]:
        known |= {name: a for name, a in found.items() if name in {p.name for p in graph.params}}
        known |= {p.name: numbers(rng, kind, p, spec.d) for p in graph.params if p.name not in known}
        found = interpret(replace(graph, results=tuple(e.out for e in graph.eqns)), known)
    return found


@pytest.mark.parametrize("name", GRAPHS)
def test_facts_hold(name: str) -> None:
    claimed = 0
    for way, d, keys in (("fwd", 24, "f32"), ("bwd", 24, "f32"), ("fwd", 40, "f16"), ("bwd", 33, "bf16,save=none")):
        facts = Facts(parse_spec(f"{name}.{way}:d={whole_heads(name, d)},dtype={keys}"), ROWS)
        for kind in ("random", "extreme", "constant"):
            values = every_value(facts.spec, kind)
            for eqn, same in facts.eqns:
                found, value = facts.ranges[same.out], values[eqn.out.name].astype(np.float64)
                claimed += bool(found.text("x"))
                assert not ((value < found.low) | (value > found.high)).any(), (keys, kind, eqn, found)
                if found.top is not None:
                    rows = value[~np.isnan(value).any(axis=-1)]
                    assert (rows == found.top).any(axis=-1).all(), (keys, kind, eqn, found)
    assert claimed or name == "rope"  # whose numbers are any


FAMILIAR = {
    "layernorm.fwd:d=64,dtype=f32": {"0 <= %var", "0 <= %rstd <= 316.2", "-8 <= %xhat <= 8"},
    "layernorm.bwd:d=64,dtype=f32": {"-8 <= %xhat <= 8"},
    "rmsnorm.fwd:d=64,quant=int8,scale_pow2=up": {"1.175e-38 <= %q_scale"},
    "l2norm.fwd:d=64,dtype=f32": {"-1 <= %y <= 1"},
    "cross_entropy.fwd:d=64,dtype=f32,target=index": {"%shifted <= 0", "0 <= %e <= 1", "1 <= %rowsum <= 64"},
    "softmax.bwd:d=64,dtype=f32": {"%shifted <= 0", "0 <= %e <= 1", "0.01562 <= %rsum <= 1", "0 <= %p <= 1"},
}


def test_familiar_facts() -> None:
    for spec, texts in FAMILIAR.items():
        facts = Facts(parse_spec(spec), ROWS)
        assert texts <= {facts.ranges[same.out].text(str(eqn.out)) for eqn, same in facts.eqns}


def graph(describe: Callable[[GraphBuilder, Value, Value], Value], **keys: object) -> Spec:
    """y of x and z, [M, D] each."""
    mine = Definition("mine", lambda b: b.output("y", describe(b, b.input("x", M, D), b.input("z", M, D))))
    return make_spec(mine, "fwd", {"d": 256, "dtype": "f32", **keys})


def of(spec: Spec | str, name: str) -> list[Hazard]:
    facts = Facts(parse_spec(spec) if isinstance(spec, str) else spec, 64)
    return [hazard for _, hazard in hazards(facts) if hazard.name == name]


def centred(b: GraphBuilder, x: Value, z: Value) -> Value:
    return x * b.mean((x - b.mean(x)) ** 2)


ONE_PASS = graph(lambda b, x, z: x * (b.mean(x * x) - b.mean(x) ** 2))
MEAN = graph(lambda b, x, z: x - b.mean(x), d=1000)
# Each hazard in a graph without a guard against it, and in one that has it, or that the numbers cannot hurt.
PAIRS: dict[str, tuple[Spec, Spec]] = {
    "one-pass variance": (ONE_PASS, graph(centred)),
    "division": (graph(lambda b, x, z: x / z), graph(lambda b, x, z: x / (z * z + 1))),
    "root of 0": (graph(lambda b, x, z: x / b.mean(x * x).sqrt()), graph(lambda b, x, z: x / (x * x + 1).sqrt())),
    "domain": (graph(lambda b, x, z: (x - 1).sqrt()), graph(lambda b, x, z: (x * x).sqrt() + (1 + x * x).log())),
    "exponential": (graph(lambda b, x, z: x.exp()), graph(lambda b, x, z: (x - b.reduce_max("top", x, axis=D)).exp())),
    "squares": (graph(lambda b, x, z: b.mean(x * x) + 0 * x), graph(centred, dtype="f16")),
    "mean removed": (MEAN, graph(centred)),
    "remainder": (graph(lambda b, x, z: z - b.sum(z * x)), graph(lambda b, x, z: z - b.sum(x * x))),
    "complement": (graph(lambda b, x, z: 1 - x.tanh() ** 2), graph(lambda b, x, z: 1 - (x.tanh() * 0.5) ** 2)),
    "f16 overflow": (graph(lambda b, x, z: x * z, dtype="f16"), graph(lambda b, x, z: x.tanh(), dtype="f16")),
    "cancellation": (graph(lambda b, x, z: x * z - z), graph(lambda b, x, z: (x * x + 2) - x.tanh())),
    "logarithm": (graph(lambda b, x, z: (1 + x * x).log()), graph(lambda b, x, z: (2 + x * x).log() + z.log())),
    "product": (graph(lambda b, x, z: x * z), graph(lambda b, x, z: x * z * x * z.tanh() * 1e4, dtype="f16")),
    "early rounding": (parse_spec("rmsnorm.fwd:d=9,dtype=bf16,casts=llama"), parse_spec("rmsnorm.fwd:d=9,dtype=bf16")),
    "saturation": tuple(parse_spec(f"rmsnorm.fwd:d=9,quant=e4m3,scales=tensor{keys}") for keys in ("", ",gamma=no")),
    "underflow": (parse_spec("rmsnorm.fwd:d=9,quant=int8"), parse_spec("rmsnorm.fwd:d=9")),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_hazard_goes_with_its_guard(name: str) -> None:
    without, guarded = PAIRS[name]
    assert [h for h in of(without, name) if not h.guard]
    assert not [h for h in of(guarded, name) if not h.guard]


def test_hazards_of_backwards_and_of_later_passes() -> None:
    layernorm = "layernorm.bwd:d=64,dtype=f32"
    assert of(f"{layernorm},save=y", "division")[0].guard == "0 is replaced"
    assert of("rmsnorm.fwd:d=64,dtype=f32,eps=0", "root of 0")[0].limit == 0
    corrected = "the mean is corrected by the mean of the differences from it"
    assert [h.guard for h in of(layernorm, "mean removed")] == ["", corrected]  # of dy gamma, and of x
    assert "segments" in of("layernorm.fwd:d=65536,dtype=f32", "mean removed")[0].guard
    assert "equal numbers of bf16" in of("layernorm.fwd:d=4096,dtype=bf16", "mean removed")[0].guard
    assert [len(of(layernorm, name)) for name in ("row sum", "column sum", "remainder")] == [2, 2, 1]


def run(spec: Spec, x: Array, z: float = 1.0) -> Array:
    given = {"x": round_to(x, spec.dtype), "z": round_to(np.full_like(x, z), spec.dtype)}
    return interpret(spec.graph(), given)["y"].astype(np.float64)


# By graph the hazard, numbers for x and z at which it happens, and the right result.
LOST: dict[str, tuple[Callable[[GraphBuilder, Value, Value], Value], str, float, float, Callable[[Any, Any], Any]]] = {
    "v - c": (lambda b, x, z: x.tanh() - 0.5, "complement", 0.5493, 0, lambda x, z: np.tanh(x) - 0.5),
    "v + -c": (lambda b, x, z: x.sigmoid() + -1.0, "complement", 12, 0, lambda x, z: -1 / (1 + np.exp(x))),
    "exp(x) - 1": (lambda b, x, z: x.exp() - 1, "complement", 1e-5, 0, lambda x, z: np.expm1(x)),
    "log(1 + x)": (lambda b, x, z: (1 + x).log(), "logarithm", 1e-5, 0, lambda x, z: np.log1p(x)),
    "a root": (lambda b, x, z: (x * x + 1).sqrt() - x, "cancellation", 999, 0, lambda x, z: 1 / (x + np.hypot(x, 1))),
    "(x + z) - z": (lambda b, x, z: (x + z) - z, "cancellation", 0.123, 1e4, lambda x, z: x),
    "(x + z) + -z": (lambda b, x, z: (x + z) + (-z), "cancellation", 0.123, 1e4, lambda x, z: x),
}


@pytest.mark.parametrize("name", LOST)
def test_digits_are_lost_where_it_is_said(name: str) -> None:
    describe, hazard, x, z, right = LOST[name]
    spec = graph(describe)
    assert [h.name for h in of(spec, hazard)] == [hazard]
    given = (round_to(np.full((1, 256), n), spec.dtype).astype(np.float64) for n in (x, z))
    assert np.abs(run(spec, np.full((1, 256), x), z) / right(*given) - 1).min() > 2**-13


def test_powers_overflow_where_it_is_said() -> None:
    cube = graph(lambda b, x, z: x * x * x)
    limits = [h.limit or 0 for h in of(cube, "product")]
    assert limits == pytest.approx([3.403e38 ** (1 / n) for n in (2, 3)], rel=1e-3)
    assert np.isinf(run(cube, np.full((1, 256), 1.001 * min(limits)))).all()
    assert np.isfinite(run(cube, np.full((1, 256), 0.999 * min(limits)))).all()
    assert not of(PAIRS["squares"][0], "product"), "which are said with their sum"
    assert len([line for line in str(section(cube)).splitlines() if "(product)" in line]) == 2


@pytest.mark.parametrize("name", ["squares", "exponential", "f16 overflow"])
def test_what_overflows_does_so_at_its_limit(name: str) -> None:
    (hazard,), x = of(PAIRS[name][0], name), np.zeros((2, 256))
    x[:, 3] = np.array([1.001, 0.999]) * (hazard.limit or 0) / (2 if name == "f16 overflow" else 1)
    assert np.isinf(run(PAIRS[name][0], x, z=2.0)[:, 3]).tolist() == [True, False]


def test_what_loses_digits_does_so_and_its_guard_does_not() -> None:
    (hazard,) = of(ONE_PASS, "one-pass variance")
    assert hazard.limit == 2.0**12
    x = np.random.default_rng(2).normal(hazard.limit, 1, (3, 256)).astype(np.float32).astype(np.float64)
    bad, good = (np.abs(run(s, x) / x / x.var(axis=1, keepdims=True) - 1).max() for s in (ONE_PASS, graph(centred)))
    assert bad > 0.3 > 1e-3 > good
    equal = np.repeat(np.linspace(0.1, 9.3, 64)[:, None], 1000, axis=1)
    assert run(MEAN, equal).any()
    assert not run(graph(centred, d=1000), equal).any()
    assert np.isinf(run(PAIRS["division"][0], equal[:, :256], z=0)).all()
    assert [np.isnan(run(s, 0 * equal[:, :256])).all() for s in PAIRS["root of 0"]] == [True, False]


def quantised(dtype: DType, divided: bool = True, **how: Any) -> Spec:
    """x in 8 bits; ``scale``: by a given one, that divides or multiplies."""

    def describe(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        given = {name: b.input(name, dtype="f32", positive=True) for name in how if name in ("scale", "amax_max")}
        if divided:
            b.quantise("y", x, dtype, **how | given)
        else:
            b.output("y", x * given["scale"], dtype)

    return make_spec(Definition("mine", describe), "fwd", {"d": 256, "dtype": "f32"})


def in_8_bits(spec: Spec, largest: float, v: float, given: float = 0.0) -> float:
    """What becomes of ``v`` in a row with that largest number, and zeros."""
    x, name = np.zeros((1, 256), np.float32), next((p.name for p in spec.graph().params[1:]), "")
    x[0, 3:5] = largest, v
    return float(interpret(spec.graph(), {"x": x, name: np.float32(given)})["y"][0, 4])


@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_cast_to_8_bits_loses_numbers_where_it_is_said(dtype: DType) -> None:
    """Beside the largest number of the row, at a bound of its scale, and with a scale that is given."""
    own = quantised(dtype)
    (times,) = (h.limit or 0 for h in of(own, "underflow"))
    assert [in_8_bits(own, 2.0, 2 * part / times) != 0 for part in (0.999, 1.001)] == [False, True]
    raised = quantised(dtype, amax_min=0.5)
    assert [h.limit for h in of(raised, "least scale")] == [0.5, 2.0**-126]
    assert [in_8_bits(raised, v := 0.5 * part / times, v) != 0 for part in (0.999, 1.001)] == [False, True]
    for divided, s in ((True, 3.0), (False, 1 / 3)):
        given = quantised(dtype, divided, scale=s)
        (most,), (least,) = ([h.limit or 0 for h in of(given, name)] for name in ("saturation", "underflow"))
        assert [in_8_bits(given, 0, 3 * part * least, s) != 0 for part in (0.999, 1.001)] == [False, True]
        assert [in_8_bits(given, 0, 3 * n, s) for n in (most, 9 * most)] == [most] * 2
        assert in_8_bits(given, 0, -27 * most, s) == -most - (dtype is DType.INT8)


@pytest.mark.parametrize(("keys", "found"), [
    ("scales=row", {"underflow", "least scale"}), ("scales=block", {"underflow", "least scale"}),
    ("apply=mul,scale_pow2=up", {"underflow", "least scale", "power of two"}),
    ("apply=ratio", {"underflow", "least scale", "division"}),
    ("amax_max=yes", {"saturation", "underflow", "least scale"}), ("scales=tensor", {"saturation", "underflow"}),
    ("scales=tensor,apply=mul", {"saturation", "underflow"}),
    ("scales=tensor,tensor_scale=multiply", {"saturation", "underflow"}),
])  # fmt: skip
def test_the_hazards_of_a_quantised_norm(keys: str, found: set[str]) -> None:
    """They follow from what is cast; names are those of the graph's own values."""
    plain, quant = (
        [hazard for _, hazard in hazards(Facts(parse_spec(f"rmsnorm.fwd:d=256,dtype=bf16{k}"), 64))]
        for k in ("", f",quant=e4m3,{keys}")
    )
    added = [h for h in quant if h not in plain]
    assert {h.name for h in added} == found
    assert not any(word in h.risk for h in added for word in ("stopped", "constant"))
    assert all(h.guard for h in added if h.name in ("division", "least scale"))


@lru_cache
def section(spec: str | Spec) -> Section:
    return stability(subject_of(spec, rows=None))


def test_the_measured_table_has_the_known_worst_cases() -> None:
    specs = ("layernorm.fwd:d=512,dtype=f32", ONE_PASS, "layernorm.bwd:d=512,dtype=bf16")
    rows, of_one_pass, backward = ({r["inputs"]: r for r in section(s).data["measured"]} for s in specs)
    assert {*rows} == {"ordinary", "large-mean-1e4", "tiny-variance", "constant-rows", "huge"}
    assert rows["large-mean-1e4"]["conditions"]["xc"] > 5e3 > 10 > rows["ordinary"]["conditions"]["xc"]
    assert rows["large-mean-1e4"]["errors"]["y"] > 100 > 10 > rows["ordinary"]["errors"]["y"]
    assert rows["huge"]["errors"]["rstd"] is rows["constant-rows"]["conditions"]["xc"] is None  # infinite
    assert of_one_pass["large-mean-1e4"]["errors"]["y"] > 1e6
    assert {*backward["ordinary"]["errors"]} == {"dx", "dgamma", "dbeta"}
    assert {*backward} == {"ordinary", "large-mean-1e2", "huge"}  # no mean of 1000 standard deviations: this is bf16


@pytest.mark.parametrize("spec", ["layernorm.bwd:d=4096,dtype=bf16", "layernorm.bwd:d=64,dtype=f32,save=y", ONE_PASS])
def test_the_section_is_short_and_names_equations(spec: str | Spec) -> None:
    found = section(spec)
    assert 10 < len(str(found).splitlines()) <= 40
    assert json.dumps(found.data, allow_nan=False)
    eqns = (parse_spec(spec) if isinstance(spec, str) else spec).trace()["cse"].eqns
    assert {f["equation"] for f in found.data["findings"]} <= {*map(print_eqn, eqns)}


def test_where_nothing_is_measured_it_says_why() -> None:
    assert "float64" in section("layernorm.fwd:d=64,dtype=f64").data["measured"]
    assert "accumulate" in section("layernorm.bwd:d=64,dtype=f32,accumulate=gamma").data["measured"]
