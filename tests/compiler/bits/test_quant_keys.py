"""If these fail, a norm with ``quant`` quantises another value, by another scale, than ``lngen help quant`` says."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import lngen
from float8 import nearest
from graph_names import whole_heads
from lngen.compiler.graphs import GRAPHS, Definition
from lngen.compiler.graphs.quantised import KEYS, NEEDS
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import Builder, D, DType, M
from lngen.compiler.ir.numerics import NUMPY_DTYPE
from lngen.compiler.spec import make_spec, parse_spec
from lngen.errors import ArrayError, SpecError
from lngen.proof.check.inputs import mismatches, random_inputs
from lngen.proof.ptx import run_plan
from plans import plan_of_each_form
from sampling import rotating

Array = Any
QUANTISING = [
    name for name in GRAPHS if "quant" in GRAPHS[name].builder(parse_spec(f"{name}.fwd:d=8").options).declared
]


# ---- a model of the rule, in NumPy's f32 and Python, without the IR ----


@dataclass(frozen=True)
class Rule:
    """The keys of a case, as words."""

    quant: str
    scales: str = "row"
    block_size: int = 128
    tensor_scale: str = "divide"
    apply: str = "div"
    amax_min: float = 0.0
    amax_max: float | None = None
    scale_min: float = 2.0**-126
    scale_pow2: str = "no"
    scale_layout: str = "rows"
    quantised: str = "f32"
    y: bool = False
    amax: bool = False

    @property
    def keys(self) -> str:
        """As a spec has them."""
        default, found = Rule(self.quant), [f"quant={self.quant}"]
        for key in KEYS:
            value = getattr(self, key)
            if value != getattr(default, key):
                found.append(f"{key}={'yes' if key in ('y', 'amax', 'amax_max') else value}")
        return ",".join(found)

    def model(self, value: Array, given: Array | None) -> tuple[Array, Array | None]:
        """The bytes, and the scales if they are computed."""
        one, dtype = np.float32(1), DType(self.quant)
        q = np.float32(dtype.largest)
        with np.errstate(all="ignore"):
            if self.scales == "tensor":
                if self.tensor_scale == "multiply":
                    return nearest(value * given, dtype), None
                return nearest(value * (one / given) if self.apply == "mul" else value / given, dtype), None
            groups = value.reshape(len(value), -1, self.block_size if self.scales == "block" else value.shape[1])
            amax = np.abs(groups).max(2)  # keeps a NaN
            if self.amax_max is not None:
                amax = np.minimum(amax, np.float32(self.amax_max))
            amax = np.maximum(amax, np.float32(self.amax_min))
            scale = np.maximum(amax / q, np.float32(self.scale_min))
            if self.scale_pow2 == "up":
                found = np.exp2(np.ceil(np.log2(scale.astype(np.float64))))
                scale = np.where(np.isfinite(scale), found, scale).astype(np.float32)
            factors = {
                "div": lambda: groups / scale[..., None],
                "mul": lambda: groups * (one / scale)[..., None],
                "ratio": lambda: groups * np.minimum(q / amax, one / np.float32(self.scale_min))[..., None],
            }
            return nearest(factors[self.apply](), dtype).reshape(value.shape), scale


# ---- cases ----


def drawn(seed: int) -> tuple[str, Rule, int, int]:
    """A graph with its own keys, a rule, D and rows."""
    rng = np.random.default_rng(seed)

    def one(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    scales, quant = one("row", "row", "block", "block", "tensor"), one("e4m3", "e5m2", "int8")
    dtype, weight = one("bf16", "f16", "f32"), one("", ",weight=f32")
    rule = Rule(quant, scales, quantised=one("f32", "y"), y=one(False, True), amax=one(False, False, True))
    if scales == "tensor":
        rule = replace(rule, tensor_scale=one("divide", "multiply"))
        if rule.tensor_scale == "divide":
            rule = replace(rule, apply=one("div", "mul"))
    else:
        power = one("no", "up")
        rule = replace(
            rule,
            scale_pow2=power,
            apply=one("div", "mul") if power == "up" else one("div", "mul", "ratio"),
            amax_min=one(0.0, 1e-10, 0.5),
            amax_max=one(None, None, 1.25),
            scale_min=one(2.0**-126, 4.359653e-06, 2.0**-23),
        )
    block = 128
    if scales == "block":
        block = int(one(*(["16", "32", "64", "128"] + ["256"] * (dtype != "f32"))))
        rule = replace(rule, block_size=block, scale_layout=one("rows", "columns"))
    graph, keys = one(
        ("rmsnorm", ""), ("rmsnorm", ",casts=llama"), ("rmsnorm", ",casts=gemma"), ("rmsnorm", ",zero_centred=yes"),
        ("layernorm", ""), ("layernorm", ",beta=no"), ("add_rmsnorm", ""), ("add_rmsnorm", ",residual_dtype=f32"),
        ("add_layernorm", ",round_sum=no"), ("gated_rmsnorm", ""), ("gated_layernorm", ",gate_first=yes"),
        ("rmsnorm_act", ",act=gelu"), ("layernorm_act", ""), ("layernorm_sigmoid_mul", ""), ("rmsnorm_sigmoid_mul", ""),
        ("l2norm", ""), ("softmax", ""), ("dyt", ""), ("parallel_rmsnorm", ""), ("parallel_layernorm", ""),
    )  # fmt: skip
    d = block * int(rng.integers(1, 5)) if scales == "block" else int(rng.integers(1, 700))
    return f"{graph}.fwd:d={d},dtype={dtype}{weight}{keys}", rule, d, int(one(1, 3, 7))


def spiced(rng: np.random.Generator, x: Array) -> Array:
    """Rows of zeros, with a NaN, with an infinity, large and small ones."""
    x = x.copy()
    for row in x:
        match rng.integers(9):
            case 0:
                row[...] = 0
            case 1:
                row[rng.integers(len(row))] = np.nan
            case 2:
                row[rng.integers(len(row))] = -np.inf
            case 3:
                row *= row.dtype.type(2.0**-12)
    return x


def check(text: str, rule: Rule, rows: int, seed: int, chosen: Callable[[list[Any]], list[Any]]) -> None:
    """The interpreter has the bytes of the model, and kernels those of the interpreter."""
    rng = np.random.default_rng(seed)
    spec, plain = parse_spec(f"{text},{rule.keys}"), parse_spec(text)
    inputs = random_inputs(spec, rows)
    inputs["x"] = spiced(rng, inputs["x"])
    for name in ("amax_max", "amax1_max"):
        if name in inputs:
            inputs[name] = np.array(rule.amax_max, np.float32)
    found = interpret(spec.graph(), inputs)
    values = interpret(plain.graph() if rule.quantised == "y" else replace(plain, out=DType.F32).graph(), inputs)
    for suffix in ("", "1") if "parallel" in text else ("",):
        value = values[f"y{suffix}"].astype(np.float32)
        q, scale = rule.model(value, inputs.get(f"q{suffix}_scale"))
        assert np.array_equal(found[f"q{suffix}"].view(np.uint8), q), (text, rule)
        if rule.amax:
            with np.errstate(invalid="ignore"):
                largest = np.maximum(np.abs(value).max(), inputs[f"amax{suffix}_in"])
            assert np.array_equal(found[f"amax{suffix}"], largest, equal_nan=True)
        if scale is not None:
            if rule.scale_layout == "columns":
                scale = scale.T
            assert np.array_equal(found[f"q{suffix}_scale"].reshape(scale.shape), scale, equal_nan=True)
    same = [name for name in ("y", "y1", "h", "mean", "rstd", "rowsum") if name in found and name in values]
    plainly = interpret(plain.graph(), inputs)
    assert mismatches({n: found[n] for n in same}, {n: plainly[n] for n in same}) == []
    assert ("y" in found) is rule.y
    for plan in chosen(plan_of_each_form(spec)):
        outcome = run_plan(plan, inputs)
        assert mismatches(outcome.results, found) == [], plan
        assert outcome.findings == ()


@rotating("seed", range(2000))
def test_a_random_rule_is_that_of_the_model(seed: int) -> None:
    text, rule, _, rows = drawn(seed)
    check(text, rule, rows, seed, lambda found: [found[seed % len(found)]] if seed % 4 == 0 else [])


@pytest.mark.parametrize(("d", "dtype", "block", "layout"), [
    (8320, "bf16", 128, "columns"), (8320, "bf16", 64, "rows"), (11008, "f32", 128, "columns"),
    (8960, "f16", 256, "columns"),
])  # fmt: skip
def test_a_block_may_lie_across_two_segments(d: int, dtype: str, block: int, layout: str) -> None:
    rule = Rule("e4m3", "block", block_size=block, scale_layout=layout)
    check(f"rmsnorm.fwd:d={d},dtype={dtype}", rule, 3, d, lambda found: found[:2])


@pytest.mark.parametrize(("rows", "apart"), [(4, 0), (6, 0), (1, 0), (8, 8), (6, 8), (6, 20), (1, 4)])
def test_columns_lie_as_far_apart_as_an_array_has_them(rows: int, apart: int) -> None:
    """A new array, 0, has zeros behind the rows; in a given one a kernel writes nothing there."""
    spec = parse_spec("rmsnorm.fwd:d=64,dtype=bf16,quant=e4m3,scales=block,block_size=16,scale_layout=columns")
    inputs = random_inputs(spec, rows)
    for plan in plan_of_each_form(spec):
        outcome = run_plan(plan, inputs, strides={"q_scale": apart} if apart else None)
        assert mismatches(outcome.results, interpret(spec.graph(), inputs)) == [], plan
        assert outcome.findings == ()
        if not apart:
            assert not outcome.results["q_scale"].base[:, rows:].any()


def test_random_rules_have_every_word_of_every_key() -> None:
    rules = [drawn(seed)[1] for seed in range(400)]
    for key, (default, words, _) in KEYS.items():
        if key == "quant":
            words = words[1:]
        seen = {str(getattr(rule, key)) for rule in rules}
        assert {*words} <= seen, key
        assert len(seen) > 1, (key, default)


# ---- what does not fit together ----

REFUSED = [
    ("scales=block", "needs quant="), ("y=yes", "needs quant="), ("quant=e4m3,block_size=64", "needs scales=block"),
    ("quant=e4m3,tensor_scale=multiply", "needs scales=tensor"), ("quant=e4m3,scales=tensor,amax_max=yes", "needs"),
    ("quant=e4m3,scales=tensor,amax_min=1", "needs scales=row|block"), ("quant=int8,scales=tensor,scale_pow2=up", ""),
    ("quant=int8,scales=tensor,scale_min=0.5", "needs scales=row|block"), ("quant=e4m3,scale_min=0", "from 2^-126"),
    ("quant=e4m3,amax_min=-1", "0 or more"), ("quant=int8,scales=block,block_size=256", "16-bit"),
    ("quant=e4m3,scales=tensor,tensor_scale=multiply,apply=mul", "leave apply away"),
    ("quant=e4m3,scales=tensor,apply=ratio", "use apply=mul"), ("quant=e4m3,scale_pow2=up,apply=ratio", "apply=mul"),
    ("quant=e4m3,scale_layout=columns", "needs scales=block"),
    ("quant=e2m1", "no quant 'e2m1'"), ("quant=e4m3,scales=column", "no scales 'column'"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "why"), REFUSED)
def test_keys_that_do_not_fit_are_refused(keys: str, why: str) -> None:
    with pytest.raises(SpecError) as raised:
        parse_spec(f"rmsnorm.fwd:d=512,{keys}").forward()
    assert why in str(raised.value)
    assert "\n" not in str(raised.value)


def test_every_key_but_quant_needs_another() -> None:
    assert {*NEEDS} == {*KEYS} - {"quant"}


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan])
def test_a_scale_of_numpy_is_above_zero(scale: float) -> None:
    """That of a GPU is not read: it would wait for the GPU."""
    norm = lngen.compile("rmsnorm", d=8, quant="e4m3", scales="tensor", dx_quant="e5m2")
    x, number = np.ones((2, 8), np.float32), np.array(scale, np.float32)
    with pytest.raises(ArrayError, match="'q_scale' is expected to be a number above 0"):
        norm.forward(x, x[0], number)
    _, saved = norm.forward(x, x[0], np.array(0.5, np.float32))
    with pytest.raises(ArrayError, match="'dx_scale' is expected to be a number above 0"):
        norm.backward(x, saved, dx_scale=number)


# ---- backward ----


@pytest.mark.parametrize("name", QUANTISING)
def test_a_backward_is_that_without_the_keys(name: str) -> None:
    keys = "quant=e4m3,scales=block,block_size=16,y=yes"
    d = whole_heads(name, 64)
    assert parse_spec(f"{name}.bwd:d={d},{keys}") == parse_spec(f"{name}.bwd:d={d}")
    forward = parse_spec(f"{name}.fwd:d={d},{keys}")
    assert forward.with_direction("bwd") == parse_spec(f"{name}.bwd:d={d}")
    saved = {p.name for p in forward.with_direction("bwd").graph().tensors}
    given = {v.name for v in (*forward.graph().results, *forward.graph().tensors)}
    assert saved - given <= {"dy", "dy1", "dh"}


def test_all_graphs_that_return_y_quantise() -> None:
    assert {*GRAPHS} - {*QUANTISING} == {"log_softmax", "cross_entropy"}


def test_slugs_have_the_word_quant() -> None:
    assert (
        parse_spec("rmsnorm.fwd:d=64,quant=e4m3,quantised=y").slug == "rmsnorm_fwd__f32_d64_set_quant_e4m3_quantised_y"
    )


# ---- division by a scale ----


@pytest.mark.parametrize("quant", ["e4m3", "e5m2", "int8"])
@pytest.mark.parametrize("bounded", [True, False])
def test_div_scale_has_the_bytes_of_a_division(quant: str, bounded: bool) -> None:
    """Over all magnitudes of scales, and beside every edge of the dtype; without a bound, also quotients beyond it."""
    rng, dtype = np.random.default_rng(3), DType(quant)
    scale = (rng.uniform(1, 2, 4000) * np.exp2(rng.integers(-126, 110, 4000))).astype(np.float32)[:, None]
    edge = np.exp2(rng.uniform(-24, np.log2(dtype.largest), (4000, 64))) * rng.choice([-1, 1], (4000, 64))
    with np.errstate(all="ignore"):
        x = (edge * scale).astype(np.float32)
        x[:, :2] = [0.0, -0.0]
        if not bounded:
            x[:, 2:6] = [np.inf, -np.inf, 3e38, np.nan]
        want = nearest(x / scale, dtype)
    assert np.array_equal(divided(x, scale, bounded, dtype), want)


@pytest.mark.parametrize("quant", ["e4m3", "e5m2", "int8"])
def test_a_scale_is_amax_divided_by_the_largest_number(quant: str) -> None:
    """For all exponents, subnormal amax, the largest one, an infinite one and a NaN."""
    rng, largest = np.random.default_rng(5), np.float32(DType(quant).largest)
    amax = (rng.uniform(1, 2, (254, 512)) * np.exp2(np.arange(-126.0, 128)[:, None])).astype(np.float32).reshape(-1)
    edges = [0, 2.0**-149, 2.0**-127, np.finfo(np.float32).max, np.inf, np.nan, largest, np.nextafter(largest, 0)]
    amax = np.concatenate([amax, np.array(edges, np.float32), np.nextafter(largest * np.float32(2.0**-126), [0, 1])])
    x = amax.astype(np.float32)[:, None]
    spec = make_spec(Definition("own", lambda b: b.quantise("q", b.input("x", M, D), quant)), "fwd", {"d": 1})
    with np.errstate(all="ignore"):
        want = np.maximum(x[:, 0] / largest, np.float32(2.0**-126))
    assert np.array_equal(interpret(spec.graph(), {"x": x})["q_scale"], want, equal_nan=True)


def divided(x: Array, scale: Array, bounded: bool, dtype: DType) -> Array:
    """By the interpreter."""
    b = Builder("f")
    v, s = b.param("x", DType.F32, M, D), b.param("s", DType.F32, M)
    q32 = b.div_scale("q32", v, s, least=2.0**-126 if bounded else 0.0, bounded=bounded)
    graph = b.build(b.cast("q", q32, to=dtype))
    return interpret(graph, {"x": x, "s": scale[:, 0]})["q"].view(np.uint8)


def test_numpy_reads_the_bytes(tmp_path: Any) -> None:
    """A result of the interpreter has the dtype of ml_dtypes, whose bytes are those of the kernel."""
    found = interpret(parse_spec("rmsnorm.fwd:d=16,quant=e4m3").graph(), {
        "x": np.ones((1, 16), np.float32), "gamma": np.ones(16, np.float32)
    })  # fmt: skip
    assert found["q"].dtype == NUMPY_DTYPE[DType.E4M3]
    assert [*itertools.chain(found["q"].astype(np.float32)[0])] == [448.0] * 16
