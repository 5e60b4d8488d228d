"""Mutants of kernels whose rows come through shared memory, of clusters, of grid barriers and of dependent launches.

Left out: numbers that say how and not what (KEEP, UNIT halved), and the order of two summands.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from lngen.lower import Kernel, Plan
from mutants import Mutant, constant, doubled, halved, in_kernel, less, more, text

LOWERING = [importlib.import_module(f"lngen.lower.{name}") for name in ("lower", "constants", "pieces", "staged")]


def texts(name: str, subject: str, *edits: tuple[str, str]) -> Mutant:
    """A mutant of several places of the emitted CUDA."""
    return Mutant(name, subject, text=tuple((old, new, 1) for old, new in edits))


# ---- bulk copies ----

SKIP, TARGET = (
    "if (lane != 0 || first == begin) return;",
    "stage == 0 ? STAGES - 1 : stage - 1, first + (STAGES - 1) * step",
)
REFILL = "        if (THREADS <= 32) __syncwarp();\n        refill(stage, first);\n"
SOON = "first + STAGES * step"
AWAIT = "        await(stage, parity);\n"
FLIP = "            stage = 0;\n            parity ^= 1;\n        }\n"
CLAMP = "first + group < rows ? first + group : rows - 1;  //"
OFFSET = "(stage * ROWS + group) * STAGE_BYTES"
FENCED = "        before_bulk_copies();\n        row_barrier<THREADS, ROWS>(group);\n"
ASKED = "if (lane != 0 || first >= rows) return;"
STORED = "if (lane != 0 || row >= rows) return;"

BULK = [
    texts(
        "a stage refilled while it is read",
        "bulk block",
        (SKIP, "if (lane != 0) return;"),
        (TARGET, "stage, first + STAGES * step"),
    ),
    texts(
        "a stage refilled before all have read it",
        "bulk block",
        (REFILL, ""),
        (AWAIT, AWAIT + "        refill(stage, first);\n"),
    ),
    texts(
        "a stage refilled before all have read it: rows without sums",
        "bulk rounded",
        ("        row_barrier<THREADS, ROWS>(group);\n        refill", "        refill"),
    ),
    text("refilled with the row before", "bulk", "first + (STAGES - 1) * step", "first + (STAGES - 2) * step"),
    text("refilled with the row after", "bulk owners", "first + (STAGES - 1) * step", "first + STAGES * step"),
    text("refilled in the first round", "bulk", SKIP, "if (lane != 0) return;"),
    text("never refilled", "bulk", REFILL, ""),
    texts(
        "refilled before all hold the row",
        "bulk soon",
        (REFILL, ""),
        (AWAIT, AWAIT + "        refill(stage, first);\n"),
    ),
    text("soon refilled with the row before", "bulk soon", SOON, "first + (STAGES - 1) * step"),
    text("soon refilled with the row after", "bulk soon", SOON, "first + (STAGES + 1) * step"),
    text(
        "the stage of the next row refilled", "bulk soon", "fetch(stage, first +", "fetch((stage + 1) % STAGES, first +"
    ),
    text("parity of the first round for ever", "bulk", "parity ^= 1;", ""),
    text("parity of every row", "bulk", FLIP, "            stage = 0;\n        }\n        parity ^= 1;\n"),
    text("parity starts at 1", "bulk", "unsigned parity = 0;", "unsigned parity = 1;"),
    text("parity starts at what was seen", "bulk columns", "(rows >> 63)", "(rows >> 63 | 1)"),
    text("not awaited", "bulk", AWAIT, ""),
    text("16 bytes too few expected", "bulk", "length * (sizeof(bf16)));", "length * (sizeof(bf16)) - 16);"),
    text("16 bytes too many expected", "bulk", "length * (sizeof(bf16)));", "length * (sizeof(bf16)) + 16);"),
    text(
        "bytes of one of two tensors expected",
        "bulk columns",
        "length * (sizeof(float) + sizeof(float))",
        "length * sizeof(float)",
    ),
    text("16 bytes too few copied", "bulk", "length * sizeof(bf16), &landed", "length * sizeof(bf16) - 16, &landed"),
    text("elements for bytes", "bulk", "length * sizeof(bf16), &landed", "length, &landed"),
    text(
        "a copy to the next stage",
        "bulk",
        "bulk_load(at(stage, 0)",
        "bulk_load(at((stage + 1) % STAGES, 0)",
    ),
    text("row groups share a stage", "bulk", OFFSET, "stage * ROWS * STAGE_BYTES"),
    text("stages overlap", "bulk", OFFSET, "(stage + group) * STAGE_BYTES"),
    text("row groups share a barrier", "bulk", "&landed[stage][group]", "&landed[stage][0]", 3),
    text("a copy of a row that is not there", "bulk", CLAMP, "first + group;  //"),
    text("every thread copies", "bulk", ASKED, "if (first >= rows) return;"),
    text("a stage not filled at first", "bulk", "s < STAGES; ++s) fetch", "s < STAGES - 1; ++s) fetch"),
    text("a stage too many filled at first", "bulk", "s < STAGES; ++s) fetch", "s <= STAGES; ++s) fetch"),
    text("the first row in all stages", "bulk", "fetch(s, begin + s * step)", "fetch(s, begin)"),
    text("a step too short", "bulk owners", "static_cast<long long>(OWNERS) * ROWS;", "ROWS;"),
    text("owners begin at the same row", "bulk owners", "static_cast<long long>(blockIdx.x) * ROWS;", "0;"),
    text(
        "owners begin a row apart",
        "bulk columns",
        "static_cast<long long>(blockIdx.x) * ROWS;",
        "blockIdx.x;",
    ),
    text("two arrivals expected", "bulk", "barrier_init(&landed[s][r], 1)", "barrier_init(&landed[s][r], 2)"),
    text("a barrier not initialised", "bulk", "s < STAGES; ++s) barrier_init", "s < STAGES - 1; ++s) barrier_init"),
    text("barriers of the first group only", "bulk", "r < ROWS; ++r)", "r < 1; ++r)"),
    text(
        "barriers used before they are initialised",
        "bulk block",
        "    }\n    __syncthreads();\n",
        "    }\n",
    ),
    text("barriers initialised by all", "bulk", "if (threadIdx.x == 0) {\n        for", "{\n        for"),
    text("stage of one row for all", "bulk", "if (++stage == STAGES)", "if (stage == STAGES)"),
    text("a stage too many", "bulk", "if (++stage == STAGES)", "if (++stage > STAGES)"),
    text("a staged store without live", "bulk", "if (live) store_chunk", "store_chunk"),
    text("a staged row result without live", "bulk", "if (live && lane == 0) mean", "if (lane == 0) mean"),
    text("staged columns of rows that are not there", "bulk columns", "if (live) sum_dy_xhat_acc", "sum_dy_xhat_acc"),
    text("a fence before the bulk store gone", "bulk groups", "        before_bulk_copies();\n", ""),
    text("a fence of one thread", "bulk groups", FENCED, FENCED.replace("before_bulk", "if (lane == 0) before_bulk")),
    text("a barrier before the bulk store gone", "bulk groups", FENCED, "        before_bulk_copies();\n"),
    text("a bulk store of a row that is not there", "bulk groups", STORED, "if (lane != 0) return;"),
    text("a bulk store by every thread", "bulk groups", STORED, "if (row >= rows) return;"),
    text(
        "bulk stores not awaited before a refill",
        "bulk groups",
        "        wait_for_stores<0>();\n        fetch",
        "        fetch",
    ),
    text(
        "all but one bulk store awaited",
        "bulk groups",
        "        wait_for_stores<0>();\n        fetch",
        "        wait_for_stores<1>();\n        fetch",
    ),
    text("bulk stores not awaited at the end", "bulk groups", "    if (lane == 0) wait_for_stores<0>();\n", ""),
    text(
        "bulk stores not awaited before the sums take their place",
        "bulk columns",
        "    if (lane == 0) wait_for_stores<0>();\n",
        "",
    ),
    text("bulk stores not committed", "bulk groups", "        commit_stores();\n    };", "    };"),
    text(
        "a bulk store 16 bytes short",
        "bulk groups",
        "at(stage, 0), length * sizeof(float));",
        "at(stage, 0), length * sizeof(float) - 16);",
    ),
    text(
        "a bulk store 16 bytes long",
        "bulk groups",
        "at(stage, 0), length * sizeof(float));",
        "at(stage, 0), length * sizeof(float) + 16);",
    ),
    text(
        "a bulk store of the next row",
        "bulk groups",
        "y_ptr + row * y_stride + start",
        "y_ptr + (row + 1) * y_stride + start",
    ),
    text(
        "a bulk store of another stage",
        "bulk groups",
        "y_stride + start, at(stage, 0)",
        "y_stride + start, at(0, 0)",
    ),
    text(
        "a row input of this row",
        "bulk most",
        "w_ptr[row + step < rows ? row + step : rows - 1]",
        "w_ptr[row < rows ? row : rows - 1]",
    ),
    text(
        "a row input past the end", "bulk most", "w_ptr[row + step < rows ? row + step : rows - 1]", "w_ptr[row + step]"
    ),
    text(
        "a first row input past the end",
        "cluster groups",
        "mean_ptr[begin + group < rows ? begin + group : rows - 1]",
        "mean_ptr[begin + group]",
    ),
    text("a row input of no row", "bulk, no rows", "if (begin < rows) mean_next", "mean_next"),
    text("sums stashed while stages are read", "bulk columns, block", "    __syncthreads();\n    stash", "    stash"),
    text(
        "sums stored before they are stashed",
        "bulk columns",
        "    __syncthreads();\n    store_partial",
        "    store_partial",
    ),
]

# ---- clusters ----

RANKED = "places + cluster_rank() * PARTS;"
SEGMENT = "places[s / SEGMENTS * PARTS + n * SEGMENTS + s % SEGMENTS]"
STAGED_COLUMN = "const int col = column<RUN, JUMP, THREADS, SEGMENT, SEGMENT_SLOTS>(start, k, lane);"
OWNED = "const bool owned = owns<RUN, JUMP, THREADS, SEGMENT_SLOTS>(k, lane);"

CLUSTERS = [
    text(
        "cluster barrier at the start gone",
        "cluster",
        "    cluster_barrier();\n",
        "    __syncthreads();\n",
    ),
    text(
        "half a cluster barrier",
        "cluster",
        r"barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;",
        "barrier.cluster.arrive.release.aligned;",
    ),
    texts(  # one that orders is enough without the fence, and with the fence one that does not
        "a cluster barrier that orders nothing, without a fence",
        "cluster",
        ("cluster.arrive.release.aligned", "cluster.arrive.relaxed.aligned"),
        ('    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");\n', ""),
    ),
    text("a number for the wrong block", "cluster", "remote_address(place, rank), at", "remote_address(place, 0), at"),
    text(
        "bytes for the wrong block", "cluster", "at = remote_address(barrier, rank)", "at = remote_address(barrier, 0)"
    ),
    text("numbers of all blocks in one place", "cluster", RANKED, "places;"),
    text("numbers overlap", "cluster", RANKED, "places + cluster_rank();"),
    text("one exchange buffer", "cluster", "exchanged[meetings % 2]", "exchanged[0]"),
    text("one exchange barrier", "cluster", "&met[meetings % 2]", "&met[0]"),
    text("exchanges not counted", "cluster", "    ++meetings;\n", ""),
    text(
        "exchange buffers of all groups are one",
        "cluster groups",
        "exchanged[meetings % 2][group]",
        "exchanged[meetings % 2][0]",
    ),
    text("exchange parity of the meeting", "cluster", "meetings / 2 % 2", "meetings % 2"),
    text("exchange parity never flips", "cluster", "meetings / 2 % 2", "0"),
    text("an exchange not awaited", "cluster", "    wait_for_cluster(barrier, meetings / 2 % 2);\n", ""),
    text("a block's segments left out", "cluster", "<Op, CLUSTER * SEGMENTS,", "<Op, (CLUSTER - 1) * SEGMENTS,"),
    text("the first block's segments only", "cluster", SEGMENT, "places[n * SEGMENTS + s % SEGMENTS]"),
    text("segments in another order", "cluster", SEGMENT, "places[s % CLUSTER * PARTS + n * SEGMENTS + s / CLUSTER]"),
    text("segments of the first sum", "cluster groups", SEGMENT, "places[s / SEGMENTS * PARTS + s % SEGMENTS]"),
    text("an exchange of a block expected", "cluster", "CLUSTER * PARTS * sizeof(real)", "PARTS * sizeof(real)"),
    text(
        "an exchange too much expected",
        "cluster",
        "CLUSTER * PARTS * sizeof(real)",
        "(CLUSTER * PARTS + 1) * sizeof(real)",
    ),
    text("floats of doubles expected", "cluster", "CLUSTER * PARTS * sizeof(real)", "CLUSTER * PARTS * sizeof(float)"),
    text("an exchange expected by every thread", "cluster", "if (lane == 0) expect_bytes", "expect_bytes"),
    text("numbers for one block", "cluster", "if (lane < CLUSTER) {", "if (lane < CLUSTER - 1) {"),
    text("numbers for a block too many", "cluster", "if (lane < CLUSTER) {", "if (lane <= CLUSTER) {"),
    text("exchange barriers not initialised", "cluster", "m < 2; ++m", "m < 1; ++m"),
    text("owners of a cluster apart", "cluster", "blockIdx.x / CLUSTER) * ROWS", "blockIdx.x) * ROWS"),
    text("row results of every block", "cluster", " && start == 0", ""),
    text("every block has the first columns", "cluster", "cluster_rank() * PIECE", "0"),
    text("start forgotten in the columns", "cluster", "(start, k, lane);", "(0, k, lane);", 2),
    text("start forgotten in a load", "cluster", "x_ptr + row * x_stride + start", "x_ptr + row * x_stride"),
    text("start forgotten in a bulk store", "cluster", "y_ptr + row * y_stride + start", "y_ptr + row * y_stride"),
    text("start forgotten in a stage", "cluster", "x_stage - start", "x_stage", 2),
    text("a last piece as long as the others", "cluster", "D - start < PIECE ? D - start : PIECE", "PIECE"),
    text(
        "start forgotten in what is kept",
        "cluster keep",
        f"{STAGED_COLUMN}\n        {OWNED}\n        load_chunk<VEC, D, RUN, JUMP, true>(gamma_kept",
        f"{STAGED_COLUMN.replace('start', '0')}\n        {OWNED}\n"
        "        load_chunk<VEC, D, RUN, JUMP, true>(gamma_kept",
    ),
    text(
        "the chunk before is kept",
        "cluster keep",
        "gamma_ptr, col, owned);",
        "gamma_ptr, col - CHUNK, owned);",
    ),
    text(
        "the first chunk for all",
        "cluster keep",
        "copy_chunk(gamma, gamma_kept[k]",
        "copy_chunk(gamma, gamma_kept[0]",
    ),
    text("beta is kept for gamma", "cluster keep", "copy_chunk(gamma, gamma_kept", "copy_chunk(gamma, beta_kept"),
    text(
        "the partial row of the block",
        "cluster columns",
        "static_cast<long long>(blockIdx.x / CLUSTER) * PITCH",
        "static_cast<long long>(blockIdx.x) * PITCH",
    ),
    text(
        "start forgotten in partial rows", "cluster groups", "stash_size(PIECE), start);", "stash_size(PIECE), 0);", 2
    ),
    text("a partial row as long as D", "cluster groups", "unit * UNIT < PIECE && start", "start"),
    text(
        "stashed at another place",
        "cluster groups",
        "parts[(unit_place(at / UNIT) * UNIT + at % UNIT) / TOGETHER]",
        "parts[at / TOGETHER]",
    ),
    text("places that meet", "cluster groups", "return unit ^ (unit >> 3 & 1);", "return unit & ~(unit >> 3 & 1);"),
]

# ---- asynchronous copies ----

COMMIT = "        commit_copies();\n    };"
ASYNC = [
    text("a group of copies too few awaited", "async", "wait_for_copies<STAGES - 2>", "wait_for_copies<STAGES - 1>"),
    text("copies not awaited", "async", AWAIT, ""),
    text(
        "groups of copies only while there are rows",
        "async",
        COMMIT,
        COMMIT.replace("commit", "if (first < rows) commit", 1),
    ),
    text("copies not committed", "async", COMMIT, "    };"),
    texts(
        "a stage refilled while it is read",
        "async",
        ("if (first > begin) fetch", "fetch"),
        (TARGET, "stage, first + STAGES * step"),
    ),
    text("refilled with the row before", "async", "first + (STAGES - 1) * step", "first + (STAGES - 2) * step"),
    text("refilled in the first round", "async", "if (first > begin) fetch", "fetch"),
    text("never refilled", "async", REFILL, ""),
    text(
        "a copy beyond the row",
        "async block",
        "if (owned && there < D)\n            asm",
        "if (owned && col < D)\n            asm",
    ),
    text("every other copy", "async", "j += STEP)", "j += 2 * STEP)"),
    text(
        "copies twice as wide",
        "async",
        "(sizeof(T)) < 16 ? VEC * static_cast<int>(sizeof(T)) : 16;",
        "(sizeof(T)) * 2;",
    ),
    text("a copy one column on", "async block", '"l"(row + there)', '"l"(row + there + 1)'),
    text(
        "a copy to the first chunk",
        "async block",
        "(static_cast<unsigned>(__cvta_generic_to_shared(to + there)))",
        "(static_cast<unsigned>(__cvta_generic_to_shared(to + there - col)))",
    ),
    text(
        "chunks that another thread reads",
        "async",
        "x_ptr + row * x_stride, col, owned",
        "x_ptr + row * x_stride, col ^ 8, owned",
    ),
    text("a copy of a row that is not there", "async", CLAMP, "first + group;  //"),
    text("a stage not filled at first", "async", "s < STAGES; ++s) fetch", "s < STAGES - 1; ++s) fetch"),
    text("row groups share a stage", "async", OFFSET, "stage * ROWS * STAGE_BYTES"),
    text("columns of rows that are not there", "async columns", "if (live) sum_dy_acc", "sum_dy_acc"),
    text("sums stashed while stages are read", "async columns", "    __syncthreads();\n    stash", "    stash"),
]

# ---- one launch ----

ADD = "0x80000000u - (gridDim.x - 1)"
FLIPPED = "while (((before ^ now) & 0x80000000u) == 0);"
ATOM = "    if (threadIdx.x == 0) {\n        const unsigned add"


def again(name: str, *edits: tuple[str, str]) -> Mutant:
    """A mutant that only a second launch shows: what the first leaves has to be fit for the next."""
    return Mutant(name, "one launch", text=tuple((old, new, 1) for old, new in edits), calls=2)


ONE_LAUNCH = [
    text("grid barrier gone", "one launch", "    grid_barrier(arrivals_ptr);\n", ""),
    text("a block barrier for the grid's", "one launch", "    grid_barrier(arrivals_ptr);\n", "    __syncthreads();\n"),
    text("no block barrier before the grid's", "one launch", f"    __syncthreads();\n{ATOM}", ATOM),
    text("no block barrier behind the grid's", "one launch", "    }\n    __syncthreads();\n}", "    }\n}"),
    text("arrivals that release nothing", "one launch", "atom.acq_rel.gpu", "atom.relaxed.gpu"),
    text("arrivals seen but not acquired", "one launch", "ld.acquire.gpu", "ld.relaxed.gpu"),
    text("arrivals of a block only", "one launch", "ld.acquire.gpu", "ld.acquire.cta"),
    text("the first block adds too much", "one launch", ADD, "0x80000000u"),
    text("the first block adds too little", "one launch", ADD, "0x80000000u - gridDim.x"),
    text("every block adds one", "one launch", f"blockIdx.x == 0 ? {ADD} : 1u", "1u"),
    text("two first blocks", "one launch", "blockIdx.x == 0 ?", "blockIdx.x <= 1 ?"),
    text("nobody waits", "one launch", FLIPPED, "while (false);"),
    text("all wait for ever", "one launch", "& 0x80000000u) == 0);", "& 0x80000000u) != 1);"),
    text("no rows sum to -0", "one launch, no rows", "rows == 0 ? real(0) : ", ""),
    text("no rows sum to -0: bulk", "bulk, no rows", "rows == 0 ? real(0) : ", ""),
    text("copies of no rows", "bulk, no rows", ASKED, "if (lane != 0) return;"),
    again("a counter that counts to the blocks", (FLIPPED, "while ((now & 0x80000000u) == 0);")),
    again("a counter that does not return", (ADD, "0x80000001u - (gridDim.x - 1)")),
    again(
        "a counter that waits for the number of blocks",
        (f"blockIdx.x == 0 ? {ADD} : 1u", "1u"),
        (FLIPPED, "while (now < gridDim.x);"),
    ),
]

# ---- dependent launches ----

WAIT, LET = "    wait_for_previous_kernel();\n", "    let_next_kernel_begin();\n"


def late(subject: str, before: str, after: str, what: str = "", then: str = LET) -> Mutant:
    """A wait that comes only before ``after``; it stood in front of ``then`` and ``before``."""
    return texts(f"a wait behind a load{what}", subject, (WAIT + then + before, then + before), (after, WAIT + after))


DEPENDENT = [
    late("small", "\n    const long long row = begin", "\n    // ---- phase 0 ----"),
    late("late", "\n    real sum_dy_xhat_acc", "    store_sums"),
    late("stream", "    __shared__ real scratch", "\n    // ---- phase 1 ----"),
    late("columns", "    const int col = (static", "    store_chunk<VEC, D, CHUNK, CHUNK, true>(sum_dy_partial"),
    late("few", "    __shared__ __align__(16) real", "        if (column < COLUMNS && col < D) {", ": finish", ""),
    late("bulk", "    const float d_size", "    int stage = 0;"),
    late("async", "\n    // Where in shared memory", "    int stage = 0;"),
    late("cluster keep", "    const float d_size", "    int stage = 0;", ": what is kept"),
    texts(
        "half the threads wait",
        "small",
        ('    asm volatile("griddepcontrol.wait;"', '    if (threadIdx.x & 4) asm volatile("griddepcontrol.wait;"'),
    ),
    text("no thread waits", "small", 'asm volatile("griddepcontrol.wait;" ::: "memory");', ";"),
    text("no kernel waits", "few", 'asm volatile("griddepcontrol.wait;" ::: "memory");', ";"),
]

# ---- plans ----


def plan(name: str, subject: str, role: str = "rows", **changes: Callable[[Kernel], Any]) -> Mutant:
    """A mutant of the fields of a kernel."""
    return Mutant(name, subject, plan=in_kernel(role, **changes))


def grid(**changes: Any) -> Callable[[Kernel], Any]:
    """The grid rule with another number."""
    return lambda k: (replace(k.grid[0], **changes), k.grid[1])


def moved(kind: str, number: int, by: int) -> Callable[[Kernel], Any]:
    """A tensor of a stage somewhere else."""

    def edit(k: Kernel) -> Any:
        listed = list(getattr(k, kind))
        listed[number] = replace(listed[number], offset=listed[number].offset + by)
        return tuple(listed)

    return edit


def lowered(name: str, subject: str, what: str, other: Callable[..., Any]) -> Mutant:
    """Lowering with another function or class called ``what``, which gets the whole one first."""
    homes = [m for m in LOWERING if hasattr(m, what)]
    whole = getattr(homes[0], what)

    def patched() -> AbstractContextManager[Any]:
        stack = ExitStack()
        for home in homes:
            stack.enter_context(patch.object(home, what, lambda *args: other(whole, *args)))
        return stack

    return Mutant(name, subject, patch=patched)


def unzeroed(p: Plan) -> Plan:
    return replace(p, workspace=tuple(replace(b, zeroed=False) for b in p.workspace))


CLUSTERED = [
    text("blocks send before others are there", "cluster registers", "    cluster_barrier();\n", ""),
    text("owners of a cluster apart", "cluster registers", "blockIdx.x / CLUSTER) * ROWS", "blockIdx.x) * ROWS"),
    text("row results of every block", "cluster registers", " && start == 0", "", 2),
    text("every block has the first columns", "cluster registers", "cluster_rank() * PIECE", "0"),
    text("start forgotten in the columns", "cluster registers", "(start, k, lane);", "(0, k, lane);", 5),
    text(
        "start forgotten where nothing is summed", "cluster rounded", "(start, k, lane);", "(0, k, lane);", 2
    ),
    text("sums of a block alone", "cluster registers", "<Op, CLUSTER * SEGMENTS,", "<Op, SEGMENTS,"),
    text("a last piece as long as the others", "cluster registers", "D - start < PIECE ? D - start : PIECE", "PIECE"),
    plan("blocks of a cluster forgotten", "cluster registers", grid=grid(times=1)),
]  # fmt: skip

PLANS = [
    plan("half the stages' memory", "bulk", dynamic=lambda k: k.dynamic // 2),
    plan("a line too little of the stages' memory", "bulk groups", dynamic=lambda k: k.dynamic - 128),
    plan("a line too little of the stages' memory: async", "async", dynamic=lambda k: k.dynamic - 128),
    plan("no room for the column sums", "cluster groups", dynamic=lambda k: k.dynamic // 4),
    plan("no room for the column sums: async", "async columns", dynamic=lambda k: k.dynamic // 4),
    plan("no room for the totals", "one launch, alone", shared=lambda k: k.shared - 1),
    plan("no room for the totals: bulk", "bulk, no rows", dynamic=lambda k: 2048),
    plan("no room for what is met", "cluster", exchanged=lambda k: k.exchanged // 2),
    plan("no room for what is met: two sums", "cluster groups", exchanged=lambda k: k.exchanged // 2),
    plan("half of the scratch", "bulk block", shared=lambda k: k.shared // 2),
    plan("half of the scratch: a cluster", "cluster", shared=lambda k: k.shared // 2),
    plan("no clusters", "cluster", cluster=lambda k: 1),
    plan("clusters of clusters", "cluster", cluster=lambda k: 4),
    plan("a block of each cluster", "cluster", grid=grid(times=1)),
    plan("two clusters for one", "cluster", grid=grid(times=4)),
    plan("more blocks than owners", "bulk owners", grid=grid(limit=3)),
    plan("fewer blocks than owners", "bulk owners", grid=grid(limit=1)),
    plan("more clusters than owners", "cluster", grid=grid(limit=2)),
    plan("no block for no rows", "one launch, no rows", grid=grid(least=0)),
    plan("no launch for no rows", "one launch, no rows", always=lambda k: False),
    plan("inputs in one place", "bulk columns", places=moved("places", 1, -512)),
    plan("an input off its line", "bulk columns", places=moved("places", 1, 8)),
    plan("a result on another input", "bulk most", results=moved("results", 0, 256)),
    plan("a result in the next stage", "bulk groups", results=moved("results", 0, 4096)),
    Mutant("a counter that is not zero at first", "one launch", plan=unzeroed),
    lowered("results stored as early as they can be", "bulk most", "Style", lambda Style, *a: Style(*a[:5], False)),
    lowered("stages without lines", "cluster columns", "stage_share", lambda f, size, s, p: size * p.d // 4),
    lowered("stages of half a row", "bulk columns", "stage_bytes", lambda f, s, p: f(s, p) // 2),
    lowered("room for one of two sums", "groups of two sums", "scratch_numbers", lambda f, s, p: f(s, p) // 2),
    lowered("room for half of the row groups", "backward", "partial_numbers", lambda f, s, p: f(s, p) // 2),
    lowered("nothing stashed", "backward", "partial_numbers", lambda f, s, p: 0),
    lowered("room for one segment of a cluster", "cluster", "met_numbers", lambda f, s, p: f(s, p) // 2),
    lowered("pieces a chunk short", "cluster", "piece", lambda f, s, p: f(s, p) - p.chunk),
    lowered("pieces a chunk long", "cluster", "piece", lambda f, s, p: f(s, p) + p.chunk),
    lowered("units of the next size", "async columns", "_unit", lambda f, p: 8),
    lowered(
        "a result in a place of its own that is not there",
        "bulk most",
        "places",
        lambda f, g, o, s, p: (f(g, o, s, p)[0], tuple(replace(x, offset=x.offset + 768) for x in f(g, o, s, p)[1])),
    ),
]

STAGED_CONSTANTS = {
    "bulk": {
        "STAGES": [less, more],
        "STAGE_BYTES": [halved, more],
        "ROWS": [halved, doubled],
        "THREADS": [halved, doubled],
        "D": [less],
        "PIECE": [halved],
        "OWNERS": [more],
        "EXACT": [more],
    },
    "bulk owners": {"OWNERS": [less, more, doubled]},
    "cluster": {"CLUSTER": [halved, doubled], "PIECE": [halved, doubled], "SEGMENT": [halved, doubled],
                "SEGMENT_SLOTS": [halved, doubled], "SLOTS": [halved, less], "D": [less]},
    "async": {"STAGES": [more], "STAGE_BYTES": [halved], "VEC": [doubled]},
    "async columns": {"PIECE": [halved]},
}  # fmt: skip
CONSTANTS = [
    Mutant(f"{name} {edit.__name__}", subject, plan=constant(name, edit))
    for subject, names in STAGED_CONSTANTS.items()
    for name, edits in names.items()
    for edit in edits
]

# ---- segments ----

LAST = "static_cast<real>(SEGMENT) : static_cast<real>(LAST);"
SQUARES = "numbers[s / SEGMENTS * PARTS + SEGMENTS + s % SEGMENTS]"
OFF = "* inverse_length<D, SEGMENT>(s * SEGMENT) - mean;"

SPREADS = [
    text("a segment measured from nothing", "spread", "x32 - x32_centre[k / SEGMENT_SLOTS]", "x32"),
    text("all measured from the first segment", "spread", "x32 - x32_centre[k / SEGMENT_SLOTS]", "x32 - x32_centre[0]"),
    text("the last segment as long as others", "spread", LAST, LAST.replace("LAST", "SEGMENT")),
    text("the last segment's mean of more", "spread", "real(1) / static_cast<real>(LAST)", "real(1) / real(SEGMENT)"),
    text("centres of the first block", "spread", "x32_segments, start);", "x32_segments, 0);"),
    text("segments not moved to the mean of the row", "spread", OFF, OFF.replace(" - mean", " - sum(s)")),
    text("squares of the first segment for all", "spread", SQUARES, "numbers[SEGMENTS]"),
    text(
        "a segment's squares alone",
        "spread",
        "return fmaf(length_of<D, SEGMENT>(s * SEGMENT) * off, off, squares)",
        "return squares",
    ),
    text(
        "sums and squares of blocks in one row",
        "spread",
        "return numbers[s / SEGMENTS * PARTS + s % SEGMENTS];",
        "return numbers[s];",
    ),
    text("a pair exchanged", "spread", "make_float2(part[n], part[n + 1])", "make_float2(part[n + 1], part[n])"),
    text("every other pair", "spread", "n < PARTS; n += 2)", "n < PARTS; n += 4)"),
    text("an element kept for its distance", "spread", "stay(x32_far)", "stay(x32)"),
    text("a block's numbers in another order", "spread registers", "numbers[s] = sums[s];", "numbers[s] = squares[s];"),
    text("all segments in one place", "spread stream", "x32_numbers[seg] = ", "x32_numbers[0] = "),
    text("squares in the place of sums", "spread stream", "x32_numbers[SEGMENTS + seg] = ", "x32_numbers[seg] = "),
    text("means of the first segment", "spread stream", "{ x32_numbers[seg] }", "{ x32_numbers[0] }", 2),
    text("segments read before they are there", "spread stream", "    row_barrier<THREADS, 1>(0);\n", "", 2),
]

STAGED_CLASSES = {
    "bulk": BULK, "clusters": CLUSTERS, "clustered": CLUSTERED, "segments": SPREADS, "async": ASYNC,
    "one launch": ONE_LAUNCH,
    "dependent": DEPENDENT, "staged plans": PLANS, "staged constants": CONSTANTS,
}  # fmt: skip
