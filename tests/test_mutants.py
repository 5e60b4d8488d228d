"""The proof on NumPy can fail: every plausible mistake in a pass, a plan, a template or a launch is caught by it.

Equivalent mutants are left out; the tables say which and why.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from lngen import passes
from lngen.check.inputs import same_bits
from lngen.ir import F32, Eqn, Graph
from lngen.lower import Argument, Kernel, Plan
from lngen.passes.edit import substitute
from lngen.ptx import run_plan
from mutants import SUBJECTS, Mutant, constant, doubled, halved, in_kernel, killer, less, more, text, twin
from mutants_staged import STAGED_CLASSES

Patch = Callable[[], AbstractContextManager[Any]]
LOWER = importlib.import_module("lngen.lower.lower")


# ---- templates ----

WORDS = (
    "if (owned && there < D) {\n            #pragma unroll\n            for (int w = 0; w < v.WORDS; ++w) {"
    "\n                "
)
WORD_OF = "(row + {}) + w;\n                if constexpr"
LOAD, STORE = f"{WORDS}const auto* from", f"{WORDS}auto* to"
WITHIN = "const int within = (slot % SEGMENT_SLOTS * THREADS + lane) * RUN;"
EQUAL = "if (a == b) return __int_as_float(__float_as_int(a) & __float_as_int(b));"

# 16 bits stand for 32: a buffer of 2^31 elements takes too long. Left out: elements past the end of a row that are
# not loaded as zero (every term of a reduction is guarded or absent, every store masked).
MEMORY = [
    text("load mask <=", "small", LOAD, LOAD.replace("< D", "<= D")),
    text("load mask short", "small", LOAD, LOAD.replace("< D", "< D - VEC")),
    text("load mask gone", "small", LOAD, LOAD.replace("owned && there < D", "true")),
    text("load mask of the chunk", "small", LOAD, LOAD.replace("there", "col")),
    text("store mask <=", "small", STORE, STORE.replace("< D", "<= D")),
    text("store mask short", "small", STORE, STORE.replace("< D", "< D - VEC")),
    text("store mask gone", "small", STORE, STORE.replace("owned && there < D", "true")),
    text("store one column on", "block", *(f"{WORD_OF.format(n)} (STAY)" for n in ("there", "there + 1"))),
    text("load one column on", "block", *(f"{WORD_OF.format(n)} (EARLY)" for n in ("there", "there + 1"))),
    text("elements in another order", "small", "element<T>(&v, i)", "element<T>(&v, VEC - 1 - i)"),
    text("stored in another order", "segments", "v.items[i] = chunk[j + i]", "v.items[i] = chunk[j + VEC - 1 - i]"),
    text(
        "an access as wide as a chunk",
        "small",
        "for (int j = 0; j < N; j += VEC) {",
        "for (int j = 0; j < VEC; j += VEC) {",
        2,
    ),
    text("x with y's stride", "small", "x_ptr + r * x_stride", "x_ptr + r * y_stride"),
    text("y with x's stride", "small", "y_ptr + row * y_stride", "y_ptr + row * x_stride"),
    text("y with D for a stride", "small", "y_ptr + row * y_stride", "y_ptr + row * D"),
    text("dx with dy's stride", "backward", "dx_ptr + row * dx_stride", "dx_ptr + row * dy_stride"),
    text("x with dy's stride", "columns", "x_ptr + row * x_stride", "x_ptr + row * dy_stride", 5),
    Mutant(
        "short load offset", "block", (("r * x_stride", "static_cast<short>(r * x_stride)", 1),), strides={"x": 1 << 14}
    ),
    Mutant(
        "short store offset",
        "block",
        (("row * y_stride", "static_cast<short>(row * y_stride)", 1),),
        strides={"y": 1 << 14},
    ),
]

ROWS = [
    text("a store without live", "small", "if (live) store_chunk", "store_chunk"),
    text("a row result without live", "small", "if (live && lane == 0)", "if (lane == 0)", 2),
    text("live <=", "small", "row < rows;", "row <= rows;"),
    text("live short", "small", "row < rows;", "row < rows - 1;"),
    text("live always", "most", "ROWS == 1 || row < rows", "true"),
    text("rows past the last not repeated", "small", "live ? row : rows - 1;", "row;"),
    text("row results of the second thread only", "small", "lane == 0) mean", "lane == 8) mean"),
    text("row results of every thread", "small", "live && lane == 0) rstd_ptr[row]", "live) rstd_ptr[r + lane]"),
    text(
        "rows of a block apart",
        "small",
        "const long long row = begin + group;",
        "const long long row = blockIdx.x + group * ROWS;",
    ),
    text("the first row of a block for all", "small", "row = begin + group;", "row = begin;"),
    text("rows that are not there asked for", "small", "if (begin + group < rows) {", "{"),
    text("columns asked for beyond their end", "small", "gamma_there, D", "gamma_there, D + 64"),
    text("a row input of the first row", "most", "w_ptr[r];", "w_ptr[0];"),
    text("a row input past the end", "most", "w_ptr[r];", "w_ptr[row];"),
    text("a scalar of the second element", "most", "*s_ptr;", "s_ptr[1];"),
    text(
        "columns from the left by thread",
        "small",
        WITHIN,
        WITHIN.replace("slot % SEGMENT_SLOTS * THREADS + lane", "lane * SEGMENT_SLOTS + slot % SEGMENT_SLOTS"),
    ),
    text(
        "columns of the next segment", "segments", "THREADS + lane) * RUN < JUMP;", "THREADS + lane) * RUN < 2 * JUMP;"
    ),
    text(
        "every slot in the first segment",
        "segments",
        "start + slot / SEGMENT_SLOTS * SEGMENT + there",
        "start + there",
    ),
    text("gamma at the chunk before", "small", "gamma_ptr, col, owned)", "gamma_ptr, col - CHUNK, owned)"),
    text("gamma for beta", "small", "beta_ptr, col, owned)", "gamma_ptr, col, owned)"),
    text("a statement's operands exchanged", "small", "x32 - mean;", "mean - x32;", 2),
    text("the division by a product", "small", "mean_sum / d_size", "mean_sum * (1.0f / 100.0f)"),
    text("an fma torn apart", "groups", "fmaf(xhat, gamma32, beta32)", "xhat * gamma32 + beta32"),
]

SUMS = [
    text("guard <=", "small", "if (behind<RUN, JUMP>(i) < D - col)", "if (behind<RUN, JUMP>(i) <= D - col)", 2),
    text("guard short", "small", "if (behind<RUN, JUMP>(i) < D - col)", "if (behind<RUN, JUMP>(i) < D - col - 1)", 2),
    text("guard gone", "small", "if (behind<RUN, JUMP>(i) < D - col)", "if (true)", 2),
    text("chunk guard gone", "groups", "EXACT || (owned && col < D) ?", "true ?", 2),
    text("chunk guard short", "groups", "EXACT || (owned && col < D) ?", "owned && col < D - CHUNK ?", 2),
    text("chunk right to left", "groups", "const float x32 = x[k][i];", "const float x32 = x[k][CHUNK - 1 - i];", 3),
    text("chunk sums start at +0", "small of zeros", "mean_sum_chunk = ABSENT;", "mean_sum_chunk = 0.0f;"),
    text(
        "absent chunks are +0",
        "small of zeros",
        "EXACT || (owned && col < D) ? mean_sum_chunk : ABSENT",
        "owned && col < D ? mean_sum_chunk : 0.0f",
    ),
    text(
        "absent terms are +0",
        "small of zeros",
        "if (behind<RUN, JUMP>(i) < D - col) mean_sum_chunk = mean_sum_chunk + x32;",
        "mean_sum_chunk = mean_sum_chunk + (behind<RUN, JUMP>(i) < D - col ? x32 : 0.0f);",
    ),
    text(
        "what is kept beyond the row is absent",
        "small",
        "if (behind<RUN, JUMP>(i) < D - col) mean_sum_chunk = mean_sum_chunk + x32;",
        "mean_sum_chunk = behind<RUN, JUMP>(i) < D - col ? mean_sum_chunk + x32 : ABSENT;",
    ),
    text(
        "a product of a row sum rounded alone",
        "groups of two sums",
        "fmaf(dy_gamma, xhat, mean_dy_gamma_xhat_sum_chunk)",
        "mean_dy_gamma_xhat_sum_chunk + dy_gamma * xhat",
    ),
    text("ABSENT is +0", "small of zeros", "ABSENT = -0.0f;", "ABSENT = 0.0f;"),
    text(
        "neighbours folded",
        "groups",
        "part[i] = Op::of(part[i], part[i + HALF])",
        "part[i] = Op::of(part[2 * i], part[2 * i + 1])",
    ),
    text(
        "left to right instead of folded",
        "segments",
        "constexpr int HALF = half_of(LIVE);",
        "constexpr int HALF = LIVE - 1;",
    ),
    text(
        "half of a count that is no power of two",
        "five slots",
        "return n <= 2 ? 1 : 2 * half_of((n + 1) / 2);",
        "return (n + 1) / 2;",
    ),
    text("a fold loses its last part", "groups", "i + HALF < LIVE;", "i + HALF < LIVE - 1;"),
    text(
        "shuffles ascending",
        "small",
        "int apart = LANES / 2; apart > 0; apart /= 2",
        "int apart = 1; apart < LANES; apart *= 2",
    ),
    text("a shuffle too few", "small", "apart > 0; apart /= 2", "apart > 1; apart /= 2"),
    text("a shuffle too many", "small", "fold_lanes<Op, (THREADS < 32 ? THREADS : 32)>", "fold_lanes<Op, 32>"),
    text("shuffle down", "small", "__shfl_xor_sync", "__shfl_down_sync"),
    text(
        "warps folded first to last",
        "block",
        "warp[w] = buffer[n * THREADS + w * 32 + lane % 32];",
        "warp[w] = buffer[n * THREADS + (w & 1) * 64 + (w >> 1) * 32 + lane % 32];",
    ),
    text("warps' lanes mixed", "block", "w * 32 + lane % 32]", "w * 32 + lane / 4 % 32]"),
    text("a warp twice", "block", "w * 32 + lane % 32]", "(w | 1) * 32 + lane % 32]"),
    text("groups share a buffer", "groups", "(group * 2 + turn)", "turn"),
    text("turn not toggled", "groups", "turn ^= 1;", ""),
    text("turns overlap", "groups", "(group * 2 + turn) * MOST * THREADS", "(group * 2 + turn) * MOST * 32"),
    text("row barrier gone", "block", "    row_barrier<THREADS, ROWS>(group);\n", ""),
    text(
        "row barrier too early",
        "block",
        "#pragma unroll\n        for (int n = 0; n < N; ++n) buffer[n * THREADS + lane] = part[n];\n        "
        "row_barrier<THREADS, ROWS>(group);",
        "row_barrier<THREADS, ROWS>(group);\n        for (int n = 0; n < N; ++n) buffer[n * THREADS + lane] = part[n];",
    ),
    text("row barrier of warps", "block", "        __syncthreads();\n    else", "        __syncwarp();\n    else"),
    text("named barriers are one", "groups", '"r"(group + 1)', '"r"(1)'),
    text("named barrier waits for half", "groups", '"n"(THREADS)', '"n"(THREADS / 2)'),
    text("named barrier waits for two rows", "groups", '"n"(THREADS)', '"n"(THREADS * 2)'),
    text(
        "barrier by part of a row",
        "block",
        "        __syncthreads();\n    else",
        "        { if (threadIdx.x < 64) __syncthreads(); }\n    else",
    ),
    text(
        "segments in another order",
        "segments",
        "return part[n * SEGMENTS + s];",
        "return part[n * SEGMENTS + s / 2 + s % 2 * (SEGMENTS / 2)];",
    ),
    text("a segment left out", "sixteen segments", "if (s + j < SEGMENTS)", "if (s + j < SEGMENTS - 1)"),
    text("a strand left out", "segments", "fold<Op, STRANDS>(strand)", "fold<Op, STRANDS - 1>(strand)"),
    text("strands of neighbours", "sixteen segments", "part(s + j));", "part(STRANDS + (s + j) / 2));"),
    text("a strand begun again", "sixteen segments", "Op::of(strand[j], part(s + j))", "part(s + j)"),
    text("two strands", "segments", "SEGMENT_STRANDS = 4;", "SEGMENT_STRANDS = 2;"),
    text("eight strands", "sixteen segments", "SEGMENT_STRANDS = 4;", "SEGMENT_STRANDS = 8;"),
    text("stream: eight strands", "long stream", "SEGMENT_STRANDS = 4;", "SEGMENT_STRANDS = 8;"),
    text("stream: a segment in every strand", "stream", "if (lane % SEGMENT_STRANDS == seg % SEGMENT_STRANDS)", ""),
    text("stream: strands not folded", "stream", "    fold_lanes<Add, SEGMENT_STRANDS>(sums_0);\n", ""),
    text("segments one slot short", "segments", "fold<Op, SEGMENT_SLOTS>(held)", "fold<Op, SEGMENT_SLOTS - 1>(held)"),
    text("stream: a segment left out", "stream", "seg < SEGMENTS;", "seg < SEGMENTS - 1;", 2),
    text("stream: segments of one length", "stream", "seg * SEGMENT, k", "seg * SEGMENT / 2, k", 2),
    text(
        "stream: the last segment only",
        "stream",
        "sums_0[n] = Add::of(sums_0[n], sums_0_segment[n]);",
        "sums_0[n] = seg < SEGMENTS - 1 ? ABSENT : sums_0_segment[n];",
    ),
    text("a mean's sum for the other's", "backward", "mean_dy_gamma_sum = sums_0[0]", "mean_dy_gamma_sum = sums_0[1]"),
    text(
        "a maximum that ignores NaN", "most of odd numbers", "a > b || a != a ? a : b;", "a > b || b != b ? a : b;", 2
    ),
    text("a maximum that takes -0 for +0", "most of signed zeros", EQUAL, "if (a == b) return a;"),
    text("the smaller of two", "most", "return a > b ||", "return a < b ||", 2),
    text(
        "a maximum that starts at 0",
        "most of negatives",
        "most_chunk = __int_as_float(0xff800000);",
        "most_chunk = 0.0f;",
    ),
    text(
        "a maximum beyond the row",
        "most of negatives",
        "if (behind<RUN, JUMP>(i) < D - col) most_chunk = maximum(most_chunk, x32);",
        "most_chunk = maximum(most_chunk, x32);",
    ),
    text("a maximum that adds", "most", "return maximum(a, b);", "return a + b;"),
]

# Left out: column threads past the end that do not return (their accesses are masked), strands that all store (the
# same value, one block), wider chunks in a column kernel (the same sums on fewer blocks), and, one without the other,
# the units past the end of a row group and the mask of what they store.
NEXT_STASH = (
    "    __syncthreads();\n    stash<D, RUN, JUMP, THREADS, SEGMENT, SEGMENT_SLOTS, PIECE, UNIT>(scratch, sum_dy_acc"
)
STASHED = "group, lane);\n    __syncthreads();\n    store_partial"
EVERY_STORE = STORE.replace("owned && there < D", "true")
GROUPS = "unit * UNIT < PIECE && start + unit * UNIT < D; unit += BLOCK"
COLUMNS = [
    text("columns of rows that are not there", "backward", "if (live) sum_dy_acc", "sum_dy_acc"),
    text("columns of each row twice", "backward", "sum_dy_acc[k][i] + dy32;", "sum_dy_acc[k][i] + dy32 + dy32;"),
    text("accumulators start at +0", "backward of zeros", "sum_dy_acc[k][i] = ABSENT;", "sum_dy_acc[k][i] = 0.0f;"),
    text("strands start at +0", "backward of zeros", "sums[n][j] = ABSENT;", "sums[n][j] = 0.0f;"),
    text("columns start at +0", "columns of zeros", "sum_dy_acc[i] = ABSENT;", "sum_dy_acc[i] = 0.0f;"),
    text("no rows sum to -0", "backward, no rows", "rows == 0 ? real(0) : ", "", 2),
    text("partial barrier between gone", "backward", NEXT_STASH, NEXT_STASH.replace("__syncthreads();", "")),
    text("partial barrier behind gone", "backward", STASHED, STASHED.replace("__syncthreads();", ""), 2),
    text("groups folded in pairs", "backward", "terms[r] = part[r]", "terms[r] = part[(r & 1) * 4 + r / 2]"),
    text("a group left out", "backward", "fold<Add, ROWS>(terms)", "fold<Add, ROWS - 1>(terms)"),
    text("groups: the last columns left out", "backward", GROUPS, GROUPS.replace("< D;", "< D - UNIT;")),
    Mutant(
        "groups: columns too many", "backward", ((GROUPS, GROUPS.replace("< D;", "<= D;"), 1), (STORE, EVERY_STORE, 1))
    ),
    text(
        "a product of a column sum rounded alone",
        "batches",
        "fmaf(dy[k][i], xhat, sum_dy_xhat_acc[k][i])",
        "sum_dy_xhat_acc[k][i] + dy[k][i] * xhat",
    ),
    text(
        "words of a partial row exchanged", "backward", '"r"(w.x), "r"(w.y), "r"(w.z)', '"r"(w.y), "r"(w.x), "r"(w.z)'
    ),
    text("groups: a step of a row", "cluster groups", GROUPS, GROUPS.replace("+= BLOCK", "+= BLOCK + 1")),
    text(
        "groups at a distance of THREADS",
        "backward",
        "place + group * stash_size(PIECE)",
        "place + group * THREADS * UNIT",
    ),
    text(
        "groups: another place",
        "backward",
        "(place + r * stash_size(PIECE))[unit_place(unit)]",
        "(place + r * stash_size(PIECE))[unit]",
    ),
    text("a row group's place not rounded up", "async columns", "return (piece + 7) / 8 * 8;", "return piece;"),
    text(
        "the partial row of block 0",
        "backward",
        "sum_dy_partial_ptr + static_cast<long long>(blockIdx.x) * PITCH",
        "sum_dy_partial_ptr",
    ),
    text(
        "the partial row of the next block",
        "rounds",
        "partial_ptr + static_cast<long long>(blockIdx.x) * PITCH",
        "partial_ptr + static_cast<long long>(blockIdx.x + 1) * PITCH",
    ),
    text("the other sum's partial row", "backward", "sum_dy_partial_ptr + static", "sum_dy_xhat_partial_ptr + static"),
    text("prefetch of the row after", "rounds", "load(row + step)", "load(row + step + 1)"),
    text("prefetch of the same row", "rounds", "load(row + step)", "load(row)"),
    text("the first row not prefetched", "rounds", "if (PREFETCH && begin < rows) load(begin + group);", ""),
    text("no rows prefetched", "one launch, no rows", "PREFETCH && begin < rows", "PREFETCH"),
    text(
        "prefetch too late",
        "rounds",
        "const double mean = mean_next;",
        "const double mean = mean_ptr[row + step < rows ? row + step : row];",
    ),
    text("a round too few", "late", "first < rows; first += step", "first + step < rows; first += step"),
    text("a step too long", "late", "first += step)", "first += step + 1)"),
    text("a step of blocks, not rows", "backward", "static_cast<long long>(OWNERS) * ROWS;", "1;"),
    text(
        "rows that neighbour in a block",
        "late",
        "begin = static_cast<long long>(blockIdx.x) * ROWS;",
        "begin = blockIdx.x * 2 % 128 + blockIdx.x / 64;",
    ),
    text("row past the last not repeated", "backward", "row < rows ? row : rows - 1;", "row;"),
    text("columns: a row too many", "columns, rounds", "row < rows; row += OWNERS", "row <= rows; row += OWNERS"),
    text(
        "columns: rows of neighbours",
        "columns, rounds",
        "row = blockIdx.y; row < rows; row += OWNERS",
        "row = 2 * blockIdx.y; row < min(rows, 2ll * blockIdx.y + 2); row += 1",
    ),
    text("columns: return too early", "columns", "if (col >= D) return;\n    ", "if (col + CHUNK >= D) return;\n    "),
    text(
        "columns: the partial row of block x",
        "columns",
        "static_cast<long long>(blockIdx.y) * PITCH, sum_dy_acc",
        "static_cast<long long>(blockIdx.x) * PITCH, sum_dy_acc",
    ),
]

EARLY = [
    text(
        "kept columns are the first for all",
        "early",
        f"{WORD_OF.format('there')} (EARLY)",
        f"{WORD_OF.format('behind<RUN, JUMP>(j)')} (EARLY)",
    ),
    text(
        "kept columns past the end",
        "early",
        LOAD,
        LOAD.replace("owned && there < D", "true"),
    ),
    text("two words exchanged", "early", "ld.global.v2.u32 { %0, %1 }", "ld.global.v2.u32 { %1, %0 }"),
    text("kept columns of another slot", "early", "JUMP, true>(gamma_kept[k]", "JUMP, true>(gamma_kept[0]"),
    text("beta is kept for gamma", "early", "true>(gamma_kept[k], gamma_ptr", "true>(gamma_kept[k], beta_ptr"),
]
STRAND = "int first = strand; first * APART < filled; first += BATCH * STRANDS"
AT = "(first + b * STRANDS) * APART + a"
THERE = "static_cast<long long>(at < filled ? at : filled - 1) * PITCH"
TOTALS = "\n        __syncthreads();\n        const int column = threadIdx.x;"
# Left out: a shorter grid, fewer threads, wider or narrower tiles in a finish (its loops make up for it), and how many
# partial rows are on their way.
FINISH = [
    text("strands in runs", "few", AT, "first + b"),
    text("groups apart in runs", "apart", AT, "first + b * STRANDS + a * 30"),
    text("groups apart left out", "apart", "fold<Add, APART>(part[n][b][j])", "part[n][b][j][0]"),
    text(
        "groups apart in turn",
        "apart",
        "fold<Add, APART>(part[n][b][j])",
        "(part[n][b][j][0] + part[n][b][j][1] + part[n][b][j][2] + part[n][b][j][3])",
    ),
    text("strands overlap", "few", STRAND, STRAND.replace("= strand;", "= strand / 2;")),
    text("strands skip", "few", AT, "(first + b * (STRANDS + 1)) * APART + a"),
    text("one batch", "batches", STRAND, STRAND.replace("first += BATCH * STRANDS", "first += 99 * STRANDS")),
    text("batches overlap", "batches", STRAND, STRAND.replace("BATCH * STRANDS", "STRANDS")),
    text("batches skip", "batches", STRAND, STRAND.replace("BATCH * STRANDS", "(BATCH + 1) * STRANDS")),
    text("the last partial row left out", "few", "at < filled ? there", "at < filled - 1 ? there"),
    text("a partial row too many", "few", "at < filled ? there.items[j] : ABSENT", "there.items[j]"),
    text("an absent partial row is +0", "few of zeros", "? there.items[j] : ABSENT", "? there.items[j] : 0.0f"),
    text("absent partial rows read", "few", THERE, "static_cast<long long>(at) * PITCH"),
    text("partial rows at a distance of COLUMNS", "few", THERE, THERE.replace("PITCH", "32")),
    text("blocks rounded down", "backward", "(rows + PER_PARTIAL - 1) / PER_PARTIAL", "rows / PER_PARTIAL"),
    text(
        "blocks not limited",
        "rounds",
        "blocks < PARTIALS ? static_cast<int>(blocks) : PARTIALS",
        "static_cast<int>(blocks)",
    ),
    text("columns past the end read", "backward", "strand < STRANDS && first < D", "strand < STRANDS"),
    text("columns past the end stored", "backward", "column < COLUMNS && col < D", "column < COLUMNS"),
    text("a column not stored", "backward", "column < COLUMNS && col < D", "column < COLUMNS - 1 && col < D"),
    text("a strand left out", "few", "fold<Add, STRANDS>", "fold<Add, STRANDS - 1>"),
    text(
        "strands in runs of four",
        "few",
        "strands[s] = totals[(0 * STRANDS + s)",
        "strands[s] = totals[(0 * STRANDS + s % 4 * 4 + s / 4)",
    ),
    text(
        "the sums exchanged",
        "backward",
        "sum_dy_strands[s] = totals[(1 * STRANDS",
        "sum_dy_strands[s] = totals[(0 * STRANDS",
    ),
    text("the sums in one place", "backward", "totals[(n * STRANDS + strand)", "totals[(0 * STRANDS + strand)"),
    text("the first kind of partial rows twice", "backward", "(partials[n] + from)", "(partials[0] + from)"),
    text("columns abreast begin one apart", "abreast", "% LANES * ABREAST;", "% LANES;"),
    text("columns abreast in one place", "abreast", "COLUMNS + within + m", "COLUMNS + within"),
    text("columns abreast are the first", "abreast", "there.items[j] : ABSENT", "there.items[0] : ABSENT"),
    text("columns abreast past the end read", "abreast", "strand < STRANDS && first < D", "strand < STRANDS"),
    text("finish barrier gone", "backward", TOTALS, TOTALS.replace("__syncthreads();", "")),
    text("a tile at a distance of two grids", "one launch", "tile += gridDim.x", "tile += 2 * gridDim.x"),
    text("tiles overlap", "one launch", "tile * COLUMNS + column;", "tile * (COLUMNS - 1) + column;"),
    text(
        "strands of half a block",
        "one launch, strands",
        "strand += blockDim.x / LANES",
        "strand += blockDim.x / LANES + 1",
    ),
    text(
        "finish barrier behind a tile gone",
        "one launch",
        "        }\n        __syncthreads();\n    }\n}",
        "        }\n    }\n}",
    ),
]

RN16 = "cvt.rn.bf16.f32"
ROUNDING = [
    text("bf16 toward zero", "small", RN16, "cvt.rz.bf16.f32"),
    text("f16 toward zero", "most", "cvt.rn.f16.f32", "cvt.rz.f16.f32"),
    text("bf16 by hand: no tie to even", "ties, old arch", "+ (u >> 16 & 1u)", "+ 1u"),
    text("bf16 by hand: cut off", "small, old arch", "(u + 0x7fffu + (u >> 16 & 1u)) >> 16", "u >> 16"),
    text("bf16 by hand: NaN becomes infinite", "small, old arch", ": 0x7fffu)", ": 0x7f80u)"),
    text("f64 rounded twice", "double ties", "__double2float_rz(v)", "__double2float_rn(v)"),
    text("f64 cut off first", "double ties", "__float_as_uint(toward_zero) | lost", "__float_as_uint(toward_zero)"),
    text("f64 by way of f32 to f16", "double ties, f16", '"d"(v)', '"d"((double)(float)v)'),
    text("f64 to f16 toward zero", "double ties, f16", "cvt.rn.f16.f64", "cvt.rz.f16.f64"),
    text(
        "bf16 read from the lower half", "small", "static_cast<unsigned>(v.bits) << 16", "static_cast<unsigned>(v.bits)"
    ),
    Mutant("division that is not rounded", "small", ptx=(("div.rn.f32", "div.approx.f32", 2),)),
    Mutant("a root that is not rounded", "small", ptx=(("sqrt.rn.f32", "sqrt.approx.f32", 1),)),
    Mutant("subnormals flushed", "small", ptx=(("sub.rn.f32", "sub.ftz.f32", 16),)),
]


# ---- plans ----


# Left out: SLOTS one more (further slots are absent, the tree is the same), VEC halved and PREFETCH changed (how, not
# what), EXACT=1 where a row ends within a chunk (each term is guarded then), SEGMENT_SLOTS of one segment, D one less
# where an access begins before it.
CONSTANTS = {
    "small": {"D": [less, more], "CHUNK": [halved], "JUMP": [less, doubled], "THREADS": [halved, doubled],
              "SLOTS": [less, halved], "VEC": [doubled], "ROWS": [less, more, halved, doubled]},
    "groups": {"EXACT": [more], "ROWS": [halved], "THREADS": [halved, doubled]},
    "segments": {"SEGMENT_SLOTS": [halved, doubled, less, more], "SLOTS": [less], "THREADS": [halved]},
    "stream": {"SEGMENT": [halved, doubled], "SLOTS": [less], "THREADS": [halved, doubled], "VEC": [doubled]},
    "backward": {"ROWS": [halved, doubled], "D": [less, more], "PITCH": [less, doubled]},
    "late": {"OWNERS": [less, more, halved, doubled]},
}  # fmt: skip
FINISH_KERNEL = {
    "backward": {"D": [less, more], "SUMS": [less]},
    "rounds": {"PARTIALS": [less, halved], "STRANDS": [doubled]},
    "apart": {"APART": [halved, doubled], "PARTIALS": [halved]},
    "few": {"PITCH": [less, doubled], "PER_PARTIAL": [doubled], "STRANDS": [halved, less]},
}  # fmt: skip
COLUMN_KERNEL = {
    "columns": {"D": [halved, more], "PITCH": [less, doubled], "THREADS": [halved, doubled], "CHUNK": [halved],
                "VEC": [doubled]},
    "columns, rounds": {"OWNERS": [less, more, halved, doubled]},
}  # fmt: skip


def constants() -> list[Mutant]:
    """A mutant for each wrong value of a constant."""
    listed = []
    for role, table in (("rows", CONSTANTS), ("finish", FINISH_KERNEL), ("columns", COLUMN_KERNEL)):
        for subject, names in table.items():
            listed += [
                Mutant(f"{role}: {name} {edit.__name__}", subject, plan=constant(name, edit, role))
                for name, edits in names.items()
                for edit in edits
            ]
    return listed


def first_grid(**changes: Any) -> Callable[[Kernel], Any]:
    return lambda k: (replace(k.grid[0], **changes), k.grid[1])


def second_grid(**changes: Any) -> Callable[[Kernel], Any]:
    return lambda k: (k.grid[0], replace(k.grid[1], **changes))


def buffers(**changes: Callable[[int], int]) -> Callable[[Plan], Plan]:
    def edit(plan: Plan) -> Plan:
        smaller = (replace(b, **{n: f(getattr(b, n)) for n, f in changes.items()}) for b in plan.workspace)
        return replace(plan, workspace=tuple(smaller))

    return edit


def swapped(a: str, b: str, kind: str) -> Callable[[Kernel], tuple[Argument, ...]]:
    """The arguments of one kind that belong to two tensors exchanged: each gets the other's."""
    other = {a: b, b: a}
    return lambda k: tuple(
        replace(x, tensor=other[x.tensor]) if x.kind == kind and x.tensor in other else x for x in k.arguments
    )


def without_statement(name: str) -> Callable[[Kernel], Any]:
    """The phases without the statements that begin with ``name``; one of them has to be there."""

    def phases(k: Kernel) -> Any:
        return tuple(
            replace(
                p,
                statements=tuple(s for s in p.statements if not s.text.startswith(name)),
                after=tuple(s for s in p.after if not s.text.startswith(name)),
            )
            for p in k.phases
        )

    return phases


def without_field(name: str, number: int) -> Callable[[Kernel], Any]:
    return lambda k: tuple(replace(p, **{name: getattr(p, name)[:-1]}) if p.number == number else p for p in k.phases)


def plan(name: str, subject: str, role: str, **changes: Callable[[Kernel], Any]) -> Mutant:
    return Mutant(name, subject, plan=in_kernel(role, **changes))


PLANS = [
    plan(
        "a statement dropped: a term",
        "small",
        "rows",
        phases=without_statement("if (behind<RUN, JUMP>(i) < D - col) mean_sum"),
    ),
    plan("a statement dropped: a definition", "small", "rows", phases=without_statement("const float xc")),
    plan("a statement dropped: a store", "small", "rows", phases=without_statement("y_out")),
    plan("a statement dropped: a column", "backward", "rows", phases=without_statement("if (live) sum_dy_acc")),
    plan("a statement dropped: a result", "backward", "finish", phases=without_statement("dbeta_ptr")),
    plan("a row result dropped", "small", "rows", phases=without_field("row_outputs", 1)),
    plan("a row result handed on dropped", "columns", "rows", phases=without_field("row_outputs", 1)),
    plan("an output dropped", "most", "rows", phases=without_field("outputs", 1)),
    plan("inputs exchanged", "most", "rows", arguments=swapped("x", "z", "input")),
    plan("outputs exchanged", "backward", "finish", arguments=swapped("dgamma", "dbeta", "output")),
    plan(
        "partial sums exchanged",
        "backward",
        "finish",
        arguments=swapped("sum_dy_partial", "sum_dy_xhat_partial", "workspace"),
    ),
    plan("statistics exchanged", "columns", "columns", arguments=swapped("mean", "rstd", "workspace")),
    plan("strides exchanged: inputs", "most", "rows", arguments=swapped("x", "z", "stride")),
    plan("strides exchanged: input, output", "small", "rows", arguments=swapped("x", "y", "stride")),
    plan("strides exchanged: backward", "backward", "rows", arguments=swapped("dy", "dx", "stride")),
    plan("too many rows a block in the grid", "small", "rows", grid=first_grid(per=13)),
    plan("half of the blocks", "small", "rows", grid=first_grid(per=16)),
    plan("a grid that is not limited", "late", "rows", grid=first_grid(limit=None)),
    plan("a grid limited too low", "late", "rows", grid=first_grid(limit=125)),
    plan("a column grid one short", "columns", "columns", grid=first_grid(fixed=16)),
    plan("a column grid that is not limited", "columns, rounds", "columns", grid=second_grid(limit=None)),
    plan("a column grid of every second row", "columns", "columns", grid=second_grid(per=2)),
    plan("no finish block", "backward", "finish", grid=first_grid(fixed=0)),
    plan("half of a block", "small", "rows", block=lambda k: k.block // 2),
    plan("two blocks in one", "small", "rows", block=lambda k: 2 * k.block),
    plan("half of a streaming block", "stream", "rows", block=lambda k: k.block // 2),
    plan("half of a column block", "columns", "columns", block=lambda k: k.block // 2),
    plan("half of the scratch", "groups", "rows", shared=lambda k: k.shared // 2),
    plan("half of the scratch: groups", "backward", "rows", shared=lambda k: k.shared // 2),
    plan("scratch one short", "stream", "rows", shared=lambda k: k.shared - 1),
    plan("too few sums a phase", "groups of two sums", "rows", most=lambda k: 1),
    plan("no finish without rows", "backward, no rows", "finish", always=lambda k: False),
    Mutant("workspace halved", "rounds", plan=buffers(fixed=halved)),
    Mutant("workspace one short", "rounds", plan=buffers(fixed=less)),
    Mutant("workspace for statistics gone", "columns", plan=buffers(per_row=halved)),
    Mutant("sums in f32", "double", (("using real = double;", "using real = float;", 1),)),
]

# Left out: a grid one long where the kernel asks for its rows or columns (what lies beyond stores nothing).
LAUNCHES = [
    Mutant(
        f"{role} grid {dx:+} x {dy:+}",
        subject,
        grid=lambda k, n, role=role, dx=dx, dy=dy: (
            (k.grid[0](n) + dx, k.grid[1](n) + dy) if k.name.endswith(f"__{role}") else (k.grid[0](n), k.grid[1](n))
        ),
    )
    for subject, role, dx, dy in [
        ("small", "rows", -1, 0),
        ("block", "rows", -1, 0),
        ("block", "rows", 1, 0),
        ("stream", "rows", 1, 0),
        ("small", "rows", 0, 1),
        ("backward", "rows", -1, 0),
        ("late", "rows", 1, 0),
        ("columns", "columns", -1, 0),
        ("columns", "columns", 0, -1),
        ("columns, rounds", "columns", 0, 1),
        ("columns", "rows", -1, 0),
    ]
]


# ---- passes ----


def after(name: str, change: Callable[[Graph], Graph]) -> Patch:
    """The pass ``name`` with a change to what it returns."""
    whole: Callable[..., Graph] = getattr(passes, name)
    return lambda: patch.object(passes, name, lambda *args: change(whole(*args)))


def instead(name: str, other: Callable[..., Graph]) -> Patch:
    return lambda: patch.object(passes, name, other)


def each(change: Callable[[Eqn], Eqn]) -> Callable[[Graph], Graph]:
    return lambda g: replace(g, eqns=tuple(map(change, g.eqns)))


def merged(a: str, b: str) -> Callable[[Graph], Graph]:
    """Uses of ``b`` become uses of ``a``, defined before it."""
    return lambda g: substitute(g, {g.values()[b]: g.values()[a]})


def unsigned(graph: Graph) -> Graph:
    """Every negated value by the value."""
    return substitute(graph, {e.out: e.args[0] for e in graph.eqns if e.op == "neg"})


def permuted(op: str, *order: int) -> Callable[[Graph], Graph]:
    return each(lambda e: replace(e, args=tuple(e.args[n] for n in order)) if e.op == op else e)


def renamed(op: str, new: str) -> Callable[[Graph], Graph]:
    return each(lambda e: replace(e, op=new) if e.op == op else e)


def facts(**changes: Callable[[int], int]) -> Patch:
    """Lowering sees another chunk, segment, ... than the graph spells."""
    whole = LOWER.problem

    def other(graph: Graph, d: int) -> Any:
        found = whole(graph, d)
        return replace(found, **{n: f(getattr(found, n)) for n, f in changes.items()})

    return lambda: patch.object(LOWER, "problem", other)


PASSES = [
    Mutant("fma without its sign", "backward", patch=after("place_fma", unsigned)),
    Mutant("fma with factor for addend", "small", patch=after("place_fma", permuted("fma", 0, 2, 1))),
    Mutant("no fma", "groups", patch=instead("place_fma", lambda g: g)),
    Mutant("subtraction turned round", "small", patch=after("cse", permuted("sub", 1, 0))),
    Mutant("cse merges two means", "backward", patch=after("cse", merged("mean_dy_gamma", "mean_dy_gamma_xhat"))),
    Mutant("cse merges x and its centred", "small", patch=after("cse", merged("x32", "xc"))),
    Mutant("cse merges the column sums", "backward", patch=after("cse", merged("sum_dy_xhat", "sum_dy"))),
    Mutant("a mean over D + 1", "small", patch=instead("decompose", lambda g, d, p=passes.decompose: p(g, d + 1))),
    Mutant("a sum for a mean", "small", patch=after("cse", renamed("reduce_mean", "reduce_sum"))),
    Mutant("a root for its reciprocal", "small", patch=after("cse", renamed("rsqrt", "sqrt"))),
    Mutant("a maximum for a sum", "most", patch=after("cse", renamed("maximum", "add"))),
    Mutant("chunk halved", "small", patch=facts(chunk=halved)),
    Mutant("chunk doubled", "small", patch=facts(chunk=doubled)),
    Mutant("segment halved", "segments", patch=facts(segment=halved)),
    Mutant("segment doubled", "segments", patch=facts(segment=doubled)),
    Mutant("segment halved: stream", "stream", patch=facts(segment=halved)),
    Mutant("blocks halved", "rounds", patch=facts(blocks=halved)),
    Mutant("a block less", "columns, rounds", patch=facts(blocks=less)),
    Mutant("sums of another dtype", "double", patch=lambda: patch.object(LOWER, "_real", lambda g: F32)),
    Mutant("terms not guarded", "small", patch=lambda: patch.object(LOWER._Lowering, "_guard", lambda s: "")),
]

# Undefined on a GPU, and values come out right all the same: only the executor can tell.
COLLECTIVES = [
    text("shuffle among too few", "small", "0xffffffffu, part[n]", "0x7fffffffu, part[n]"),
    text("named barrier number", "groups", '"r"(group + 1)', '"r"(group + 16)'),
]

CLASSES = {
    "memory": MEMORY, "rows": ROWS, "early": EARLY, "sums": SUMS, "columns": COLUMNS, "finish": FINISH,
    "rounding": ROUNDING,
    "constants": constants(), "plans": PLANS, "launches": LAUNCHES, "passes": PASSES, **STAGED_CLASSES,
}  # fmt: skip
CASES = [pytest.param(m, id=f"{kind}: {m.name}: {m.subject}") for kind, listed in CLASSES.items() for m in listed]
CASES += [pytest.param(m, id=f"collectives: {m.name}") for m in COLLECTIVES]


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_twin_is_clean(name: str) -> None:
    t, subject = twin(name), SUBJECTS[name]
    outcome = run_plan(t.plan, t.inputs, arch=subject.arch, rows=subject.rows, strides=t.strides)
    assert not outcome.findings
    assert all(same_bits(outcome.results[n], v).all() for n, v in t.expected.items())


@pytest.mark.parametrize("mutant", CASES)
def test_the_mutant_is_killed(mutant: Mutant) -> None:
    assert killer(mutant), f"{mutant.name} survives on '{mutant.subject}'"


def test_there_are_enough_of_them() -> None:
    listed = [(m.name, m.subject) for mutants in CLASSES.values() for m in mutants]
    assert len(set(listed)) == len(listed) >= 200, Counter(listed).most_common(1)
