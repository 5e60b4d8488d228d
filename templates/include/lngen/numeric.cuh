// numeric.cuh: numbers: 16-bit storage types, conversions that round once, maxima that keep a NaN.
//
//     const float x = f32_from_bf16(row[i]);
//     y[i] = bf16_from_f32(x);
//
// The types hold bits and have no arithmetic: every conversion is written out. cuda_bf16.h and cuda_fp16.h have the
// same conversions and take a second to compile. Roundings are to nearest even; a NaN stays a NaN.
#ifndef LNGEN_NUMERIC_CUH
#define LNGEN_NUMERIC_CUH

namespace lngen {

struct bf16 { unsigned short bits; };

struct f16 { unsigned short bits; };

__device__ __forceinline__ float f32_from_bf16(bf16 v) { return __uint_as_float(static_cast<unsigned>(v.bits) << 16); }

// Before sm_80 the rounding is integer arithmetic: adds half a unit, less one where the kept bit is even.
__device__ __forceinline__ bf16 bf16_from_f32(float v) {
    bf16 r;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(v));
#else
    const unsigned u = __float_as_uint(v);
    r.bits = static_cast<unsigned short>(v == v ? (u + 0x7fffu + (u >> 16 & 1u)) >> 16 : 0x7fffu);
#endif
    return r;
}

// A function of libdevice, whose result the compiler may keep; it repeats inline assembly at every use.
extern "C" __device__ float __nv_half2float(unsigned short bits);

__device__ __forceinline__ float f32_from_f16(f16 v) { return __nv_half2float(v.bits); }

// Repeated at every use, because rows, prefetched rows and column sums leave no registers for the result.
__device__ __forceinline__ float f32_from_f16_at_use(f16 v) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v.bits));
    return r;
}

__device__ __forceinline__ f16 f16_from_f32(float v) {
    f16 r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(v));
    return r;
}

// Whole numbers, to nearest even where they have more digits; truth values are 0 and 1.
__device__ __forceinline__ float f32_from_int8(signed char v) { return v; }

__device__ __forceinline__ float f32_from_i32(int v) { return __int2float_rn(v); }

__device__ __forceinline__ float f32_from_i64(long long v) { return __ll2float_rn(v); }

__device__ __forceinline__ float f32_from_bool(unsigned char v) { return v ? 1.0f : 0.0f; }

// To nearest even; numbers beyond the range become its ends, and a NaN becomes 0.
__device__ __forceinline__ int i32_from_f32(float v) { return __float2int_rn(v); }

__device__ __forceinline__ double f64_from_int8(signed char v) { return v; }

__device__ __forceinline__ double f64_from_i32(int v) { return v; }

__device__ __forceinline__ double f64_from_i64(long long v) { return __ll2double_rn(v); }

__device__ __forceinline__ double f64_from_bool(unsigned char v) { return v ? 1.0 : 0.0; }

__device__ __forceinline__ double f64_from_f32(float v) { return v; }

__device__ __forceinline__ float f32_from_f64(double v) { return __double2float_rn(v); }

__device__ __forceinline__ double f64_from_bf16(bf16 v) { return f32_from_bf16(v); }

__device__ __forceinline__ double f64_from_f16(f16 v) { return f32_from_f16(v); }

// A float rounded to odd leaves no false tie for a second rounding, to fewer digits (Boldo and Melquiond, 2008).
__device__ __forceinline__ float odd_from_f64(double v) {
    const float toward_zero = __double2float_rz(v);
    const unsigned lost = static_cast<double>(toward_zero) != v ? 1u : 0u;
    return v == v ? __uint_as_float(__float_as_uint(toward_zero) | lost) : toward_zero;
}

__device__ __forceinline__ bf16 bf16_from_f64(double v) { return bf16_from_f32(odd_from_f64(v)); }

__device__ __forceinline__ f16 f16_from_f64(double v) {
    f16 r;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(r.bits) : "d"(v));
    return r;
}

// The larger number; a NaN if either is one, and +0 is larger than -0, so the order of the operands does not matter.
// Since sm_80 the maximum of two f32 is one instruction.
template <typename T> __device__ __forceinline__ T maximum(T a, T b) {
#if __CUDA_ARCH__ >= 800
    if constexpr (sizeof(T) == 4) {
        T r;
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
        return r;
    }
#endif
    if (a == b) return a == 0 ? a + b : a;
    return a > b || a != a ? a : b;
}

// The smaller number; a NaN if either is one, and -0 is smaller than +0.
template <typename T> __device__ __forceinline__ T minimum(T a, T b) { return -maximum(-a, -b); }

// |a| with the sign of b, in one instruction: bits of b where the mask has ones, else of a.
__device__ __forceinline__ float copysign_of(float a, float b) {
    unsigned r;
    asm("lop3.b32 %0, %1, %2, 0x80000000, 0xd8;" : "=r"(r) : "r"(__float_as_uint(a)), "r"(__float_as_uint(b)));
    return __uint_as_float(r);
}

// v, but with a magnitude of ``most``, a positive number, where it is larger; a NaN stays one.
// One instruction since sm_86.
__device__ __forceinline__ float limited_of(float v, float most) {
#if __CUDA_ARCH__ >= 860
    float r;
    asm("min.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(r) : "f"(v), "f"(most));
    return r;
#else
    return copysign_of(minimum(fabsf(v), most), v);
#endif
}

// 2^n for v = n + 1.5 * 2^23, n whole from -126 to 127.
__device__ __forceinline__ float exp2_whole(float v) {
    return __uint_as_float((__float_as_uint(v) << 23) + 0x3f800000u);
}

// The whole number k with v / 2^k in [2/3, 4/3), of a positive normal number; 0x3f2aaaab is 2/3.
__device__ __forceinline__ float exponent(float v) {
    const int k = static_cast<int>(__float_as_uint(v) - 0x3f2aaaabu) >> 23;
    return __int_as_float(k + 0x4b400000) - 12582912.0f;
}

// v / 2^k in [2/3, 4/3), of a positive normal number.
__device__ __forceinline__ float significand(float v) {
    const unsigned u = __float_as_uint(v);
    return __uint_as_float(u - (u - 0x3f2aaaabu & 0xff800000u));
}

// The value itself, in a register, since the compiler would otherwise recompute it later from its operands.
__device__ __forceinline__ float materialised(float v) {
    asm volatile("" : "+f"(v));
    return v;
}

}  // namespace lngen

#endif
