// pair_maxima.cuh: the maximum of elements of 16 bits, two at a time.
//
//     row_sums<MaxOfPairs<bf16>, Row>(reduce, [&](int v, Two<bf16>& most) { most.take(x_row[v]); }, rowmax);
//
// A thread takes pairs of its vectors, and widens the two numbers that are left. It is the maximum of the widened
// elements: of a NaN one, and +0 is larger than -0.
#ifndef LNGEN_PAIR_MAXIMA_CUH
#define LNGEN_PAIR_MAXIMA_CUH

#include "lngen/row_reduce.cuh"
#include "lngen/vector.cuh"

namespace lngen {

// What max.NaN of two numbers in a register needs to know of their type.
template <typename T> struct Half;
template <> struct Half<bf16> {
    static constexpr unsigned LEAST = 0xff80u;  // -infinity
    static __device__ __forceinline__ float wide(bf16 v) { return f32_from_bf16(v); }
    static __device__ __forceinline__ bf16 narrow(float v) { return bf16_from_f32(v); }
    static __device__ __forceinline__ void larger(unsigned& a, unsigned b) {
        asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    }
};
template <> struct Half<f16> {
    static constexpr unsigned LEAST = 0xfc00u;
    static __device__ __forceinline__ float wide(f16 v) { return f32_from_f16(v); }
    static __device__ __forceinline__ f16 narrow(float v) { return f16_from_f32(v); }
    static __device__ __forceinline__ void larger(unsigned& a, unsigned b) {
        asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    }
};

// Two numbers in a register.
template <typename T> struct Two {
    unsigned bits = Half<T>::LEAST * 0x10001u;
    __device__ __forceinline__ float operator[](int i) const {
        return Half<T>::wide(T{static_cast<unsigned short>(bits >> 16 * i)});
    }
    __device__ __forceinline__ void take(unsigned other) {
#if __CUDA_ARCH__ >= 800
        Half<T>::larger(bits, other);
#else
        const Two b{other};
        const unsigned low = Half<T>::narrow(maximum((*this)[0], b[0])).bits;
        bits = low | static_cast<unsigned>(Half<T>::narrow(maximum((*this)[1], b[1])).bits) << 16;
#endif
    }
    template <int N> __device__ __forceinline__ void take(const Vec<T, N>& v) {
        for (int i = 0; i < N; i += 2) take(v[i].bits | static_cast<unsigned>(v[i + 1].bits) << 16);
    }
};

// The maximum, in pairs in a thread.
template <typename T> struct MaxOfPairs : Max<float> {
    using part = Two<T>;
    using Max<float>::of;
    static __device__ __forceinline__ part start() { return {}; }
    static __device__ __forceinline__ part of(part a, part b) {
        a.take(b.bits);
        return a;
    }
    static __device__ __forceinline__ float whole(part v) { return maximum(v[0], v[1]); }
};

}  // namespace lngen

#endif
