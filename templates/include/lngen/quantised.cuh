// quantised.cuh: 8-bit storage types, and conversions to them that saturate.
//
//     const e4m3 q = e4m3_from_f32(x / scale);  // to nearest even, 448 at most
//     const float y = f32_from_e4m3(q) * scale;
//
// e4m3 and e5m2 are float8_e4m3fn and float8_e5m2. A number beyond the range, also an infinite one, becomes the largest
// finite one of its sign. A NaN becomes 0x7f, in int8 0. Since sm_89 a conversion of floats is one instruction; before,
// it is integer arithmetic with the same bits.
#ifndef LNGEN_QUANTISED_CUH
#define LNGEN_QUANTISED_CUH

#include "lngen/numeric.cuh"
#include "lngen/vector.cuh"

namespace lngen {

struct e4m3 { unsigned char bits; };

struct e5m2 { unsigned char bits; };

// v as a float of 8 bits, of which MANTISSA are the mantissa; its exponents are biased by BIAS. Where v is normal, half
// a unit is added to its bits, less one where the kept bit is even. Where it is not, the sum with a number whose last
// place is the least subnormal number has the rounded number in its last bits.
template <int MANTISSA, int BIAS> __device__ __forceinline__ unsigned char float8_from_f32(float v, float largest) {
    constexpr int DROPPED = 23 - MANTISSA;
    constexpr unsigned REBIASED = static_cast<unsigned>(127 - BIAS) << 23, HALF = (1u << (DROPPED - 1)) - 1;
    constexpr unsigned MAGIC = static_cast<unsigned>(127 + 1 - BIAS + DROPPED) << 23;
    const float size = fminf(fabsf(v), largest);
    const unsigned u = __float_as_uint(size);
    const unsigned normal = (u + (u >> DROPPED & 1u) + (HALF - REBIASED)) >> DROPPED;
    const unsigned subnormal = __float_as_uint(size + __uint_as_float(MAGIC)) - MAGIC;
    const unsigned magnitude = u < REBIASED + (1u << 23) ? subnormal : normal;
    return static_cast<unsigned char>(v == v ? magnitude | (__float_as_uint(v) >> 24 & 0x80u) : 0x7fu);
}

// The bits of two numbers, of the first in the lower byte.
__device__ __forceinline__ unsigned short two_from_f32(float first, float second, e4m3) {
#if __CUDA_ARCH__ >= 890
    unsigned short two;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(second), "f"(first));
    return two;
#else
    return float8_from_f32<3, 7>(first, 448.0f) | float8_from_f32<3, 7>(second, 448.0f) << 8;
#endif
}

__device__ __forceinline__ unsigned short two_from_f32(float first, float second, e5m2) {
#if __CUDA_ARCH__ >= 890
    unsigned short two;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(two) : "f"(second), "f"(first));
    return two;
#else
    return float8_from_f32<2, 15>(first, 57344.0f) | float8_from_f32<2, 15>(second, 57344.0f) << 8;
#endif
}

__device__ __forceinline__ e4m3 e4m3_from_f32(float v) {
    return e4m3{static_cast<unsigned char>(two_from_f32(v, 0.0f, e4m3{}))};
}

__device__ __forceinline__ e5m2 e5m2_from_f32(float v) {
    return e5m2{static_cast<unsigned char>(two_from_f32(v, 0.0f, e5m2{}))};
}

// A vector of f32 that is stored as T: two elements are converted by one instruction, and four make a word.
template <typename T, int N> struct Pairs {
    float items[N];
    __device__ __forceinline__ float operator[](int i) const { return items[i]; }
    __device__ __forceinline__ float& operator[](int i) { return items[i]; }
};

template <typename T> __device__ __forceinline__ unsigned four_from_f32(const float* v) {
    return two_from_f32(v[0], v[1], T{}) | static_cast<unsigned>(two_from_f32(v[2], v[3], T{})) << 16;
}

// Stores vector v as the store of a Vec does.
template <typename Row, typename Path, typename T>
__device__ __forceinline__ void store_pairs(T* p, int v, const Pairs<T, Row::N>& vector) {
    constexpr int COUNT = Row::ACCESS;
    using Whole = typename Word<COUNT>::type;
    for (int j = 0; j < Row::N; j += COUNT) {
        if (!Row::holds(v, j)) continue;
        Whole* to = reinterpret_cast<Whole*>(Row::BLOCKS_PER_ROW > 1 ? Row::at(p, v, j) : p + Row::column(v, j));
        const float* from = vector.items + j;
        if constexpr (COUNT == 1) {
            Path::write(to, static_cast<Whole>(two_from_f32(from[0], 0.0f, T{})));
        } else if constexpr (COUNT == 2) {
            Path::write(to, two_from_f32(from[0], from[1], T{}));
        } else if constexpr (COUNT == 4) {
            Path::write(to, four_from_f32<T>(from));
        } else if constexpr (COUNT == 8) {
            Path::write(to, make_uint2(four_from_f32<T>(from), four_from_f32<T>(from + 4)));
        } else {
            static_assert(COUNT == 16, "a word has up to 16 bytes");
            Path::write(to, make_uint4(four_from_f32<T>(from), four_from_f32<T>(from + 4), four_from_f32<T>(from + 8),
                four_from_f32<T>(from + 12)));
        }
    }
}

__device__ __forceinline__ signed char int8_from_f32(float v) {
    int r;
    asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(r) : "f"(v));
    return static_cast<signed char>(r);
}

// The bits shifted to their places in f32 are the number over 2^120, also a subnormal one.
__device__ __forceinline__ float f32_from_e4m3(e4m3 v) {
#if __CUDA_ARCH__ >= 890
    unsigned two;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"(static_cast<unsigned short>(v.bits)));
    return f32_from_f16(f16{static_cast<unsigned short>(two)});
#else
    const unsigned magnitude = v.bits & 0x7fu, sign = (v.bits & 0x80u) << 24;
    const float size = __uint_as_float(magnitude << 20) * 0x1p120f;
    return __uint_as_float((magnitude == 0x7fu ? 0x7fc00000u : __float_as_uint(size)) | sign);
#endif
}

// The upper half of an f16.
__device__ __forceinline__ float f32_from_e5m2(e5m2 v) {
    return f32_from_f16(f16{static_cast<unsigned short>(v.bits << 8)});
}

__device__ __forceinline__ e4m3 e4m3_from_f64(double v) { return e4m3_from_f32(odd_from_f64(v)); }

__device__ __forceinline__ e5m2 e5m2_from_f64(double v) { return e5m2_from_f32(odd_from_f64(v)); }

__device__ __forceinline__ signed char int8_from_f64(double v) { return int8_from_f32(odd_from_f64(v)); }

__device__ __forceinline__ double f64_from_e4m3(e4m3 v) { return f32_from_e4m3(v); }

__device__ __forceinline__ double f64_from_e5m2(e5m2 v) { return f32_from_e5m2(v); }

}  // namespace lngen

#endif
