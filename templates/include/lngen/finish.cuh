// finish.cuh: the partial column sums of all blocks, added in one order.
//
//     interleaved_sums<Add<float>, LEADING, INTERLEAVE, BATCH, ROWS_PER_TERM>(sums, partials, from, partial_rows);
//     const float total = column_total<Add<float>, INTERLEAVE, COLUMNS>(shared, n, column, rows);
//
// Interleaved partial sums are tree-reduced, as in segments.cuh.
#ifndef LNGEN_FINISH_CUH
#define LNGEN_FINISH_CUH

#include "lngen/row_reduce.cuh"
#include "lngen/vector.cuh"

namespace lngen {

// Reads through L2, because other blocks write there.
struct L2Load {
    template <typename W> static __device__ __forceinline__ W read(const W* p) { return __ldcg(p); }
};

// Reduces the terms `from`, `from` + INTERLEAVE, ..., BATCH of them loaded at a time, in COLUMNS neighbouring columns
// of each of SUMS partial sums. A term is the tree reduction of ROWS_PER_TERM rows of partial sums, of which there are
// `partial_rows`; rows past the last are neutral. LEADING is the leading dimension of partial sums.
template <typename Op, int LEADING, int INTERLEAVE, int BATCH, int ROWS_PER_TERM, int COLUMNS, int SUMS,
          typename Real>
__device__ __forceinline__ void interleaved_sums(
    Real (&sums)[SUMS][COLUMNS], const Real* const (&partials)[SUMS], int from, int partial_rows) {
    for (int n = 0; n < SUMS; ++n) {
        for (int j = 0; j < COLUMNS; ++j) sums[n][j] = Op::neutral();
    }
    #pragma unroll 1
    for (int first = from; first * ROWS_PER_TERM < partial_rows; first += BATCH * INTERLEAVE) {
        Real parts[SUMS][BATCH][COLUMNS][ROWS_PER_TERM];
        for (int b = 0; b < BATCH; ++b) {
            for (int e = 0; e < ROWS_PER_TERM; ++e) {
                const int row = (first + b * INTERLEAVE) * ROWS_PER_TERM + e;
                const int valid = row < partial_rows ? row : partial_rows - 1;
                const long long offset = static_cast<long long>(valid) * LEADING;
                for (int n = 0; n < SUMS; ++n) {
                    Access<Real, COLUMNS> unit;
                    unit.read(partials[n] + offset, L2Load{});
                    for (int j = 0; j < COLUMNS; ++j) {
                        parts[n][b][j][e] = row < partial_rows ? unit[j] : Op::neutral();
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

// The total of kind `n` in a column of a tile of COLUMNS: the tree reduction of its INTERLEAVE partial sums.
template <typename Op, int INTERLEAVE, int COLUMNS, typename Real>
__device__ __forceinline__ Real column_total(const Real* sums, int n, int column, long long rows) {
    Real parts[INTERLEAVE];
    for (int s = 0; s < INTERLEAVE; ++s) parts[s] = sums[(n * INTERLEAVE + s) * COLUMNS + column];
    return rows == 0 ? Op::of_nothing() : tree_reduce<Op, INTERLEAVE>(parts);
}

}  // namespace lngen

#endif
