"""Maxima of 16-bit inputs, two elements at a time: if these fail, a maximum loses an element, a NaN or a sign of 0."""

import numpy as np
import pytest

from lngen.compiler.emit import emit
from lngen.compiler.graphs import GraphBuilder
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import D, M
from lngen.compiler.ir.numerics import NUMPY_DTYPE
from lngen.compiler.lower import lower
from lngen.compiler.problem import Schedule
from lngen.compiler.spec import Spec
from lngen.dtypes import DType
from lngen.proof.check.inputs import mismatches
from lngen.proof.ptx import run_plan
from number_graphs import spec_of
from sampling import grid
from schedules import multipass, registers, tma

pytest.importorskip("cupy")

SHORT, LONG = 64, 16384  # the second has segments
CASES: list[tuple[int, Schedule, str]] = [
    (SHORT, registers(8, 4, 8), "sm_75"),
    (SHORT, registers(8, 4, 8), "sm_80"),
    (SHORT, tma(32, 1, 8, 2, "regs", grid=3), "sm_90"),
    (LONG, multipass(128, 8), "sm_75"),
    (LONG, registers(512, 1, 8), "sm_80"),
    (LONG, tma(256, 1, 8, 2, "", grid=2), "sm_90"),
    (LONG, tma(256, 1, 8, 2, "regs", cluster=2, grid=2), "sm_90"),
]


def largest(b: GraphBuilder) -> None:
    """The maximum of each row, and the elements less it."""
    x = b.input("x", M, D)
    top = b.max(x)
    b.output("most", b.stop_gradient(top), dtype=DType.F32)
    b.output("y", x - b.stop_gradient(top))


def spec_with(dtype: str, d: int) -> Spec:
    return spec_of(largest, d=d, dtype=dtype)


def rows_of(d: int, dtype: str) -> np.ndarray:
    """A row for each place of the largest element, of a NaN and of +0 among -0; and rows of -inf and of one number."""
    rng, places = np.random.default_rng(d), (0, 1, 7, d // 2, d - 2, d - 1)
    random = -np.abs(rng.normal(size=(3 * len(places) + 2, d))) - 1
    for n, place in enumerate(places):
        random[3 * n, place] = -0.5
        random[3 * n + 1, place] = np.nan
        random[3 * n + 2], random[3 * n + 2, place] = -0.0, 0.0
    random[-2], random[-1] = -np.inf, -3.0
    return random.astype(NUMPY_DTYPE[DType(dtype)])


@grid(("d", "schedule", "arch", "dtype"), [(*case, dtype) for case in CASES for dtype in ("bf16", "f16")], strength=1)
def test_pairs_have_the_maximum_of_the_elements(d: int, schedule: Schedule, arch: str, dtype: str) -> None:
    spec, x = spec_with(dtype, d), rows_of(d, dtype)
    plan = lower(spec, schedule)
    assert f"MaxOfPairs<{dtype}>" in emit(plan)
    outcome = run_plan(plan, {"x": x}, rows=len(x), arch=arch)
    assert outcome.findings == ()
    wanted = interpret(spec.graph(), {"x": x})
    assert mismatches(outcome.results, wanted) == []
    most = outcome.results["most"].astype(np.float64)
    assert np.array_equal(most, x.astype(np.float64).max(axis=1), equal_nan=True)
    assert not np.signbit(most[2:-2:3]).any()


@pytest.mark.parametrize(("dtype", "d", "vec"), [("f32", 64, 4), ("bf16", 63, 1)])
def test_other_elements_are_taken_one_at_a_time(dtype: str, d: int, vec: int) -> None:
    assert "MaxOfPairs" not in emit(lower(spec_with(dtype, d), registers(32, 1, vec)))
