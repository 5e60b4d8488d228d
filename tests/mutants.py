"""What the mutants of ``test_mutants`` are mutants of: a few kernels of every structure, small enough to execute.

A mutant is a row of a table: what it is called, which subject it changes, and the edit. An edit changes the emitted
text, the plan, the PTX, the grid, or what a pass hands to lowering; nothing in lngen knows about it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from lngen.check.inputs import random_inputs, same_bits
from lngen.emit import emit
from lngen.errors import CompileError, PtxError
from lngen.graphs import GRAPHS, Definition, GraphBuilder
from lngen.interpret import interpret
from lngen.ir import D, M
from lngen.ir.numerics import Array
from lngen.lower import Kernel, Plan, lower
from lngen.ptx import run_plan
from lngen.schedule import Schedule
from lngen.spec import Spec, parse_spec
from lngen.toolchain import compile_ptx

ARCH = "sm_90"


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


OWN = {d.name: d for d in (
    Definition("most", scaled_by_most), Definition("totals", totals), Definition("rounded", rounded),
)}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A kernel set and what it runs on; row strides differ from tensor to tensor."""

    spec: str
    schedule: Schedule
    rows: int
    numbers: str = "normal"
    arch: str = ARCH


def registers(threads: int, rows: int, vec: int, prefetch: bool = False, one_launch: bool = False) -> Schedule:
    """A schedule of rows in registers."""
    return Schedule("registers", threads, rows, vec, 1, prefetch, one_launch=one_launch)


def bulk(threads: int, rows: int, vec: int, stages: int = 2, cluster: int = 1, **more: Any) -> Schedule:
    """A schedule of rows that come by bulk copies."""
    return Schedule("bulk", threads, rows, vec, stages=stages, cluster=cluster, **more)


def copies(threads: int, rows: int, vec: int, stages: int = 2, **more: Any) -> Schedule:
    """A schedule of rows that come by asynchronous copies."""
    return Schedule("async", threads, rows, vec, stages=stages, **more)


def stream(threads: int, vec: int) -> Schedule:
    """A streaming schedule."""
    return Schedule("stream", threads, 1, vec)


SUBJECTS: dict[str, Subject] = {
    # Partial chunks, several rows a warp, a block whose last rows do not exist.
    "small": Subject("layernorm.fwd:d=100,dtype=bf16", registers(8, 4, 4), 18),
    "early": Subject("layernorm.fwd:d=100,dtype=bf16", replace(registers(8, 4, 4), keep=True), 5),
    "small of zeros": Subject("layernorm.fwd:d=100,dtype=bf16", registers(8, 4, 4), 18, "zeros"),
    "small of odd numbers": Subject("layernorm.fwd:d=100,dtype=bf16", registers(8, 4, 4), 18, "odd"),
    "small, old arch": Subject("layernorm.fwd:d=100,dtype=bf16", registers(8, 4, 4), 18, "odd", "sm_75"),
    "ties, old arch": Subject("rounded.fwd:d=64,dtype=f32,out=bf16", registers(32, 1, 4), 3, "ties", "sm_75"),
    "double ties": Subject("rounded.fwd:d=64,dtype=f64,out=bf16", registers(32, 1, 2), 3, "double ties"),
    "double ties, f16": Subject("rounded.fwd:d=64,dtype=f64,out=f16", registers(32, 1, 2), 3, "double ties f16"),
    # Row groups of several warps: named barriers.
    "groups": Subject("layernorm.fwd:d=1000,dtype=f32", registers(64, 2, 4), 5),
    "groups of two sums": Subject(
        "layernorm.bwd:d=1000,dtype=f32,wrt=x,save=none", registers(64, 2, 4), 5
    ),
    # A row a block: the block barrier.
    "block": Subject("totals.fwd:d=1003,dtype=f32", registers(128, 1, 1), 9, "wild"),
    "five slots": Subject("totals.fwd:d=77,dtype=f32", registers(4, 8, 1), 9, "wild"),
    "segments": Subject("totals.fwd:d=20000,dtype=f32", registers(256, 1, 4), 8, "wild"),
    "sixteen segments": Subject(
        "totals.fwd:d=17000,dtype=f64", replace(registers(256, 1, 2), cluster=2), 3, "wild"
    ),
    "most": Subject("most.fwd:d=77,dtype=f16,weight=f32", registers(4, 8, 1), 7),
    "most of odd numbers": Subject("most.fwd:d=77,dtype=f16,weight=f32", registers(4, 8, 1), 40, "odd"),
    "most of signed zeros": Subject("most.fwd:d=77,dtype=f16,weight=f32", registers(4, 8, 1), 7, "signs"),
    "most of negatives": Subject("most.fwd:d=77,dtype=f16,weight=f32", registers(4, 8, 1), 7, "negative"),
    "double": Subject("rmsnorm.fwd:d=21,dtype=bf16,weight=f64", registers(4, 8, 1), 9),
    # Column sums: blocks of row groups, the last one not full; then more rows than all blocks take at once.
    "backward": Subject("layernorm.bwd:d=996,dtype=bf16,weight=f32", registers(128, 8, 4), 20),
    "backward of zeros": Subject("layernorm.bwd:d=996,dtype=bf16,wrt=beta", registers(64, 8, 4), 20, "zeros"),
    "backward, no rows": Subject("layernorm.bwd:d=996,dtype=bf16", registers(128, 8, 4), 0),
    "rounds": Subject("layernorm.bwd:d=2052,dtype=f64,wrt=gamma", registers(256, 1, 2, True), 140),
    "late": Subject("layernorm.bwd:d=2052,dtype=f64,wrt=gamma", registers(256, 1, 2, False), 140),
    # Partial rows in pairs, the last one alone.
    "few": Subject("layernorm.bwd:d=2052,dtype=f64,wrt=gamma", registers(256, 1, 2), 37),
    # The row groups of a block are a block each, and not all of them are there.
    "apart": Subject("layernorm.bwd:d=7172,dtype=bf16,weight=f32,wrt=gamma", registers(256, 1, 4), 86),
    # A thread of the finish has four columns, the last tile is nearly empty.
    "abreast": Subject("layernorm.bwd:d=32772,dtype=f32,wrt=beta", stream(512, 4), 3),
    "few of zeros": Subject("layernorm.bwd:d=2052,dtype=f64,wrt=beta", registers(256, 1, 2), 5, "zeros"),
    "stream": Subject("totals.fwd:d=8202,dtype=f32", stream(256, 2), 8, "wild"),
    "long stream": Subject("totals.fwd:d=66002,dtype=f32", stream(512, 2), 3, "wild"),
    "columns": Subject("layernorm.bwd:d=8202,dtype=f32,save=none", stream(512, 2), 3),
    "columns of zeros": Subject("layernorm.bwd:d=8202,dtype=f32,wrt=beta", stream(256, 2), 3, "zeros"),
    "columns, rounds": Subject("layernorm.bwd:d=4100,dtype=f32,wrt=beta", stream(256, 4), 140),
    # Bulk copies: row groups of half a warp, of two warps, of a block; results in place of inputs.
    "bulk": Subject("layernorm.fwd:d=104,dtype=bf16", bulk(16, 4, 8, owners=1), 13),
    "bulk groups": Subject("totals.fwd:d=1004,dtype=f32", bulk(64, 2, 4, owners=1, bulk_store=True), 7, "wild"),
    "bulk block": Subject("layernorm.fwd:d=1004,dtype=f32", bulk(128, 1, 4, owners=1), 5),
    "bulk soon": Subject(
        "layernorm.fwd:d=1004,dtype=f32", replace(bulk(64, 2, 4, owners=1), hold=True, soon=True), 13
    ),
    "bulk owners": Subject("totals.fwd:d=68,dtype=f32", bulk(32, 1, 4, stages=3, owners=2, bulk_store=True), 9, "wild"),
    "bulk most": Subject(
        "most.fwd:d=72,dtype=f16,weight=f32", bulk(16, 2, 8, owners=1, bulk_store=True), 9, "negative"
    ),
    "bulk columns": Subject("rmsnorm.bwd:d=740,dtype=f32", bulk(32, 8, 4, bulk_store=True), 20),
    "bulk columns, block": Subject("layernorm.bwd:d=1540,dtype=f32,save=none,wrt=beta", bulk(128, 2, 4), 3),
    "bulk rounded": Subject("rounded.fwd:d=520,dtype=f32,out=bf16", bulk(64, 1, 4, owners=1), 5),
    # Rows shared by two blocks, each with two segments, or one; the last segment shorter.
    "cluster": Subject("totals.fwd:d=4100,dtype=f64", bulk(256, 1, 2, 3, 2, owners=1, bulk_store=True), 7, "wild"),
    "cluster keep": Subject("layernorm.fwd:d=4100,dtype=f32", bulk(256, 1, 4, 2, 2, owners=1, keep=True), 4),
    "cluster columns": Subject("layernorm.bwd:d=2052,dtype=f64,wrt=gamma", bulk(256, 1, 2, 2, 2), 3),
    "cluster groups": Subject("layernorm.bwd:d=3076,dtype=f64", bulk(128, 2, 2, 2, 2, keep=True), 5),
    # Few rows in registers, shared by two blocks, without and with sums.
    "cluster registers": Subject(
        "layernorm.fwd:d=4100,dtype=f32", replace(registers(128, 1, 4), cluster=2, keep=True), 3
    ),
    "cluster rounded": Subject("rounded.fwd:d=8200,dtype=f32,out=bf16", replace(registers(128, 1, 4), cluster=2), 3),
    # Rows measured from the means of four segments, the last of them shorter: by two blocks, by one, read again.
    "spread": Subject(
        "layernorm.fwd:d=8200,dtype=f32", bulk(256, 1, 4, 2, 2, owners=1, keep=True, hold=True, soon=True), 4
    ),
    "spread registers": Subject("layernorm.fwd:d=8200,dtype=f32", registers(256, 1, 4), 2),
    "spread stream": Subject("layernorm.fwd:d=8200,dtype=f32", stream(256, 4), 2),
    # Asynchronous copies.
    "async": Subject("totals.fwd:d=100,dtype=bf16", copies(4, 8, 4, 3, owners=1), 37, "wild"),
    "async block": Subject("totals.fwd:d=203,dtype=f32", copies(32, 1, 1, owners=1), 4, "wild"),
    "async columns": Subject("layernorm.bwd:d=740,dtype=f32,wrt=beta", copies(32, 8, 4), 5),
    # Column sums finished behind a grid barrier, by fewer blocks than there are tiles.
    "batches": Subject("layernorm.bwd:d=4102,dtype=f32,wrt=gamma+beta,blocks=63", registers(512, 1, 2), 70),
    "one launch, strands": Subject("layernorm.bwd:d=740,dtype=f32,wrt=beta", registers(32, 8, 4, one_launch=True), 20),
    "one launch": Subject("layernorm.bwd:d=740,dtype=f32,wrt=beta,blocks=3", registers(32, 8, 4, one_launch=True), 20),
    # A row group alone stashes nothing: shared memory is for the totals.
    "one launch, alone": Subject(
        "layernorm.bwd:d=4100,dtype=f32,wrt=beta,blocks=3", registers(256, 1, 4, one_launch=True), 5
    ),
    "one launch, no rows": Subject("layernorm.bwd:d=740,dtype=f32,wrt=gamma", registers(32, 8, 4, True, True), 0),
    "bulk, no rows": Subject("layernorm.bwd:d=740,dtype=f32,wrt=gamma", bulk(32, 8, 4, one_launch=True), 0),
}  # fmt: skip


@dataclass(frozen=True)
class Twin:
    """A subject without a mutation."""

    spec: Spec
    plan: Plan
    source: str
    inputs: dict[str, Array]
    strides: dict[str, int]
    expected: dict[str, Array]


@cache
def twin(name: str) -> Twin:
    """The subject called ``name``, planned, emitted and interpreted."""
    subject = SUBJECTS[name]
    spec = parse_spec(subject.spec, GRAPHS | OWN)
    plan = lower(spec, subject.schedule)
    inputs = {n: _numbers(a, subject.numbers, k) for k, (n, a) in enumerate(random_inputs(spec, subject.rows).items())}
    wide = [v.name for v in (*plan.inputs, *plan.outputs) if v.type.axes == (M, D)]
    strides = {n: spec.d + subject.schedule.vec * (k + 1) for k, n in enumerate(wide)}
    return Twin(spec, plan, emit(plan), inputs, strides, interpret(plan.graph, inputs))


def _numbers(array: Array, kind: str, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    if kind == "zeros":
        return np.full_like(array, -0.0)
    if kind.startswith("double ties"):  # between two bf16 or two f16, and a little beside it
        half = 0x1000 if kind.endswith("f16") else 0x8000
        bits = array.astype(np.float32).view(np.uint32) & np.uint32(2**32 - 2 * half) | np.uint32(half)
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


Grid = Callable[[Kernel, int], tuple[int, int]]


@dataclass(frozen=True)
class Mutant:
    """One mistake. ``text``: pairs of old and new text and how often the old one occurs in the source, or the PTX.

    ``calls``: how often every kernel is launched in the same memory.
    """

    name: str
    subject: str
    text: tuple[tuple[str, str, int], ...] = ()
    ptx: tuple[tuple[str, str, int], ...] = ()
    plan: Callable[[Plan], Plan] | None = None
    grid: Grid | None = None
    patch: Callable[[], AbstractContextManager[Any]] | None = None
    strides: dict[str, int] = field(default_factory=dict)
    order: int = 0
    calls: int = 1


def text(name: str, subject: str, old: str, new: str, count: int = 1) -> Mutant:
    """A mutant of the emitted CUDA."""
    return Mutant(name, subject, text=((old, new, count),))


def edited(source: str, edits: tuple[tuple[str, str, int], ...]) -> str:
    """The text with each edit made; it has to fit as often as it says."""
    for old, new, count in edits:
        assert source.count(old) == count, f"'{old}' occurs {source.count(old)} times, not {count}, in\n{source}"
        assert old != new
        source = source.replace(old, new)
    return source


def halved(n: int) -> int:
    return n // 2


def doubled(n: int) -> int:
    return 2 * n


def less(n: int) -> int:
    return n - 1


def more(n: int) -> int:
    return n + 1


def killer(mutant: Mutant) -> str:
    """What gives the mutant away; nothing if nothing does."""
    t, subject = twin(mutant.subject), SUBJECTS[mutant.subject]
    plan = t.plan
    if mutant.patch:
        with mutant.patch():
            plan = lower(t.spec, subject.schedule)
        assert emit(plan) != t.source, "the patch changed nothing"
    if mutant.plan:
        plan = mutant.plan(plan)
        assert plan != t.plan, "the edit changed nothing"
    try:
        source = edited(emit(plan), mutant.text)
        ptx = edited(compile_ptx(source, subject.arch), mutant.ptx) if mutant.ptx else None
        called = replace(plan, kernels=plan.kernels * mutant.calls)
        outcome = run_plan(
            called, t.inputs, source=source, ptx=ptx, arch=subject.arch, rows=subject.rows,
            strides=t.strides | mutant.strides, grid=mutant.grid, order=mutant.order, stop=True,
        )  # fmt: skip
    except (CompileError, PtxError) as error:
        return type(error).__name__
    if outcome.findings:
        return outcome.findings[0].kind
    return "bits" if any(not same_bits(outcome.results[n], v).all() for n, v in t.expected.items()) else ""


def in_kernel(role: str, **changes: Callable[[Kernel], Any]) -> Callable[[Plan], Plan]:
    """A plan edit: fields of the kernel whose name ends with ``role``, computed from the kernel."""

    def edit(plan: Plan) -> Plan:
        kernels = tuple(
            replace(k, **{n: f(k) for n, f in changes.items()}) if k.name.endswith(f"__{role}") else k
            for k in plan.kernels
        )
        return replace(plan, kernels=kernels)

    return edit


def constant(name: str, value: Callable[[int], int], role: str = "rows") -> Callable[[Plan], Plan]:
    """A plan edit: another value of a constant."""
    return in_kernel(
        role,
        constants=lambda k: tuple(replace(c, value=value(c.value)) if c.name == name else c for c in k.constants),
    )
