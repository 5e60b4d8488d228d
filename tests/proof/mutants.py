"""What a mutant is, and the subjects that mutants change: small kernels of every structure.

A mutant is one mistake: in the CUDA text, in the PTX, in a plan, or in what a pass hands to lowering. ``mistakes.py``
lists them. Nothing in lngen knows about them.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from lngen.compiler.emit import emit
from lngen.compiler.graphs import GRAPHS, Definition, GraphBuilder
from lngen.compiler.headers import bundled
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import D, M
from lngen.compiler.ir.numerics import Array
from lngen.compiler.lower import Plan, lower
from lngen.compiler.problem import Schedule
from lngen.compiler.spec import Spec, parse_spec
from lngen.compiler.toolchain import compile_ptx
from lngen.errors import CompileError, PtxError, ValidationError
from lngen.proof.check.inputs import distances, random_inputs, same_bits
from lngen.proof.ptx import Outcome, run_plan
from lngen.rules import Distance
from schedules import cp_async, multipass, registers, tma, unaligned

ARCH = "sm_90"
LONGER = 16  # times what the subject takes, and a mutant never ends


def scaled_by_most(b: GraphBuilder) -> None:
    """Maxima, sums and maxima in one phase, row, column and scalar inputs, results of every shape."""
    x, z = b.input("x", M, D), b.input("z", M, D)
    w, gamma, s = b.input("w", M), b.input("gamma", D), b.input("s")
    most, total = b.reduce_max("most", x, axis=D), b.reduce_sum("total", z, axis=D)
    scale = b.add("scale", b.mul("scaled", most, s), w)
    y32 = b.fma("y32", b.mul("xg", x, gamma), scale, b.maximum("larger", z, total))
    b.output("y", y32)
    b.results.append(b.neg("shifted", scale))
    b.results.append(b.neg("minus_total", total))
    b.results.append(b.neg("minus_most", most))
    b.results.append(b.cast("either", b.maximum("either32", x, z), to=b.options.dtype))
    b.results.append(b.cast("q", b.sub("apart", x, z), to=b.options.dtype))


def totals(b: GraphBuilder) -> None:
    """Row sums as they are: no later rounding hides the order of their additions."""
    x = b.input("x", M, D)
    total = b.reduce_sum("total", x, axis=D)
    b.output("y", b.sub("less", x, total))
    b.results.append(b.neg("minus_total", total))


def rounded(b: GraphBuilder) -> None:
    """Nothing but a rounding."""
    b.output("y", b.input("x", M, D))


def numbers(b: GraphBuilder) -> None:
    """Column sums and maxima, numbers of both and of rows, two at a time, and a [D] result that follows from one."""
    x, u = b.input("x", M, D), b.input("u", M)
    column, most, row = (b.emit(op, name, (x,), axis=axis) for op, name, axis in (
        ("reduce_sum", "column", M), ("reduce_max", "most", M), ("reduce_max", "row", D),
    ))  # fmt: skip
    all_ = b.reduce_sum("all", column, axis=D)
    for name, v in {
        "both": b.add("p", column, most),
        "share": b.sub("q", column, all_),
        "largest": b.reduce_max("largest32", row, axis=M),
        "rows": b.reduce_sum("rows32", u, axis=M),
        "far": b.reduce_sum("far32", b.mul("off", row, u), axis=M),
        "peaks": b.reduce_sum("peaks32", most, axis=D),
    }.items():
        b.results.append(b.neg(name, v))


OWN = {d.name: d for d in (
    Definition("most", scaled_by_most), Definition("totals", totals), Definition("rounded", rounded),
    Definition("numbers", numbers),
)}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A kernel set and what it runs on; row strides differ from tensor to tensor, but where rows have to be contiguous.

    ``calls``: how often it is called on the same workspace. ``apart``: elements between two rows; by default few.
    """

    spec: str
    schedule: Schedule
    rows: int
    numbers: str = "normal"
    arch: str = ARCH
    calls: int = 1
    apart: int = 0


SUBJECTS: dict[str, Subject] = {
    # Partial vectors, several rows a warp, a block whose last rows do not exist; rows too far apart for 16 bits.
    "small": Subject("layernorm.fwd:d=100,dtype=bf16", registers(8, 4, 4), 18),
    "far rows": Subject("layernorm.fwd:d=100,dtype=bf16", registers(8, 4, 4), 18, apart=1 << 14),
    "small of zeros": Subject("layernorm.fwd:d=100,dtype=bf16", registers(8, 4, 4), 18, "zeros"),
    "small, old arch": Subject("layernorm.fwd:d=100,dtype=bf16", registers(8, 4, 4), 18, "odd", "sm_75"),
    "ties, old arch": Subject("rounded.fwd:d=64,dtype=f32,out=bf16", registers(32, 1, 4), 3, "ties", "sm_75"),
    "double ties": Subject("rounded.fwd:d=64,dtype=f64,out=bf16", registers(32, 1, 2), 3, "double ties"),
    # Vectors that cover a row; accesses of several words.
    "exact": Subject("totals.fwd:d=1024,dtype=f32", registers(64, 2, 4), 5, "wild"),
    # Row groups of several warps: named barriers.
    "groups": Subject("layernorm.fwd:d=1000,dtype=f32", registers(64, 2, 4), 5),
    # A row a block: the block barrier.
    "block": Subject("totals.fwd:d=1003,dtype=f32", registers(128, 1, 1), 9, "wild"),
    "segments": Subject("totals.fwd:d=20000,dtype=f32", registers(256, 1, 4), 8, "wild"),
    "most": Subject("most.fwd:d=77,dtype=f16,weight=f32", registers(4, 8, 1), 7),
    "most of odd numbers": Subject("most.fwd:d=77,dtype=f16,weight=f32", registers(4, 8, 1), 40, "odd"),
    "most of odd numbers, old arch": Subject(
        "most.fwd:d=77,dtype=f16,weight=f32", registers(4, 8, 1), 40, "odd", "sm_75"
    ),
    "most of signed zeros, old arch": Subject(
        "most.fwd:d=77,dtype=f16,weight=f32", registers(4, 8, 1), 7, "signs", "sm_75"
    ),
    "most of negatives": Subject("most.fwd:d=77,dtype=f16,weight=f32", registers(4, 8, 1), 7, "negative"),
    "double": Subject("rmsnorm.fwd:d=21,dtype=bf16,weight=f64", registers(4, 8, 1), 9),
    # Column sums: blocks of row groups, the last one not full; then more rows than all blocks take at once.
    "backward": Subject("layernorm.bwd:d=996,dtype=bf16,weight=f32", registers(128, 8, 4), 20),
    "backward, no rows": Subject("layernorm.bwd:d=996,dtype=bf16", registers(128, 8, 4), 0),
    "rounds": Subject("layernorm.bwd:d=2052,dtype=f64,wrt=gamma", registers(256, 1, 2, "prefetch"), 140),
    "late": Subject("layernorm.bwd:d=2052,dtype=f64,wrt=gamma", registers(256, 1, 2), 140),
    # Rows of partial sums in pairs, the last one alone.
    "few": Subject("layernorm.bwd:d=2052,dtype=f64,wrt=gamma", registers(256, 1, 2), 37),
    # Rows that are read again in every phase, and columns of a kernel of their own.
    "multipass": Subject("totals.fwd:d=8202,dtype=f32", multipass(256, 2), 8, "wild"),
    "columns": Subject("layernorm.bwd:d=8202,dtype=f32,save=none", multipass(512, 2), 3),
    "columns, rounds": Subject("layernorm.bwd:d=4100,dtype=f32,wrt=beta", multipass(256, 4), 140),
    # Numbers of columns and of rows.
    "numbers of many rows": Subject("numbers.fwd:d=2052,dtype=f32", registers(256, 2, 4), 700, "wild"),
    # TMA: row groups of half a warp, of two warps, of a block; results in place of inputs.
    "tma": Subject("layernorm.fwd:d=104,dtype=bf16", tma(16, 4, 8, 2, grid=1), 13),
    "tma groups": Subject("totals.fwd:d=1004,dtype=f32", tma(64, 2, 4, 2, "store", grid=1), 7, "wild"),
    "tma block": Subject("layernorm.fwd:d=1004,dtype=f32", tma(128, 1, 4, 2, grid=1), 5),
    "tma columns": Subject("rmsnorm.bwd:d=740,dtype=f32", tma(32, 8, 4, 2, "store"), 20),
    # Rows that begin anywhere: three stages, two row groups, the last turn not full; pairs of neighbours; rows held by
    # warps; two inputs and column sums.
    "unaligned": Subject("layernorm.fwd:d=171,dtype=bf16", unaligned(16, 2, 1, 3, grid=2), 19),
    "unaligned, pairs": Subject("layernorm.fwd:d=554,dtype=bf16", unaligned(64, 1, 2, 2, grid=1), 5),
    "unaligned, in registers": Subject("layernorm.fwd:d=1007,dtype=bf16", unaligned(64, 1, 1, 2, "regs", grid=1), 9),
    "unaligned, sums": Subject(
        "layernorm.bwd:d=1001,dtype=f16,blocks=2",
        unaligned(64, 8, 1, 2, "cached single"), 37,
    ),
    # Rows shared by two blocks, each with two segments, the last one shorter.
    "cluster": Subject("totals.fwd:d=4100,dtype=f64", tma(256, 1, 2, 3, "store", grid=1, cluster=2), 7, "wild"),
    # Rows measured from the means of four segments, the last of them shorter.
    "centred": Subject("layernorm.fwd:d=8200,dtype=f32", registers(256, 1, 4), 2),
    # Rows that a counter gives out to blocks of two row groups, launched twice.
    "dynamic": Subject(
        "layernorm.fwd:d=256,dtype=bf16", tma(32, 2, 8, 2, "cached regs dynamic", grid=2), 29, calls=2
    ),
    # Asynchronous copies.
    "cp_async": Subject("totals.fwd:d=100,dtype=bf16", cp_async(4, 8, 4, 3, grid=1), 37, "wild"),
    # Rows at two distances: a row group past the last row, and rows that a counter gives out.
    "two distances": Subject("layernorm.fwd:d=100,dtype=bf16,strides=2", registers(8, 4, 4), 19),
    "two distances, dynamic": Subject(
        "layernorm.fwd:d=256,dtype=bf16,strides=2", tma(32, 2, 8, 2, "cached regs dynamic", grid=2), 29
    ),
    # Column sums finished behind a grid barrier, by fewer blocks than there are tiles.
    "single launch": Subject(
        "layernorm.bwd:d=740,dtype=f32,wrt=beta,blocks=3", registers(32, 8, 4, "single"), 20
    ),
    "single launch, twice": Subject(
        "layernorm.bwd:d=740,dtype=f32,wrt=beta,blocks=3", registers(32, 8, 4, "single"), 20, calls=2
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Twin:
    """A subject without a mutation."""

    spec: Spec
    plan: Plan
    inputs: dict[str, Array]
    strides: Mapping[str, Distance]
    inner: int
    expected: dict[str, Array]


@cache
def twin(name: str) -> Twin:
    """The subject called ``name``, planned and interpreted."""
    subject = SUBJECTS[name]
    spec = parse_spec(subject.spec, GRAPHS | OWN)
    plan = lower(spec, subject.schedule)
    inputs = {n: _numbers(a, subject.numbers, k) for k, (n, a) in enumerate(random_inputs(spec, subject.rows).items())}
    wide = [v.name for v in (*plan.inputs, *plan.outputs) if v.type.axes == (M, D)]
    apart = 0 if plan.contiguous else subject.apart or subject.schedule.vec
    strides, inner = distances(plan)  # of rows at two distances alone
    strides = strides or {n: spec.d + apart * (k + 1) for k, n in enumerate(wide)}
    return Twin(spec, plan, inputs, strides, inner, interpret(plan.graph, inputs))


def _numbers(array: Array, kind: str, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    if kind == "zeros":
        return np.full_like(array, -0.0)
    if kind == "double ties":  # between two bf16, and a little beside it
        bits = array.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000) | np.uint32(0x8000)
        return bits.view(np.float32).astype(np.float64) * rng.choice([1.0, 1 + 2.0**-50, 1 - 2.0**-50], array.shape)
    if kind == "wild":  # sums that cancel: the order of every addition shows
        return (rng.normal(0, 1, array.shape) * 2.0 ** rng.integers(-6, 7, array.shape)).astype(array.dtype)
    if kind == "signs":
        return np.where(rng.random(array.shape) < 0.5, -0.0, 0.0).astype(array.dtype)
    if kind == "negative":
        return -np.abs(array)
    if kind == "ties":  # between two bf16
        return (array.view(np.uint32) & np.uint32(0xFFFF0000) | np.uint32(0x8000)).view(np.float32)
    if kind == "odd":
        rare = rng.choice([np.nan, np.inf, -np.inf, -0.0, 3e38, 1e-40], array.shape)
        with np.errstate(all="ignore"):
            odd = np.where(rng.random(array.shape) < 0.004, rare, array.astype(np.float64))
            return odd.astype(np.float32).astype(array.dtype)
    return array


@dataclass(frozen=True)
class Mutant:
    """One mistake. ``cuda``, ``ptx``: an old and a new text; ``patch``: lowering runs in this context."""

    name: str
    subject: str
    cuda: tuple[str, str] | None = None
    ptx: tuple[str, str] | None = None
    plan: Callable[[Plan], Plan] | None = None
    patch: Callable[[], AbstractContextManager[Any]] | None = None


def edited(text: str, old: str, new: str) -> str:
    """``text`` with ``new`` for every ``old``, whatever white space stands between its words."""
    pattern = r"\s+".join(map(re.escape, old.split()))
    changed, found = re.subn(pattern, lambda _: new, text)
    assert found, f"the text does not hold '{old}'"
    return changed


def source_of(plan: Plan) -> str:
    """The CUDA text of a plan, its device headers included."""
    return bundled(emit(plan))


@cache
def clean(name: str) -> Outcome:
    """What a subject gives without a mutation."""
    return _run(Mutant("", name), twin(name).plan, {})


def killer(mutant: Mutant) -> str:
    """What gives the mutant away; nothing if nothing does."""
    t = twin(mutant.subject)
    most = LONGER * max(clean(mutant.subject).traffic.segments.values(), default=1)
    with mutant.patch() if mutant.patch else nullcontext():  # a spec keeps its graph, its copy computes it again
        try:
            plan = lower(replace(t.spec), SUBJECTS[mutant.subject].schedule) if mutant.patch else t.plan
        except ValidationError:
            return "the derivation is wrong"
    plan = mutant.plan(plan) if mutant.plan else plan
    assert plan != t.plan or not (mutant.patch or mutant.plan), "the mutation changed nothing"
    try:
        outcome = _run(mutant, plan, {"most": most, "stop": True})
    except (CompileError, PtxError) as error:
        return type(error).__name__
    if outcome.findings:
        return outcome.findings[0].kind
    return "bits" if any(not same_bits(outcome.results[n], v).all() for n, v in t.expected.items()) else ""


def _run(mutant: Mutant, plan: Plan, options: dict[str, Any]) -> Outcome:
    """A subject's kernels as the mutant makes them."""
    t, subject = twin(mutant.subject), SUBJECTS[mutant.subject]
    source = edited(source_of(plan), *mutant.cuda) if mutant.cuda else source_of(plan)
    ptx = edited(compile_ptx(source, subject.arch), *mutant.ptx) if mutant.ptx else None
    return run_plan(
        plan, t.inputs, source=source, ptx=ptx, arch=subject.arch, rows=subject.rows,
        strides=t.strides, inner=t.inner, times=subject.calls, **options,
    )  # fmt: skip
