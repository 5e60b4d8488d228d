// stretches.cuh: column sums by sets of rows, such as the tokens of a sample: each set is cut into stretches.
//
//     using Cut = Stretch</* rows */ 64, /* least */ 16, /* long */ 4096, /* groups */ 4>;
//     StretchRows<Row, GRID, Cut> stream{rows, per_set};
//     while (stream.next_stretch()) {
//         while (stream.next()) { ... add row stream.row ... }
//         ... store the partial row stream.at.number ...
//     }
//     parts[threadIdx.x] = part_of_stretches<Add<float>, Finish>(partials, stretches_of_a_set);
//     __syncthreads();
//     const float sum = stretch_total<Add<float>, Finish>(parts);
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

// The rows of a block in a persistent grid: those of every GRID-th stretch, of which row i is that of row group i % ROWS.
// Place is where a block is: the stretch among those of all sets, its set, the row of the block's first row group, and
// where the stretch ends.
template <typename Row, int GRID, typename Cut> struct StretchRows {
    struct Place { long long number, set, block_row, end; };
    const long long rows, per_set;
    Place at;
    long long row = 0;
    __device__ __forceinline__ StretchRows(long long rows, long long per_set, Place at)
        : rows(rows), per_set(per_set), at(at) {}
    __device__ __forceinline__ StretchRows(long long rows, long long per_set)
        : StretchRows(rows, per_set, Place{static_cast<long long>(Row::grid_index()) - GRID, 0, 0, 0}) {}

    // Goes to the next stretch, before its first rows; false where there is none.
    __device__ __forceinline__ bool next_stretch() {
        const long long length = Cut::rows(per_set), of_a_set = Cut::count(per_set);
        at.number += GRID;
        const long long set = at.number / of_a_set, first_of_set = set * per_set;
        if (first_of_set >= rows) return false;
        const long long first = first_of_set + (at.number - set * of_a_set) * length;
        const long long most = first + length, last = first_of_set + per_set;
        at = Place{at.number, set, first - Row::ROWS, most < last ? most : last};
        return true;
    }
    // Goes to the next rows of the stretch; false behind the last.
    __device__ __forceinline__ bool next() {
        at.block_row += Row::ROWS;
        row = at.block_row + Row::group();
        return at.block_row < at.end;
    }
    // Goes to the next rows of any stretch.
    __device__ __forceinline__ bool next_of_all() {
        return (at.block_row + Row::ROWS < at.end || next_stretch()) && next();
    }
    __device__ __forceinline__ bool has_row() const { return Row::ROWS == 1 || row < at.end; }
    __device__ __forceinline__ long long row_or_last(long long r) const { return r < at.end ? r : at.end - 1; }
    // The place of a row of the stretch, and of the current one, or the last.
    __device__ __forceinline__ RowPlace place(long long r) const { return RowPlace(r, per_set, at.set); }
    __device__ __forceinline__ RowPlace place() const { return place(row_or_last(row)); }
    // The next row of a row group in the stretch, or its last one.
    __device__ __forceinline__ long long following() const {
        return row_or_last(at.block_row + Row::ROWS + Row::group());
    }
    // The first row of a row group; of a block without stretches, the number of rows.
    __device__ __forceinline__ long long first_row() const {
        StretchRows first(rows, per_set, at);
        return first.next_of_all() ? first.row_or_last(first.row) : rows;
    }
};

// How the totals of COLUMNS columns of a set are added by a block: INTERLEAVE partial sums of each, or a quarter of that
// many where they would have fewer than four terms. THREADS threads of a column have them in turn, so the first levels of
// the tree over them are within a thread.
template <int LEADING_, int INTERLEAVE_, int THREADS_, int COLUMNS_> struct SetFinish {
    static constexpr int LEADING = LEADING_, INTERLEAVE = INTERLEAVE_, THREADS = THREADS_, COLUMNS = COLUMNS_;
    static constexpr int FEW = INTERLEAVE / 4 > 0 ? INTERLEAVE / 4 : 1;
    static_assert(THREADS == 1 || THREADS == FEW, "a thread has one of few partial sums");
    static __device__ __forceinline__ int column() { return threadIdx.x % COLUMNS; }
    static __device__ __forceinline__ int thread() { return threadIdx.x / COLUMNS; }  // of those of a column
};

// What a thread adds of `count` partial rows in its column, in STRANDS partial sums, which are tree-reduced. So many loads
// are in flight together.
template <typename Op, typename Finish, int STRANDS, typename Real>
__device__ __forceinline__ Real strands_of_stretches(const Real* partials, long long count) {
    constexpr int IN_FLIGHT = STRANDS > 16 ? STRANDS : 16 / STRANDS * STRANDS, THREADS = Finish::THREADS;
    Real strands[STRANDS];
    for (int s = 0; s < STRANDS; ++s) strands[s] = Op::neutral();
    #pragma unroll 1
    for (long long first = Finish::thread(); first < count; first += IN_FLIGHT * THREADS) {
        Real loaded[IN_FLIGHT];
        #pragma unroll
        for (int n = 0; n < IN_FLIGHT; ++n) {
            const long long row = first + n * THREADS;
            if (row < count) loaded[n] = __ldcg(partials + row * Finish::LEADING);
        }
        #pragma unroll
        for (int n = 0; n < IN_FLIGHT; ++n) {
            if (first + n * THREADS < count) strands[n % STRANDS] = Op::of(strands[n % STRANDS], loaded[n]);
        }
    }
    return tree_reduce<Op, STRANDS>(strands);
}

// The part of a thread in the sum of `count` partial rows in its column, for stretch_total.
template <typename Op, typename Finish, typename Real>
__device__ __forceinline__ Real part_of_stretches(const Real* partials, long long count) {
    constexpr int THREADS = Finish::THREADS, MANY = Finish::INTERLEAVE / THREADS, FEW = Finish::FEW / THREADS;
    if (count >= 4 * Finish::INTERLEAVE) return strands_of_stretches<Op, Finish, MANY>(partials, count);
    return strands_of_stretches<Op, Finish, FEW>(partials, count);
}

// The tree over what the threads of a column have; `parts` has a place for each thread of the block, and is shared
// between two barriers.
template <typename Op, typename Finish, typename Real> __device__ __forceinline__ Real stretch_total(const Real* parts) {
    Real own[Finish::THREADS];
    for (int t = 0; t < Finish::THREADS; ++t) own[t] = parts[t * Finish::COLUMNS + Finish::column()];
    return tree_reduce<Op, Finish::THREADS>(own);
}

}  // namespace lngen

#endif
