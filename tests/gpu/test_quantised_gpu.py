"""If these fail, a GPU's conversion to 8 bits is not its expansion, or the division by a scale is not a division."""

import pytest

from lngen.compiler.headers import bundled
from sampling import rotating

pytestmark = pytest.mark.gpu

SOURCE = """#include "lngen/quantised.cuh"
using namespace lngen;

__device__ unsigned char whole(float v) {
    const float near = fminf(fmaxf(v, -128.0f), 127.0f);
    return static_cast<unsigned char>(v == v ? __float2int_rn(near) : 0);
}

// Every f32 once: numbers[0] and so on count the bits that differ.
extern "C" __global__ void compare(unsigned long long* numbers) {
    for (unsigned long long u = blockIdx.x * blockDim.x + threadIdx.x; u < 1ull << 32; u += gridDim.x * blockDim.x) {
        const float v = __uint_as_float(static_cast<unsigned>(u));
        const bool differ[] = {
            e4m3_from_f32(v).bits != float8_from_f32<3, 7>(v, 448.0f),
            e5m2_from_f32(v).bits != float8_from_f32<2, 15>(v, 57344.0f),
            static_cast<unsigned char>(int8_from_f32(v)) != whole(v),
        };
        for (int n = 0; n < 3; ++n) if (differ[n]) atomicAdd(numbers + n, 1ull);
    }
}
"""


def test_all_floats_are_converted_as_by_the_expansion() -> None:
    """Before sm_89 the expansions of floats are compared with themselves."""
    import cupy

    numbers = cupy.zeros(3, cupy.uint64)
    cupy.RawKernel(bundled(SOURCE), "compare", options=("-fmad=false",))((2048,), (256,), (numbers,))
    assert numbers.tolist() == [0, 0, 0]


PAIRS = r"""
// v / s for a significand s of each thread and all significands v, as ir/scales.py divides: wrong counts quotients that
// are not within half a unit of the exact one, whose remainder tells (there are no ties).
extern "C" __global__ void pairs(unsigned first, unsigned long long* wrong) {
    const unsigned n = first + blockIdx.x * blockDim.x + threadIdx.x;
    const float s = __uint_as_float(0x3f800000u | n), inverse = 1.0f / s;
    const float below = 0x1p-25f * s, above = 0x1p-24f * s;
    unsigned bad = 0;
    #pragma unroll 8
    for (unsigned i = 0; i < 1u << 23; ++i) {
        const float v = __uint_as_float(0x3f800000u | i);
        const float near = v * inverse, over = fmaf(near, s, -v), quotient = fmaf(-over, inverse, near);
        bad += fabsf(fmaf(-quotient, s, v)) < (i < n ? below : above) ? 0u : 1u;
    }
    if (bad) atomicAdd(wrong, static_cast<unsigned long long>(bad));
}
"""
PARTS, THREADS = 128, 256


@rotating("part", range(PARTS))
def test_a_quotient_by_a_scale_is_rounded_correctly(part: int) -> None:
    """All 2^46 pairs of significands in 128 parts, 31 s on an H100; exponents only shift the quotient."""
    import cupy

    wrong, count = cupy.zeros(1, cupy.uint64), (1 << 23) // PARTS
    kernel = cupy.RawKernel(PAIRS, "pairs", options=("-fmad=false",))
    kernel((count // THREADS,), (THREADS,), (cupy.uint32(part * count), wrong))
    assert int(wrong[0]) == 0
