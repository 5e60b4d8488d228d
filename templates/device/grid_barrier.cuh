// A barrier of all blocks of the grid, which must all be resident (cooperative launch). All blocks together add exactly
// 2^31 to the counter, which flips its upper bit; it is zero before its first use.
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
