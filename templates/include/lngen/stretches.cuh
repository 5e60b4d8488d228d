// stretches.cuh: column sums by sets of rows, such as the tokens of a sample: each set is cut into stretches.
//
//     using Cut = Stretch</* rows */ 64, /* least */ 16, /* long */ 4096, /* groups */ 4>;
//     StretchRows<Row, GRID, Cut> stream{rows, per_set};
//     while (stream.next_stretch()) {
//         while (stream.next()) { ... add row stream.row ... }
//         ... store the partial row stream.at.number ...
//     }
//     using Sum = SetSum<Add<float>, Finish, float>;
//     const Sum sum{partials, parts}, other{other_partials, other_parts};
//     add_stretches<Finish>(stretches_of_a_set, sum, other);
//     __syncthreads();
//     const float total = sum.total();
//
// A block takes whole stretches, any of them, so the sums of a set depend on its own rows alone.
#ifndef LNGEN_STRETCHES_CUH
#define LNGEN_STRETCHES_CUH

#include "lngen/finish.cuh"
#include "lngen/row_place.cuh"
#include "lngen/row_reduce.cuh"
#include "lngen/vector.cuh"

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

// How a block adds the totals of a set: THREADS threads have the same EACH neighbouring columns, and LANES of them are side
// by side. There are INTERLEAVE partial sums of a column, or a quarter of that many where they would have fewer than four
// terms. The threads of a column have them in turn, so the first levels of the tree over them are within a thread.
template <int LEADING_, int INTERLEAVE_, int THREADS_, int LANES_, int EACH_> struct SetFinish {
    static constexpr int LEADING = LEADING_, INTERLEAVE = INTERLEAVE_, THREADS = THREADS_, LANES = LANES_, EACH = EACH_;
    static constexpr int FEW = INTERLEAVE / 4 > 0 ? INTERLEAVE / 4 : 1;
    static_assert(THREADS == 1 || THREADS == FEW, "a thread has one of few partial sums");
    static_assert(EACH <= THREADS, "each column has a thread that completes it");
    static __device__ __forceinline__ int thread() { return threadIdx.x / LANES; }  // of those with the same columns
    static __device__ __forceinline__ int first_column() {
        return (static_cast<int>(blockIdx.x) * LANES + static_cast<int>(threadIdx.x) % LANES) * EACH;
    }
};

// A column sum of a set: where its partial rows begin in a thread's columns, and a place for what each thread adds. It is
// in shared memory, between two barriers.
template <typename Op, typename Finish, typename Real> struct SetSum {
    static constexpr int BLOCK = Finish::THREADS * Finish::LANES;
    const Real* partials;
    Real* parts;

    // What a thread adds of partial rows, ROWS of them at a time, in STRANDS partial sums, which are tree-reduced. Loads
    // precede additions, so that those of all sums are in flight together.
    template <int STRANDS> struct Strands {
        static constexpr int ROWS = STRANDS > 8 ? STRANDS : 8 / STRANDS * STRANDS, STEP = ROWS * Finish::THREADS;
        const SetSum& sum;
        Vec<Real, Finish::EACH> loaded[ROWS];
        Real strands[Finish::EACH][STRANDS];
        __device__ __forceinline__ explicit Strands(const SetSum& sum) : sum(sum) {
            for (auto& column : strands) {
                for (Real& strand : column) strand = Op::neutral();
            }
        }
        __device__ __forceinline__ void load(long long first, int left) {
            const Real* row = sum.partials + first * Finish::LEADING;
            #pragma unroll
            for (int n = 0; n < ROWS; ++n) {
                Access<Real, Finish::EACH> columns = {};
                const Real* from = row + n * Finish::THREADS * Finish::LEADING;
                if (n * Finish::THREADS < left) columns.read(from, L2Load{});
                for (int c = 0; c < Finish::EACH; ++c) loaded[n][c] = columns[c];
            }
        }
        __device__ __forceinline__ void add(int left) {
            #pragma unroll
            for (int n = 0; n < ROWS; ++n) {
                for (int c = 0; c < Finish::EACH; ++c) {
                    Real& strand = strands[c][n % STRANDS];
                    if (n * Finish::THREADS < left) strand = Op::of(strand, loaded[n][c]);
                }
            }
        }
        __device__ __forceinline__ void share() {
            for (int c = 0; c < Finish::EACH; ++c) {
                sum.parts[c * BLOCK + static_cast<int>(threadIdx.x)] = tree_reduce<Op, STRANDS>(strands[c]);
            }
        }
    };

    // The total of the column that this thread completes: of those that its threads share, the one with its number.
    __device__ __forceinline__ Real total() const {
        Real own[Finish::THREADS];
        const int lane = static_cast<int>(threadIdx.x) % Finish::LANES;
        for (int t = 0; t < Finish::THREADS; ++t) own[t] = parts[Finish::thread() * BLOCK + t * Finish::LANES + lane];
        return tree_reduce<Op, Finish::THREADS>(own);
    }
};

// Adds `count` partial rows of all sums, as many rows at a time as are in flight together.
template <typename Finish, typename... Strands>
__device__ __forceinline__ void add_strands(long long count, Strands... sums) {
    constexpr int STEPS[] = {Strands::STEP...};
    #pragma unroll 1
    for (long long first = Finish::thread(); first < count; first += STEPS[0]) {
        const int left = count - first < STEPS[0] ? static_cast<int>(count - first) : STEPS[0];
        (sums.load(first, left), ...);
        (sums.add(left), ...);
    }
    (sums.share(), ...);
}

// Adds the `count` partial rows of sums of a set, a part in each thread.
template <typename Finish, typename... Sums>
__device__ __forceinline__ void add_stretches(long long count, const Sums&... sums) {
    constexpr int MANY = Finish::INTERLEAVE / Finish::THREADS, FEW = Finish::FEW / Finish::THREADS;
    if (count >= 4 * Finish::INTERLEAVE) add_strands<Finish>(count, typename Sums::template Strands<MANY>(sums)...);
    else add_strands<Finish>(count, typename Sums::template Strands<FEW>(sums)...);
}

}  // namespace lngen

#endif
