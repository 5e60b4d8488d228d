// finish.cuh: the partial column sums of all blocks, added in one order.
//
//     using Finish = ColumnFinish<D, LEADING, INTERLEAVE, COLUMNS, COLUMNS_PER_THREAD, BATCH, ROWS_PER_TERM>;
//     share_totals<Add<float>, Finish>(totals, tile, partials_per_column<ROWS_PER_BLOCK, BLOCKS>(rows), dgamma_partials);
//     __syncthreads();
//     const float sum = column_total<Add<float>, Finish>(totals, 0, rows);  // of column tile * COLUMNS + threadIdx.x
//
// A block completes a tile of COLUMNS columns at a time. Interleaved partial sums of a column are added by different
// threads, shared, and tree-reduced, as in segments.cuh. Loads are ld.global.cg (L2Load).
#ifndef LNGEN_FINISH_CUH
#define LNGEN_FINISH_CUH

#include "lngen/row_reduce.cuh"
#include "lngen/vector.cuh"

namespace lngen {

// How the partial sums of D columns are added. LEADING: from a row of partial sums to the next; INTERLEAVE: partial
// sums of a column; a thread has COLUMNS_PER_THREAD neighbouring columns and loads BATCH terms of each at a time; a
// term is the tree reduction of ROWS_PER_TERM rows of partial sums.
template <int D_, int LEADING_, int INTERLEAVE_, int COLUMNS_, int COLUMNS_PER_THREAD_, int BATCH_, int ROWS_PER_TERM_>
struct ColumnFinish {
    static constexpr int D = D_, LEADING = LEADING_, INTERLEAVE = INTERLEAVE_, COLUMNS = COLUMNS_;
    static constexpr int COLUMNS_PER_THREAD = COLUMNS_PER_THREAD_, BATCH = BATCH_, ROWS_PER_TERM = ROWS_PER_TERM_;
};

// The partial sums of each column: one for each block of ROWS_PER_BLOCK rows, at most BLOCKS.
template <int ROWS_PER_BLOCK, int BLOCKS> __device__ __forceinline__ int partials_per_column(long long rows) {
    const long long blocks = (rows + ROWS_PER_BLOCK - 1) / ROWS_PER_BLOCK;
    return blocks < BLOCKS ? static_cast<int>(blocks) : BLOCKS;
}

// Reads from L2: the L1 cache may hold what was there before other blocks wrote.
struct L2Load {
    template <typename W> static __device__ __forceinline__ W read(const W* p) { return __ldcg(p); }
};

// Reduces the terms `from`, `from` + INTERLEAVE, ... in neighbouring columns of each of SUMS column sums. A column has
// `count` partial sums; those past the last are neutral.
template <typename Op, typename Finish, int SUMS, typename Real>
__device__ __forceinline__ void interleaved_sums(
    Real (&sums)[SUMS][Finish::COLUMNS_PER_THREAD], const Real* const (&partials)[SUMS], int from, int count) {
    constexpr int COLUMNS = Finish::COLUMNS_PER_THREAD, BATCH = Finish::BATCH, INTERLEAVE = Finish::INTERLEAVE;
    constexpr int ROWS_PER_TERM = Finish::ROWS_PER_TERM;
    for (int n = 0; n < SUMS; ++n) {
        for (int j = 0; j < COLUMNS; ++j) sums[n][j] = Op::neutral();
    }
    #pragma unroll 1
    for (int first = from; first * ROWS_PER_TERM < count; first += BATCH * INTERLEAVE) {
        Real parts[SUMS][BATCH][COLUMNS][ROWS_PER_TERM];
        for (int b = 0; b < BATCH; ++b) {
            for (int e = 0; e < ROWS_PER_TERM; ++e) {
                const int row = (first + b * INTERLEAVE) * ROWS_PER_TERM + e;
                const int valid = row < count ? row : count - 1;
                const long long offset = static_cast<long long>(valid) * Finish::LEADING;
                for (int n = 0; n < SUMS; ++n) {
                    Access<Real, COLUMNS> unit;
                    unit.read(partials[n] + offset, L2Load{});
                    for (int j = 0; j < COLUMNS; ++j) {
                        parts[n][b][j][e] = row < count ? unit[j] : Op::neutral();
                    }
                }
            }
        }
        for (int n = 0; n < SUMS; ++n) {
            for (int b = 0; b < BATCH; ++b) {
                for (int j = 0; j < COLUMNS; ++j) {
                    sums[n][j] = Op::of(sums[n][j], tree_reduce<Op, ROWS_PER_TERM>(parts[n][b][j]));
                }
            }
        }
    }
}

// Shares the interleaved sums of a tile of columns: (n * INTERLEAVE + from) * COLUMNS + column is that of sum n.
template <typename Op, typename Finish, typename Real, typename... Partials>
__device__ __forceinline__ void share_totals(Real* totals, int tile, int count, const Partials*... partials) {
    constexpr int SUMS = sizeof...(partials), EACH = Finish::COLUMNS_PER_THREAD, COLUMNS = Finish::COLUMNS;
    constexpr int THREADS = COLUMNS / EACH;  // of a tile
    const int column = threadIdx.x % THREADS * EACH, first = tile * COLUMNS + column;
    for (int from = threadIdx.x / THREADS; from < Finish::INTERLEAVE && first < Finish::D;
         from += blockDim.x / THREADS) {
        const Real* const of_thread[SUMS] = {(partials + first)...};
        Real sums[SUMS][EACH];
        interleaved_sums<Op, Finish>(sums, of_thread, from, count);
        for (int n = 0; n < SUMS; ++n) {
            for (int e = 0; e < EACH; ++e) totals[(n * Finish::INTERLEAVE + from) * COLUMNS + column + e] = sums[n][e];
        }
    }
}

// The total of sum n in the column of this thread: the tree reduction of its interleaved sums.
template <typename Op, typename Finish, typename Real>
__device__ __forceinline__ Real column_total(const Real* totals, int n, long long rows) {
    Real parts[Finish::INTERLEAVE];
    for (int s = 0; s < Finish::INTERLEAVE; ++s) {
        parts[s] = totals[(n * Finish::INTERLEAVE + s) * Finish::COLUMNS + threadIdx.x];
    }
    return rows == 0 ? Op::of_nothing() : tree_reduce<Op, Finish::INTERLEAVE>(parts);
}

}  // namespace lngen

#endif
