"""If these fail, a kernel gets arrays that it cannot read, or a result destroys an array that is still needed."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lngen.launch.runtime as runtime
from fake_arrays import FakeArray
from fake_gpu import FakeGpu
from fuzz import fuzzed
from lngen.compiler.graphs import GraphBuilder
from lngen.compiler.ir import D, M
from lngen.errors import ArrayError
from lngen.launch.array_rules import Span, meet, near, replaced, row_stride
from lngen.launch.arrays import Layout
from lngen.launch.runtime import Norm
from lngen.launch.signature import WIDE, Tensor

# ---- layouts, as a GPU array would have them ----


X, GAMMA, MEAN = Tensor("x", "f32", 4, WIDE), Tensor("gamma", "f32", 4, ("D",)), Tensor("mean", "f32", 4, ("M",))


def layout(shape: tuple[int, ...], strides: tuple[int, ...], device: int = 0) -> Layout:
    return ("float32", shape, strides, device)


@pytest.mark.parametrize(("value", "shape", "strides", "expected"), [
    (X, (5, 8), (8, 1), 8), (X, (5, 8), (24, 1), 24), (X, (2, 5, 8), (80, 16, 1), 16),
    (X, (2, 1, 8), (16, 999, 1), 16), (X, (1, 8), (999, 1), 8), (X, (5, 1), (3, 7), 3), (X, (0, 8), (8, 1), 8),
    (X, (5, 8), (0, 1), 0), (MEAN, (5,), (1,), 1), (MEAN, (2, 5), (5, 1), 1), (GAMMA, (8,), (1,), 8),
])  # fmt: skip
def test_row_stride(value: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], expected: int) -> None:
    assert row_stride(value, layout(shape, strides), written=False) == expected


# ---- memory that arrays share ----


WIDTH, ROWS = 64, 5
LAYOUTS = st.lists(st.tuples(st.integers(0, 4), st.integers(-19, 19)), max_size=3)
SIZES = st.sampled_from([1, 2, 4])


@fuzzed
@given(LAYOUTS, LAYOUTS, SIZES, SIZES, st.integers(-80, 80))
def test_arrays_that_share_memory_are_found(
    one: list[tuple[int, int]], other: list[tuple[int, int]], size: int, others_size: int, distance: int
) -> None:
    """Against bytes counted one by one, for any strides; what shares some is never out of reach."""

    def bytes_of(dims: list[tuple[int, int]], element: int, address: int) -> set[int]:
        places = np.ndindex(*(n for n, _ in dims))
        starts = [sum(i * step for i, (_, step) in zip(place, dims, strict=True)) for place in places]
        return {address + s + n for s in starts for n in range(element)}

    def span(dims: list[tuple[int, int]], element: int) -> Span | None:
        return Span.of([n for n, _ in dims], [step for _, step in dims], element)

    shared = bytes_of(one, size, 1000 + distance) & bytes_of(other, others_size, 1000)
    a, b = span(one, size), span(other, others_size)
    assert (a is not None and b is not None and meet(a, b, distance + a.first - b.first)) == bool(shared)
    close = [low < distance < high for _, _, low, high in near([b, a], 1)]
    assert close in ([[True]] if shared else [[], [False], [True]])


@pytest.mark.parametrize(("shift", "step"), [(0, 8), (4, 8), (-4, 8), (0, 4), (32, 8)])
def test_a_sum_takes_exactly_the_place_of_what_it_is_added_to(shift: int, step: int) -> None:
    """Here of 8 numbers each, and behind another input."""
    tensors = X, Tensor("sums", "f64", 8, ("D",)), Tensor("dgamma", "f64", 8, ("D",))
    places = [(0, Span.of([5, 8], [32, 4], 4)), *((4096 + n, Span.of([8], [d], 8)) for n, d in ((0, 8), (shift, step)))]
    with nullcontext() if (shift, step) == (0, 8) else pytest.raises(ArrayError, match="'dgamma' is written to, but"):
        assert replaced(tensors, places, 2, "", {"dgamma": "sums"}) == ()


# ---- on a GPU ----


def row_array(gpu: FakeGpu, address: int | None = None, stride: int = WIDTH) -> FakeArray:
    return gpu.array("f32", ROWS, WIDTH, strides=(stride, 1), address=address)


@pytest.fixture
def inputs(gpu: FakeGpu) -> tuple[FakeArray, FakeArray, FakeArray]:
    return row_array(gpu), gpu.array("f32", WIDTH), gpu.array("f32", WIDTH)


def norm_of(direction: str = "fwd", schedule: str = "", graph: Any = "layernorm") -> Norm:
    return runtime.compile(graph, d=WIDTH, schedule={direction: schedule})


def two_results(b: GraphBuilder) -> None:
    """h = x + residual is stored before its mean square is known."""
    h = b.add("h", b.input("x", M, D), b.input("residual", M, D))
    ms = b.reduce_mean("ms", b.mul("h2", h, h), axis=D)
    b.output("h_out", h)
    b.output("y", b.mul("hhat", h, b.rsqrt("rstd", b.add("mseps", ms, b.eps()))))


def test_dx_in_place_of_what_forward_saved(gpu: FakeGpu, inputs: Any) -> None:
    """dy's place is free; that of x, too, but there is no second backward then."""
    norm, dy = norm_of(), row_array(gpu)
    _, saved = norm.forward(*inputs)
    dx, _, _ = norm.backward(dy, saved, out=(dy, None, None))
    assert dx is dy
    norm.backward(dy, saved, out=(inputs[0], None, None))
    with pytest.raises(ArrayError, match="'x' is needed, but a result was written over it"):
        norm.backward(dy, saved)


STREAM = "form=multipass,rows_per_block=1,vec=4,threads="


def test_a_streamed_backward_refuses(gpu: FakeGpu) -> None:
    """It has column sums to do after dx, whatever plan the addresses ask for."""
    d = 8200
    norm = runtime.compile("layernorm", d=d, schedule={"bwd": STREAM + "256"})
    _, saved = norm.forward(gpu.array("f32", ROWS, d), gpu.array("f32", d), gpu.array("f32", d))
    gpu.launched.clear()
    for address in (1 << 40, (1 << 40) + 4):
        dy = gpu.array("f32", ROWS, d, address=address)
        with pytest.raises(
            ArrayError, match="'dx' takes the place of 'dy', which kernels with form=multipass read again"
        ):
            norm.backward(dy, saved, out=(dy, None, None))
    assert gpu.launched == []


def test_a_streamed_forward_refuses_if_it_reads_a_row_after_its_first_result(gpu: FakeGpu) -> None:
    def norm(graph: Any, schedule: str) -> Norm:
        return runtime.compile(graph, d=128, schedule={"fwd": schedule})

    x, residual, weight = gpu.array("f32", ROWS, 128), gpu.array("f32", ROWS, 128), gpu.array("f32", 128)
    norm("layernorm", STREAM + "32").forward(x, weight, weight, out=x)
    norm(two_results, "form=registers").forward(x, residual, out=x)
    with pytest.raises(ArrayError, match=r"'h_out' takes the place of 'x', .* compile with another schedule"):
        norm(two_results, STREAM + "32").forward(x, residual, out=x)


# ---- on NumPy ----


@pytest.fixture
def arrays() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=s).astype(np.float32) for s in ((ROWS, WIDTH), (WIDTH,), (WIDTH,)))


def test_nothing_is_written_before_everything_is_checked(arrays: Any) -> None:
    y, rstd, before = np.zeros((ROWS, WIDTH), np.float32), np.zeros(ROWS, np.float32), arrays[0].copy()
    rstd.flags.writeable = False
    for out in ((y, None, rstd), (y, arrays[0][:, 0], None), (arrays[0][::-1], None, None)):
        with pytest.raises(ArrayError, match="is written to, but"):
            norm_of().forward(*arrays, out=out)
    assert not y.any()
    assert (arrays[0] == before).all()
