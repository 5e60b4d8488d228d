// mbarrier.cuh: barriers in shared memory that count bytes: PTX mbarrier, cuda::barrier with a transaction count.
//
//     mbarrier_init(&full);                  // one thread
//     mbarrier_init_fence();                 // then a barrier of all threads
//     mbarrier_arrive_expect(&full, bytes);  // one thread, before it issues the copies
//     mbarrier_wait(&full, parity);          // all threads; the parity alternates from 0
//
// A phase completes with one arrival and all bytes that it expects. Needs sm_90.
#ifndef LNGEN_MBARRIER_CUH
#define LNGEN_MBARRIER_CUH

namespace lngen {

// The 32-bit address of p in the shared window, as PTX takes it.
__device__ __forceinline__ unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Initialises a barrier for one arrival a phase.
__device__ __forceinline__ void mbarrier_init(unsigned long long* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(barrier)) : "memory");
}

// Makes the initialisation of barriers visible to bulk copies and to other blocks; it orders nothing else.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives at a barrier, whose phase then also waits for that many bytes.
__device__ __forceinline__ void mbarrier_arrive_expect(unsigned long long* barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
        :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Lets the phase of a barrier wait for that many more bytes, without an arrival.
__device__ __forceinline__ void mbarrier_expect_more(unsigned long long* barrier, unsigned bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
        :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Arrives at a barrier whose phase waits for no bytes.
__device__ __forceinline__ void mbarrier_arrive(unsigned long long* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}

// Waits until the phase with that parity has completed, and acquires what was released by its arrivals and copies.
__device__ __forceinline__ void mbarrier_wait(unsigned long long* barrier, unsigned parity) {
    asm volatile("{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
        :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}

}  // namespace lngen

#endif
