"""If these fail, the oracles disagree, or their bounds refuse a correct kernel or allow a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import family
from lngen.check.differences import differences, directional
from lngen.check.oracles import (
    NORMS,
    Array,
    Bound,
    NormName,
    ResultName,
    bound,
    layernorm_backward,
    layernorm_forward,
    mean_over_std,
    rmsnorm_backward,
    rmsnorm_forward,
    row_mean,
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
    ("M", "D", "mean"), [(5, 7, 0.5), (1, 1, 0.5), (4, 1, 3.0), (3, 2, 0.0), (6, 6, -2.0), (3, 33, 1e2), (4, 9, 1e4)]
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
        lambda x, gamma, beta: layernorm_forward(x, gamma, beta, EPS)[0], case.inputs, "x", direction, STEP, dy=case.dy
    )
    assert found == pytest.approx((dx * direction).sum(), rel=1e-8)


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
    ("M", "D", "mean"), [(3, 1, 2.0), (5, 2, 0.0), (65, 7, 1.0), (9, 768, 1e2), (4, 4099, 1e4), (300, 64, 1e4)]
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
