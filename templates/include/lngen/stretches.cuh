// stretches.cuh: column sums by sets of rows, such as the tokens of a sample: each set is cut into stretches.
//
//     using Cut = Stretch</* rows */ 64, /* least */ 16, /* long */ 4096, /* groups */ 4>;
//     StretchRows<Row, GRID, Cut> stream{rows, per_set};
//     while (stream.next()) {
//         ... add row stream.row ...
//         if (stream.ends()) { ... store the partial row stream.number(), begin anew ... }
//     }
//     const float sum = stretch_total<Add<float>, LEADING, INTERLEAVE>(partials, stretches_of_a_set);
//
// A block takes whole stretches, any of them, so the sums of a set depend on its own rows alone.
#ifndef LNGEN_STRETCHES_CUH
#define LNGEN_STRETCHES_CUH

#include "lngen/row_place.cuh"
#include "lngen/row_reduce.cuh"

namespace lngen {

// How a set is cut: a set of LONG rows or more has stretches of ROWS rows; a quarter of them has half of that, and so on
// down to LEAST; a stretch is raised to whole GROUPS.
template <int ROWS, int LEAST, int LONG, int GROUPS> struct Stretch {
    static __device__ __forceinline__ long long rows(long long per_set) {
        int rows = ROWS, length = LONG;
        while (rows > LEAST && per_set < length) rows /= 2, length /= 4;
        return (rows + GROUPS - 1) / GROUPS * GROUPS;
    }
    static __device__ __forceinline__ long long count(long long per_set) {
        return (per_set + rows(per_set) - 1) / rows(per_set);
    }
};

// The rows of a block in a persistent grid: every GRID-th stretch, of which row i is that of row group i % ROWS. Nothing
// is divided on the way from one to the next: GRID stretches are so many sets, and so many stretches of another one.
template <typename Row, int GRID, typename Cut> struct StretchRows {
    const long long rows, per_set;
    const long long length = Cut::rows(per_set), of_a_set = Cut::count(per_set);
    const long long sets_on = GRID / of_a_set, stretches_on = GRID % of_a_set;
    long long set = static_cast<long long>(Row::grid_index()) / of_a_set - sets_on;  // that of the current stretch
    long long stretch = static_cast<long long>(Row::grid_index()) % of_a_set - stretches_on;  // its number in the set
    long long block_row = 0, end = 0;  // the row of the block's first row group, and where the stretch ends
    long long row = 0;
    __device__ __forceinline__ bool next() {
        block_row += Row::ROWS;
        if (block_row >= end) {
            set += sets_on;
            stretch += stretches_on;
            if (stretch >= of_a_set) ++set, stretch -= of_a_set;
            const long long last = (set + 1) * per_set;
            block_row = set * per_set + stretch * length;
            end = block_row + length < last ? block_row + length : last;
        }
        row = block_row + Row::group();
        return block_row < rows;
    }
    // The number of the current stretch among those of all sets.
    __device__ __forceinline__ long long number() const { return set * of_a_set + stretch; }
    // The place of a row of the current stretch.
    __device__ __forceinline__ RowPlace place(long long r) const { return RowPlace(r, per_set, set); }
    __device__ __forceinline__ bool has_row() const { return Row::ROWS == 1 || row < end; }
    __device__ __forceinline__ long long row_or_last(long long r) const { return r < end ? r : end - 1; }
    // True in the last rows of a stretch.
    __device__ __forceinline__ bool ends() const { return block_row + Row::ROWS >= end; }
    // The row after the current one; behind the last, the last; of a block without stretches, the number of rows.
    __device__ __forceinline__ long long following() const {
        StretchRows ahead = *this;
        return ahead.next() ? ahead.row_or_last(ahead.row) : end > 0 ? row_or_last(row) : rows;
    }
};

// The sum of `count` partial rows in one column: STRANDS partial sums, which are tree-reduced. So many loads are in
// flight together.
template <typename Op, int LEADING, int STRANDS, typename Real>
__device__ __forceinline__ Real strands_of_stretches(const Real* partials, long long count) {
    constexpr int IN_FLIGHT = STRANDS > 16 ? STRANDS : 16 / STRANDS * STRANDS;
    Real strands[STRANDS];
    for (int s = 0; s < STRANDS; ++s) strands[s] = Op::neutral();
    #pragma unroll 1
    for (long long first = 0; first < count; first += IN_FLIGHT) {
        Real loaded[IN_FLIGHT];
        #pragma unroll
        for (int n = 0; n < IN_FLIGHT; ++n) {
            if (first + n < count) loaded[n] = __ldcg(partials + (first + n) * LEADING);
        }
        #pragma unroll
        for (int n = 0; n < IN_FLIGHT; ++n) {
            if (first + n < count) strands[n % STRANDS] = Op::of(strands[n % STRANDS], loaded[n]);
        }
    }
    return tree_reduce<Op, STRANDS>(strands);
}

// The same in INTERLEAVE partial sums where each has four terms at least, else in a quarter of that many.
template <typename Op, int LEADING, int INTERLEAVE, typename Real>
__device__ __forceinline__ Real stretch_total(const Real* partials, long long count) {
    constexpr int FEW = INTERLEAVE / 4 > 0 ? INTERLEAVE / 4 : 1;
    if (count >= 4 * INTERLEAVE) return strands_of_stretches<Op, LEADING, INTERLEAVE>(partials, count);
    return strands_of_stretches<Op, LEADING, FEW>(partials, count);
}

}  // namespace lngen

#endif
