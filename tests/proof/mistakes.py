"""The mutants: one for each kind of mistake that a kernel, its plan or its launch can hold.

A mutant of the CUDA text or of the PTX is the subject that shows it, the old text and the new one. Every missing or
weakened barrier, fence, wait and arrival is in ``deletions.py``. Left out, being equivalent: elements past the end of a
row that are not loaded as zero (every term of a reduction is guarded, every store masked), the order of two summands,
how far loops are unrolled, and a copy of the last row where there is no further one.
"""

import importlib
import pkgutil
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import lngen.compiler.lower
from lngen.compiler import passes
from lngen.compiler.ir import Eqn, Graph
from lngen.compiler.lower import Argument, Kernel, Plan
from lngen.compiler.passes.edit import substitute
from mutants import Mutant

Text = tuple[str, str, str, str]  # what is wrong, the subject, the old text, the new text

VECTORS = "Threads::thread() * N + (v * Threads::THREADS * N + i)"
MASKED_LOAD, MASKED_STORE = "if (Row::holds(v, j)) { const bool", "if (Row::holds(v, j)) { T* to"
WARP = "w * 32 + Row::thread() % 32]"
REFILLED = "previous_stage<STAGES>(this->stage), this->block_row + (STAGES - 1) * Rows::STEP"
EXPECTED = "mbarrier_arrive_expect(full_, Row::columns()"
FIRST_ADDS = "0x80000000u - (gridDim.x - 1)"

CUDA: dict[str, list[Text]] = {
    "rounding and special numbers": [
        ("no tie to even", "ties, old arch", "+ (u >> 16 & 1u)", "+ 1u"),
        ("a NaN becomes infinite", "small, old arch", ": 0x7fffu)", ": 0x7f80u)"),
        ("a maximum that ignores NaN", "most of odd numbers, old arch", "a > b || a != a", "a > b || b != b"),
        ("a maximum that is -0 for +0", "most of signed zeros, old arch", "a == 0 ? a + b : a", "a"),
        ("sums of vectors in f32", "double", "Part vectors[N]", "float vectors[N]"),
        ("an fma torn apart", "groups", "fmaf(xhat, gamma32, beta32)", "xhat * gamma32 + beta32"),
        ("a division by a product", "small", "mean_sum / d_size", "mean_sum * (1.0f / 100.0f)"),
    ],
    "what a sum starts with": [
        ("+0", "small of zeros", "static_cast<Real>(-0.0)", "static_cast<Real>(0.0)"),
        ("a maximum with 0", "most of negatives", "-__int_as_float(0x7f800000)", "0"),
        ("no rows with -0", "backward, no rows", "Real of_nothing() { return 0; }",
         "Real of_nothing() { return neutral<Real>(); }"),
    ],
    "the order of a sum": [
        ("left to right for a tree", "segments", "constexpr int HALF = half_of(LIVE);",
         "constexpr int HALF = LIVE - 1;"),
        ("lanes ascending", "small", "int distance = LANES / 2; distance > 0; distance /= 2",
         "int distance = 1; distance < LANES; distance *= 2"),
        ("warps first to last", "block", WARP, "(w & 1) * 64 + (w >> 1) * 32 + Row::thread() % 32]"),
        ("two interleaved sums of segments", "segments", "SEGMENTS < INTERLEAVE ? SEGMENTS : INTERLEAVE",
         "SEGMENTS < 2 ? SEGMENTS : 2"),
        ("row groups in pairs", "backward", "parts[r] = groups[r].items[j]",
         "parts[r] = groups[(r & 1) * 4 + r / 2].items[j]"),
        ("numbers of rows in runs", "numbers of many rows", "tile + b < BLOCKS; b += INTERLEAVE)",
         "tile + b < BLOCKS; b += 1)"),
        ("partial sums in runs", "few", "const int row = (first + b * INTERLEAVE) * ROWS_PER_TERM + e;",
         "const int row = first + b;"),
    ],
    "the end of a row, of the columns, of the rows": [
        ("a load without a mask", "small", MASKED_LOAD, "if (true) { const bool"),
        ("a store masked by vector", "small", MASKED_STORE, "if (Row::holds(v, 0)) { T* to"),
        ("a column too many", "small", "column(v, i) < D)", "column(v, i) <= D)"),
        ("terms past the end", "small", "if (Row::holds(v_, i_)) var_sum_acc_", "var_sum_acc_"),
        ("a last segment as long as the others", "centred", "? Row::SEGMENT : (Row::D - 1) % Row::SEGMENT + 1;",
         "? Row::SEGMENT : Row::SEGMENT;"),
        ("columns past the end stored", "backward", "threadIdx.x < Finish::COLUMNS && col_ < Finish::D",
         "threadIdx.x < Finish::COLUMNS"),
        ("a row too many stored", "small", "Row::ROWS == 1 || row < rows; }", "Row::ROWS == 1 || row <= rows; }"),
        ("rows past the last read", "small", "has_row() ? row : rows - 1;", "row;"),
        ("column sums of rows past the last", "tma columns", "if (stream_.has_row()) sum_dy", "sum_dy"),
        ("a row of partial sums too few", "few", "row < count ? unit[j]", "row < count - 1 ? unit[j]"),
        ("the last bytes of an array passed", "unaligned", "last ? end / 16 * 16 : ", ""),
    ],
    "places": [
        ("threads have neighbouring vectors", "exact", VECTORS, "(Threads::thread() * VECTORS + v) * N + i"),
        ("row groups with one row", "small", "return threadIdx.x / THREADS;", "return 0;"),
        ("the rows of the next block", "small", "{ return blockIdx.x; }", "{ return blockIdx.x + 1; }"),
        ("rows D apart", "small", "stream_.row * y_stride_, v_,", "stream_.row * Row::D, v_,"),
        ("an offset of 16 bits", "far rows", "stream_.row * y_stride_, v_,",
         "static_cast<short>(stream_.row * y_stride_), v_,"),
        ("the outer distance of another tensor", "two distances", "place_, y_outer_,", "place_, x_outer_,"),
        ("an inner row too many", "two distances", "place_(stream_.row_or_last(), inner_)",
         "place_(stream_.row_or_last(), inner_ + 1)"),
        ("a remainder without its quotient", "two distances", "row - quotient * inner", "row - inner"),
        ("results where the next row is loaded", "two distances, dynamic", "place_(stream_.row, inner_)",
         "place_(stream_.row + 1, inner_)"),
        ("the first rows alone copied", "two distances, dynamic", "place_(row_, inner_)",
         "place_(group_first_, inner_)"),
        ("the first block's columns copied", "cluster", "row_ * x_stride_ + Row::first_column(),", "row_ * x_stride_,"),
        ("the first block's partial sums", "rounds",
         "_partials_ + static_cast<long long>(Row::grid_index()) * /* leading */ 2052", "_partials_"),
        ("one half for both", "small", "words)[i / 2] >> i % 2 * 16", "words)[i / 2] >> 16"),
        ("an unaligned row begins at its stage", "unaligned",
         "stream_.shared<bf16>(/* byte */ 0) + misalignment(x_ptr_ + stream_.row_or_last(stream_.row) * x_stride_)",
         "stream_.shared<bf16>(/* byte */ 0)"),
    ],
    "barriers": [
        ("one for all row groups", "groups", '"r"(Row::group() + 1)', '"r"(1)'),
        ("for half of a row", "groups", '"n"(Row::THREADS)', '"n"(Row::THREADS / 2)'),
        ("of warps for a block's", "block", "        __syncthreads();\n    else", "        __syncwarp();\n    else"),
        ("of a block for the grid's", "single launch", "grid_barrier(arrivals_);\n", "__syncthreads();\n"),
        ("that the first block passes early", "single launch", FIRST_ADDS, "0x80000000u - gridDim.x"),
        ("that a second launch finds passed", "single launch, twice", FIRST_ADDS,
         "0x80000001u - (gridDim.x - 1)"),
    ],
    "buffers and stages": [
        ("one buffer for two reductions", "groups", "turn ^= 1;", ""),
        ("row groups share a stage", "tma", "(s * Row::ROWS + Row::group()) * STAGE_BYTES",
         "s * Row::ROWS * STAGE_BYTES"),
        ("a parity that never flips", "tma", "stage = 0, parity ^= 1;", "stage = 0;"),
        ("bytes that never come expected", "tma", EXPECTED, EXPECTED.replace("Row", "16 + Row")),
        ("bytes too few expected", "tma", EXPECTED, EXPECTED.replace("Row", "-16 + Row")),
        ("a stage filled while it is read", "tma block", REFILLED,
         "this->stage, this->block_row + STAGES * Rows::STEP"),
        ("an early release of a row that is still read", "tma block", "/* early release */ false",
         "/* early release */ true"),
        ("a group of copies too few awaited", "cp_async", '"n"(STAGES - 2)', '"n"(STAGES - 1)'),
        ("the parity of the turn", "cluster", "count / 2 % 2", "count % 2"),
        ("a number for the wrong block", "cluster", "remote_address(place, rank), at", "remote_address(place, 0), at"),
        ("the row of the stage before", "dynamic", "staged[s][Row::group()] = r;",
         "staged[s == 0 ? STAGES - 1 : s - 1][Row::group()] = r;"),
        ("a counter of rows that stays where it ended", "dynamic", "else if (next_row == rows + STEP - 1)",
         "else if (false)"),
    ],
}  # fmt: skip

PTX: list[Text] = [
    ("bf16 toward zero", "small", "cvt.rn.bf16.f32", "cvt.rz.bf16.f32"),
    ("rounded twice", "double ties", "cvt.rz.f32.f64", "cvt.rn.f32.f64"),
    ("a maximum that ignores NaN", "most of odd numbers", "max.NaN.f32", "max.f32"),
    ("a division that is not rounded", "small", "div.rn.f32", "div.approx.f32"),
    ("a root that is not rounded", "small", "sqrt.rn.f32", "sqrt.approx.f32"),
    ("subnormals flushed", "small", "sub.rn.f32", "sub.ftz.f32"),
]

# ---- plans and launches ----


def halved(n: int) -> int:
    return n // 2


def less(n: int) -> int:
    return n - 1


def plan(name: str, subject: str, role: str = "rows", **changes: Callable[[Kernel], Any]) -> Mutant:
    """A mutant of fields of the kernel whose name ends with ``role``, each computed from the kernel."""

    def edit(plan: Plan) -> Plan:
        kernels = tuple(
            replace(k, **{n: f(k) for n, f in changes.items()}) if k.name.endswith(f"__{role}") else k
            for k in plan.kernels
        )
        return replace(plan, kernels=kernels)

    return Mutant(name, subject, plan=edit)


def grid(axis: int = 0, **changes: Any) -> Callable[[Kernel], Any]:
    """The grid of a kernel with another rule for one of its axes."""
    return lambda k: tuple(g._replace(**changes) if n == axis else g for n, g in enumerate(k.grid))


def swapped(a: str, b: str, kind: str) -> Callable[[Kernel], tuple[Argument, ...]]:
    """The arguments of one kind that belong to two tensors exchanged: each gets the other's."""
    other = {a: b, b: a}
    return lambda k: tuple(
        replace(x, tensor=other[x.tensor]) if x.kind == kind and x.tensor in other else x for x in k.arguments
    )


PLANS = [
    plan("inputs exchanged", "most", arguments=swapped("x", "z", "input")),
    plan("outputs exchanged", "backward", "finish", arguments=swapped("dgamma", "dbeta", "output")),
    plan("strides exchanged", "small", arguments=swapped("x", "y", "stride")),
    plan("half of the blocks", "small", grid=grid(per=16)),
    plan("a grid that is not limited", "late", grid=grid(limit=None)),
    plan("a column grid one short", "columns", "columns", grid=grid(fixed=16)),
    plan("a column grid of every second row", "columns", "columns", grid=grid(1, per=2)),
    plan("half of a block", "small", block=lambda k: k.block // 2),
    plan("no finish without rows", "backward, no rows", "finish", always=lambda k: False),
    plan("no clusters", "cluster", cluster=lambda k: 1),
    plan("a line too little shared memory", "tma groups", dynamic=lambda k: k.dynamic - 128),
    Mutant("a counter that is not zero at first", "single launch",
           plan=lambda p: replace(p, workspace=tuple(replace(b, zeroed=False) for b in p.workspace))),
    Mutant("a workspace one short", "rounds",
           plan=lambda p: replace(p, workspace=tuple(replace(b, fixed=b.fixed - 1) for b in p.workspace))),
]  # fmt: skip

# ---- passes and lowering ----


def after(name: str, change: Callable[[Graph], Graph]) -> Callable[[], AbstractContextManager[Any]]:
    """The pass ``name`` with a change to what it returns."""
    whole: Callable[..., Graph] = getattr(passes, name)
    return lambda: patch.object(passes, name, lambda *args: change(whole(*args)))


def instead(name: str, other: Callable[..., Graph]) -> Callable[[], AbstractContextManager[Any]]:
    """Another function for the pass ``name``."""
    return lambda: patch.object(passes, name, other)


def each(op: str, change: Callable[[Eqn], Eqn]) -> Callable[[Graph], Graph]:
    """A change to every equation of one operator."""
    return lambda g: replace(g, eqns=tuple(change(e) if e.op == op else e for e in g.eqns))


def unsigned(graph: Graph) -> Graph:
    """Every negated value by the value."""
    return substitute(graph, {e.out: e.args[0] for e in graph.eqns if e.op == "neg"})


def merged(a: str, b: str) -> Callable[[Graph], Graph]:
    """Uses of ``b`` become uses of ``a``, defined before it."""
    return lambda g: substitute(g, {g.values()[b]: g.values()[a]})


_PARTS = [
    importlib.import_module(m.name)
    for m in pkgutil.walk_packages(lngen.compiler.lower.__path__, "lngen.compiler.lower.")
]
LOWERING = [lngen.compiler.lower, *_PARTS]


def lowered(name: str, subject: str, what: str, other: Callable[..., Any]) -> Mutant:
    """Lowering with another function called ``what``, which gets the whole one first."""
    homes = [m for m in LOWERING if hasattr(m, what)]
    whole = getattr(homes[0], what)

    def patched() -> AbstractContextManager[Any]:
        stack = ExitStack()
        for home in homes:
            stack.enter_context(patch.object(home, what, lambda *args: other(whole, *args)))
        return stack

    return Mutant(name, subject, patch=patched)


def seen(**changes: Callable[[int], int]) -> Callable[..., Any]:
    """Lowering sees another chunk, segment, ... than the graph spells."""
    return lambda f, *args: replace(f(*args), **{n: c(getattr(f(*args), n)) for n, c in changes.items()})


PASSES = [
    Mutant("an fma without its sign", "backward", patch=after("place_fma", unsigned)),
    Mutant("no fma", "groups", patch=instead("place_fma", lambda g: g)),
    Mutant("a subtraction turned round", "small",
           patch=after("cse", each("sub", lambda e: replace(e, args=e.args[::-1])))),
    Mutant("two values merged", "backward", patch=after("cse", merged("mean_dy_gamma", "mean_dy_gamma_xhat"))),
    Mutant("a mean over D + 1", "small",
           patch=instead("decompose", lambda g, d, *of, p=passes.decompose: p(g, d + 1, *of))),
    Mutant("a root for its reciprocal", "small", patch=after("cse", each("rsqrt", lambda e: replace(e, op="sqrt")))),
    lowered("half a chunk", "small", "problem", seen(chunk=halved)),
    lowered("half a segment", "multipass", "problem", seen(segment=halved)),
    lowered("a block less", "columns, rounds", "problem", seen(blocks=less)),
    lowered("room for half of the row groups", "backward", "partial_values", lambda f, s, p: f(s, p) // 2),
    lowered("vectors that cover a row taken for partial", "small", "is_exact", lambda f, s, p: True),
]  # fmt: skip

MUTANTS = {
    **{kind: [Mutant(name, on, cuda=(old, new)) for name, on, old, new in rows] for kind, rows in CUDA.items()},
    "PTX": [Mutant(name, subject, ptx=(old, new)) for name, subject, old, new in PTX],
    "plans": PLANS,
    "passes and lowering": PASSES,
}
