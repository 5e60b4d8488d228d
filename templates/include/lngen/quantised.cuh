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

__device__ __forceinline__ e4m3 e4m3_from_f32(float v) {
#if __CUDA_ARCH__ >= 890
    unsigned short two;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.0f), "f"(v));
    return e4m3{static_cast<unsigned char>(two)};
#else
    return e4m3{float8_from_f32<3, 7>(v, 448.0f)};
#endif
}

__device__ __forceinline__ e5m2 e5m2_from_f32(float v) {
#if __CUDA_ARCH__ >= 890
    unsigned short two;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.0f), "f"(v));
    return e5m2{static_cast<unsigned char>(two)};
#else
    return e5m2{float8_from_f32<2, 15>(v, 57344.0f)};
#endif
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
