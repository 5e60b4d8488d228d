"""If these fail, gradients are wrong where there is none: a relu or |x| at 0, a tie, the ends of a clamp."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

import sampling
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import D, M
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array, round_to
from lngen.compiler.spec import Spec
from lngen.proof.check.inputs import mismatches, same_bits
from lngen.proof.ptx import run_plan
from own_graphs import Expression, own
from plans import best

# Each graph, and what PyTorch calls it.
GRAPHS: dict[str, tuple[Expression, Callable[..., Any]]] = {
    "rectified": (lambda b, x: x.relu(), lambda torch, x: torch.relu(x)),
    "larger": (lambda b, x, z: x.maximum(z), lambda torch, x, z: torch.maximum(x, z)),
    "larger_of_row": (lambda b, x, z=M: x.maximum(z), lambda torch, x, z: torch.maximum(x, z[:, None])),
    "not_below_zero": (lambda b, x: x.maximum(0), lambda torch, x: torch.maximum(x, torch.zeros_like(x))),
    "smaller": (lambda b, x, z: x.minimum(z), lambda torch, x, z: torch.minimum(x, z)),
    "clamped": (lambda b, x: x.clamp(-1, 2), lambda torch, x: torch.clamp(x, -1, 2)),
    "magnitude": (lambda b, x: abs(x), lambda torch, x: torch.abs(x)),
    "rounded": (lambda b, x: x * x.rint(), lambda torch, x: x * x.round()),
    # One of two tensors, and nothing through what chooses.
    "chosen_by_size": (
        lambda b, x, z: b.where_gt("y32", x.detach(), z.rint(), x, z),
        lambda torch, x, z: torch.where(x.detach() > z.round(), x, z),
    ),
    "below_largest": (
        lambda b, x: x - b.reduce_max("most", x, axis=D),
        lambda torch, x: x - x.amax(dim=1, keepdim=True),
    ),
    # Gated rows, each measured by its largest element.
    "of_largest": (
        lambda b, x, z: x * (gate := b.relu("gate", z)) + b.statistic(b.reduce_max("most", x.maximum(gate), axis=D)),
        lambda torch, x, z: x * torch.relu(z) + torch.maximum(x, torch.relu(z)).amax(dim=1, keepdim=True),
    ),
    "above": (lambda b, x, z, v: b.select_gt("y32", x, z, v), lambda torch, x, z, v: torch.where(x > z, v, 0)),
    "equal": (lambda b, x, z, v: b.select_eq("y32", x, z, v), lambda torch, x, z, v: torch.where(x == z, v, 0)),
}
OF_V = {"above": {"wrt": "v"}, "equal": {"wrt": "v"}}  # nothing passes through what selects


def spec_of(name: str, way: str, d: int, dtype: str = "f64") -> Spec:
    keys = OF_V.get(name, {}) if way == "bwd" else {}
    return own(GRAPHS[name][0], way, d=d, dtype=dtype, **keys)


def gradients(name: str, inputs: dict[str, Array], dy: Array) -> dict[str, Array]:
    """The gradient of every input."""
    forward, backward = (spec_of(name, way, dy.shape[1]).graph() for way in ("fwd", "bwd"))
    return interpret(backward, {**inputs, **interpret(forward, inputs), "dy": dy})


@pytest.mark.parametrize("name", GRAPHS)
def test_the_gradient_at_ties_and_zeros_is_torchs(name: str) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    few = [-1.0, -0.0, 0.0, 2.0]
    inputs = {p.name: rng.choice(few, p.type.shape(50, 6)) for p in spec_of(name, "fwd", 6).graph().params}
    dy = rng.normal(0.5, 1, (50, 6))
    leaves = {n: torch.tensor(a, requires_grad=True) for n, a in inputs.items()}
    GRAPHS[name][1](torch, *leaves.values()).backward(torch.tensor(dy))
    for gradient, found in gradients(name, inputs, dy).items():
        wanted = leaves[gradient[1:]].grad.numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-13, atol=1e-13, err_msg=gradient)


@pytest.mark.parametrize(("name", "cotangents", "x", "y", "passes"), [
    (
        "rectified", (2.0, np.inf, np.nan), [1.0, np.inf, 5e-324, -0.0, 0.0, -1.0, -np.inf, np.nan],
        [1.0, np.inf, 5e-324, 0.0, 0.0, 0.0, 0.0, np.nan], [1, 1, 1, 0, 0, 0, 0, 0],
    ),
    (
        "clamped", (3.0,), [-1.0, -1.5, 2.0, 2.5, 0.0, np.nan, np.inf, -np.inf],
        [-1.0, -1.0, 2.0, 2.0, 0.0, np.nan, 2.0, -1.0], [1, 0, 1, 0, 1, 0, 0, 0],
    ),
])  # fmt: skip
def test_a_cotangent_passes_whole_or_not_at_all(
    name: str, cotangents: tuple[float, ...], x: list[float], y: list[float], passes: list[int]
) -> None:
    assert same_bits(interpret(spec_of(name, "fwd", 8).graph(), {"x": np.array([x])})["y"], np.array([y])).all()
    for ct in cotangents:
        dx = gradients(name, {"x": np.array([x])}, np.full((1, 8), ct))["dx"]
        np.testing.assert_array_equal(dx, [np.where(passes, ct, 0.0)])


def odd_numbers(spec: Spec, rows: int) -> dict[str, Array]:
    """Ties, zeros of both signs, infinities and NaN."""
    rng = np.random.default_rng(spec.d)
    odd = [-2.0, -1.0, -0.0, 0.0, 1.0, 2.0, np.inf, -np.inf, np.nan]
    often = [0.1, 0.2, 0.2, 0.2, 0.2, 0.07, 0.01, 0.01, 0.01]
    drawn = {p: rng.choice(odd, p.type.shape(rows, spec.d), p=often) for p in spec.graph().params}
    return {p.name: round_to(a, p.type.dtype).astype(NUMPY_DTYPE[p.type.dtype]) for p, a in drawn.items()}


OF = [("of_largest", "fwd"), ("rectified", "fwd")]
OF += [(name, "bwd") for name in ("of_largest", "smaller", "chosen_by_size", "clamped", "magnitude")]
ROWS_OF = ((5, "f32"), (64, "bf16"), (200, "f16"), (33, "f64"))


@sampling.grid(("name", "way", "d", "dtype"), [(*a, *b) for a, b in product(OF, ROWS_OF)], strength=1)
def test_kernels_have_the_same_bits(name: str, way: str, d: int, dtype: str) -> None:
    pytest.importorskip("cupy")
    spec = spec_of(name, way, d, dtype)
    inputs = odd_numbers(spec, 7)
    outcome = run_plan(best(spec), inputs)
    assert outcome.findings == ()
    assert not mismatches(outcome.results, interpret(spec.graph(), inputs))
