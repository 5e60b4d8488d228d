"""Arrays with rows at two distances: if these fail, a kernel is given other rows, or a call is refused that could run.

The layouts are those of q, k and v in a packed projection [T, 3, H, D], and of what else collapses into two groups.
"""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lngen.launch.runtime as runtime
from fake_gpu import FakeArray, FakeGpu
from lngen.errors import ArrayError
from lngen.launch.array_rules import fits, two_distances
from lngen.launch.runtime import Norm
from lngen.launch.signature import WIDE, Tensor

TOKENS, HEADS, WIDTH = 5, 4, 64
PACKED = (3 * HEADS * WIDTH, WIDTH, 1)
SHAPE = (TOKENS, HEADS, WIDTH)
X, Y = (Tensor(name, "f32", 4, WIDE) for name in "xy")


def norm_of(graph: Any = "rmsnorm", strides: int = 2, d: int = WIDTH, **keys: Any) -> Norm:
    return runtime.compile(graph, d=d, strides=strides, **keys)


def packed(gpu: FakeGpu, which: int = 0, base: int = 1 << 40, dtype: str = "f32") -> FakeArray:
    """q, k or v of one projection."""
    size = 4 if dtype == "f32" else 2
    return gpu.array(dtype, *SHAPE, strides=PACKED, address=base + which * HEADS * WIDTH * size)


def values(gpu: FakeGpu, *names: str) -> tuple[int, ...]:
    """Arguments of the last launch."""
    return tuple(gpu.launched[-1].values[name] for name in names)


# ---- which rows a kernel is given ----


def test_heads_of_a_packed_projection_are_read_in_place(gpu: FakeGpu) -> None:
    q = packed(gpu)
    y, _ = norm_of().forward(q, gpu.array("f32", WIDTH))
    assert values(gpu, "rows_", "inner_", "x_ptr_") == (TOKENS * HEADS, HEADS, q.address)
    assert values(gpu, "x_outer_", "x_stride_", "y_outer_", "y_stride_") == (*PACKED[:2], HEADS * WIDTH, WIDTH)
    assert y.strides == (HEADS * WIDTH, WIDTH, 1), "a new result is contiguous"


def test_gradients_are_read_and_written_in_place(gpu: FakeGpu) -> None:
    """dy, dx and x all in projections of their own."""
    norm = norm_of()
    x, dy, dx = (packed(gpu, 1, (1 + n) << 40) for n in range(3))
    _, saved = norm.forward(x, gpu.array("f32", WIDTH), out=packed(gpu, 2, 9 << 40))
    assert values(gpu, "y_outer_", "y_stride_") == PACKED[:2]
    assert norm.backward(dy, saved, out=(dx, None))[0] is dx
    rows = next(one for one in gpu.launched[1:] if "dx_ptr_" in one.values).values
    for name, array in (("x", x), ("dy", dy), ("dx", dx)):
        assert (rows[f"{name}_ptr_"], rows[f"{name}_outer_"], rows[f"{name}_stride_"]) == (array.address, *PACKED[:2])
    assert rows["inner_"] == HEADS


def starts(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Where the rows begin, by the definition of strides."""
    return [sum(np.multiply(at, strides[:-1])) for at in np.ndindex(*shape[:-1])]


@given(
    st.lists(st.integers(1, 3), min_size=0, max_size=4),
    st.integers(0, 4),
    st.tuples(st.integers(-9, 40), st.integers(-9, 40)),
)
def test_the_places_are_those_of_the_strides(shape: list[int], cut: int, steps: tuple[int, int]) -> None:
    """Of any shape that is cut anywhere, beside a contiguous array: every row is where NumPy has it."""
    outer, inner = shape[:cut], shape[cut:]
    strides = [
        step * math.prod(side[n + 1 :])
        for side, step in ((outer, steps[0]), (inner, steps[1]))
        for n in range(len(side))
    ]
    contiguous = tuple(8 * math.prod(shape[n + 1 :]) for n in range(len(shape)))
    arrays = [(v, ("f32", (*shape, 8), (*s, 1), 0)) for v, s in ((X, strides), (Y, contiguous))]
    found, rows = two_distances(arrays, shape, ())
    for (_, layout), distance in zip(arrays, found, strict=True):
        assert fits(layout)
        given = [r // rows * distance[0] + r % rows * distance[1] for r in range(math.prod(shape))]
        assert given == starts((*shape, 8), layout[2])


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_the_cut_is_where_any_array_has_it(gpu: FakeGpu, order: tuple[int, ...]) -> None:
    """Whatever array comes first: one with two distances, and others with one, with a dimension of 1 between."""
    layouts = [((3000, 1, 64, 1), 3000), ((256, 256, 64, 1), 256), ((512, 7, 128, 1), 512)]
    norm = norm_of("add_rmsnorm")
    x, residual, out = (
        gpu.array("f32", TOKENS, 1, HEADS, WIDTH, strides=layouts[n][0], address=(1 + n) << 40) for n in order
    )
    norm.forward(x, residual, gpu.array("f32", WIDTH), out=(out, None, None))
    for name, n in zip(("x", "residual", gpu.launched[-1].plan.outputs[0].name), order, strict=True):
        assert values(gpu, f"{name}_outer_", f"{name}_stride_") == (layouts[n][1], layouts[n][0][2])
    assert values(gpu, "inner_") == (HEADS,)


@pytest.mark.parametrize(("shape", "strides", "expected"), [
    ((20, 64), (64, 1), (20, 1280, 64)),  # all rows are inner ones
    ((5, 4, 64), (256, 64, 1), (20, 1280, 64)),
    ((5, 4, 64), (64, 512, 1), (4, 64, 512)),  # heads first in memory
    ((5, 4, 64), (0, 64, 1), (4, 0, 64)),  # the same rows for every token
    ((5, 4, 64), (1000, -64, 1), (4, 1000, -64)),
    ((1, 64), (999, 1), (1, 64, 64)),  # a row has no distance
    ((64,), (1,), (1, 64, 64)),
    ((5, 1, 64), (999, 7, 1), (5, 4995, 999)),
    ((0, 4, 64), (3, 3, 1), (1, 64, 64)),
])  # fmt: skip
def test_layouts(gpu: FakeGpu, shape: Any, strides: Any, expected: tuple[int, int, int]) -> None:
    norm_of().forward(gpu.array("f32", *shape, strides=strides), gpu.array("f32", WIDTH))
    if 0 not in shape:
        assert values(gpu, "inner_", "x_outer_", "x_stride_") == expected


# ---- how wide accesses are ----


@pytest.mark.parametrize(("outer", "stride", "vec"), [
    (4096, 72, 8), (4100, 72, 4), (4096, 68, 4), (4098, 72, 2), (4096, 66, 2), (4097, 72, 1), (4096, 65, 1),
])  # fmt: skip
@pytest.mark.parametrize("array", ["x", "y"])
def test_both_distances_decide_the_access(gpu: FakeGpu, outer: int, stride: int, vec: int, array: str) -> None:
    norm = norm_of(dtype="bf16", schedule={"fwd": "form=registers,threads=8,rows_per_block=16,vec=8"})
    x, y = (gpu.array("bf16", *SHAPE, strides=(outer, stride, 1) if array == name else ()) for name in ("x", "y"))
    norm.forward(x, gpu.array("bf16", WIDTH), out=y)
    assert gpu.launched[-1].plan.schedule.vec == vec


def test_no_bulk_copy_of_rows_at_odd_distances(gpu: FakeGpu) -> None:
    norm = norm_of(
        dtype="bf16", d=1024, schedule={"fwd": "form=tma,threads=128,rows_per_block=1,vec=8,stages=2,grid=9"}
    )
    weight = gpu.array("bf16", 1024)
    forms = []
    for outer in (3 * 4 * 1024, 3 * 4 * 1024 + 4):
        norm.forward(gpu.array("bf16", TOKENS, HEADS, 1024, strides=(outer, 1024, 1)), weight)
        forms.append((gpu.launched[-1].plan.schedule.form, gpu.launched[-1].plan.schedule.vec))
    assert forms[0] == ("tma", 8)
    assert forms[1][0] != "tma"
    assert forms[1][1] == 4


# ---- memory that arrays share ----


def test_q_is_normalised_in_place_beside_k_and_v(gpu: FakeGpu) -> None:
    q, k = packed(gpu, 0), packed(gpu, 1)
    norm, gamma = norm_of(), gpu.array("f32", WIDTH)
    y, saved = norm.forward(q, gamma, out=q)
    assert y is q
    assert saved.overwritten == ("x",)
    _, saved = norm.forward(q, gamma, out=k)
    assert saved.overwritten == ()
    assert len(gpu.launched) == 2


@pytest.mark.parametrize("shift", [4, -4, 4 * WIDTH, 4 * (HEADS * WIDTH - 1), 4 * PACKED[0]])
def test_a_true_overlap_is_refused(gpu: FakeGpu, shift: int) -> None:
    """By one element, by one head, by all but one element, by a token."""
    q = packed(gpu)
    out = gpu.array("f32", *SHAPE, strides=PACKED, address=q.address + shift)
    with pytest.raises(ArrayError, match="'y' is written to, but shares memory with 'x'; pass an array of its own"):
        norm_of().forward(q, gpu.array("f32", WIDTH), out=out)
    assert gpu.launched == []


@pytest.mark.parametrize("strides", [(64, 320, 1), (-256, 64, 1), (256, -64, 1)])
def test_rows_that_are_apart_may_be_written(gpu: FakeGpu, strides: tuple[int, ...]) -> None:
    out = gpu.array("f32", *SHAPE, strides=strides, address=1 << 40)
    norm_of().forward(gpu.array("f32", *SHAPE), gpu.array("f32", WIDTH), out=out)
    assert len(gpu.launched) == 1


# ---- what is refused ----


def test_a_layout_that_no_kernel_reads_or_writes_launches_nothing(gpu: FakeGpu) -> None:
    """Rows at more than two distances, or at other ones; overlapping rows; numbers that are not contiguous."""
    gamma, shape = gpu.array("f32", WIDTH), (2, 3, 4, WIDTH)
    x, y = (gpu.array("f32", *shape, strides=strides) for strides in ((5000, 256, 64, 1), (3000, 1000, 64, 1)))
    for one, out, strides in (
        (gpu.array("f32", *shape, strides=(5000, 1000, 100, 1)), None, 2),
        (gpu.array("f32", *SHAPE, strides=(512, 128, 2)), None, 2),
        (packed(gpu), None, 1),
        (packed(gpu), gpu.array("f32", *SHAPE, strides=(255, 64, 1)), 2),
        (packed(gpu), (None, gpu.array("f32", TOKENS, HEADS, strides=(8, 1))), 2),
        (x, y, 2),
    ):
        with pytest.raises(ArrayError):
            norm_of(strides=strides).forward(one, gamma, out=out)
    assert gpu.launched == []
    for array in (x, y):
        norm_of().forward(array, gamma)


# ---- on NumPy ----


def test_numpy_takes_any_strides_with_and_without_the_key() -> None:
    """The interpreter has the same bits, in place as well, and leaves k and v alone."""
    qkv = np.random.default_rng(0).normal(size=(TOKENS, 3, HEADS, WIDTH)).astype(np.float32)
    gamma, before = np.random.default_rng(1).normal(size=WIDTH).astype(np.float32), qkv.copy()
    want, _ = norm_of(strides=1).forward(before[:, 0].copy(), gamma)
    assert norm_of().forward(qkv[:, 0], gamma)[0].tobytes() == want.tobytes()
    norm_of().forward(qkv[:, 0], gamma, out=qkv[:, 0])
    assert (qkv[:, 0] == want).all()
    assert (qkv[:, 1:] == before[:, 1:]).all()
