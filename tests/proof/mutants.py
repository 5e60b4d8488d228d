"""What mutants are, and the subjects they change: a few kernels of every structure, small enough to execute.

A mutant is one mistake: in a file of the templates, in a plan, in the PTX, in a launch, or in what a pass hands to
lowering. ``mutants_device.py`` and ``mutants_kernel.py`` list them; nothing in lngen knows about them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from jinja2 import ChoiceLoader, DictLoader

from lngen.check.inputs import random_inputs, same_bits
from lngen.data import data_dir
from lngen.emit import emit, environment
from lngen.errors import CompileError, PtxError
from lngen.graphs import GRAPHS, Definition, GraphBuilder
from lngen.interpret import interpret
from lngen.ir import D, M
from lngen.ir.numerics import Array
from lngen.lower import Kernel, Plan, headers, lower
from lngen.ptx import Outcome, run_plan
from lngen.schedule import Schedule
from lngen.spec import Spec, parse_spec
from lngen.toolchain import compile_ptx

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


def least(b: GraphBuilder) -> None:
    """The smaller of two elements, stored as it is."""
    b.results.append(b.minimum("smaller", b.input("x", M, D), b.input("z", M, D)))


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
    Definition("numbers", numbers), Definition("least", least),
)}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A kernel set and what it runs on; row strides differ from tensor to tensor, but where rows have to be contiguous.

    ``calls``: how often it is called on the same workspace.
    """

    spec: str
    schedule: Schedule
    rows: int
    numbers: str = "normal"
    arch: str = ARCH
    calls: int = 1


def registers(threads: int, rows: int, vec: int, **more: Any) -> Schedule:
    """A schedule of rows in registers."""
    return Schedule("registers", threads, rows, vec, **more)


def tma(threads: int, rows: int, vec: int, stages: int = 2, cluster: int = 1, **more: Any) -> Schedule:
    """A schedule of rows that come by TMA."""
    return Schedule("tma", threads, rows, vec, stages=stages, cluster=cluster, **more)


def unaligned(threads: int, rows: int, vec: int, stages: int = 2, **more: Any) -> Schedule:
    """A schedule of rows that come by TMA and begin anywhere."""
    return Schedule("tma_unaligned", threads, rows, vec, stages=stages, tma_store=True, **more)


def cp_async(threads: int, rows: int, vec: int, stages: int = 2, **more: Any) -> Schedule:
    """A schedule of rows that come by asynchronous copies."""
    return Schedule("cp_async", threads, rows, vec, stages=stages, **more)


def multipass(threads: int, vec: int) -> Schedule:
    """A schedule of rows that are read again in every phase."""
    return Schedule("multipass", threads, 1, vec)


HELD = {"row_in_registers": True}
EARLY = {"row_in_registers": True, "early_release": True}
DYNAMIC = {"row_in_registers": True, "dynamic": True}

SUBJECTS: dict[str, Subject] = {
    # Partial vectors, several rows a warp, a block whose last rows do not exist.
    "small": Subject("layernorm.fwd:d=100,dtype=bf16", registers(8, 4, 4), 18),
    "early": Subject("layernorm.fwd:d=100,dtype=bf16", registers(8, 4, 4, cached_weights=True), 5),
    "small of zeros": Subject("layernorm.fwd:d=100,dtype=bf16", registers(8, 4, 4), 18, "zeros"),
    "small, old arch": Subject("layernorm.fwd:d=100,dtype=bf16", registers(8, 4, 4), 18, "odd", "sm_75"),
    "ties, old arch": Subject("rounded.fwd:d=64,dtype=f32,out=bf16", registers(32, 1, 4), 3, "ties", "sm_75"),
    "double ties": Subject("rounded.fwd:d=64,dtype=f64,out=bf16", registers(32, 1, 2), 3, "double ties"),
    "double ties, f16": Subject("rounded.fwd:d=64,dtype=f64,out=f16", registers(32, 1, 2), 3, "double ties f16"),
    "double to single": Subject("rounded.fwd:d=64,dtype=f64,out=f32", registers(32, 1, 2), 3),
    # Vectors that cover a row; accesses of several words.
    "exact": Subject("totals.fwd:d=1024,dtype=f32", registers(64, 2, 4), 5, "wild"),
    "wide": Subject("layernorm.fwd:d=104,dtype=bf16,weight=f32,out=f32", registers(16, 2, 8), 5),
    # Row groups of several warps: named barriers.
    "groups": Subject("layernorm.fwd:d=1000,dtype=f32", registers(64, 2, 4), 5),
    "groups of two sums": Subject("layernorm.bwd:d=1000,dtype=f32,wrt=x,save=none", registers(64, 2, 4), 5),
    # A row a block: the block barrier.
    "block": Subject("totals.fwd:d=1003,dtype=f32", registers(128, 1, 1), 9, "wild"),
    "five vectors": Subject("totals.fwd:d=77,dtype=f32", registers(4, 8, 1), 9, "wild"),
    "segments": Subject("totals.fwd:d=20000,dtype=f32", registers(256, 1, 4), 8, "wild"),
    "sixteen segments": Subject("totals.fwd:d=17000,dtype=f64", registers(256, 1, 2, cluster=2), 3, "wild"),
    "two sums of segments": Subject("layernorm.bwd:d=8200,dtype=f32,wrt=x", registers(256, 1, 4), 2),
    "most": Subject("most.fwd:d=77,dtype=f16,weight=f32", registers(4, 8, 1), 7),
    "most of odd numbers": Subject("most.fwd:d=77,dtype=f16,weight=f32", registers(4, 8, 1), 40, "odd"),
    "most of signed zeros": Subject("most.fwd:d=77,dtype=f16,weight=f32", registers(4, 8, 1), 7, "signs"),
    "most of odd numbers, old arch": Subject(
        "most.fwd:d=77,dtype=f16,weight=f32", registers(4, 8, 1), 40, "odd", "sm_75"
    ),
    "most of signed zeros, old arch": Subject(
        "most.fwd:d=77,dtype=f16,weight=f32", registers(4, 8, 1), 7, "signs", "sm_75"
    ),
    "least of odd numbers": Subject("least.fwd:d=77,dtype=f16", registers(4, 8, 1), 40, "odd"),
    "tanh": Subject("dyt.fwd:d=100,dtype=bf16", registers(8, 4, 4), 5),
    "most of negatives": Subject("most.fwd:d=77,dtype=f16,weight=f32", registers(4, 8, 1), 7, "negative"),
    "double": Subject("rmsnorm.fwd:d=21,dtype=bf16,weight=f64", registers(4, 8, 1), 9),
    # Column sums: blocks of row groups, the last one not full; then more rows than all blocks take at once.
    "backward": Subject("layernorm.bwd:d=996,dtype=bf16,weight=f32", registers(128, 8, 4), 20),
    "backward of zeros": Subject("layernorm.bwd:d=996,dtype=bf16,wrt=beta", registers(64, 8, 4), 20, "zeros"),
    "backward, no rows": Subject("layernorm.bwd:d=996,dtype=bf16", registers(128, 8, 4), 0),
    "many groups": Subject("layernorm.bwd:d=92,dtype=bf16,wrt=gamma+beta,blocks=2", registers(4, 128, 4), 200),
    "rounds": Subject("layernorm.bwd:d=2052,dtype=f64,wrt=gamma", registers(256, 1, 2, prefetch=True), 140),
    "late": Subject("layernorm.bwd:d=2052,dtype=f64,wrt=gamma", registers(256, 1, 2), 140),
    # Rows of partial sums in pairs, the last one alone.
    "few": Subject("layernorm.bwd:d=2052,dtype=f64,wrt=gamma", registers(256, 1, 2), 37),
    "few of zeros": Subject("layernorm.bwd:d=2052,dtype=f64,wrt=beta", registers(256, 1, 2), 5, "zeros"),
    # The row groups of a block are a block each, several to a term, and not all of them are there.
    "terms": Subject("layernorm.bwd:d=7172,dtype=bf16,weight=f32,wrt=gamma", registers(256, 1, 4), 86),
    # A thread of the finish has four columns, or two of eight bytes; the last tile is nearly empty.
    "neighbours": Subject("layernorm.bwd:d=32772,dtype=f32,wrt=beta", multipass(512, 4), 3),
    "multipass": Subject("totals.fwd:d=8202,dtype=f32", multipass(256, 2), 8, "wild"),
    "long multipass": Subject("totals.fwd:d=66002,dtype=f32", multipass(512, 2), 3, "wild"),
    "columns": Subject("layernorm.bwd:d=8202,dtype=f32,save=none", multipass(512, 2), 3),
    "columns of zeros": Subject("layernorm.bwd:d=8202,dtype=f32,wrt=beta", multipass(256, 2), 3, "zeros"),
    # Eight row groups a block, of which the last ones have fewer rows; the last columns are few.
    "columns of groups": Subject("layernorm.bwd:d=996,dtype=bf16,weight=f32,blocks=2", multipass(64, 4), 37),
    "columns, rounds": Subject("layernorm.bwd:d=4100,dtype=f32,wrt=beta", multipass(256, 4), 140),
    # TMA: row groups of half a warp, of two warps, of a block; results in place of inputs.
    "tma": Subject("layernorm.fwd:d=104,dtype=bf16", tma(16, 4, 8, grid=1), 13),
    "tma groups": Subject("totals.fwd:d=1004,dtype=f32", tma(64, 2, 4, grid=1, tma_store=True), 7, "wild"),
    "tma block": Subject("layernorm.fwd:d=1004,dtype=f32", tma(128, 1, 4, grid=1), 5),
    "tma early": Subject("layernorm.fwd:d=1004,dtype=f32", tma(64, 2, 4, grid=1, **EARLY), 13),
    "tma persistent": Subject("totals.fwd:d=68,dtype=f32", tma(32, 1, 4, 3, grid=2, tma_store=True), 9, "wild"),
    "tma most": Subject("most.fwd:d=72,dtype=f16,weight=f32", tma(16, 2, 8, grid=1, tma_store=True), 9, "negative"),
    "tma columns": Subject("rmsnorm.bwd:d=740,dtype=f32", tma(32, 8, 4, tma_store=True), 20),
    "tma columns, block": Subject("layernorm.bwd:d=1540,dtype=f32,save=none,wrt=beta", tma(128, 2, 4), 3),
    "tma rounded": Subject("rounded.fwd:d=520,dtype=f32,out=bf16", tma(64, 1, 4, grid=1), 5),
    "widened": Subject("layernorm.fwd:d=104,dtype=f16", tma(8, 4, 8, grid=1, cached_weights=True), 9),
    "packed": Subject(
        "layernorm.fwd:d=12288,dtype=bf16",
        tma(256, 1, 8, 3, grid=1, blocks_per_sm=2, cached_weights=True, **DYNAMIC), 1,
    ),
    # Rows that begin anywhere: three stages, two row groups, the last turn not full; pairs of neighbours; rows held by
    # warps, by half a warp, in two segments; results wider and narrower than inputs; two inputs and column sums.
    "unaligned": Subject("layernorm.fwd:d=171,dtype=bf16", unaligned(16, 2, 1, 3, grid=2), 19),
    "unaligned, pairs": Subject("layernorm.fwd:d=554,dtype=bf16", unaligned(64, 1, 2, grid=1), 5),
    "unaligned, in registers": Subject("layernorm.fwd:d=1007,dtype=bf16", unaligned(64, 1, 1, grid=1, **HELD), 9),
    "unaligned, small": Subject("rmsnorm.fwd:d=171,dtype=f16", unaligned(16, 2, 1, grid=2, **HELD), 19),
    "unaligned, long": Subject("rmsnorm.fwd:d=8201,dtype=f16", unaligned(128, 1, 1, grid=1, **HELD), 9),
    "unaligned, wider": Subject(
        "rmsnorm.fwd:d=85,dtype=f16,out=f32", unaligned(32, 1, 1, grid=1, cached_weights=True, **HELD), 6
    ),
    "unaligned, narrower": Subject("rmsnorm.fwd:d=75,dtype=f32,out=bf16", unaligned(16, 2, 1, grid=2), 13),
    "unaligned, sums": Subject(
        "layernorm.bwd:d=1001,dtype=f16,blocks=2",
        unaligned(64, 8, 1, cached_weights=True, single_launch=True), 37,
    ),
    # Rows shared by two blocks, each with two segments, or one; the last segment shorter; whole tiles.
    "cluster": Subject("totals.fwd:d=4100,dtype=f64", tma(256, 1, 2, 3, 2, grid=1, tma_store=True), 7, "wild"),
    "cluster exact": Subject("totals.fwd:d=8192,dtype=f32", tma(256, 1, 4, 2, 2, grid=1, tma_store=True), 3, "wild"),
    "cluster cached": Subject("layernorm.fwd:d=4100,dtype=f32", tma(256, 1, 4, 2, 2, grid=1, cached_weights=True), 4),
    "cluster columns": Subject("layernorm.bwd:d=2052,dtype=f64,wrt=gamma", tma(256, 1, 2, 2, 2), 3),
    "cluster groups": Subject("layernorm.bwd:d=3076,dtype=f64", tma(128, 2, 2, 2, 2, cached_weights=True), 5),
    "a cluster, groups": Subject("layernorm.bwd:d=3076,dtype=f64,blocks=1", tma(128, 2, 2, 2, 2), 5),
    # Few rows in registers, shared by two blocks, without and with sums.
    "cluster registers": Subject(
        "layernorm.fwd:d=4100,dtype=f32", registers(128, 1, 4, cluster=2, cached_weights=True), 3
    ),
    "cluster rounded": Subject("rounded.fwd:d=8200,dtype=f32,out=bf16", registers(128, 1, 4, cluster=2), 3),
    # Rows measured from the means of four segments, the last of them shorter: by two blocks, by one, read again.
    "cluster pairs": Subject(
        "layernorm.fwd:d=8200,dtype=f32", tma(256, 1, 4, 2, 2, grid=1, cached_weights=True, **EARLY), 4
    ),
    "centred": Subject("layernorm.fwd:d=8200,dtype=f32", registers(256, 1, 4), 2),
    "centred multipass": Subject("layernorm.fwd:d=8200,dtype=f32", multipass(256, 4), 2),
    # Rows that a counter gives out, launched twice: to blocks of two row groups, and to a cluster.
    "dynamic": Subject(
        "layernorm.fwd:d=256,dtype=bf16", tma(32, 2, 8, grid=2, cached_weights=True, **DYNAMIC), 29, calls=2
    ),
    "dynamic, a row group": Subject(
        "layernorm.fwd:d=256,dtype=bf16", tma(32, 1, 8, grid=2, cached_weights=True, **DYNAMIC), 29, calls=2
    ),
    "dynamic cluster": Subject(
        "layernorm.fwd:d=8200,dtype=bf16",
        tma(64, 2, 8, cluster=2, grid=2, cached_weights=True, early_release=True, **DYNAMIC), 21, calls=2,
    ),
    # Asynchronous copies.
    "cp_async": Subject("totals.fwd:d=100,dtype=bf16", cp_async(4, 8, 4, 3, grid=1), 37, "wild"),
    "cp_async block": Subject("totals.fwd:d=203,dtype=f32", cp_async(32, 1, 1, grid=1), 4, "wild"),
    "cp_async columns": Subject("layernorm.bwd:d=740,dtype=f32,wrt=beta", cp_async(32, 8, 4), 5),
    "cp_async columns of two": Subject("layernorm.bwd:d=740,dtype=f32", cp_async(32, 8, 4), 5),
    # Column sums finished behind a grid barrier, by fewer blocks than there are tiles.
    "batches": Subject("layernorm.bwd:d=4102,dtype=f32,wrt=gamma+beta,blocks=63", registers(512, 1, 2), 70),
    "single launch, interleaved": Subject(
        "layernorm.bwd:d=740,dtype=f32,wrt=beta", registers(32, 8, 4, single_launch=True), 20
    ),
    "single launch": Subject(
        "layernorm.bwd:d=740,dtype=f32,wrt=beta,blocks=3", registers(32, 8, 4, single_launch=True), 20
    ),
    "single launch, twice": Subject(
        "layernorm.bwd:d=740,dtype=f32,wrt=beta,blocks=3", registers(32, 8, 4, single_launch=True), 20, calls=2
    ),
    # A row group alone shares no column sums: shared memory is for the totals.
    "single launch, alone": Subject(
        "layernorm.bwd:d=4100,dtype=f32,wrt=beta,blocks=3", registers(256, 1, 4, single_launch=True), 5
    ),
    "single launch, no rows": Subject(
        "layernorm.bwd:d=740,dtype=f32,wrt=gamma", registers(32, 8, 4, prefetch=True, single_launch=True), 0
    ),
    # Numbers of column sums and of rows: several sums in a loop, rows for every group of every block, and none.
    "columns and numbers": Subject("numbers.fwd:d=740,dtype=f32", registers(32, 8, 4), 37, "negative"),
    "columns and numbers of groups": Subject("numbers.fwd:d=740,dtype=f32", multipass(64, 4), 37, "negative"),
    "columns and numbers, multipass": Subject("numbers.fwd:d=8202,dtype=f32", multipass(256, 2), 3, "negative"),
    "numbers of many rows": Subject("numbers.fwd:d=2052,dtype=f32", registers(256, 2, 4), 700, "wild"),
    "numbers of many groups": Subject("numbers.fwd:d=92,dtype=f32", registers(4, 64, 4), 1500, "wild"),
    "numbers of zeros": Subject("numbers.fwd:d=740,dtype=f32", registers(32, 8, 4), 5, "zeros"),
    "numbers, no rows": Subject("numbers.fwd:d=740,dtype=f32", registers(32, 8, 4), 0),
    "tma, no rows": Subject("layernorm.bwd:d=740,dtype=f32,wrt=gamma", tma(32, 8, 4, single_launch=True), 0),
}  # fmt: skip


@dataclass(frozen=True)
class Twin:
    """A subject without a mutation."""

    spec: Spec
    plan: Plan
    inputs: dict[str, Array]
    strides: dict[str, int]
    expected: dict[str, Array]


@cache
def twin(name: str) -> Twin:
    """The subject called ``name``, planned and interpreted."""
    subject = SUBJECTS[name]
    spec = parse_spec(subject.spec, GRAPHS | OWN)
    plan = lower(spec, subject.schedule)
    inputs = {n: _numbers(a, subject.numbers, k) for k, (n, a) in enumerate(random_inputs(spec, subject.rows).items())}
    wide = [v.name for v in (*plan.inputs, *plan.outputs) if v.type.axes == (M, D)]
    apart = 0 if plan.contiguous else subject.schedule.vec
    strides = {n: spec.d + apart * (k + 1) for k, n in enumerate(wide)}
    return Twin(spec, plan, inputs, strides, interpret(plan.graph, inputs))


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


@dataclass(frozen=True)
class Edit:
    """Another text in a file of the templates, in which the old one occurs ``count`` times, however it is broken."""

    file: str
    old: str
    new: str
    count: int = 1

    def __call__(self, text: str) -> str:
        assert self.old != self.new
        pattern = r"\s+".join(map(re.escape, self.old.split()))
        changed, found = re.subn(pattern, lambda _: self.new, text)
        assert found == self.count, f"{self.file} holds '{self.old}' {found} times, not {self.count}"
        return changed


@contextmanager
def templates(edits: tuple[Edit, ...]) -> Iterator[None]:
    """Kernels are emitted from templates and device headers in which each edit is made."""
    texts: dict[str, str] = {}
    for edit in edits:
        whole = texts.get(edit.file) or (data_dir("templates") / edit.file).read_text(encoding="utf-8")
        texts[edit.file] = edit(whole)
    changed = {Path(file).stem: text for file, text in texts.items() if file.startswith("device/")}
    known = headers.definitions()
    definitions = tuple(
        d
        for name in headers.HEADERS
        for d in (headers.cut(name, changed[name]) if name in changed else [d for d in known if d.header == name])
    )
    loader = environment().loader
    assert loader is not None
    jinja = environment().overlay(loader=ChoiceLoader([DictLoader(texts), loader]))
    with (
        patch.object(headers, "definitions", lambda: definitions),
        patch("lngen.emit.emit.environment", lambda: jinja if len(changed) < len(texts) else environment()),
    ):
        yield


Grid = Callable[[Kernel, int], tuple[int, int]]


@dataclass(frozen=True)
class Mutant:
    """One mistake. ``ptx``: pairs of old and new text and how often the old one occurs in the PTX."""

    name: str
    subject: str
    files: tuple[Edit, ...] = ()
    ptx: tuple[tuple[str, str, int], ...] = ()
    plan: Callable[[Plan], Plan] | None = None
    grid: Grid | None = None
    patch: Callable[[], AbstractContextManager[Any]] | None = None
    strides: dict[str, int] = field(default_factory=dict)


@cache
def clean(name: str) -> Outcome:
    """What a subject gives without a mutation."""
    return _run(Mutant("", name), twin(name).plan, {})


def killer(mutant: Mutant) -> str:
    """What gives the mutant away; nothing if nothing does."""
    t, subject = twin(mutant.subject), SUBJECTS[mutant.subject]
    most = LONGER * max(clean(mutant.subject).traffic.segments.values(), default=1)
    plan = t.plan
    if mutant.patch:
        with mutant.patch():
            plan = lower(replace(t.spec), subject.schedule)  # a spec keeps its graph, its copy computes it again
    if mutant.plan:
        plan = mutant.plan(plan)
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
    with templates(mutant.files) if mutant.files else nullcontext():
        source = emit(plan)
    assert source != emit(t.plan) or not mutant.files, "the mutation changed nothing"
    ptx = compile_ptx(source, subject.arch) if mutant.ptx else None
    for old, new, count in mutant.ptx:
        assert ptx is not None
        ptx = Edit("the PTX", old, new, count)(ptx)
    return run_plan(
        plan, t.inputs, source=source, ptx=ptx, arch=subject.arch, rows=subject.rows,
        strides=t.strides | mutant.strides, grid=mutant.grid, times=subject.calls, **options,
    )  # fmt: skip
