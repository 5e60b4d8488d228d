// block_folds.cuh: a number for each block of features that threads of several warps have, or of several segments.
//
//     share_vector<Row>(max_vectors, v, max_acc);  // in a loop: what vector v has of its block
//     row_barrier<Row>();
//     const float max = fold_vectors<Max<float>, Row, /* vectors */ 16, /* lanes */ 8>(max_vectors, v);
//
// The order is that of blocks which neighbouring lanes have (reduce_lanes in row_reduce.cuh): a vector from left to
// right, then a tree over the vectors of a block. Its last levels are over lanes, those before over shared memory.
#ifndef LNGEN_BLOCK_FOLDS_CUH
#define LNGEN_BLOCK_FOLDS_CUH

#include "lngen/row_reduce.cuh"

namespace lngen {

// The index of vector v among those of the block of threads.
template <typename Row> __device__ __forceinline__ int vector_index(int v) {
    return (Row::column(v, 0) - Row::first_column()) / Row::N;
}

// Shares the number of vector v with the threads of the row.
template <typename Row, typename Real, int COUNT>
__device__ __forceinline__ void share_vector(Real (&numbers)[Row::ROWS][COUNT], int v, Real number) {
    if (Row::holds(v, 0)) numbers[Row::group()][vector_index<Row>(v)] = number;
}

// The number of the block of VECTORS vectors that vector v is a part of. Each of LANES neighbouring threads, whose
// vectors are of one block, folds every LANES-th number of it; then they fold what each has.
template <typename Op, typename Row, int VECTORS, int LANES, typename Real, int COUNT>
__device__ __forceinline__ Real fold_vectors(const Real (&numbers)[Row::ROWS][COUNT], int v) {
    const int index = vector_index<Row>(v), first = index - index % VECTORS + index % LANES;
    Real part[VECTORS / LANES];
    for (int n = 0; n < VECTORS / LANES; ++n) {
        part[n] = Row::holds(v, 0) ? numbers[Row::group()][first + n * LANES] : Op::neutral();
    }
    Real whole[1] = {tree_reduce<Op, VECTORS / LANES>(part)};
    reduce_lanes<Op, LANES>(whole);
    return whole[0];
}

}  // namespace lngen

#endif
