"""If these fail, a GPU's conversion to e4m3, e5m2 or int8 is not its expansion in integers."""

import pytest

from lngen.compiler.headers import bundled

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
