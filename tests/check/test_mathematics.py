"""If these fail, the interpreter's LayerNorm or RMSNorm is off the closed form, or special numbers go astray in it.

Rows alone, permuted and absent, and gradients against differences are cases of ``lngen conform`` (test_conform.py);
PyTorch judges every graph of the family in tests/family/test_family.py.
"""

from itertools import product

import numpy as np
import pytest

from lngen.check.oracles import NORMS, Array, Expected, closed_form
from lngen.graphs import Definition, GraphBuilder
from lngen.interpret import interpret
from lngen.ir import BF16, F16, F32, F64, D, DType, M, compute_dtype
from lngen.ir.numerics import NUMPY_DTYPE, round_to
from lngen.spec import Spec, make_spec, parse_spec

DTYPES = [F16, BF16, F32, F64]

# D and M in pairs: every length, short and long columns, more rows than row groups times blocks at D = 255.
SHAPES = [
    *((1, 17), (2, 300), (3, 17), (8, 300), (31, 17), (64, 3)),
    *((255, 300), (768, 17), (1000, 3), (4096, 1), (4096, 17)),
]


def draw(spec: Spec, rows: int, mean: float = 0.5, seed: int = 0) -> dict[str, Array]:
    """x a ``mean`` of standard deviations off zero, gamma of either sign, dy with a mean; in their dtypes."""
    rng = np.random.default_rng([seed, rows, spec.d])
    wide, gradient = (rows, spec.d), spec.out
    values = {
        "x": (rng.standard_normal(wide) + mean, spec.dtype),
        "gamma": (rng.uniform(0.5, 2, spec.d) * rng.choice([-1, 1], spec.d), spec.weight),
        "beta": (rng.standard_normal(spec.d), spec.weight),
        "dy": (rng.standard_normal(wide) + 0.7, gradient),
    }
    return {name: round_to(value, dtype) for name, (value, dtype) in values.items()}


def results(spec: Spec, inputs: dict[str, Array]) -> dict[str, Array]:
    """The interpreter's results; backward takes from forward what forward saves."""
    forward = spec.with_direction("fwd").graph()
    if spec.direction == "fwd":
        return interpret(forward, inputs)
    saved = interpret(forward, inputs) if spec.save == "stats" else {}
    return interpret(spec.graph(), {**inputs, **saved})


def truth(spec: Spec, inputs: dict[str, Array]) -> dict[str, Expected]:
    """The closed form of every result, in f64."""
    norm = next(n for n in NORMS if n == spec.definition.name)
    names = ("x", "dy", *(p.name for p in spec.with_direction("fwd").forward().params))
    stored = {r.name: r.type.dtype for r in spec.graph().results}
    compute = compute_dtype(spec.dtype, spec.weight, spec.out)
    return closed_form(norm, {n: a for n, a in inputs.items() if n in names}, stored, spec.eps, compute)


def excess(spec: Spec, inputs: dict[str, Array]) -> float:
    """The largest error of a result, as a multiple of its bound."""
    found = results(spec, inputs)
    return max(expected.excess(found[name]) for name, expected in truth(spec, inputs).items())


OPTIONS = ["", ",save=none", ",gamma=no", ",beta=no", ",gamma=no,beta=no", ",eps=0.01"]
MIXED = [
    ("dtype=bf16,weight=f32", BF16), ("dtype=f16,weight=f32,out=f32", F16), ("dtype=f32,out=bf16", F32),
    ("dtype=bf16,weight=f64,out=f16", BF16),
]  # fmt: skip


def specs(norm: str, way: str, d: int, keys: str) -> Spec:
    if norm == "rmsnorm":
        keys = keys.replace(",beta=no", ",beta=yes")
    wrt = ",wrt=x" if way == "bwd" and "gamma=no,beta=no" in keys else ""
    return parse_spec(f"{norm}.{way}:d={d},{keys}{wrt}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["fwd", "bwd"])
@pytest.mark.parametrize("norm", NORMS)
def test_every_length(norm: str, way: str, dtype: DType) -> None:
    for d, rows in SHAPES:
        spec = parse_spec(f"{norm}.{way}:d={d},dtype={dtype}")
        assert excess(spec, draw(spec, rows)) <= 1, (d, rows)


@pytest.mark.parametrize("keys", [*(f"dtype={t}{o}" for t in DTYPES for o in OPTIONS), *(k for k, _ in MIXED)])
@pytest.mark.parametrize("way", ["fwd", "bwd"])
@pytest.mark.parametrize("norm", NORMS)
def test_every_option(norm: str, way: str, keys: str) -> None:
    for d, rows in ((31, 17), (64, 3)):
        spec = specs(norm, way, d, keys)
        assert excess(spec, draw(spec, rows)) <= 1, spec


@pytest.mark.parametrize("mean", [0.0, 30.0, 1e3, 1e4])
@pytest.mark.parametrize("way", ["fwd", "bwd"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_large_mean(norm: str, way: str, mean: float) -> None:
    for dtype, d in ((F32, 255), (F32, 4096), (F64, 255)):
        spec = parse_spec(f"{norm}.{way}:d={d},dtype={dtype}")
        assert excess(spec, draw(spec, 5, mean)) <= 1, spec


def bits(a: Array) -> Array:
    """The bits; a NaN counts as any other."""
    return np.where(np.isnan(a.astype(np.float64)), 0, a.view(f"u{a.dtype.itemsize}"))


def both(norm: str, dtype: DType, d: int) -> tuple[Spec, Spec]:
    forward = parse_spec(f"{norm}.fwd:d={d},dtype={dtype}")
    return forward, forward.with_direction("bwd")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["x", "dy"])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("norm", NORMS)
def test_a_bad_element_stays_in_its_row(norm: str, dtype: DType, where: str, bad: float) -> None:
    fwd, bwd = both(norm, dtype, 37)
    inputs = draw(fwd, 6)
    clean = results(fwd, inputs) | results(bwd, inputs)
    spoilt = {**inputs, where: inputs[where].copy()}
    spoilt[where][3, 20] = bad
    found = results(fwd, spoilt) | results(bwd, spoilt)
    others = np.arange(6) != 3
    for name, value in found.items():
        wide = value.astype(np.float64)
        if name in ("dgamma", "dbeta"):
            # A NaN of x spoils its whole row of xhat; dbeta knows dy only.
            columns = np.arange(37) == 20 if where == "dy" else np.full(37, name == "dgamma")
            if bad != bad or where == "dy":
                np.testing.assert_array_equal(np.isfinite(wide), ~columns)
            np.testing.assert_array_equal(bits(value)[~columns], bits(clean[name])[~columns])
            continue
        np.testing.assert_array_equal(bits(value)[others], bits(clean[name])[others])
        if name == "dx" and (where == "dy" or bad != bad):
            # inf times a negative mean may cancel to NaN or stay inf; finite it is nowhere.
            assert not np.isfinite(wide[3]).any()
        elif where == "x" and bad != bad:
            assert np.isnan(wide[3]).all(), name
        elif where == "dy":
            np.testing.assert_array_equal(bits(value), bits(clean[name]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_one_feature_is_all_mean(dtype: DType) -> None:
    fwd, bwd = both("layernorm", dtype, 1)
    inputs = draw(fwd, 17, mean=3.0)
    found = results(fwd, inputs) | results(bwd, inputs)
    np.testing.assert_array_equal(found["y"], np.broadcast_to(inputs["beta"], (17, 1)))
    np.testing.assert_array_equal(found["dx"].astype(np.float64), 0)
    np.testing.assert_array_equal(found["dgamma"].astype(np.float64), 0)


CONSTANT = [
    *product([F32], (1, 3, 37, 64, 127, 768, 1000, 4096, 5120, 12289, 65536)),
    *((BF16, 127), (BF16, 5120), (BF16, 65537), (F16, 768), (F16, 8191), (F16, 8193)),
]


@pytest.mark.parametrize(("dtype", "d"), CONSTANT, ids=str)
def test_constant_rows_give_beta(dtype: DType, d: int) -> None:
    fwd, bwd = both("layernorm", dtype, d)
    inputs = constant_rows(fwd, 16)
    found = results(fwd, inputs)
    np.testing.assert_array_equal(found["mean"], inputs["x"][:, 0].astype(np.float32))
    np.testing.assert_array_equal(found["y"], np.broadcast_to(inputs["beta"], found["y"].shape))
    found |= results(bwd, inputs | found | {"dy": inputs["x"]})
    np.testing.assert_array_equal(found["dgamma"].astype(np.float64), 0)


@pytest.mark.parametrize("factor", [3.3, 1000.1, 1e6, 1e30])
@pytest.mark.parametrize("d", [3, 37, 5120, 40000])
def test_a_sum_in_f32_of_equal_terms_gives_beta(d: int, factor: float) -> None:
    """Of 16-bit terms, too, whose sum is not rounded; and where a square would overflow."""
    spec = parse_spec(f"add_layernorm.fwd:d={d},dtype=bf16,weight=f32,residual_dtype=f32")
    inputs = draw(spec, 2)
    inputs |= {"x": np.ones((2, d), inputs["x"].dtype), "residual": np.full((2, d), factor, np.float32)}
    found = results(spec, inputs)
    np.testing.assert_array_equal(found["mean"], found["h"][:, 0])
    np.testing.assert_array_equal(found["y"], np.broadcast_to(inputs["beta"], (2, d)).astype(found["y"].dtype))


def constant_rows(spec: Spec, rows: int) -> dict[str, Array]:
    """Inputs of which each row of x is one number between -1000 and 1000."""
    inputs = draw(spec, rows)
    numbers = np.random.default_rng(rows).uniform(-1000, 1000, (rows, 1)).astype(inputs["x"].dtype)
    return inputs | {"x": np.repeat(numbers, spec.d, axis=1)}


def test_a_row_without_variance_has_no_nan_beside_its_mean() -> None:
    """eps = 0, squares that underflow: infinite away from the mean, however many segments a row has."""
    for d in (4096, 65536):
        fwd = parse_spec(f"layernorm.fwd:d={d},eps=0,gamma=no,beta=no")
        x = (np.random.default_rng(0).normal(size=(2, d)) * 1e-30).astype(np.float32)
        with np.errstate(divide="ignore"):
            found = results(fwd, {"x": x})
        np.testing.assert_array_equal(found["y"], np.where(x > found["mean"][:, None], np.inf, -np.inf))


def test_a_scale_that_overflows_gives_no_nan() -> None:
    """1e20 / sqrt(1e-38) is no f32 number; with eps = 1e-38 itself the scale is finite, and NaN does not appear."""
    for factor, expected in ((1.0, 0), (1e20, 2)):

        def scaled(b: GraphBuilder, factor: float = factor) -> None:
            x = b.input("x", M, D)
            xc = b.sub("xc", x, b.reduce_mean("mean", x, axis=D))
            var = b.reduce_mean("var", b.mul("square", xc, xc), axis=D)
            root = b.sqrt("root", b.add("veps", var, b.const("eps", 1e-38, b.compute)))
            b.output("y", b.mul("hat", xc, b.div("scale", b.const("factor", factor, b.compute), root)))

        spec = make_spec(Definition("scaled", scaled), "fwd", {"d": 65536})
        x = (np.random.default_rng(0).normal(size=(2, 65536)) * 1e-30).astype(np.float32)
        with np.errstate(over="ignore"):
            y = results(spec, {"x": x})["y"]
        assert not np.isnan(y).any()
        assert np.isinf(y).any(axis=1).sum() == expected


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("graph", ["rmsnorm", "layernorm", "l2norm"])
@pytest.mark.parametrize(("d", "most"), [(4, 9.2e18), (4096, 2.9e17)])
def test_a_row_whose_squares_overflow_is_zero_as_the_page_says(graph: str, d: int, most: float, dtype: str) -> None:
    spec = parse_spec(f"{graph}.fwd:d={d},dtype={dtype}")
    signs = np.where(np.arange(d) % 2, 1, -1)
    x = np.stack([signs * most / 1.1, signs * most * 1.1]).astype(NUMPY_DTYPE[spec.dtype])
    inputs = {"x": x, "gamma": np.ones(d, x.dtype), "beta": np.zeros(d, x.dtype)}
    y = results(spec, {p.name: inputs[p.name] for p in spec.graph().params})["y"].astype(float)
    np.testing.assert_allclose(np.abs(y[0]), d**-0.5 if graph == "l2norm" else 1.0, rtol=1e-2)
    assert not y[1].any()


def test_a_mean_is_rounded_as_the_page_says() -> None:
    """10239 times 256.0 and one 255.0: their distance from the mean, and so y, is 6.2 % off."""
    x = np.full((1, 10240), 256, np.float32)
    x[0, 0] = 255
    exact = (x - x.mean(dtype=float)) / np.sqrt(x.var(dtype=float) + 1e-5)
    y = results(parse_spec("layernorm.fwd:d=10240,gamma=no,beta=no"), {"x": x})["y"]
    np.testing.assert_allclose(1 - y[0, 1:] / exact[0, 1:], 0.062, atol=1e-3)
