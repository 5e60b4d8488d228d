"""Kernels with strides=2 are checked on rows with gaps: if these fail, ``lngen check`` misses rows in a wrong place."""

import ctypes
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lngen.compiler.compile import KernelSet
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import WIDE, Value
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array
from lngen.compiler.lower import Plan
from lngen.compiler.toolchain import Binary
from lngen.proof.check import inputs as checked
from lngen.proof.check import spec_checks
from lngen.proof.check.inputs import distances, random_inputs
from lngen.rules import Distance
from plans import plan_of
from schedules import registers, tma

SPEC, ROWS = "rmsnorm.fwd:d=64,dtype=f16,strides=2", 7


def plan() -> Plan:
    return plan_of(SPEC, registers(2, 64, 8))


# ---- the layout ----


@pytest.mark.parametrize(("text", "schedule", "unit"), [
    (SPEC, registers(2, 64, 8), 8),
    ("layernorm.bwd:d=99,dtype=bf16,strides=2,wrt=x", registers(16, 4, 1), 1),
    ("rmsnorm.fwd:d=768,dtype=bf16,out=f32,strides=2", tma(32, 4, 8, 2, "store", grid=4), 8),
])  # fmt: skip
def test_no_two_tensors_lie_alike_and_gaps_follow_all_rows(text: str, schedule: Any, unit: int) -> None:
    made = plan_of(text, schedule)
    found, inner = distances(made)
    assert [*found] == [v.name for v in (*made.inputs, *made.outputs) if v.type.axes == WIDE]
    assert len({*found.values()}) == len(found) > 1
    for distance in found.values():
        outer, near = distance
        assert near > made.spec.d
        assert outer > inner * near
        assert outer % unit == near % unit == 0
    assert inner > 1
    assert distances(plan_of(text.replace(",strides=2", ""), schedule)) == ({}, 1)


def test_elements_between_rows_that_change_are_counted() -> None:
    at = checked.places((40, 12), 5, 10)
    assert at[:, 0].tolist() == [0, 12, 24, 40, 52]
    memory = checked.spread(np.arange(50, dtype=np.float16).reshape(5, 10), at, 2)
    assert memory[at].tolist() == np.arange(50, dtype=np.float16).reshape(5, 10).view("u2").tolist()
    assert checked.touched(memory, at) == 0
    memory[[10, 11, 39, -1]] = 0
    assert checked.touched(memory, at) == 4
    memory[at] = 0
    assert checked.touched(memory, at) == 4


# ---- on the PTX executor ----


@pytest.mark.parametrize(("old", "new"), [
    ("place.quotient * outer", "place.quotient * 3 * stride"),
    ("place.remainder * stride", "place.remainder * 64"),
    ("row / inner", "row / 1"),
])  # fmt: skip
def test_rows_in_a_wrong_place_fail(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Rows without gaps would hide each of them."""
    pytest.importorskip("cupy")
    made, inputs = plan(), random_inputs(plan().spec, ROWS)
    want = interpret(made.graph, inputs)
    right = spec_checks.executed(KernelSet(made), "sm_90", ROWS, inputs, want)
    assert right.ok, right.detail
    wrong = KernelSet(made)
    text = wrong.bundle
    assert old in text
    monkeypatch.setattr(KernelSet, "text", text.replace(old, new))
    assert not spec_checks.executed(KernelSet(made), "sm_90", ROWS, inputs, want).ok


# ---- on a GPU, whose memory is that of NumPy here ----


class OnHost:
    """A launcher that computes by the interpreter, and writes ``more`` elements behind each row of y."""

    def __init__(self, made: Plan, more: int) -> None:
        self.plan, self.device, self.more = made, 0, more

    def contiguous(self, rows: int) -> dict[str, Distance]:
        return {}

    def __call__(
        self, rows: int, pointers: dict[str, int], strides: dict[str, Distance], work: int, stream: int, inner: int,
        values: dict[str, int],
    ) -> None:  # fmt: skip
        def at(v: Value, row: int, more: int = 0) -> Array:
            """A row of an [M, D] tensor, or all of another one."""
            outer, near = strides[v.name] if v.type.axes == WIDE else (0, 0)  # type: ignore[misc]
            dtype, shape = np.dtype(NUMPY_DTYPE[v.type.dtype]), v.type.shape(rows, self.plan.spec.d)
            start = pointers[v.name] + (row // inner * outer + row % inner * near) * dtype.itemsize
            raw = (ctypes.c_char * ((shape[-1] + more) * dtype.itemsize)).from_address(start)
            return np.frombuffer(raw, dtype)

        x, gamma = self.plan.inputs
        inputs = {"x": np.stack([at(x, row) for row in range(rows)]), "gamma": at(gamma, 0)}
        results = interpret(self.plan.graph, inputs)
        y, rstd = self.plan.outputs
        at(rstd, 0)[:] = results["rstd"]
        for row in range(rows):
            at(y, row, self.more)[:] = [*results["y"][row], *[1] * self.more]


class HostArray:
    """A copy of an array, as one of CuPy's."""

    def __init__(self, a: Array) -> None:
        self.array = np.array(a)
        self.data = SimpleNamespace(ptr=self.array.ctypes.data)

    def get(self, stream: Any) -> Array:
        return self.array


@pytest.mark.parametrize(("more", "complaint"), [(0, ""), (1, "y: 7 elements between rows are written to")])
def test_bytes_between_rows_have_to_stay(monkeypatch: pytest.MonkeyPatch, more: int, complaint: str) -> None:
    cupy = SimpleNamespace(
        asarray=HostArray, uint8=np.uint8, full=lambda n, fill, dtype: HostArray(np.full(n, fill, dtype)),
        cuda=SimpleNamespace(Device=lambda number: nullcontext(), get_current_stream=lambda: SimpleNamespace(ptr=0)),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    made, inputs = plan(), random_inputs(plan().spec, ROWS)
    monkeypatch.setattr(spec_checks, "_launcher", lambda *_: OnHost(made, more))
    found = spec_checks.bits(made, Binary("sm_90", b"", "", {}), ROWS, inputs, interpret(made.graph, inputs))
    assert (found.ok, complaint in found.detail) == (not more, True)
