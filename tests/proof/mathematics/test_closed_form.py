"""If these fail, LayerNorm and RMSNorm are off their closed forms, these are wrong, or their bounds allow a mistake.

Rows alone, permuted and absent are cases of ``lngen conform`` (tests/check); PyTorch judges every member of the family,
with every option, in test_family.py.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest

import family
import sampling
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import BF16, F32, DType, compute_dtype
from lngen.compiler.ir.numerics import NUMPY_DTYPE, round_to
from lngen.compiler.spec import Spec, parse_spec
from lngen.proof.check.differences import differences, directional
from lngen.proof.check.oracles import (
    NORMS,
    Array,
    Bound,
    Expected,
    NormName,
    ResultName,
    bound,
    closed_form,
    layernorm_backward,
    layernorm_forward,
    mean_over_std,
    rmsnorm_backward,
    rmsnorm_forward,
    scales,
)
from own_graphs import own

DTYPES = ("f16", "bf16", "f32", "f64")


def draw(spec: Spec, rows: int, mean: float = 0.5) -> dict[str, Array]:
    """x a ``mean`` of standard deviations off zero, gamma of either sign, dy with a mean; in their dtypes."""
    rng = np.random.default_rng([0, rows, spec.d])
    wide = (rows, spec.d)
    values = {
        "x": (rng.standard_normal(wide) + mean, spec.dtype),
        "gamma": (rng.uniform(0.5, 2, spec.d) * rng.choice([-1, 1], spec.d), spec.weight),
        "beta": (rng.standard_normal(spec.d), spec.weight),
        "dy": (rng.standard_normal(wide) + 0.7, spec.out),
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


# ---- the graphs, within the bounds of the closed form ----

# Keys, and D, M and the mean of x in its deviations: every length, short and long columns, large means.
CASES = [
    *((f"d={d},dtype={t}", rows, 0.5) for t in DTYPES for d, rows in ((1, 17), (3, 17), (31, 17), (255, 300))),
    *((f"d={d},dtype={t}", rows, 0.5) for t in DTYPES for d, rows in ((8, 300), (768, 17), (1000, 3), (4096, 17))),
    *((f"d={d},dtype={t}", 5, m) for m in (30.0, 1e3, 1e4) for t, d in (("f32", 255), ("f32", 20000), ("f64", 255))),
    *((f"d={d},dtype={t}", 300, m) for d, m in ((31, 1e2), (64, 1e4)) for t in ("f16", "bf16")),
    *((f"d=31{keys}", 17, 0.5) for keys in (
        ",dtype=bf16,weight=f32", ",dtype=f16,weight=f32,out=f32", ",dtype=f32,out=bf16",
        ",dtype=bf16,weight=f64,out=f16", ",save=none,dtype=bf16", ",gamma=no,wrt=x", ",eps=0.01",
    )),
]  # fmt: skip


@pytest.mark.parametrize("way", ["fwd", "bwd"])
@pytest.mark.parametrize("norm", NORMS)
def test_results_are_within_the_bound(norm: str, way: str) -> None:
    for case, rows, mean in CASES:
        spec = parse_spec(f"{norm}.{way}:{case if way == 'bwd' else case.replace(',wrt=x', '')}")
        inputs = draw(spec, rows, mean)
        found = results(spec, inputs)
        assert max(e.excess(found[name]) for name, e in truth(spec, inputs).items()) <= 1, (spec, rows, mean)


# ---- special numbers ----


def bits(a: Array) -> Array:
    """The bits; a NaN counts as any other."""
    return np.where(np.isnan(a.astype(np.float64)), 0, a.view(f"u{a.dtype.itemsize}"))


def both(norm: str, dtype: object, d: int) -> tuple[Spec, Spec]:
    forward = parse_spec(f"{norm}.fwd:d={d},dtype={dtype}")
    return forward, forward.with_direction("bwd")


@sampling.grid(("norm", "dtype", "where", "bad"), product(NORMS, (BF16, F32), ("x", "dy"), (np.nan, np.inf, -np.inf)))
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


CONSTANT = [
    *(("f32", d) for d in (1, 3, 37, 64, 127, 768, 1000, 4096, 5120, 12289, 65536)),
    *(("bf16", 1), ("bf16", 127), ("bf16", 5120), ("bf16", 65537), ("f16", 768), ("f16", 8191), ("f16", 8193)),
    ("f64", 1),
]


@pytest.mark.parametrize(("dtype", "d"), CONSTANT)
def test_constant_rows_give_beta(dtype: str, d: int) -> None:
    fwd, bwd = both("layernorm", dtype, d)
    inputs = draw(fwd, 16)
    numbers = np.random.default_rng(16).uniform(-1000, 1000, (16, 1)).astype(inputs["x"].dtype)
    inputs["x"] = np.repeat(numbers, d, axis=1)
    found = results(fwd, inputs)
    np.testing.assert_array_equal(found["mean"], inputs["x"][:, 0].astype(found["mean"].dtype))
    np.testing.assert_array_equal(found["y"], np.broadcast_to(inputs["beta"], found["y"].shape))
    found |= results(bwd, inputs | found | {"dy": inputs["x"]})
    np.testing.assert_array_equal(found["dgamma"].astype(np.float64), 0)
    if d == 1:
        np.testing.assert_array_equal(found["dx"].astype(np.float64), 0)


@pytest.mark.parametrize("factor", [3.3, 1000.1, 1e6, 1e30])
def test_a_sum_in_f32_of_equal_terms_gives_beta(factor: float) -> None:
    """Of 16-bit terms, too, whose sum is not rounded; and where a square would overflow."""
    for d in (3, 37, 5120, 40000):
        spec = parse_spec(f"add_layernorm.fwd:d={d},dtype=bf16,weight=f32,residual_dtype=f32")
        inputs = draw(spec, 2)
        inputs |= {"x": np.ones((2, d), inputs["x"].dtype), "residual": np.full((2, d), factor, np.float32)}
        found = results(spec, inputs)
        np.testing.assert_array_equal(found["mean"], found["h"][:, 0])
        np.testing.assert_array_equal(found["y"], np.broadcast_to(inputs["beta"], (2, d)).astype(found["y"].dtype))


def test_a_row_without_variance_has_no_nan_beside_its_mean() -> None:
    """eps = 0, squares that underflow: infinite away from the mean, however many segments a row has."""
    for d in (4096, 65536):
        fwd = parse_spec(f"layernorm.fwd:d={d},eps=0,gamma=no,beta=no")
        x = (np.random.default_rng(0).normal(size=(2, d)) * 1e-30).astype(np.float32)
        with np.errstate(divide="ignore"):
            found = results(fwd, {"x": x})
        np.testing.assert_array_equal(found["y"], np.where(x > found["mean"][:, None], np.inf, -np.inf))


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 0), (1e20, 2)])
def test_a_scale_that_overflows_gives_no_nan(factor: float, expected: int) -> None:
    """1e20 / sqrt(1e-38) is no f32 number; with eps = 1e-38 itself the scale is finite, and NaN does not appear."""
    scaled = own(lambda b, x: (c := x - b.mean(x)) * (factor / (b.mean(c * c) + 1e-38).sqrt()), d=65536)
    x = (np.random.default_rng(0).normal(size=(2, 65536)) * 1e-30).astype(np.float32)
    with np.errstate(over="ignore"):
        y = results(scaled, {"x": x})["y"]
    assert not np.isnan(y).any()
    assert np.isinf(y).any(axis=1).sum() == expected


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("graph", ["rmsnorm", "layernorm", "l2norm"])
def test_a_row_whose_squares_overflow_is_zero_as_the_page_says(graph: str, dtype: str) -> None:
    for d, most in ((4, 9.2e18), (4096, 2.9e17)):
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


# ---- the closed forms, against differences and PyTorch; and their bounds ----

EPS = 0.1  # large enough that a misplaced eps shows
STEP = 1e-3
FORWARD = {"layernorm": layernorm_forward, "rmsnorm": rmsnorm_forward}
BACKWARD = {"layernorm": layernorm_backward, "rmsnorm": rmsnorm_backward}
RESULTS: tuple[ResultName, ...] = ("y", "mean", "rstd", "dx", "dgamma", "dbeta")


@dataclass(frozen=True)
class Case:
    """Random inputs: gamma and dy without symmetry, dy with a nonzero mean, x with a chosen mean per std."""

    x: Array
    gamma: Array
    beta: Array
    dy: Array

    @classmethod
    def random(cls, m: int, d: int, mean: float = 0.5) -> "Case":
        rng = np.random.default_rng([m, d, int(abs(mean))])
        x, dy = rng.standard_normal((m, d)) + mean, rng.standard_normal((m, d)) + 0.7
        return cls(x, rng.uniform(0.5, 2, d) * rng.choice([-1, 1], d), rng.standard_normal(d), dy)

    @property
    def inputs(self) -> dict[str, Array]:
        return {"x": self.x, "gamma": self.gamma, "beta": self.beta}

    def exact(self, norm: NormName) -> dict[ResultName, Array]:
        """Every result of the closed forms."""
        y, *statistics = FORWARD[norm](self.x, self.gamma, self.beta, EPS)
        mean, rstd = statistics if norm == "layernorm" else (np.zeros_like(statistics[0]), statistics[0])
        gradients = BACKWARD[norm](self.dy, self.x, self.gamma, EPS)
        return dict(zip(RESULTS, (y, mean, rstd, *gradients), strict=True))

    def scales(self, norm: NormName) -> dict[ResultName, Array]:
        return scales(self.x, self.gamma, self.beta, self.dy, EPS, norm=norm)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("m", "d", "mean"), [(5, 7, 0.5), (1, 1, 0.5), (4, 1, 3.0), (3, 2, 0.0), (6, 6, -2.0), (3, 33, 1e2), (4, 9, 1e4)]
)
def test_three_oracles_agree(norm: NormName, m: int, d: int, mean: float) -> None:
    case, keys = Case.random(m, d, mean), family.Keys(eps=EPS)

    def forward(x: Array, gamma: Array, beta: Array) -> Array:
        return FORWARD[norm](x, gamma, beta, EPS)[0]

    by_differences = {f"d{n}": differences(forward, case.inputs, n, STEP, dy=case.dy) for n in case.inputs}
    by_torch = family.results(norm, keys, case.inputs)
    by_torch |= family.gradients(norm, keys, case.inputs, {"y": case.dy}, ("x", "gamma", "beta"))
    truth, scale = case.exact(norm), case.scales(norm)
    by_torch.pop("h")  # the sum before the norm, which is x here
    for name, value in (*by_differences.items(), *by_torch.items()):
        assert value.shape == truth[name].shape
        assert np.linalg.norm(value - truth[name]) / np.linalg.norm(scale[name]) < 1e-8, name
    along = np.random.default_rng(0).standard_normal((m, d))
    slope = directional(forward, case.inputs, "x", along, STEP, dy=case.dy)
    assert slope == pytest.approx((truth["dx"] * along).sum(), rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("norm", NORMS)
def test_gamma_and_beta_are_optional(norm: NormName) -> None:
    case, forward, backward = Case.random(4, 5), FORWARD[norm], BACKWARD[norm]
    ones, zeros = np.ones(5), np.zeros(5)
    np.testing.assert_array_equal(forward(case.x)[0], forward(case.x, ones, zeros)[0])
    np.testing.assert_array_equal(forward(case.x, None, case.beta)[0], forward(case.x, ones, case.beta)[0])
    for bare, explicit in zip(backward(case.dy, case.x), backward(case.dy, case.x, ones), strict=True):
        np.testing.assert_array_equal(bare, explicit)


@pytest.mark.parametrize("mean", [1e2, 1e3, 1e4])
def test_the_bound_refuses_a_variance_that_is_not_centred(mean: float) -> None:
    """E[x^2] - E[x]^2 in f32 is wrong at these means; the bound of the centred algorithm must say so."""
    x = Case.random(8, 4096, mean).x.astype(np.float32)
    exact = x.astype(np.float64)
    raw = (x * x).mean(axis=1) - x.mean(axis=1) ** 2
    rstd = 1 / np.sqrt(np.maximum(raw, 0) + np.float32(EPS))
    allowed = bound("rstd", F32, 4096, 8, mean_over_std(exact, EPS))
    assert allowed.excess(rstd, layernorm_forward(exact, eps=EPS)[2], scales(exact, eps=EPS)["rstd"]) > 1


def test_a_bound_is_useful_and_refuses_what_is_not_finite() -> None:
    """A large mean costs digits, and leaves some."""
    assert bound("y", F32, 4096, 1, 1e4).arithmetic < 0.05
    assert bound("y", F32, 4096, 1, 0.0).arithmetic < 1e-5
    ref = np.ones(3)
    for bad in (np.nan, np.inf, -np.inf):
        assert Bound(1e-3, 1e-3, 0.0).excess(np.array([1.0, bad, 1.0]), ref, ref) == np.inf
    assert Bound(0.0, 0.0, 0.0).excess(ref, ref, ref) == 0
    assert Bound(0.0, 0.0, 0.0).excess(2 * ref, ref, ref) == np.inf
