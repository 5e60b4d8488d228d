// grid_maxima.cuh: maxima over all threads of a grid, joined to what memory has, in one launch.
//
//     GridMaxima</* threads */ 128> maxima{arrivals, begun};
//     if (maxima.is_first()) { begin_maximum(result, given); maxima.begin(); }
//     ...
//     float most[] = {mine};
//     if (maxima.joins(most)) join_maximum(result, most[0]);
//
// The block that arrives first stores what the maxima begin with; at its end, each block folds what its threads have and
// joins that by red.max. A maximum has no order, so the bits are the same in every run. The bits of floats with sign 0
// are whole numbers in the same order, and those of floats with sign 1 are below: only numbers with sign 0 are joined.
// Blocks wait for the first alone, which waits for none, so they need not be resident together.
//
// The words are zero before the first launch. All blocks together add 2^31 to the arrivals, which flips the upper bit:
// it tells a launch from the one before.
#ifndef LNGEN_GRID_MAXIMA_CUH
#define LNGEN_GRID_MAXIMA_CUH

#include "lngen/row_reduce.cuh"

namespace lngen {

// The bits of a float; one pattern for every NaN, which is larger than all others as a whole number.
__device__ __forceinline__ int ordered_bits(float v) { return v == v ? __float_as_int(v) : 0x7fc00000; }

// Stores what a maximum begins with.
__device__ __forceinline__ void begin_maximum(float* result, float v) { *result = __int_as_float(ordered_bits(v)); }

// Joins a number with sign 0, or the maximum of nothing, to a maximum that has begun.
__device__ __forceinline__ void join_maximum(float* result, float v) {
    const int bits = ordered_bits(v);
    if (bits >= 0) asm volatile("red.relaxed.gpu.global.max.s32 [%0], %1;" :: "l"(result), "r"(bits) : "memory");
}

// Folds what the THREADS threads of a block have; its first thread gets the maxima.
template <int THREADS, int N> __device__ __forceinline__ void fold_block(float (&most)[N]) {
    constexpr int WARPS = THREADS / 32;
    __shared__ float warps[N][WARPS];
    reduce_lanes<Max<float>, 32>(most);
    if (threadIdx.x % 32 == 0) {
        for (int n = 0; n < N; ++n) warps[n][threadIdx.x / 32] = most[n];
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int n = 0; n < N; ++n) most[n] = tree_reduce<Max<float>, WARPS>(warps[n]);
}

// Blocks of THREADS threads, whose first ones arrive, begin and join.
template <int THREADS> struct GridMaxima {
    unsigned *const arrivals, *const begun;
    unsigned turn = 0;  // 1 and 2 in turn, from launch to launch

    // True in one thread of the grid.
    __device__ __forceinline__ bool is_first() {
        if (threadIdx.x > 0) return false;
        const unsigned add = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
        unsigned before;
        asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
            : "=r"(before) : "l"(arrivals), "r"(add) : "memory");
        turn = (before >> 31) + 1;
        return (before & 0x7fffffffu) == 0;
    }

    // That thread has stored what the maxima begin with.
    __device__ __forceinline__ void begin() const {
        asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(begun), "r"(turn) : "memory");
    }

    // True in the thread of a block that joins its maxima, which have begun then.
    template <int N> __device__ __forceinline__ bool joins(float (&most)[N]) const {
        fold_block<THREADS>(most);
        if (threadIdx.x > 0) return false;
        unsigned now;
        do
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(begun) : "memory");
        while (now != turn);
        return true;
    }
};

}  // namespace lngen

#endif
