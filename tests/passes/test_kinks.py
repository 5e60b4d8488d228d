"""If these fail, gradients are wrong where there is none: a relu or |x| at 0, a tie, the ends of a clamp."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import sampling
from lngen.check.inputs import same_bits
from lngen.compile import Compilation
from lngen.graphs import Definition, GraphBuilder
from lngen.interpret import interpret
from lngen.ir import D, Graph, M, Value
from lngen.ir.numerics import NUMPY_DTYPE, Array, round_to
from lngen.lower import lower
from lngen.ptx import run_plan
from lngen.spec import Spec, make_spec


def x_of(b: GraphBuilder) -> Value:
    return b.input("x", M, D)


def x_and_z(b: GraphBuilder) -> tuple[Value, Value]:
    return b.input("x", M, D), b.input("z", M, D)


def below_largest(b: GraphBuilder) -> Value:
    """What a softmax begins with."""
    x = x_of(b)
    return x - b.reduce_max("most", x, axis=D)


def rounded(b: GraphBuilder) -> Value:
    """Nothing passes through rint."""
    x = x_of(b)
    return x * x.rint()


def chosen_by_size(b: GraphBuilder) -> Value:
    """One of two tensors, and nothing through what chooses."""
    x, z = x_and_z(b)
    return b.where_gt("y32", x.detach(), z.rint(), x, z)


def of_largest(b: GraphBuilder) -> Value:
    """All of them: gated rows, each measured by its largest element."""
    x, z = x_and_z(b)
    gate = b.relu("gate", z)
    return x * gate + b.statistic(b.reduce_max("most", x.maximum(gate), axis=D))


# Each graph, and what PyTorch calls it.
GRAPHS: dict[str, tuple[Callable[[GraphBuilder], Value], Callable[..., Any]]] = {
    "rectified": (lambda b: x_of(b).relu(), lambda torch, x: torch.relu(x)),
    "larger": (lambda b: Value.maximum(*x_and_z(b)), lambda torch, x, z: torch.maximum(x, z)),
    "larger_of_row": (lambda b: x_of(b).maximum(b.input("z", M)), lambda torch, x, z: torch.maximum(x, z[:, None])),
    "not_below_zero": (lambda b: x_of(b).maximum(0), lambda torch, x: torch.maximum(x, torch.zeros_like(x))),
    "smaller": (lambda b: Value.minimum(*x_and_z(b)), lambda torch, x, z: torch.minimum(x, z)),
    "clamped": (lambda b: x_of(b).clamp(-1, 2), lambda torch, x: torch.clamp(x, -1, 2)),
    "magnitude": (lambda b: abs(x_of(b)), lambda torch, x: torch.abs(x)),
    "rounded": (rounded, lambda torch, x: x * x.round()),
    "chosen_by_size": (chosen_by_size, lambda torch, x, z: torch.where(x.detach() > z.round(), x, z)),
    "below_largest": (below_largest, lambda torch, x: x - x.amax(dim=1, keepdim=True)),
    "of_largest": (
        of_largest,
        lambda torch, x, z: x * torch.relu(z) + torch.maximum(x, torch.relu(z)).amax(dim=1, keepdim=True),
    ),
}


def spec_of(name: str, way: str, d: int, dtype: str = "f64") -> Spec:
    def describe(b: GraphBuilder) -> None:
        b.output("y", GRAPHS[name][0](b))

    return make_spec(Definition(name, describe), way, {"d": d, "dtype": dtype})


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
    leaves = [torch.tensor(a, requires_grad=True) for a in inputs.values()]
    GRAPHS[name][1](torch, *leaves).backward(torch.tensor(dy))
    found = gradients(name, inputs, dy)
    for wrt, leaf in zip(inputs, leaves, strict=True):
        np.testing.assert_allclose(found[f"d{wrt}"], leaf.grad.numpy(), rtol=1e-13, atol=1e-13, err_msg=wrt)


FEW = st.sampled_from([-1.5, -0.0, 0.0, 1.0])


@given(x=arrays(np.float64, (3, 5), elements=FEW), z=arrays(np.float64, (3, 5), elements=FEW))
def test_what_ties_share_is_the_cotangent(x: Array, z: Array) -> None:
    dy = np.arange(1.0, 16).reshape(3, 5)
    found = gradients("larger", {"x": x, "z": z}, dy)
    np.testing.assert_array_equal(found["dx"] + found["dz"], dy)
    np.testing.assert_array_equal(found["dx"] == found["dz"], x == z)
    # Each row's maximum takes away what its elements got: nothing is left, nothing made up.
    np.testing.assert_allclose(gradients("below_largest", {"x": x}, dy)["dx"].sum(axis=1), 0, atol=1e-13)


def test_relu_keeps_nan_and_passes_nothing_at_zero_nor_at_nan() -> None:
    x = np.array([[1.0, np.inf, 5e-324, -0.0, 0.0, -1.0, -np.inf, np.nan]])
    y = interpret(spec_of("rectified", "fwd", 8).graph(), {"x": x})["y"]
    assert same_bits(y, np.array([[1.0, np.inf, 5e-324, 0.0, 0.0, 0.0, 0.0, np.nan]])).all()
    for ct in (2.0, np.inf, np.nan):
        dx = gradients("rectified", {"x": x}, np.full((1, 8), ct))["dx"]
        np.testing.assert_array_equal(dx, [[ct, ct, ct, 0.0, 0.0, 0.0, 0.0, 0.0]])


@pytest.mark.parametrize(("op", "passed"), [("select_gt", [0.0, 0.0, 5.0]), ("select_eq", [0.0, 5.0, 0.0])])
def test_a_selection_passes_the_cotangent_to_what_it_chose(op: str, passed: list[float]) -> None:
    def chosen(b: GraphBuilder) -> None:
        b.output("y", getattr(b, op)("y32", b.input("x", M, D), b.input("z", M, D), b.input("v", M, D)))

    inputs = {"x": np.array([[1.0, 2.0, 3.0]]), "z": np.array([[2.0, 2.0, 2.0]]), "v": np.full((1, 3), 7.0)}
    spec = make_spec(Definition("chosen", chosen), "bwd", {"d": 3, "dtype": "f64", "wrt": "v"})
    found = interpret(spec.graph(), {**inputs, "dy": np.full((1, 3), 5.0)})
    np.testing.assert_array_equal(found["dv"], [passed])


def test_a_clamp_passes_the_cotangent_between_its_ends_and_at_them() -> None:
    x = np.array([[-1.0, -1.5, 2.0, 2.5, 0.0, np.nan, np.inf, -np.inf]])
    dx = gradients("clamped", {"x": x}, np.full((1, 8), 3.0))["dx"]
    np.testing.assert_array_equal(dx, [[3, 0, 3, 0, 3, 0, 0, 0]])


def odd_numbers(graph: Graph, rows: int, d: int) -> dict[str, Array]:
    """Ties, zeros of both signs, infinities and NaN."""
    rng = np.random.default_rng(d)
    odd = [-2.0, -1.0, -0.0, 0.0, 1.0, 2.0, np.inf, -np.inf, np.nan]
    often = [0.1, 0.2, 0.2, 0.2, 0.2, 0.07, 0.01, 0.01, 0.01]
    return {
        p.name: round_to(rng.choice(odd, p.type.shape(rows, d), p=often), p.type.dtype).astype(
            NUMPY_DTYPE[p.type.dtype]
        )
        for p in graph.params
    }


OF = [("of_largest", "fwd"), ("rectified", "fwd")]
OF += [(name, "bwd") for name in ("of_largest", "smaller", "chosen_by_size", "clamped", "magnitude")]
ROWS_OF = ((5, "f32"), (64, "bf16"), (200, "f16"), (33, "f64"))


@sampling.grid(("name", "way", "d", "dtype"), [(*a, *b) for a, b in product(OF, ROWS_OF)], strength=1)
def test_kernels_have_the_same_bits(name: str, way: str, d: int, dtype: str) -> None:
    pytest.importorskip("cupy")
    spec = spec_of(name, way, d, dtype)
    inputs = odd_numbers(spec.graph(), 7, d)
    outcome = run_plan(lower(spec, Compilation(spec).schedule("sm_90")), inputs)
    assert outcome.findings == ()
    for result, value in interpret(spec.graph(), inputs).items():
        assert same_bits(outcome.results[result], value).all(), result
