// cluster.cuh: clusters: blocks that reach each other's shared memory (DSMEM).
//
//     send(&values[i], sum, &full, rank);  // to block `rank`; completes 4 or 8 bytes on its barrier
//     AcquireShared::wait(&full, parity);  // there
//
// PTX barrier.cluster, mapa and st.async; cooperative_groups::cluster_group. Needs sm_90 and a launch with clusters.
#ifndef LNGEN_CLUSTER_CUH
#define LNGEN_CLUSTER_CUH

#include "lngen/mbarrier.cuh"

namespace lngen {

// The index of this block in its cluster.
__device__ __forceinline__ int cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// A barrier of all threads of the cluster.
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address in another block of the cluster that corresponds to p in this one.
__device__ __forceinline__ unsigned remote_address(const void* p, int rank) {
    unsigned address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
    return address;
}

// Stores a value to the shared memory of another block of the cluster; its bytes complete on the mbarrier there.
template <typename T> __device__ __forceinline__ void send(T* place, T value, unsigned long long* barrier, int rank) {
    const unsigned to = remote_address(place, rank), at = remote_address(barrier, rank);
    if constexpr (sizeof(T) == 4)
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
            :: "r"(to), "r"(reinterpret_cast<const unsigned&>(value)), "r"(at) : "memory");
    else
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];"
            :: "r"(to), "l"(reinterpret_cast<const long long&>(value)), "r"(at) : "memory");
}

// Waits for a phase of an mbarrier and acquires all memory, which invalidates the L1 cache.
struct AcquireAll {
    static __device__ __forceinline__ void wait(unsigned long long* barrier, unsigned parity) {
        asm volatile("{\n.reg .pred done;\nagain:\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
            :: "r"(shared_address(barrier)), "r"(parity) : "memory");
    }
};

// Waits for a phase of an mbarrier and acquires shared memory alone, which holds the values of the DSMEM exchange.
// The L1 cache keeps its lines.
struct AcquireShared {
    static __device__ __forceinline__ void wait(unsigned long long* barrier, unsigned parity) {
        asm volatile("{\n.reg .pred done;\nagain:\n"
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208  // fence.acquire.sync_restrict: PTX ISA 8.6, CUDA 12.8
            "mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n"
            "fence.acquire.sync_restrict::shared::cluster.cluster;\n"
#else
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n"
#endif
            "}" :: "r"(shared_address(barrier)), "r"(parity) : "memory");
    }
};

}  // namespace lngen

#endif
