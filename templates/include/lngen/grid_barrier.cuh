// grid_barrier.cuh: a barrier of all blocks of the grid, which must all be resident:
// cooperative_groups::grid_group::sync().
//
//     grid_barrier(arrivals);
//
// The counter is zero before its first use and is never reset: all blocks together add exactly 2^31, which flips its
// upper bit, and a block waits for that. Needs a cooperative launch.
#ifndef LNGEN_GRID_BARRIER_CUH
#define LNGEN_GRID_BARRIER_CUH

namespace lngen {

// Block 0 adds what the others leave of 2^31.
__device__ __forceinline__ void grid_barrier(unsigned* arrivals) {
    __syncthreads();
    if (threadIdx.x == 0) {
        const unsigned add = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
        unsigned before, now;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
            : "=r"(before) : "l"(arrivals), "r"(add) : "memory");
        do
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(arrivals) : "memory");
        while (((before ^ now) & 0x80000000u) == 0);
    }
    __syncthreads();
}

}  // namespace lngen

#endif
