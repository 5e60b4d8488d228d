"""Derivatives where there is none: a relu or |x| at 0, a maximum or minimum at a tie, the ends of a clamp."""

from __future__ import annotations

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
from lngen.ir import F64, Builder, D, Graph, M, parse, print_graph
from lngen.ir.numerics import NUMPY_DTYPE, Array, round_to
from lngen.lower import lower
from lngen.ptx import run_plan
from lngen.spec import Spec, make_spec

Describe = Callable[[GraphBuilder], None]


def rectified(b: GraphBuilder) -> None:
    """max(x, 0), with the derivative 0 at 0."""
    b.output("y", b.relu("y32", b.input("x", M, D)))


def larger(b: GraphBuilder) -> None:
    """The larger of two tensors."""
    b.output("y", b.maximum("y32", b.input("x", M, D), b.input("z", M, D)))


def larger_of_row(b: GraphBuilder) -> None:
    """The larger of a tensor's elements and of a number for each row."""
    b.output("y", b.maximum("y32", b.input("x", M, D), b.input("z", M)))


def not_below_zero(b: GraphBuilder) -> None:
    """max(x, 0) as a maximum."""
    b.output("y", b.maximum("y32", b.input("x", M, D), b.number("zero", 0.0)))


def below_largest(b: GraphBuilder) -> None:
    """What a softmax begins with."""
    x = b.input("x", M, D)
    b.output("y", b.sub("y32", x, b.reduce_max("most", x, axis=D)))


def smaller(b: GraphBuilder) -> None:
    """The smaller of two tensors."""
    b.output("y", b.input("x", M, D).minimum(b.input("z", M, D)))


def clamped(b: GraphBuilder) -> None:
    """Between two numbers that x may have."""
    b.output("y", b.input("x", M, D).clamp(-1, 2))


def magnitude(b: GraphBuilder) -> None:
    """|x|."""
    b.output("y", abs(b.input("x", M, D)))


def chosen_by_size(b: GraphBuilder) -> None:
    """One of two tensors, and nothing through what chooses."""
    x, z = b.input("x", M, D), b.input("z", M, D)
    b.output("y", b.where_gt("y32", x.detach(), z.rint(), x, z))


def of_largest(b: GraphBuilder) -> None:
    """All of them: gated rows, each measured by its largest element."""
    x, z = b.input("x", M, D), b.input("z", M, D)
    gate = b.relu("gate", z)
    most = b.statistic(b.reduce_max("most", b.maximum("kept", x, gate), axis=D))
    b.output("y", b.add("y32", b.mul("gated", x, gate), most))


def spec_of(describe: Describe, way: str, d: int, dtype: str = "f64") -> Spec:
    return make_spec(Definition(describe.__name__, describe), way, {"d": d, "dtype": dtype})


def gradients(describe: Describe, inputs: dict[str, Array], dy: Array) -> dict[str, Array]:
    """The gradient of every input."""
    forward, backward = (spec_of(describe, way, dy.shape[1]).graph() for way in ("fwd", "bwd"))
    return interpret(backward, {**inputs, **interpret(forward, inputs), "dy": dy})


TORCH: dict[Describe, Callable[..., Any]] = {
    rectified: lambda torch, x: torch.relu(x),
    larger: lambda torch, x, z: torch.maximum(x, z),
    larger_of_row: lambda torch, x, z: torch.maximum(x, z[:, None]),
    not_below_zero: lambda torch, x: torch.maximum(x, torch.zeros_like(x)),
    smaller: lambda torch, x, z: torch.minimum(x, z),
    clamped: lambda torch, x: torch.clamp(x, -1, 2),
    magnitude: lambda torch, x: torch.abs(x),
    chosen_by_size: lambda torch, x, z: torch.where(x.detach() > z.round(), x, z),
    below_largest: lambda torch, x: x - x.amax(dim=1, keepdim=True),
    of_largest: lambda torch, x, z: x * torch.relu(z) + torch.maximum(x, torch.relu(z)).amax(dim=1, keepdim=True),
}


@pytest.mark.parametrize("describe", TORCH)
def test_the_gradient_at_ties_and_zeros_is_torchs(describe: Describe) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    forward = spec_of(describe, "fwd", 6).graph()
    few = [-1.0, -0.0, 0.0, 2.0]
    inputs = {p.name: rng.choice(few, p.type.shape(50, 6)) for p in forward.params}
    dy = rng.normal(0.5, 1, (50, 6))
    leaves = [torch.tensor(a, requires_grad=True) for a in inputs.values()]
    TORCH[describe](torch, *leaves).backward(torch.tensor(dy))
    found = gradients(describe, inputs, dy)
    for name, leaf in zip(inputs, leaves, strict=True):
        np.testing.assert_allclose(found[f"d{name}"], leaf.grad.numpy(), rtol=1e-13, atol=1e-13, err_msg=name)


FEW = st.sampled_from([-1.5, -0.0, 0.0, 1.0])


@given(x=arrays(np.float64, (3, 5), elements=FEW), z=arrays(np.float64, (3, 5), elements=FEW))
def test_what_ties_share_is_the_cotangent(x: Array, z: Array) -> None:
    dy = np.arange(1.0, 16).reshape(3, 5)
    found = gradients(larger, {"x": x, "z": z}, dy)
    np.testing.assert_array_equal(found["dx"] + found["dz"], dy)
    np.testing.assert_array_equal(found["dx"] == found["dz"], x == z)
    # Each row's maximum takes away what its elements got: nothing is left, nothing made up.
    np.testing.assert_allclose(gradients(below_largest, {"x": x}, dy)["dx"].sum(axis=1), 0, atol=1e-13)


def test_a_row_of_equal_elements_has_no_gradient_below_its_largest() -> None:
    np.testing.assert_array_equal(gradients(below_largest, {"x": np.ones((1, 4))}, np.ones((1, 4)))["dx"], 0)


def test_relu_keeps_nan_and_passes_nothing_at_zero_nor_at_nan() -> None:
    x = np.array([[1.0, np.inf, 5e-324, -0.0, 0.0, -1.0, -np.inf, np.nan]])
    y = interpret(spec_of(rectified, "fwd", 8).graph(), {"x": x})["y"]
    assert same_bits(y, np.array([[1.0, np.inf, 5e-324, 0.0, 0.0, 0.0, 0.0, np.nan]])).all()
    for ct in (2.0, np.inf, np.nan):
        dx = gradients(rectified, {"x": x}, np.full((1, 8), ct))["dx"]
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
    dx = gradients(clamped, {"x": x}, np.full((1, 8), 3.0))["dx"]
    np.testing.assert_array_equal(dx, [[3, 0, 3, 0, 3, 0, 0, 0]])


def test_no_cotangent_passes_through_rint() -> None:
    def product_of(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        b.output("y", x * x.rint())

    found = gradients(product_of, {"x": np.array([[2.0, -3.0]])}, np.array([[1.0, 10.0]]))
    np.testing.assert_array_equal(found["dx"], [[2.0, -30.0]])


def test_the_text_of_relu_parses_back() -> None:
    b = Builder("f")
    x = b.param("x", F64, M, D)
    graph = b.build(b.select_gt("y", x, b.relu("kept", x), x))
    assert "%kept : f64[M, D] = relu %x" in print_graph(graph)
    assert parse(print_graph(graph)) == graph


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


OF = (
    *((of_largest, "fwd"), (of_largest, "bwd"), (rectified, "fwd"), (smaller, "bwd"), (chosen_by_size, "bwd")),
    *((clamped, "bwd"), (magnitude, "bwd")),
)
ROWS_OF = ((5, "f32"), (64, "bf16"), (200, "f16"), (33, "f64"))


@sampling.grid(("describe", "way", "d", "dtype"), [(*a, *b) for a, b in product(OF, ROWS_OF)], strength=1)
def test_kernels_have_the_same_bits(describe: Describe, way: str, d: int, dtype: str) -> None:
    pytest.importorskip("cupy")
    spec = spec_of(describe, way, d, dtype)
    inputs = odd_numbers(spec.graph(), 7, d)
    outcome = run_plan(lower(spec, Compilation(spec).schedule("sm_90")), inputs)
    assert outcome.findings == ()
    for name, value in interpret(spec.graph(), inputs).items():
        assert same_bits(outcome.results[name], value).all(), name
