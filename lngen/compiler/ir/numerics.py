"""The arithmetic of the IR on NumPy: exact fma, single rounding, sums in their one order.

Every function is elementwise or has an explicit order of additions, so IEEE 754 determines its bits on any
machine. Absent terms of a sum are -0.0, the one number whose addition changes no other number, not even
+0.0 or -0.0.
"""

from __future__ import annotations

from math import ceil, log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lngen.compiler.ir.types import BF16, Graph
from lngen.dtypes import DType
from lngen.rules import RULES

Array = NDArray[Any]

NUMPY_DTYPE: dict[DType, np.dtype[Any]] = {dtype: dtype.numpy() for dtype in DType}
FROM_NUMPY = {own: dtype for dtype, own in NUMPY_DTYPE.items()}

ABSENT = -0.0


def round_to(x: Array, to: DType) -> Array:
    """x rounded once, to nearest even, to the dtype ``to``.

    What has the digits of bfloat16 or fewer goes from float64 through a float32 rounded to odd, so that the second
    rounding meets no false tie (Boldo and Melquiond, Emulation of FMA and correctly rounded sums, IEEE Trans.
    Computers 57(4), 2008).
    """
    if to.digits <= BF16.digits and x.dtype == np.float64:
        x = _to_odd_f32(x)
    return np.asarray(x.astype(NUMPY_DTYPE[to]))


def stored(drawn: Array, to: DType) -> Array:
    """Random numbers as an input of the dtype ``to`` holds them: rounded, or as truth values those above one half."""
    if to.digits:
        return round_to(drawn, to)
    return np.asarray(drawn > 0.5 if to is DType.BOOL else np.rint(drawn).astype(NUMPY_DTYPE[to]))


def _to_odd_f32(x: Array) -> Array:
    """float64 to float32, rounded to odd: toward zero, then the last bit is set if the result is inexact."""
    near = x.astype(np.float32)
    over = np.abs(near.astype(np.float64)) > np.abs(x)
    toward_zero = np.where(over, np.nextafter(near, np.float32(0)), near)
    lost = toward_zero.astype(np.float64) != x
    bits = np.asarray(toward_zero).view(np.uint32) | (lost & np.isfinite(toward_zero)).astype(np.uint32)
    return np.asarray(bits.view(np.float32))


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in float32, rounded once.

    The product of two float32 is exact in float64; the sum is rounded to odd there, so that the rounding to
    float32 gives the correctly rounded result (Boldo and Melquiond, 2008).
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    total = product + addend
    # TwoSum (Knuth): total + error is the exact sum.
    shadow = total - product
    error = (product - (total - shadow)) + (addend - shadow)
    bits = np.asarray(total).view(np.int64)
    even = (bits & 1) == 0
    inexact = np.isfinite(total) & (error != 0) & even
    # One step toward the exact value, in sign-magnitude order: outward if the error has total's sign.
    step = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.where(inexact, bits + step, bits).view(np.float64)
    return odd.astype(np.float32)


def maximum(a: Array, b: Array) -> Array:
    """The larger one; a NaN if either is one, and +0 is larger than -0, so the order of operands does not matter."""
    return np.asarray(np.where(a == b, np.where(np.signbit(a), b, a), np.maximum(a, b)))


def minimum(a: Array, b: Array) -> Array:
    """The smaller one; a NaN if either is one, and -0 is smaller than +0, so the order of operands does not matter."""
    return np.asarray(np.where(a == b, np.where(np.signbit(a), a, b), np.minimum(a, b)))


def exp2_biased(t: Array) -> Array:
    """2^n for t = n + 1.5 * 2^23 + 127 in float32, n whole from -126 to 127: the low bits of t as the exponent."""
    return np.asarray((_bits(t) << np.uint32(23)).view(np.float32))


# The bits of 2/3 in float32, rounded up: differences of bits count in exponents from there.
_TWO_THIRDS = np.uint32(0x3F2AAAAB)


def exponent(x: Array) -> Array:
    """The whole number k with x / 2^k in [2/3, 4/3), of a positive normal float32."""
    return np.asarray(((_bits(x) - _TWO_THIRDS).view(np.int32) >> np.int32(23)).astype(np.float32))


def significand(x: Array) -> Array:
    """x / 2^k in [2/3, 4/3), of a positive normal float32; exact."""
    return np.asarray((_bits(x) - ((_bits(x) - _TWO_THIRDS) & np.uint32(0xFF800000))).view(np.float32))


# The difference of bits is near that of logarithms (J. F. Blinn, Floating-point tricks, IEEE Computer Graphics and
# Applications 17(4), 1997). This number makes the largest error of a reciprocal least.
RECIPROCAL = 0x7EF33000


def reciprocal_guess(x: Array) -> Array:
    """1 / x to within 5.1 percent, of a float32 from 2^-126 to 1.89 * 2^125: the bits subtracted from a number."""
    return np.asarray((np.uint32(RECIPROCAL) - _bits(x)).view(np.float32))


def _bits(x: Array) -> Array:
    return np.ascontiguousarray(x).view(np.uint32)


def row_max(x: Array) -> Array:
    """The largest element of the last axis, [..., D] -> [...]; the same in every order."""
    largest = x.max(axis=-1)  # among zeros NumPy may return either
    zero = (largest == 0) & ((x == 0) & ~np.signbit(x)).any(axis=-1)
    return np.asarray(np.where(zero, np.zeros_like(largest), largest))


def column_max(x: Array) -> Array:
    """The largest element of the first axis, [M, D] -> [D]; the same in every order; of no rows, -inf."""
    return row_max(x.T) if len(x) else np.full(x.shape[1:], -np.inf, x.dtype)


def fold(parts: Array) -> Array:
    """Sum over the last axis: while more than one part is left, add the upper half onto the lower half.

    The count is padded to a power of two with absent parts.
    """
    count = parts.shape[-1]
    parts = _pad(parts, 1 << (count - 1).bit_length())
    while parts.shape[-1] > 1:
        half = parts.shape[-1] // 2
        parts = parts[..., :half] + parts[..., half:]
    return parts[..., 0]


def interleaved_sum(terms: Array, interleave: int) -> Array:
    """Sum over the last axis in ``interleave`` partial sums: [..., terms] -> [...].

    Term i belongs to partial sum i % interleave, which adds its terms left to right; the partial sums are folded.
    """
    rounds = -(-terms.shape[-1] // interleave)
    split = _pad(terms, rounds * interleave).reshape(*terms.shape[:-1], rounds, interleave)
    return fold(_left_to_right(np.moveaxis(split, -2, -1)))


def row_sum(
    x: Array, times: Array | None = None, *, chunk: int, segment: int, run: int | None = None, interleave: int = 1
) -> Array:
    """Sum over the last axis in the canonical order of row sums, [..., D] -> [...].

    The sums of the segments (``segment_sums``) are added in ``interleave`` partial sums (``interleaved_sum``).
    """
    return interleaved_sum(segment_sums(x, times, chunk=chunk, segment=segment, run=run), interleave)


def segment_sums(x: Array, times: Array | None = None, *, chunk: int, segment: int, run: int | None = None) -> Array:
    """The sum of each segment of the last axis, [..., D] -> [..., S].

    The row is cut into segments of ``segment`` elements, the last perhaps shorter, and each segment into chunks of
    ``chunk`` elements. A chunk consists of runs of ``run`` consecutive elements (None: it is one run). The distance of
    its runs is ``run`` times the chunks of a segment. A chunk is added left to right, the chunks of a segment are added
    in a tree (``fold``). With ``times``, of x's shape, the terms are products, each rounded together with its addition
    to the chunk.
    """
    run, chunks = run or chunk, -(-segment // chunk)
    shape = *x.shape[:-1], chunk // run, chunks, run
    sums = []
    for start in range(0, x.shape[-1], segment):
        parts = (_pad(f[..., start : start + segment], chunks * chunk, absent) for f, absent in _factors(x, times))
        runs = (np.moveaxis(p.reshape(shape), -3, -2).reshape(*x.shape[:-1], chunks, chunk) for p in parts)
        sums.append(fold(_left_to_right(*runs)))
    return np.stack(sums, axis=-1)


def segment_sizes(d: int, segment: int, dtype: DType) -> Array:
    """The number of elements of each segment in rows of ``d``: [S]; the last may have fewer than ``segment``."""
    starts = np.arange(0, d, segment)
    return np.minimum(segment, d - starts).astype(NUMPY_DTYPE[dtype])


def column_sum(x: Array, times: Array | None = None, *, groups: int, blocks: int, interleave: int) -> Array:
    """Sum over the rows in the canonical order of column sums, [M, D] -> [D]; of no rows, +0.

    Row r belongs to block (r // groups) % blocks and to its group r % groups. A group adds its rows
    in increasing order, the groups of a block are folded, the blocks are added in ``interleave``
    partial sums (``interleaved_sum``). With ``times``, of x's shape, the terms are products, each
    rounded together with its addition to the group.
    """
    rows, features = x.shape
    if rows == 0:
        return np.zeros(features, x.dtype)
    rounds = -(-rows // (groups * blocks))
    shape = features, rounds, blocks, groups
    tiled = (_pad(f.T, rounds * blocks * groups, absent).reshape(shape) for f, absent in _factors(x, times))
    per_block = fold(_left_to_right(*(np.moveaxis(t, 1, -1) for t in tiled)))
    return interleaved_sum(per_block, interleave)


def _factors(x: Array, times: Array | None) -> list[tuple[Array, float]]:
    """The factors of a sum's terms, each with the value that makes a term absent."""
    return [(x, ABSENT)] if times is None else [(x, ABSENT), (times, 1.0)]


def _left_to_right(x: Array, times: Array | None = None) -> Array:
    """Sum over the last axis, left to right; with ``times`` of the products, each rounded with its addition."""
    total = x[..., 0] if times is None else x[..., 0] * times[..., 0]
    for i in range(1, x.shape[-1]):
        total = total + x[..., i] if times is None else fma(x[..., i], times[..., i], total)
    return total


def _pad(x: Array, count: int, absent: float = ABSENT) -> Array:
    """The last axis padded to ``count`` with absent terms, or with factors of absent terms."""
    missing = count - x.shape[-1]
    if missing == 0:
        return x
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], constant_values=x.dtype.type(absent))


# ---- numbers that a launch passes by value ----


def values_of(graph: Graph, eps: float) -> dict[str, Array]:
    """The parameters that ``graph`` takes by value, by name: NumPy arrays of shape (), rounded once to their dtypes.

    Nothing may write to them.
    """
    with np.errstate(over="ignore", under="ignore"):
        found = {v.name: np.array(RULES[v.rule].of(eps), NUMPY_DTYPE[v.type.dtype]) for v in graph.by_value}
    for number in found.values():
        number.setflags(write=False)
    return found


def bits_of(value: Array) -> int:
    """The bits of a number of 4 or 8 bytes, as an argument block holds them."""
    return int.from_bytes(value.tobytes(), "little")


# ---- how often a term of a sum is rounded ----


def row_depth(D: int) -> int:
    """Most roundings of a term in a row sum: chunks of <= 8, a tree, >= 2048 elements a segment, 4 partial sums."""
    return min(D - 1, 7 + ceil(log2(D)) + D // 8192)


def column_depth(M: int, D: int) -> int:
    """The same for a column sum: partial sums of rows, 64 or more (4 for wide rows), added at depth <= 128."""
    return min(max(M, 1) - 1, ceil(M / (64 if D <= 32768 else 4)) + 128)
