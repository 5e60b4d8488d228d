"""The PTX executor: bits equal to the interpreter, whatever the schedule, the strides and the arch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

import sampling
from lngen.aot.catalog import plans
from lngen.check.inputs import random_inputs, same_bits
from lngen.emit import emit
from lngen.errors import PtxError
from lngen.interpret import interpret
from lngen.ir import D, M
from lngen.lower import Plan, lower
from lngen.ptx import Outcome, parse, run_plan
from lngen.ptx.computing import pure
from lngen.ptx.program import immediate
from lngen.schedule import Schedule, is_legal, problem, space
from lngen.spec import parse_spec
from lngen.toolchain import compile_ptx

pytest.importorskip("cupy")

DTYPES = ("f16", "bf16", "f32", "f64", "bf16,weight=f32", "f32,weight=bf16")


def run(plan: Plan, rows: int, **options: object) -> Outcome:
    """The outcome, after its bits are compared; no findings are expected."""
    inputs = random_inputs(plan.spec, rows)
    outcome = run_plan(plan, inputs, **options)  # type: ignore[arg-type]
    for name, want in interpret(plan.graph, inputs).items():
        assert same_bits(outcome.results[name], want).all(), name
    assert outcome.findings == (), "\n".join(map(str, outcome.findings))
    return outcome


def plan_of(text: str, number: int = 0, vec: int | None = None) -> Plan:
    """A plan under the schedule of that number, among all legal ones, counted with a stride that varies them.

    With ``vec`` they are those that take rows from any address on.
    """
    spec = parse_spec(text)
    facts = problem(spec.graph(), spec.d)
    listed = (s if vec is None else replace(s, vec=vec) for s in space(facts))
    aligned = () if vec is None else ("tma", "tma_unaligned")
    schedules = [s for s in listed if is_legal(s, facts) and s.form not in aligned]
    return lower(spec, schedules[number * 7919 % len(schedules)])


@sampling.rotating("plan", plans(), ids=lambda p: p.name)
def test_goldens(plan: Plan) -> None:
    run(plan, 20)


SIZES = ((1, 3, "sm_75"), (31, 17, "sm_90"), (96, 1, "sm_80"), (1000, 5, "sm_120"))  # D, rows, arch


@sampling.grid(
    ("graph", "direction", "dtype", "size"), product(("layernorm", "rmsnorm"), ("fwd", "bwd"), DTYPES, SIZES)
)
def test_dtypes_and_lengths(graph: str, direction: str, dtype: str, size: tuple[int, int, str]) -> None:
    d, rows, arch = size
    few = ",blocks=3" if direction == "bwd" else ""
    run(plan_of(f"{graph}.{direction}:d={d},dtype={dtype}{few}", SIZES.index(size) + d), rows, arch=arch)


@pytest.mark.parametrize("rows", [0, 1, 3, 133])
@pytest.mark.parametrize("text", ["layernorm.bwd:d=255,dtype=bf16,blocks=7", "rmsnorm.fwd:d=64,dtype=f32"])
def test_rows(text: str, rows: int) -> None:
    run(plan_of(text, 3), rows, order=rows)


@pytest.mark.parametrize("text", ["layernorm.fwd:d=100,dtype=f16", "layernorm.bwd:d=513,dtype=f32,blocks=3"])
def test_strides_and_unaligned_pointers(text: str) -> None:
    plan = plan_of(text, 5, vec=1)
    wide = [v.name for v in (*plan.inputs, *plan.outputs) if v.type.axes == (M, D)]
    strides = {name: plan.spec.d + n for n, name in enumerate(wide)}
    for offset in (1, 3):
        run(plan, 6, strides=strides, offset=offset, order=2)


@pytest.mark.parametrize("text", ["layernorm.fwd:d=1536,dtype=bf16", "rmsnorm.bwd:d=1536,dtype=f16,blocks=3"])
def test_schedules_agree(text: str) -> None:
    for number in range(4):
        run(plan_of(text, number), 4)


def test_nan_and_infinity() -> None:
    plan = plan_of("layernorm.fwd:d=64,dtype=f32", 1)
    inputs = random_inputs(plan.spec, 4)
    inputs["x"][0, 3], inputs["x"][1, 5], inputs["x"][2] = np.nan, np.inf, 1e-42
    outcome = run_plan(plan, inputs)
    for name, want in interpret(plan.graph, inputs).items():
        assert same_bits(outcome.results[name], want).all()


@cache
def small() -> Plan:
    return lower(parse_spec("layernorm.fwd:d=256,dtype=bf16"), Schedule("registers", 32, 4, 8))


def test_traffic_is_what_the_algorithm_needs() -> None:
    plan = small()
    traffic = run(plan, 8).traffic
    (kernel,) = traffic.tensors
    x, y = (traffic.tensors[kernel][n] for n in "xy")
    assert x["bytes_read"] == y["bytes_written"] == 8 * 256 * 2
    assert x["sectors_read"] == y["sectors_written"] == 8 * 256 * 2 // 32
    assert traffic.instructions[kernel]["sqrt.rn.f32"] == 8
    assert traffic.shared[kernel]["accesses"] == traffic.barriers[kernel] == 0
    block = lower(plan.spec, Schedule("registers", 32, 1, 8))
    wide = lower(parse_spec("layernorm.fwd:d=4096,dtype=bf16"), Schedule("registers", 128, 1, 8))
    traffic = run(wide, 2).traffic
    (kernel,) = traffic.tensors
    assert traffic.barriers[kernel] == 2 * 4 * 2  # rows, warps, sums
    assert traffic.shared[kernel]["bank_conflicts"] == 0
    assert problem(block.graph, 256).run == 8


def test_ptx_of_several_entries() -> None:
    plan = plan_of("layernorm.bwd:d=64,dtype=f32", 0)
    text = compile_ptx(emit(plan), "sm_90", lines=True)
    module = parse(text)
    assert list(module.entries) == [k.name for k in plan.kernels]
    assert module.target == "sm_90"
    entry = module.entries[plan.kernels[0].name]
    assert len(entry.params) == len(plan.kernels[0].arguments)
    lines = text.splitlines()
    assert all(i.opcode in lines[i.line - 1] for i in entry.instructions)
    assert any(i.loc.inlined_at for i in entry.instructions)
    plain = parse(compile_ptx(emit(plan), "sm_90")).entries[entry.name]
    assert [i.text for i in plain.instructions] == [i.text for i in entry.instructions]


@pytest.mark.parametrize(
    ("mutate", "message"),
    [
        (lambda t: t.replace("sqrt.rn.f32", "sqrt.approx.f32", 1), r"PTX line \d+: instruction 'sqrt.approx.f32' is"),
        (lambda t: t.replace("bar.sync", "bar.red.popc.u32", 1), r"instruction 'bar.red.popc.u32' is not"),
        (lambda t: t.replace("ld.global.nc", "ld.global.xy", 1), r"instruction 'ld.global.xy"),
        (lambda t: t.replace("bra", "bra $nowhere; //", 1), r"'\$nowhere', which is not a label"),
        (lambda t: t.replace("%f1,", "%z1,", 1), r"register '%z1', which is not declared"),
        (lambda t: t.replace("ret;", "ret", 1), "';' is expected|PTX ends"),
        (lambda t: t.rstrip().rstrip("}"), "PTX ends inside the kernel"),
        (lambda t: "", "at least one .entry"),
    ],
)
def test_what_it_does_not_know_is_an_error(mutate: Callable[[str], str], message: str) -> None:
    plan = lower(parse_spec("layernorm.fwd:d=4096,dtype=bf16"), Schedule("registers", 128, 1, 8))
    ptx = compile_ptx(emit(plan), "sm_90")
    text = mutate(ptx)
    assert text != ptx, "the edit changed nothing"
    with pytest.raises(PtxError, match=message):
        run_plan(plan, random_inputs(plan.spec, 2), ptx=text)
    assert PtxError.exit_code == 1


def u4(*numbers: int) -> np.ndarray:
    return np.array([n & 0xFFFFFFFF for n in numbers], np.uint32)


@pytest.mark.parametrize(
    ("opcode", "sources", "want"),
    [
        ("mul.hi.s32", ((-5,), (1 << 30,)), -2),
        ("div.s32", ((-7,), (2,)), -3),
        ("rem.s32", ((-7,), (2,)), -1),
        ("shl.b32", ((1,), (32,)), 0),
        ("shr.s32", ((-8,), (40,)), -1),
        ("shr.u32", ((-8,), (28,)), 15),
        ("prmt.b32", ((0x33221100,), (0x77665544,), (0x7531,)), 0x77553311),
        ("prmt.b32", ((0x80,), (0,), (0x8,)), 0x808080FF),
        ("bfe.s32", ((0xF0,), (4,), (4,)), -1),
        ("bfe.u32", ((0xF0,), (4,), (4,)), 15),
        ("bfi.b32", ((0xF,), (0,), (8,), (4,)), 0xF00),
        ("shf.l.wrap.b32", ((0x80000000,), (1,), (1,)), 3),
        ("lop3.b32", ((0b1100,), (0b1010,), (0b1001,), (0x96,)), 0b1111),
        ("cvt.s32.s8", ((0xFF,),), -1),
    ],
)
def test_integer_instructions(opcode: str, sources: tuple[tuple[int, ...], ...], want: int) -> None:
    row = pure(opcode)
    assert row is not None
    given = [u4(*s).astype(t) if t.itemsize < 4 else u4(*s).view(t) for s, t in zip(sources, row.ins, strict=True)]
    assert int(row.fn(*given)[0]) & 0xFFFFFFFF == want & 0xFFFFFFFF


def test_float_conversions_and_immediates() -> None:
    third = np.array([2 / 3, -2 / 3, np.inf])
    rz = pure("cvt.rz.f32.f64")
    assert rz is not None
    assert (np.abs(rz.fn(third).astype(np.float64)) <= np.abs(third)).all()
    to_int = pure("cvt.rzi.s32.f32")
    assert to_int is not None
    got = to_int.fn(np.array([2.7, -2.7, 1e20, np.nan], np.float32))
    assert got.tolist() == [2, -2, 2**31 - 1, 0]
    assert immediate("0f3F800000", np.dtype(np.float32)) == 1
    assert immediate("0d3FF0000000000000", np.dtype(np.float64)) == 1
    assert immediate("-1", np.dtype(np.uint32)) == 0xFFFFFFFF
    assert pure("setp.neu.s32") is None
    neu = pure("setp.neu.f32")
    assert neu is not None
    assert neu.fn(np.float32("nan"), np.float32(1))[0]
