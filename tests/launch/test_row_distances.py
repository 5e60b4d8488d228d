"""Arrays with rows at two distances: if these fail, a kernel is given other rows, or reads them in smaller parts.

The layouts are those of q, k and v in a packed projection [T, 3, H, D], and of what else collapses into two groups.
"""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lngen.launch.runtime as runtime
from fake_gpu import FakeGpu
from lngen.launch.array_rules import fits, two_distances
from lngen.launch.runtime import Norm
from lngen.launch.signature import WIDE, Tensor

TOKENS, HEADS, WIDTH = 5, 4, 64
SHAPE = (TOKENS, HEADS, WIDTH)
X, Y = (Tensor(name, "f32", 4, WIDE) for name in "xy")


def norm_of(graph: Any = "rmsnorm", strides: int = 2, d: int = WIDTH, **keys: Any) -> Norm:
    return runtime.compile(graph, d=d, strides=strides, **keys)


def values(gpu: FakeGpu, *names: str) -> tuple[int, ...]:
    """Arguments of the last launch."""
    return tuple(gpu.launched[-1].values[name] for name in names)


# ---- which rows a kernel is given ----


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
