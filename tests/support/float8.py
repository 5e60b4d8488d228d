"""Floats of 8 bits and int8 as tables of all their numbers, and f32 numbers that tell roundings apart.

``nearest`` searches a table for the next number, so it shares no arithmetic with what it checks.
"""

import math
from typing import Any

import numpy as np

from lngen.compiler.ir import DType

SHAPES = {DType.E4M3: (3, 7, 127), DType.E5M2: (2, 15, 124)}  # mantissa, bias, finite numbers that are not negative


def table(dtype: DType) -> Any:
    """The finite numbers from 0 on, by their bits."""
    if dtype is DType.INT8:
        return np.arange(128.0)
    mantissa, bias, count = SHAPES[dtype]
    codes = np.arange(count)
    exponent, part = np.maximum(codes >> mantissa, 1), codes % (1 << mantissa)
    return np.ldexp(part + (codes >> mantissa > 0) * 2.0**mantissa, exponent - bias - mantissa)


def nearest(x: Any, dtype: DType) -> Any:
    """The bits of the next number, of two the even one; the last one beyond them; 0x7f, in int8 0, for a NaN."""
    numbers = table(dtype)
    edges = (numbers[1:] + numbers[:-1]) / 2
    with np.errstate(invalid="ignore"):  # signalling NaNs
        wide = np.asarray(x, np.float64)
    size = np.where(np.isnan(wide), 0, np.abs(wide))
    found = np.searchsorted(edges, size)
    found += (found % 2 == 1) & np.isin(size, edges)
    if dtype is DType.INT8:
        below = found + (size >= 127.5)  # -128 has no positive counterpart
        return np.where(np.isnan(wide), 0, np.where(wide < 0, -below, found)).astype(np.int8).view(np.uint8)
    return np.where(np.isnan(wide), 0x7F, found | np.signbit(wide) * 0x80).astype(np.uint8)


def boundaries(dtype: DType) -> Any:
    """Every number, every edge between two, the range's end, and the neighbours of each in f32, of both signs."""
    numbers = table(dtype)
    edges = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2])
    last = 2 * numbers[-1] - numbers[-2]
    more = np.array([(numbers[-1] + last) / 2, last, 128, 128.5, 1e30, math.inf])
    at = np.concatenate([edges, more]).astype(np.float32)
    around = np.concatenate([at, np.nextafter(at, np.float32(0)), np.nextafter(at, np.float32(math.inf))])
    return np.concatenate([around, -around])


def tried(count: int) -> Any:
    """f32: all f16 and bf16, all boundaries, NaNs of both signs with payloads, and ``count`` random bits."""
    halves = np.arange(2**16, dtype=np.uint16)
    rng = np.random.default_rng(0)
    bits = rng.integers(2**32, size=count, dtype=np.uint32)
    near = np.ldexp(rng.uniform(-2, 2, count), rng.integers(-18, 17, count)).astype(np.float32)
    special = np.array([0, 1 << 31, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 1, 0x80000001], np.uint32)
    return np.concatenate([
        halves.view(np.float16).astype(np.float32), (halves.astype(np.uint32) << 16).view(np.float32),
        *(boundaries(t) for t in (*SHAPES, DType.INT8)), special.view(np.float32), bits.view(np.float32), near,
    ])  # fmt: skip
