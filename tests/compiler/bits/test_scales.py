"""If these fail, ``b.quantise`` chooses another scale, or divides by it, otherwise than ``lngen help graph`` says."""

import hashlib
from typing import Any

import numpy as np
import pytest

from explained import subject_of
from float8 import nearest
from lngen.compiler.graphs import Definition, GraphBuilder
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import D, DType, M
from lngen.compiler.ir.numerics import NUMPY_DTYPE
from lngen.compiler.spec import Spec, make_spec
from lngen.dtypes import QUANTISED
from lngen.lab.explain import explain
from lngen.proof.check.differences import gradient_excess
from lngen.proof.check.inputs import mismatches, random_inputs
from lngen.proof.ptx import run_plan
from plans import plan_of_each_form

LEAST = np.float32(2.0**-126)


def spec_of(describe: Any, d: int, dtype: str = "f32", way: str = "fwd") -> Spec:
    return make_spec(Definition("own", describe), way, {"d": d, "dtype": dtype})


def quantised(dtype: DType, block: int = 0, **options: Any) -> Any:
    """x itself, quantised by rows, or by blocks of features."""

    def describe(b: GraphBuilder) -> None:
        b.quantise("q", b.input("x", M, D), dtype, to=b.axis("B", D / block) if block else None, **options)

    return describe


def by_given_scale(dtype: DType) -> Any:
    def describe(b: GraphBuilder) -> None:
        s = b.input("q_scale", dtype="f32", differentiable=False)
        b.quantise("q", b.input("x", M, D), dtype, scale=s)

    return describe


def model(x: Any, dtype: DType, block: int, scale_min: Any = LEAST) -> tuple[Any, Any]:
    """The bytes and the scales, in NumPy's f32."""
    groups = x.astype(np.float32).reshape(len(x), -1, block)
    with np.errstate(all="ignore"):
        scale = np.maximum(np.abs(groups).max(2) / np.float32(dtype.largest), np.float32(scale_min))
        return nearest(groups / scale[..., None], dtype).reshape(x.shape), scale


def bits(a: Any) -> Any:
    return a.view(np.uint8)


def test_the_known_answer() -> None:
    """Many ties: x * (1 / scale) has other bytes."""
    x = ((np.arange(128) - 64) * 0.0371).astype(NUMPY_DTYPE[DType.BF16])[None]
    found = interpret(spec_of(quantised(DType.E4M3), 128, "bf16").graph(), {"x": x})
    q = bits(found["q"])[0].tobytes()
    assert found["q_scale"].view(np.uint32).tolist() == [0x3BADB6DB]
    assert (q[:8].hex(), q[-8:].hex()) == ("fefefefdfdfdfdfc", "7c7c7d7d7d7d7e7e")
    assert hashlib.sha256(q).hexdigest()[:12] == "d8b65f35a16a"
    blocked = interpret(spec_of(quantised(DType.E4M3, 128), 128, "bf16").graph(), {"x": x})
    assert bits(blocked["q"])[0].tobytes() == q


INF, NAN = np.inf, np.nan
# A row, the largest |x| of which is scaled (None: the scale is the least one), its bytes in e4m3, e5m2, int8.
RULES: list[tuple[list[float], Any, Any]] = [
    ([0.0, -0.0, 0.0, -0.0], None, ([0, 0x80, 0, 0x80], [0, 0x80, 0, 0x80], [0, 0, 0, 0])),
    ([1.0, NAN, 0.0, -2.0], "nan", ([0x7F] * 4, [0x7F] * 4, [0] * 4)),
    ([1.0, INF, -0.0, 2.0], INF, ([0, 0x7F, 0x80, 0], [0, 0x7F, 0x80, 0], [0, 0, 0, 0])),
    ([1.0, -INF, -3.0, INF], INF, ([0, 0x7F, 0x80, 0x7F], [0, 0x7F, 0x80, 0x7F], [0, 0, 0, 0])),
    ([4.0, -4.0, 2.0, -0.0], 4.0, ([0x7E, 0xFE, 0x76, 0x80], [0x7B, 0xFB, 0x77, 0x80], [127, 129, 64, 0])),
    ([2.0**-140, -(2.0**-149), 0.0, 0.0], None, ([0, 0x80, 0, 0], [0x04, 0x80, 0, 0], [0, 0, 0, 0])),
]  # fmt: skip


@pytest.mark.parametrize("arch", ["", "sm_75", "sm_80", "sm_90"])
@pytest.mark.parametrize("block", [0, 4])
def test_the_rules(block: int, arch: str) -> None:
    """On NumPy, and in kernels for ``arch``."""
    x = np.array([row for row, _, _ in RULES], np.float32)
    for n, t in enumerate((DType.E4M3, DType.E5M2, DType.INT8)):
        spec = spec_of(quantised(t, block), 4)
        plan, given = plan_of_each_form(spec)[0], {"x": x}
        found = run_plan(plan, given, arch=arch).results if arch else interpret(spec.graph(), given)
        assert bits(found["q"]).tolist() == [q[n] for _, _, q in RULES]
        for scale, (_, largest, _) in zip(found["q_scale"].reshape(-1), RULES, strict=True):
            if largest == "nan":
                assert np.isnan(scale)
            else:
                assert scale == (LEAST if largest is None else np.float32(largest) / np.float32(t.largest))


@pytest.mark.parametrize("dtype", QUANTISED)
def test_with_a_given_scale_a_nan_stays_alone(dtype: DType) -> None:
    x = np.array([[1.0, NAN, INF, -INF, -0.0, 3.0, 1e-30, -700.0]], np.float32)
    for scale in (1.0, 0.0123, INF, NAN, 2.0**-140):
        inputs = {"x": x, "q_scale": np.array(scale, np.float32)}
        spec = spec_of(by_given_scale(dtype), 8)
        with np.errstate(all="ignore"):
            want = nearest(x / inputs["q_scale"], dtype)
        assert bits(interpret(spec.graph(), inputs)["q"]).tolist() == want.tolist()
        assert bits(run_plan(plan_of_each_form(spec)[0], inputs).results["q"]).tolist() == want.tolist()


@pytest.mark.parametrize(("dtype", "d", "x", "block", "scale_min"), [
    ("e4m3", 256, "bf16", 128, 2.0**-126), ("e4m3", 100, "f32", 0, 2.0**-126), ("e5m2", 512, "f16", 64, 2.0**-126),
    ("int8", 96, "f32", 32, 2.0**-23), ("int8", 264, "bf16", 0, 2.0**-126), ("e4m3", 128, "bf16", 16, 4.36e-6),
], ids=str)  # fmt: skip
def test_scales_are_those_of_a_model(dtype: str, d: int, x: str, block: int, scale_min: float) -> None:
    """Rows from 2^-120 to 2^120, one of zeros; the model is the interpreter, and every form of kernels is."""
    rng = np.random.default_rng(d)
    size = 2.0 ** (rng.integers(-14, 15, (7, 1)) if x == "f16" else rng.integers(-120, 121, (7, 1)))
    given = (rng.normal(size=(7, d)) * size).astype(NUMPY_DTYPE[DType(x)])
    given[3] = 0
    spec = spec_of(quantised(DType(dtype), block, scale_min=scale_min), d, x)
    q, scale = model(given, DType(dtype), block or d, scale_min)
    found = interpret(spec.graph(), {"x": given})
    assert np.array_equal(bits(found["q"]), q)
    assert np.array_equal(found["q_scale"].reshape(scale.shape), scale)
    for plan in plan_of_each_form(spec):
        outcome = run_plan(plan, {"x": given})
        assert mismatches(outcome.results, found) == [], plan
        assert outcome.findings == ()


def normed(b: GraphBuilder) -> None:
    """What a GEMM with scales of blocks takes of an addition and its norm."""
    h = b.output("h", b.input("x", M, D) + b.input("residual", M, D))
    h32 = b.cast("h32", h, to=b.compute)
    y = h32 * b.statistic((b.mean(h32 * h32) + b.eps()).rsqrt(), "rstd") * b.input("gamma", D)
    b.quantise("q", y, to=b.axis("B", D / 64))


@pytest.mark.parametrize(("d", "dtype", "way", "forms"), [
    (512, "bf16", "fwd", None), (192, "f32", "fwd", None), (64, "f64", "fwd", 1), (512, "bf16", "bwd", 2),
], ids=str)  # fmt: skip
def test_a_norm_of_blocks_has_the_interpreters_bits(d: int, dtype: str, way: str, forms: int | None) -> None:
    spec = spec_of(normed, d, dtype, way)
    inputs = random_inputs(spec, 3)
    for plan in plan_of_each_form(spec)[:forms]:
        outcome = run_plan(plan, inputs)
        assert mismatches(outcome.results, interpret(spec.graph(), inputs)) == [], plan
        assert outcome.findings == ()


@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_gradient_passes_straight_through(dtype: DType) -> None:
    """dx = dq / scale, also of what saturates; the largest element has no other gradient than its neighbours."""
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    scale = np.abs(x).max(1, keepdims=True) / np.float32(dtype.largest)
    dq = np.random.default_rng(1).normal(size=(3, 8)).astype(np.float32)
    found = interpret(spec_of(quantised(dtype), 8, way="bwd").graph(), {"dq": dq, "x": x})
    assert np.array_equal(found["dx"], dq / scale)


def test_in_f64_the_scale_that_is_stored_divides() -> None:
    """It is rounded to f32 first."""
    x = np.random.default_rng(0).normal(size=(5, 16))
    found = interpret(spec_of(quantised(DType.E4M3), 16, "f64").graph(), {"x": x})
    assert found["q_scale"].dtype == np.float32
    assert np.array_equal(bits(found["q"]), nearest(x / found["q_scale"][:, None].astype(np.float64), DType.E4M3))


def test_the_gradient_is_that_of_differences() -> None:
    """The rounding to 8 bits is taken for none, also where the largest number of a block saturates."""
    found = gradient_excess(spec_of(normed, 128, way="bwd"))
    assert {*found} == {"dx", "dresidual", "dgamma"}
    assert max(found.values()) < 1


def test_explain_measures_the_errors_of_quantised_results() -> None:
    (section,) = explain(subject_of(spec_of(normed, 128, "bf16")), ["stability"])
    (ordinary, *_) = section.data["measured"]
    assert {*ordinary["errors"]} >= {"h", "q", "q_scale"}
    assert ordinary["errors"]["q"] <= 1
