"""The oracles agree with each other, and can fail: each refuses every one of a list of plausible mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import family
from lngen.check.oracles import (
    Array,
    differences,
    directional,
    layernorm_backward,
    layernorm_forward,
    rmsnorm_backward,
    rmsnorm_forward,
    row_mean,
)
from lngen.check.tolerances import (
    NORMS,
    SLACK,
    Bound,
    NormName,
    ResultName,
    bound,
    column_depth,
    mean_over_std,
    row_depth,
    scales,
)
from lngen.ir import BF16, F16, F32, F64, DType
from lngen.ir.numerics import NUMPY_DTYPE

EPS = 0.1  # large enough that a misplaced eps shows
STEP = 1e-3


@dataclass(frozen=True)
class Case:
    """Random inputs: gamma and dy without symmetry, dy with a nonzero mean, x with a chosen mean per std."""

    x: Array
    gamma: Array
    beta: Array
    dy: Array

    @classmethod
    def random(cls, M: int, D: int, mean: float = 0.5) -> Case:
        rng = np.random.default_rng([M, D, int(abs(mean))])
        x, dy = rng.standard_normal((M, D)) + mean, rng.standard_normal((M, D)) + 0.7
        return cls(x, rng.uniform(0.5, 2, D) * rng.choice([-1, 1], D), rng.standard_normal(D), dy)

    @property
    def inputs(self) -> dict[str, Array]:
        return {"x": self.x, "gamma": self.gamma, "beta": self.beta}


def closed_form(norm: NormName, case: Case) -> dict[ResultName, Array]:
    """Every result of the closed forms."""
    if norm == "layernorm":
        y, mean, rstd = layernorm_forward(case.x, case.gamma, case.beta, EPS)
        gradients = layernorm_backward(case.dy, case.x, case.gamma, EPS)
    else:
        y, rstd = rmsnorm_forward(case.x, case.gamma, case.beta, EPS)
        mean, gradients = np.zeros_like(rstd), rmsnorm_backward(case.dy, case.x, case.gamma, EPS)
    return dict(zip(("y", "mean", "rstd", "dx", "dgamma", "dbeta"), (y, mean, rstd, *gradients), strict=True))


def by_differences(norm: NormName, case: Case) -> dict[ResultName, Array]:
    """The gradients by central differences of the closed forward."""

    def forward(x: Array, gamma: Array, beta: Array) -> Array:
        return (layernorm_forward if norm == "layernorm" else rmsnorm_forward)(x, gamma, beta, EPS)[0]

    wrt: dict[ResultName, str] = {"dx": "x", "dgamma": "gamma", "dbeta": "beta"}
    return {out: differences(forward, case.inputs, name, STEP, dy=case.dy) for out, name in wrt.items()}


def by_torch(norm: NormName, case: Case) -> dict[ResultName, Array]:
    """y and the gradients by PyTorch."""
    keys = family.Keys(eps=EPS)
    found = family.results(norm, keys, case.inputs)
    return found | family.gradients(norm, keys, case.inputs, {"y": case.dy}, ("x", "gamma", "beta"))


def error(out: Array, ref: Array, scale: Array) -> float:
    """``||out - ref|| / ||scale||``; infinite for another shape."""
    return float(np.linalg.norm(out - ref) / np.linalg.norm(scale)) if out.shape == ref.shape else np.inf


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("M", "D", "mean"),
    [(5, 7, 0.5), (1, 1, 0.5), (4, 1, 3.0), (3, 2, 0.0), (6, 6, -2.0), (3, 33, 1e2), (4, 9, 1e4)],
)
def test_three_oracles_agree(norm: NormName, M: int, D: int, mean: float) -> None:
    case = Case.random(M, D, mean)
    truth = closed_form(norm, case)
    scale = scales(case.x, case.gamma, case.beta, case.dy, EPS, norm=norm)
    for oracle in (by_differences, by_torch):
        for result, value in oracle(norm, case).items():
            assert error(value, truth[result], scale[result]) < 1e-8, (oracle.__name__, result)


@pytest.mark.parametrize("forward", [layernorm_forward, rmsnorm_forward])
def test_gamma_and_beta_are_optional(forward: Callable[..., tuple[Array, ...]]) -> None:
    case = Case.random(4, 5)
    ones, zeros = np.ones(5), np.zeros(5)
    np.testing.assert_array_equal(forward(case.x)[0], forward(case.x, ones, zeros)[0])
    np.testing.assert_array_equal(forward(case.x, None, case.beta)[0], forward(case.x, ones, case.beta)[0])
    backward = layernorm_backward if forward is layernorm_forward else rmsnorm_backward
    for bare, explicit in zip(backward(case.dy, case.x), backward(case.dy, case.x, ones), strict=True):
        np.testing.assert_array_equal(bare, explicit)


def test_a_directional_derivative_is_the_gradient_along_it() -> None:
    case = Case.random(4, 5)
    direction = np.random.default_rng(0).standard_normal((4, 5))
    dx, _, _ = layernorm_backward(case.dy, case.x, case.gamma, EPS)
    found = directional(
        lambda x, gamma, beta: layernorm_forward(x, gamma, beta, EPS)[0],
        case.inputs,
        "x",
        direction,
        STEP,
        dy=case.dy,
    )
    assert found == pytest.approx((dx * direction).sum(), rel=1e-8)


@dataclass(frozen=True)
class Parts:
    """The intermediate numbers of a norm, for writing wrong formulas with."""

    case: Case
    mean: Array
    r: Array
    xhat: Array
    g: Array

    @classmethod
    def of(cls, norm: NormName, case: Case) -> Parts:
        mean = row_mean(case.x) if norm == "layernorm" else np.zeros((len(case.x), 1))
        r = 1 / np.sqrt(row_mean((case.x - mean) ** 2) + EPS)
        return cls(case, mean, r, (case.x - mean) * r, case.dy * case.gamma)

    def dx(self, g: Array, mean_term: float, xhat_term: float) -> Array:
        """``r (g - mean_term * mean(g) - xhat_term * xhat mean(g xhat))``."""
        return self.r * (g - mean_term * row_mean(g) - xhat_term * self.xhat * row_mean(g * self.xhat))

    def y(self, xhat: Array) -> Array:
        return self.case.gamma * xhat + self.case.beta

    @property
    def dgamma(self) -> Array:
        return (self.case.dy * self.xhat).sum(axis=0)

    @property
    def dbeta(self) -> Array:
        return self.case.dy.sum(axis=0)


Mutation = tuple[ResultName, Callable[[Parts], Array]]

BOTH: dict[str, Mutation] = {
    "dgamma is dbeta": ("dgamma", lambda p: p.dbeta),
    "dbeta is dgamma": ("dbeta", lambda p: p.dgamma),
    "dgamma without rstd": ("dgamma", lambda p: p.dgamma / p.r.mean()),
    "dgamma of g": ("dgamma", lambda p: (p.g * p.xhat).sum(axis=0)),
    "dbeta of g": ("dbeta", lambda p: p.g.sum(axis=0)),
    "dgamma averages over the rows": ("dgamma", lambda p: p.dgamma / len(p.g)),
    "dgamma sums over the row": ("dgamma", lambda p: (p.case.dy * p.xhat).sum(axis=1)),
    "dbeta sums over the row": ("dbeta", lambda p: p.case.dy.sum(axis=1)),
    "dgamma loses the last row": ("dgamma", lambda p: (p.case.dy * p.xhat)[:-1].sum(axis=0)),
    "dx without rstd": ("dx", lambda p: p.dx(p.g, float((p.mean != 0).any()), 1) / p.r),
    "y without beta": ("y", lambda p: p.case.gamma * p.xhat),
    "y without gamma": ("y", lambda p: p.xhat + p.case.beta),
    "y with a zero-centred gamma": ("y", lambda p: p.y(p.xhat) + p.xhat),
    "unbiased variance": (
        "rstd",
        lambda p: 1 / np.sqrt(((p.xhat / p.r) ** 2).sum(axis=1) / (p.g.shape[1] - 1) + EPS),
    ),
    "eps added to the standard deviation": ("rstd", lambda p: (1 / (np.sqrt(p.r**-2 - EPS) + EPS))[:, 0]),
    "eps added to rstd": ("rstd", lambda p: (1 / np.sqrt(p.r**-2 - EPS) + EPS)[:, 0]),
    "no eps": ("rstd", lambda p: (1 / np.sqrt(p.r**-2 - EPS))[:, 0]),
    "a sum for the mean square": ("rstd", lambda p: 1 / np.sqrt(((p.xhat / p.r) ** 2).sum(axis=1) + EPS)),
}

MUTATIONS: dict[NormName, dict[str, Mutation]] = {
    "layernorm": BOTH
    | {
        "dx without gamma": ("dx", lambda p: p.dx(p.case.dy, 1, 1)),
        "dx without the mean term": ("dx", lambda p: p.dx(p.g, 0, 1)),
        "dx without the xhat term": ("dx", lambda p: p.dx(p.g, 1, 0)),
        "dx with twice the mean term": ("dx", lambda p: p.dx(p.g, 2, 1)),
        "dx with twice the xhat term": ("dx", lambda p: p.dx(p.g, 1, 2)),
        "dx with batch sums for row sums": (
            "dx",
            lambda p: p.r * (p.g - (p.dbeta + p.xhat * p.dgamma) / p.g.shape[1]),
        ),
        "dx with column means": (
            "dx",
            lambda p: p.r * (p.g - p.g.mean(axis=0) - p.xhat * (p.g * p.xhat).mean(axis=0)),
        ),
        "dx with gamma after the projection": ("dx", lambda p: p.case.gamma * p.dx(p.case.dy, 1, 1)),
        "y is not centred": ("y", lambda p: p.y(p.case.x * p.r)),
        "mean over the rows": ("mean", lambda p: p.case.x.mean(axis=0)),
        "variance is not centred": ("rstd", lambda p: 1 / np.sqrt((p.case.x**2).mean(axis=1) + EPS)),
    },
    "rmsnorm": BOTH
    | {
        "dx without gamma": ("dx", lambda p: p.dx(p.case.dy, 0, 1)),
        "dx with LayerNorm's mean term": ("dx", lambda p: p.dx(p.g, 1, 1)),
        "dx without the xhat term": ("dx", lambda p: p.dx(p.g, 0, 0)),
        "dx with twice the xhat term": ("dx", lambda p: p.dx(p.g, 0, 2)),
        "dx with batch sums for row sums": ("dx", lambda p: p.r * (p.g - p.xhat * p.dgamma / p.g.shape[1])),
        "dx with gamma after the projection": ("dx", lambda p: p.case.gamma * p.dx(p.case.dy, 0, 1)),
        "y is centred": ("y", lambda p: p.y((p.case.x - row_mean(p.case.x)) * p.r)),
        "variance is centred": ("rstd", lambda p: 1 / np.sqrt(p.case.x.var(axis=1) + EPS)),
    },
}
ALL_MUTATIONS = [(norm, name) for norm, mutations in MUTATIONS.items() for name in mutations]


@pytest.mark.parametrize(("norm", "name"), ALL_MUTATIONS)
def test_every_oracle_refuses_the_mutation(norm: NormName, name: str) -> None:
    case = Case.random(6, 6)  # square, so that a row sum passes for a column sum
    result, wrong = MUTATIONS[norm][name]
    mutated = wrong(Parts.of(norm, case))
    scale = scales(case.x, case.gamma, case.beta, case.dy, EPS, norm=norm)[result]
    judges = [oracle(norm, case) for oracle in (closed_form, by_differences, by_torch)]
    errors = [error(mutated, judge[result], scale) for judge in judges if result in judge]
    assert min(errors) > 1e-3


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize(("norm", "name"), ALL_MUTATIONS)
def test_every_tolerance_refuses_the_mutation(norm: NormName, name: str, dtype: DType) -> None:
    case = Case.random(6, 6)
    result, wrong = MUTATIONS[norm][name]
    scale = scales(case.x, case.gamma, case.beta, case.dy, EPS, norm=norm)[result]
    allowed = bound(result, dtype, 6, 6, mean_over_std(case.x, EPS))
    assert allowed.excess(wrong(Parts.of(norm, case)), closed_form(norm, case)[result], scale) > 1


def centred(x: Any, gamma: Any, beta: Any, dy: Any, norm: NormName, compute: Any) -> dict[ResultName, Array]:
    """LayerNorm or RMSNorm as a kernel computes it: every operation in ``compute``, the variance centred."""
    x, gamma, beta, dy, eps = (np.asarray(a).astype(compute) for a in (x, gamma, beta, dy, EPS))
    mean = row_mean(x) if norm == "layernorm" else np.zeros((len(x), 1), compute)
    r = 1 / np.sqrt(row_mean((x - mean) ** 2) + eps)
    xhat, g = (x - mean) * r, dy * gamma
    dx = r * (g - (row_mean(g) if norm == "layernorm" else 0) - xhat * row_mean(g * xhat))
    gradients = dx, (dy * xhat).sum(axis=0), dy.sum(axis=0)
    return dict(
        zip(
            ("y", "mean", "rstd", "dx", "dgamma", "dbeta"),
            (gamma * xhat + beta, mean[:, 0], r[:, 0], *gradients),
            strict=True,
        )
    )


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
@pytest.mark.parametrize(
    ("M", "D", "mean"),
    [(3, 1, 2.0), (5, 2, 0.0), (65, 7, 1.0), (9, 768, 1e2), (4, 4099, 1e4), (300, 64, 1e4)],
)
def test_a_correct_kernel_is_within_the_bound(norm: NormName, dtype: DType, M: int, D: int, mean: float) -> None:
    stored = {k: v.astype(NUMPY_DTYPE[dtype]) for k, v in vars(Case.random(M, D, mean)).items()}
    exact = Case(**{k: v.astype(np.float64) for k, v in stored.items()})
    ref = closed_form(norm, exact)
    scale = scales(exact.x, exact.gamma, exact.beta, exact.dy, EPS, norm=norm)
    kappa = mean_over_std(exact.x, EPS) if norm == "layernorm" else 0.0
    found = centred(**stored, norm=norm, compute=np.float32)
    for result, value in found.items():
        allowed = bound(result, dtype, D, M, kappa, compute=F32)
        assert allowed.excess(value.astype(NUMPY_DTYPE[dtype]), ref[result], scale[result]) <= 1, result


@pytest.mark.parametrize("mean", [1e2, 1e3, 1e4])
def test_the_bound_refuses_a_variance_that_is_not_centred(mean: float) -> None:
    """E[x^2] - E[x]^2 in f32 is wrong at these means; the bound of the centred algorithm must say so."""
    x = Case.random(8, 4096, mean).x.astype(np.float32)
    exact = x.astype(np.float64)
    raw = (x * x).mean(axis=1) - x.mean(axis=1) ** 2
    rstd = 1 / np.sqrt(np.maximum(raw, 0) + np.float32(EPS))
    allowed = bound("rstd", F32, 4096, 8, mean_over_std(exact, EPS))
    assert allowed.excess(rstd, layernorm_forward(exact, eps=EPS)[2], scales(exact, eps=EPS)["rstd"]) > 1


def test_a_bound_has_the_terms_of_its_derivation_alone() -> None:
    u, rows, d, kappa = 2.0**-24, 37, 768, 3.0
    shift = (row_depth(d) + 1) * u * (1 + kappa)
    rstd = (row_depth(d) + 10) * u / 2 + shift**2 / 2
    terms: dict[ResultName, float] = {
        "mean": (row_depth(d) + 1) * u,
        "rstd": rstd,
        "y": shift + rstd + 4 * u,
        "dbeta": column_depth(rows, d) * u,
    }
    for name, wanted in terms.items():
        assert bound(name, F32, d, rows, kappa).arithmetic == pytest.approx(SLACK * wanted, rel=1e-12)


def test_the_bound_is_useful_where_it_is_widest() -> None:
    """A large mean costs digits, and leaves some."""
    assert bound("y", F32, 4096, 1, 1e4).arithmetic < 0.05
    assert bound("y", F32, 4096, 1, 0.0).arithmetic < 1e-5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_excess_of_a_number_that_is_not_finite_is_infinite(bad: float) -> None:
    ref = np.ones(3)
    assert Bound(1e-3, 1e-3, 0.0).excess(np.array([1.0, bad, 1.0]), ref, ref) == np.inf
    assert Bound(0.0, 0.0, 0.0).excess(ref, ref, ref) == 0
    assert Bound(0.0, 0.0, 0.0).excess(2 * ref, ref, ref) == np.inf
