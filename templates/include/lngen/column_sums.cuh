// column_sums.cuh: column sums of a block, stored as a row of partial sums.
//
//     share_column_sums<Row, /* unit */ 4>(shared, sums);  // between barriers of the block
//     store_partial<Add<float>, Row, /* unit */ 4, EvictLastStore16>(partials + block * LEADING, shared);
//
// Each thread adds the rows that it sees, in registers; the row groups of a block are tree-reduced through shared
// memory; finish.cuh adds the blocks. st.shared and st.global, a Unit at a time.
#ifndef LNGEN_COLUMN_SUMS_CUH
#define LNGEN_COLUMN_SUMS_CUH

#include "lngen/row_reduce.cuh"
#include "lngen/vector.cuh"

namespace lngen {

// UNIT neighbouring columns, which are moved together.
template <typename Real, int UNIT> struct alignas(UNIT * sizeof(Real)) Unit { Real items[UNIT]; };

// Begins the column sums of a thread: the neutral element in each.
template <typename Op, typename Row, typename Real>
__device__ __forceinline__ void begin_column_sums(Real (&sums)[Row::VECTORS][Row::N]) {
    #pragma unroll
    for (int v = 0; v < Row::VECTORS; ++v) {
        for (int i = 0; i < Row::N; ++i) sums[v][i] = Op::neutral();
    }
}

// Stores the column sums of each thread, where the block has one row group. Writes up to a whole unit past the row.
template <typename Row, int UNIT, typename Path, typename Real>
__device__ __forceinline__ void store_column_sums(Real* partial, const Real (&sums)[Row::VECTORS][Row::N]) {
    constexpr int COUNT = Row::RUN < UNIT ? 1 : UNIT;
    #pragma unroll
    for (int v = 0; v < Row::VECTORS; ++v) {
        for (int i = 0; i < Row::N; i += COUNT) {
            if (Row::holds(v, i)) write<Path, COUNT>(partial + Row::column(v, i), sums[v] + i);
        }
    }
}

// The place of a unit in shared memory: in every second group of eight units, the two of a pair change places. A thread
// that writes half a vector at a time would otherwise meet bank conflicts. cute::Swizzle<1, 0, 3>.
__device__ __forceinline__ int swizzled(int unit) { return unit ^ (unit >> 3 & 1); }

// The columns from one row group to the next in shared memory: rounded up to 8, because swizzled() may move the last
// unit to the next place.
template <typename Row> __device__ constexpr int group_stride() { return (Row::BLOCK_COLUMNS + 7) / 8 * 8; }

// Writes the column sums of each thread to shared memory, with a place for each row group.
template <typename Row, int UNIT, typename Real>
__device__ __forceinline__ void share_column_sums(Real* shared, const Real (&sums)[Row::VECTORS][Row::N]) {
    constexpr int COUNT = Row::RUN < UNIT ? 1 : UNIT;
    auto* units = reinterpret_cast<Unit<Real, COUNT>*>(shared + Row::group() * group_stride<Row>());
    #pragma unroll
    for (int v = 0; v < Row::VECTORS; ++v) {
        if (!Row::owns(v)) continue;
        for (int i = 0; i < Row::N; i += COUNT) {
            Unit<Real, COUNT> unit;
            for (int j = 0; j < COUNT; ++j) unit.items[j] = sums[v][i + j];
            const int at = Row::column(v, i) - Row::first_column();
            units[(swizzled(at / UNIT) * UNIT + at % UNIT) / COUNT] = unit;
        }
    }
}

// Tree-reduces the column sums of the row groups of a block, and stores the block's part of a row of partial sums.
template <typename Op, typename Row, int UNIT, typename Path, typename Real>
__device__ __forceinline__ void store_partial(Real* partial, const Real* shared) {
    constexpr int STRIDE = group_stride<Row>(), THREADS = Row::THREADS * Row::ROWS;
    const int start = Row::first_column();
    #pragma unroll 1
    for (int unit = threadIdx.x; unit * UNIT < Row::BLOCK_COLUMNS && start + unit * UNIT < Row::D; unit += THREADS) {
        Unit<Real, UNIT> groups[Row::ROWS], sum;
        for (int r = 0; r < Row::ROWS; ++r) {
            groups[r] = reinterpret_cast<const Unit<Real, UNIT>*>(shared + r * STRIDE)[swizzled(unit)];
        }
        for (int j = 0; j < UNIT; ++j) {
            Real parts[Row::ROWS];
            for (int r = 0; r < Row::ROWS; ++r) parts[r] = groups[r].items[j];
            sum.items[j] = tree_reduce<Op, Row::ROWS>(parts);
        }
        write<Path, UNIT>(partial + start + unit * UNIT, sum.items);
    }
}

// Tree-reduces and stores the column sums of more row groups than registers hold as units: one column at a time, in
// PARTS parts of GROUPS row groups each, which is the same tree.
template <typename Op, typename Row, int UNIT, typename Path, int GROUPS, typename Real>
__device__ __forceinline__ void store_partial_of_many(Real* partial, const Real* shared) {
    constexpr int PARTS = Row::ROWS / GROUPS, THREADS = Row::THREADS * Row::ROWS;
    for (int i = threadIdx.x; i < Row::D; i += THREADS) {
        const Real* column = shared + swizzled(i / UNIT) * UNIT + i % UNIT;
        Real sums[PARTS];
        for (int s = 0; s < PARTS; ++s) {
            Real parts[GROUPS];
            for (int r = 0; r < GROUPS; ++r) parts[r] = column[(s + r * PARTS) * group_stride<Row>()];
            sums[s] = tree_reduce<Op, GROUPS>(parts);
        }
        const Real sum[1] = {tree_reduce<Op, PARTS>(sums)};
        write<Path, 1>(partial + i, sum);
    }
}

// The tree of tree_reduce over the row groups of a block, through shared memory, for a vector of columns a thread. The
// first row group gets the sums.
template <typename Op, typename Row, typename Real>
__device__ __forceinline__ void reduce_row_groups(Real* upper, Real (&sums)[Row::N]) {
    int live = Row::ROWS;
    #pragma unroll 1
    for (int half = half_of(Row::ROWS); half > 0; half /= 2) {
        Real* shared = upper + (Row::group() & (half - 1)) * (Row::N * Row::THREADS) + Row::thread();
        __syncthreads();  // all threads have read what was there
        if (Row::group() >= half && Row::group() < live) {
            for (int i = 0; i < Row::N; ++i) shared[i * Row::THREADS] = sums[i];
        }
        __syncthreads();
        if (Row::group() + half < live) {
            for (int i = 0; i < Row::N; ++i) sums[i] = Op::of(sums[i], shared[i * Row::THREADS]);
        }
        live = half;
    }
}

// Stores the column sums of one vector of columns.
template <typename Row, typename Path, typename Real>
__device__ __forceinline__ void store_partial_vector(Real* partial, const Real (&sums)[Row::N]) {
    for (int i = 0; i < Row::N; i += Row::ACCESS) {
        if (Row::holds(0, i)) write<Path, Row::ACCESS>(partial + Row::column(0, i), sums + i);
    }
}

}  // namespace lngen

#endif
