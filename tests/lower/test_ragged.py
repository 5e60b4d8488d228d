"""Ragged rows: if these fail, rows that begin anywhere give other bits, or are taken where they may not be."""

import re
from dataclasses import replace
from functools import partial

import pytest

import lngen
from fake_gpu import FakeArray, FakeGpu
from lngen.check.inputs import random_inputs
from lngen.contract import described
from lngen.errors import ArrayError
from lngen.lower import lower
from lngen.problem import Schedule
from lngen.ptx import run_plan
from lngen.runtime import Norm
from lngen.spec import parse_spec
from mutants import edited, source_of, twin

GOOD = Schedule("tma_unaligned", 32, 1, 1, 1, False, 2, 1, 2, True)


# ---- what arrays have to be like ----


def test_alignment() -> None:
    def aligned(text: str, s: Schedule) -> dict[str, int]:
        plan = lower(parse_spec(text), s)
        return {v.name: plan.alignment(v) for v in (*plan.inputs, *plan.outputs) if v.type.axes}

    ragged = aligned("layernorm.fwd:d=1001,dtype=bf16,weight=f32", GOOD)
    assert ragged == {"x": 16, "gamma": 4, "beta": 4, "y": 16, "mean": 4, "rstd": 4}
    assert aligned("cross_entropy.fwd:d=1001,dtype=bf16", replace(GOOD, tma_store=False)) == {
        "x": 16, "target": 16, "loss": 4, "rowmax": 4, "rowsum": 4,
    }  # fmt: skip
    bulk, text = Schedule("tma", 32, 1, 4, 1, False, 2, 1, 2), "layernorm.fwd:d=1008,dtype=f32,out=bf16"
    assert aligned(text, bulk)["y"] == 8
    assert aligned(text, replace(bulk, tma_store=True))["y"] == 16


def test_the_manifest_asks_for_contiguous_rows() -> None:
    tensors = {t["name"]: t for t in described(lower(parse_spec("layernorm.fwd:d=1001,dtype=bf16"), GOOD))["tensors"]}
    for name in "xy":
        found = tensors[name]
        assert (found["alignment"], found["row_stride_multiple"]) == (16, 1001)
        assert found["layout"] == "contiguous: row stride 1001"
    assert tensors["gamma"]["alignment"] == 2


def went(gpu: FakeGpu, norm: Norm, strides: dict[str, int], shifts: dict[str, int], rows: int = 5) -> tuple[str, int]:
    """The form and access width of a call with those row strides, and addresses shifted by so many bytes."""
    spec, made = norm.spec(), dict[str, FakeArray]()
    dtypes = {"x": spec.dtype, "gamma": spec.weight, "beta": spec.weight, "y": spec.out, "mean": "f32", "rstd": "f32"}
    for n, (name, dtype) in enumerate(dtypes.items(), 1):
        shape, step = ((rows, spec.d), (strides.get(name, spec.d), 1)) if name in "xy" else ((spec.d,), (1,))
        shape = (rows,) if name in ("mean", "rstd") else shape
        made[name] = gpu.array(str(dtype), *shape, strides=step, address=(n << 24) + shifts.get(name, 0))
    norm.forward(*(made[n] for n in ("x", "gamma", "beta")), out=tuple(made[n] for n in ("y", "mean", "rstd")))
    found = gpu.launched[-1].plan.schedule
    return found.form, found.vec


RAGGED = "form=tma_unaligned,threads=32,rows_per_block=1,stages=2,grid=128,tma_store=yes"


def test_calls_of_ragged_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """One behind the other and from a multiple of 16 bytes on, or in another way."""
    norm = lngen.compile("layernorm", d=1002, dtype="bf16", schedule={"fwd": RAGGED + ",vec=2"})
    go = partial(went, FakeGpu(monkeypatch), norm)
    assert go({}, {}) == ("tma_unaligned", 2)
    for strides, shifts, vec in [
        ({"x": 1004}, {}, 2), ({"y": 1008}, {}, 2), ({"x": 1005}, {}, 1), ({"x": 0}, {}, 2), ({"x": -1002}, {}, 2),
        ({}, {"x": 8}, 2), ({}, {"y": 4}, 2), ({}, {"y": 2}, 1), ({"y": 1003}, {"x": 2}, 1),
    ]:  # fmt: skip
        form, width = go(strides, shifts)
        assert form not in ("tma", "tma_unaligned"), (strides, shifts)
        assert width <= vec, (strides, shifts)
    # [D] and [M] arrays are read as ever; a single row has no stride; the first call's plan is still there.
    assert go({}, {"gamma": 4, "beta": 12, "mean": 4}) == ("tma_unaligned", 2)
    assert go({}, {"gamma": 2})[0] not in ("tma", "tma_unaligned")
    assert go({"x": 1005}, {}, rows=1) == go({}, {}) == ("tma_unaligned", 2)
    for name, size, past in (("x", 2, 1), ("mean", 4, 2), ("gamma", 2, 1)):
        message = (
            f"'{name}' is expected at an address that is a multiple of its element size, {size} bytes, got one {past} "
            "bytes past such an address; copy it to a new array."
        )
        with pytest.raises(ArrayError, match=re.escape(message)):
            go({}, {name: past})


def test_calls_of_bulk_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result narrower than the inputs leaves in bulk from multiples of 16 bytes only."""
    gpu, text = FakeGpu(monkeypatch), "form=tma,threads=32,rows_per_block=1,vec=4,stages=2,grid=128"
    bulk, plain = (
        partial(went, gpu, lngen.compile("layernorm", d=1008, dtype="f32", out="bf16", schedule={"fwd": s}))
        for s in (text + ",tma_store=yes", text)
    )
    assert bulk({}, {}) == bulk({"y": 1016}, {}) == bulk({"x": 1012}, {}) == ("tma", 4)
    assert bulk({"y": 1012}, {})[0] != "tma"
    assert bulk({}, {"y": 8})[0] != "tma"
    assert plain({"y": 1012}, {}) == plain({}, {"y": 8}) == ("tma", 4)
    assert plain({"x": 1010}, {})[0] != "tma"


# ---- shared memory ----


def test_a_stage_has_room_for_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 2046 bytes touch up to 2064."""
    pytest.importorskip("cupy")
    spec = parse_spec("layernorm.fwd:d=1023,dtype=bf16")
    s = Schedule("tma_unaligned", 32, 1, 1, stages=2, grid=1, tma_store=True)
    inputs = random_inputs(spec, 9)
    assert run_plan(lower(spec, s), inputs).findings == ()
    for module in ("lngen.problem.footprint", "lngen.lower.policies"):
        monkeypatch.setattr(f"{module}.stage_share", lambda size, s, p: -(-p.d * size // 128) * 128)
    assert run_plan(lower(spec, s), inputs).findings


@pytest.mark.parametrize("name", ["unaligned, pairs", "unaligned, in registers", "unaligned, sums"])
def test_neighbouring_threads_meet_in_no_bank(name: str) -> None:
    """Threads side by side read and store what lies side by side, where whole warps have a row."""
    pytest.importorskip("cupy")
    subject = twin(name)

    def conflicts(source: str) -> int:
        outcome = run_plan(subject.plan, subject.inputs, source=source)
        return sum(t["bank_conflicts"] for t in outcome.traffic.shared.values())

    source, place = source_of(subject.plan), "vector_in_segment(v) * RUN + run + i % RUN"
    assert conflicts(source) < conflicts(edited(source, place, "vector_in_segment(v) * N + i")) / 2
