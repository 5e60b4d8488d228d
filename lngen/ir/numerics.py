"""The arithmetic the IR means, on NumPy: exact fma, single rounding, sums in their one order.

Every function is elementwise or spells its order of additions out, so its bits are those IEEE 754
prescribes, on any machine. Absent terms of a sum are -0.0, the one number that changes no other
number, not even +0.0 or -0.0, when it is added.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from lngen.ir.types import BF16, F16, F32, F64, DType

Array = NDArray[Any]

NUMPY_DTYPE: dict[DType, np.dtype[Any]] = {
    F16: np.dtype(np.float16),
    BF16: np.dtype(ml_dtypes.bfloat16),
    F32: np.dtype(np.float32),
    F64: np.dtype(np.float64),
}

ABSENT = -0.0

SEGMENT_STRANDS = 4  # sums that are kept of a row of any length


def round_to(x: Array, to: DType) -> Array:
    """x rounded once, to nearest even, to the dtype ``to``.

    bfloat16 from float64 goes through a float32 rounded to odd, which keeps the second rounding
    from seeing a tie that is none (Boldo and Melquiond, Emulation of FMA and correctly rounded
    sums, IEEE Trans. Computers 57(4), 2008).
    """
    if to is BF16 and x.dtype == np.float64:
        x = _to_odd_f32(x)
    return np.asarray(x.astype(NUMPY_DTYPE[to]))


def _to_odd_f32(x: Array) -> Array:
    """float64 to float32, rounded to odd: toward zero, then the last bit set if anything was lost."""
    near = x.astype(np.float32)
    over = np.abs(near.astype(np.float64)) > np.abs(x)
    toward_zero = np.where(over, np.nextafter(near, np.float32(0)), near)
    lost = toward_zero.astype(np.float64) != x
    bits = np.asarray(toward_zero).view(np.uint32) | (lost & np.isfinite(toward_zero)).astype(np.uint32)
    return np.asarray(bits.view(np.float32))


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in float32, rounded once.

    The product of two float32 is exact in float64; the sum is rounded to odd there, so that the
    rounding to float32 is the only one that shows (Boldo and Melquiond, 2008).
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
    """The larger one; a NaN if either is one, and +0 is larger than -0, so that no order of operands shows."""
    return np.asarray(np.where(a == b, np.where(np.signbit(a), b, a), np.maximum(a, b)))


def row_max(x: Array) -> Array:
    """The largest element of the last axis, [..., D] -> [...]; the same in every order."""
    largest = x.max(axis=-1)  # among zeros NumPy's may be either
    zero = (largest == 0) & ((x == 0) & ~np.signbit(x)).any(axis=-1)
    return np.asarray(np.where(zero, np.zeros_like(largest), largest))


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


def join_segments(parts: Array) -> Array:
    """Sum over the last axis, a number of each segment of a row, in the canonical order: [..., segments] -> [...].

    Segment s belongs to strand s % SEGMENT_STRANDS; a strand adds its segments left to right, the strands are folded.
    """
    count = parts.shape[-1]
    turns = -(-count // SEGMENT_STRANDS)
    stranded = _pad(parts, turns * SEGMENT_STRANDS).reshape(*parts.shape[:-1], turns, SEGMENT_STRANDS)
    return fold(_left_to_right(np.moveaxis(stranded, -2, -1)))


def row_sum(x: Array, times: Array | None = None, *, chunk: int, segment: int, run: int | None = None) -> Array:
    """Sum over the last axis in the canonical order of row sums, [..., D] -> [...].

    The row is cut into segments of ``segment`` elements and each segment into chunks of ``chunk`` elements: runs of
    ``run`` consecutive ones (None: all of a chunk), which lie as far apart as there are chunks of them. A chunk is
    added left to right, the chunks of a segment are folded, the segments are joined (``join_segments``). With
    ``times``, of x's shape, the terms are products, each rounded together with its addition to the chunk.
    """
    run, chunks = run or chunk, -(-segment // chunk)
    shape = *x.shape[:-1], chunk // run, chunks, run
    sums = []
    for start in range(0, x.shape[-1], segment):
        parts = (_pad(f[..., start : start + segment], chunks * chunk, absent) for f, absent in _factors(x, times))
        runs = (np.moveaxis(p.reshape(shape), -3, -2).reshape(*x.shape[:-1], chunks, chunk) for p in parts)
        sums.append(fold(_left_to_right(*runs)))
    return join_segments(np.stack(sums, axis=-1))


def segment_mean(x: Array, *, chunk: int, segment: int, run: int | None = None) -> Array:
    """About the mean of each element's segment, float32 [..., D] -> [..., D].

    The sum of the segment, as ``row_sum`` adds it, times 1 / n, the reciprocal of its length rounded.
    """
    one, parts = x.dtype.type(1), []
    for part in _segments(x, segment):
        centre = row_sum(part, chunk=chunk, segment=segment, run=run) * (one / x.dtype.type(part.shape[-1]))
        parts.append(np.broadcast_to(centre[..., None], part.shape))
    return np.concatenate(parts, axis=-1)


def row_spread(x: Array, *, chunk: int, segment: int, run: int | None = None) -> Array:
    """Sum of the squares of the distances from the mean over the last axis, float32 [..., D] -> [...].

    Each segment is measured from its own mean, or nearly: from its ``segment_mean`` c. With q, its sum of squares of
    distances from c, in the order of ``row_sum``,

        sum (x - mean)^2 = q + n (c - mean)^2

    is what it adds; the product is rounded with the addition to q, the segments are joined. The mean is the sum of the
    row, as ``row_sum`` adds it, divided by D. So are samples combined (Chan, Golub and LeVeque, Algorithms for
    Computing the Sample Variance, The American Statistician 37(3), 1983), here so that only sums of single segments
    come before those of squares.
    """
    order: dict[str, Any] = {"chunk": chunk, "segment": segment, "run": run}
    dtype, centre = x.dtype.type, segment_mean(x, **order)
    mean, terms = row_sum(x, **order) / dtype(x.shape[-1]), []
    for c, far in zip(_segments(centre, segment), _segments(x - centre, segment), strict=True):
        off = c[..., 0] - mean
        terms.append(fma(dtype(far.shape[-1]) * off, off, row_sum(far, far, **order)))
    return join_segments(np.stack(terms, axis=-1))


def _segments(x: Array, segment: int) -> list[Array]:
    """The last axis cut into segments, the last perhaps shorter."""
    return [x[..., start : start + segment] for start in range(0, x.shape[-1], segment)]


def column_sum(x: Array, times: Array | None = None, *, groups: int, blocks: int, strands: int) -> Array:
    """Sum over the rows in the canonical order of column sums, [M, D] -> [D]; of no rows, +0.

    Row r belongs to block (r // groups) % blocks and to its group r % groups. A group adds its rows
    in increasing order, the groups of a block are folded; block b belongs to strand b % strands, a
    strand adds its blocks in increasing order, the strands are folded. With ``times``, of x's shape,
    the terms are products, each rounded together with its addition to the group.
    """
    rows, features = x.shape
    if rows == 0:
        return np.zeros(features, x.dtype)
    rounds = -(-rows // (groups * blocks))
    shape = features, rounds, blocks, groups
    tiled = (_pad(f.T, rounds * blocks * groups, absent).reshape(shape) for f, absent in _factors(x, times))
    per_block = fold(_left_to_right(*(np.moveaxis(t, 1, -1) for t in tiled)))
    turns = -(-blocks // strands)
    stranded = _pad(per_block, turns * strands).reshape(features, turns, strands)
    return fold(_left_to_right(np.moveaxis(stranded, 1, -1)))


def _factors(x: Array, times: Array | None) -> list[tuple[Array, float]]:
    """What the terms of a sum are made of, and what makes an absent one."""
    return [(x, ABSENT)] if times is None else [(x, ABSENT), (times, 1.0)]


def _left_to_right(x: Array, times: Array | None = None) -> Array:
    """Sum over the last axis, left to right; with ``times`` of the products, each rounded with its addition."""
    total = x[..., 0] if times is None else x[..., 0] * times[..., 0]
    for i in range(1, x.shape[-1]):
        total = total + x[..., i] if times is None else fma(x[..., i], times[..., i], total)
    return total


def _pad(x: Array, count: int, absent: float = ABSENT) -> Array:
    """The last axis filled up to ``count`` with absent terms, or factors of such."""
    missing = count - x.shape[-1]
    if missing == 0:
        return x
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], constant_values=x.dtype.type(absent))
