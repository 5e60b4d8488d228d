// vector_sums.cuh: sums of a vector, by one block.
//
//     __shared__ float shared[THREADS];
//     vector_sums<Add<float>, GROUPS, BLOCKS, INTERLEAVE, THREADS>(shared, count, [&](long long i, float& sum) {
//         sum = sum + values[i];
//     }, total);
//
// The order is that of column sums (column_sums.cuh, finish.cuh): a grid of BLOCKS blocks of GROUPS row groups would
// add the same numbers so, in INTERLEAVE partial sums. cub::BlockReduce, in a fixed order.
#ifndef LNGEN_VECTOR_SUMS_CUH
#define LNGEN_VECTOR_SUMS_CUH

#include "lngen/row_reduce.cuh"

namespace lngen {

// The tree of tree_reduce over the COUNT numbers of shared memory from `numbers` on, by COUNT threads; this is thread
// `i` of them. All threads of the block call it, for its barriers; those without numbers have `takes` false. The result
// is in the first number.
template <typename Op, int COUNT, typename Real>
__device__ __forceinline__ void tree_reduce_shared(Real* numbers, int i, bool takes) {
    for (int half = half_of(COUNT); half > 0; half /= 2) {
        if (takes && i < half && i + half < COUNT) numbers[i] = Op::of(numbers[i], numbers[i + half]);
        __syncthreads();
    }
}

// Reduces `count` numbers by one block, in the order of column sums: number i belongs to block i / GROUPS % BLOCKS and
// to its group i % GROUPS. A group adds its numbers in increasing order, the groups of a block are tree-reduced, and
// the blocks are added in INTERLEAVE partial sums, which are tree-reduced. term(i, sum, ...) adds number i; every
// thread gets the results. `shared` has THREADS numbers.
template <typename Op, int GROUPS, int BLOCKS, int INTERLEAVE, int THREADS, typename Real, typename Term,
          typename... Names>
__device__ __forceinline__ void vector_sums(Real* shared, long long count, Term term, Names&... names) {
    constexpr int N = sizeof...(names), TILE = THREADS / GROUPS;  // blocks at a time
    Real sums[N];
    const int thread = threadIdx.x, block = thread / GROUPS;
    for (int n = 0; n < N; ++n) sums[n] = Op::neutral();
    #pragma unroll 1
    for (int tile = 0; tile < BLOCKS; tile += TILE) {
        const bool takes = block < TILE && tile + block < BLOCKS;
        Real group[N];
        for (int n = 0; n < N; ++n) group[n] = Op::neutral();
        if (takes) {
            #pragma unroll 16
            for (long long i = tile * GROUPS + thread; i < count; i += GROUPS * BLOCKS) add_terms(term, i, group);
        }
        for (int n = 0; n < N; ++n) {
            shared[thread] = group[n];
            __syncthreads();
            tree_reduce_shared<Op, GROUPS>(shared + block * GROUPS, thread % GROUPS, takes);
            if (thread < INTERLEAVE) {
                int b = (thread + INTERLEAVE - tile % INTERLEAVE) % INTERLEAVE;
                for (; b < TILE && tile + b < BLOCKS; b += INTERLEAVE) sums[n] = Op::of(sums[n], shared[b * GROUPS]);
            }
            __syncthreads();
        }
    }
    for (int n = 0; n < N; ++n) {
        shared[thread] = sums[n];
        __syncthreads();
        tree_reduce_shared<Op, INTERLEAVE>(shared, thread, true);
        sums[n] = count == 0 ? Op::of_nothing() : shared[0];
        __syncthreads();
    }
    name_sums(sums, names...);
}

}  // namespace lngen

#endif
