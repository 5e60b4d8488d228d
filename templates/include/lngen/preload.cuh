// preload.cuh: loads that complete here.
//
//     parity ^= (bits_of(mean_next) ^ vector_bits<Row>(gamma)) & static_cast<unsigned>(rows >> 63);  // is 0
//
// Whoever uses the bits of a loaded value waits for its load. Otherwise the wait falls inside the row loop, and there
// it also waits for newer loads. No PTX instruction waits for a plain load; its first use does.
#ifndef LNGEN_PRELOAD_CUH
#define LNGEN_PRELOAD_CUH

#include "lngen/vector.cuh"

namespace lngen {

// The bits of v, the low ones of a whole number; the halves of a double are XORed.
__device__ __forceinline__ unsigned bits_of(bf16 v) { return v.bits; }

__device__ __forceinline__ unsigned bits_of(f16 v) { return v.bits; }

template <typename T> __device__ __forceinline__ unsigned bits_of(T v) {
    if constexpr (static_cast<T>(0.5) == 0) return static_cast<unsigned>(v);  // a whole number
    else if constexpr (sizeof(T) == 4) return __float_as_uint(v);
    else return static_cast<unsigned>(__double2hiint(v) ^ __double2loint(v));
}

// The XOR of one element of every access of the vectors of a row: one element completes the load of its whole access.
template <typename Row, typename T>
__device__ __forceinline__ unsigned vector_bits(const Vec<T, Row::N> (&vectors)[Row::VECTORS]) {
    unsigned bits = 0;
    #pragma unroll
    for (int v = 0; v < Row::VECTORS; ++v) {
        for (int i = 0; i < Row::N; i += Row::ACCESS) bits ^= bits_of(vectors[v][i]);
    }
    return bits;
}

}  // namespace lngen

#endif
