"""Sums and maxima in their one order, on NumPy arrays.

The order of additions is explicit, so IEEE 754 determines the bits on any machine. Absent terms are -0.0, the one
number whose addition changes no other number, not even +0.0 or -0.0.
"""

from __future__ import annotations

import numpy as np

from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array, add_products, fma, maximum
from lngen.dtypes import DType
from lngen.rules import Stretch

ABSENT = -0.0

# ---- over the elements of rows ----


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
        part = slice(start, start + segment)
        terms = _pad(x[..., part], chunks * chunk).reshape(shape)
        factors = None if times is None else _pad(times[..., part], chunks * chunk, 1.0).reshape(shape)
        sums.append(fold(_chunk_sums(terms, factors)))
    return np.stack(sums, axis=-1) if len(sums) > 1 else sums[0][..., None]


def _chunk_sums(terms: Array, factors: Array | None) -> Array:
    """The sums of chunks, left to right, [..., runs, chunks, run] -> [..., chunks]."""
    first, *rest = ((..., j, slice(None), i) for j in range(terms.shape[-3]) for i in range(terms.shape[-1]))
    if factors is None:
        total = terms[first] + terms[rest[0]] if rest else terms[first]
        for place in rest[1:]:
            total += terms[place]
        return total
    return add_products(terms[first] * factors[first], [(terms[place], factors[place]) for place in rest])


def _pad(x: Array, count: int, absent: float = ABSENT) -> Array:
    """The last axis padded to ``count`` with absent terms, or with factors of absent terms."""
    if x.shape[-1] == count:
        return x
    padded = np.full((*x.shape[:-1], count), absent, x.dtype)
    padded[..., : x.shape[-1]] = x
    return padded


def fold(parts: Array) -> Array:
    """Sum over the last axis: while more than one part is left, add the upper half onto the lower half.

    The count is padded to a power of two with absent parts, which add nothing.
    """
    while (count := parts.shape[-1]) > 1:
        half = 1 << (count - 1).bit_length() - 1
        lower, upper = parts[..., :half], parts[..., half:]
        if count == 2 * half:
            parts = lower + upper
        else:
            parts = lower.copy()
            parts[..., : count - half] += upper
    return parts[..., 0]


def interleaved_sum(terms: Array, interleave: int) -> Array:
    """Sum over the last axis in ``interleave`` partial sums: [..., terms] -> [...].

    Term i belongs to partial sum i % interleave, which adds its terms left to right; the partial sums are folded.
    """
    if terms.shape[-1] <= interleave:
        return fold(terms)
    total = terms[..., :interleave].copy()
    for start in range(interleave, terms.shape[-1], interleave):
        more = terms[..., start : start + interleave]
        total[..., : more.shape[-1]] += more
    return fold(total)


def segment_sizes(d: int, segment: int, dtype: DType) -> Array:
    """The number of elements of each segment in rows of ``d``: [S]; the last may have fewer than ``segment``."""
    starts = np.arange(0, d, segment)
    return np.minimum(segment, d - starts).astype(NUMPY_DTYPE[dtype])


def row_max(x: Array) -> Array:
    """The largest element of the last axis, [..., D] -> [...]; the same in every order."""
    largest = np.asarray(x.max(axis=-1))
    zero = largest == 0  # NumPy may return either
    if zero.any():
        largest[zero & ((x == 0) & ~np.signbit(x)).any(axis=-1)] = 0
    return largest


# ---- over rows, which come in blocks ----


class ColumnSum:
    """A sum over the rows in the canonical order of column sums, [M, D] -> [D], of rows that come in blocks.

    Row r belongs to block (r // groups) % blocks and to its group r % groups. A group adds its rows in increasing
    order, the groups of a block are folded, the blocks are added in ``interleave`` partial sums
    (``interleaved_sum``). Of no rows it is +0.
    """

    def __init__(self, rows: int, groups: int = 1, blocks: int = 1, interleave: int = 1) -> None:
        self._count, self._groups, self._interleave = groups * blocks, groups, interleave
        # The groups that have rows, and those that fill the last block with absent terms.
        self._held = min(-(-rows // groups) * groups, self._count)
        self._sums: Array | None = None
        self._rows = 0

    def add(self, x: Array, times: Array | None = None) -> None:
        """The next rows; with ``times`` the terms are products, each rounded with its addition."""
        if times is not None:
            x, times = np.broadcast_arrays(x, times)
        if self._sums is None:
            self._sums = np.full((self._held, x.shape[1]), ABSENT, x.dtype)
        done = 0
        while done < len(x):
            first = self._rows % self._count
            part = slice(done, min(len(x), done + self._count - first))
            self._add(first, x[part], None if times is None else times[part])
            self._rows += part.stop - done
            done = part.stop

    def _add(self, first: int, x: Array, times: Array | None) -> None:
        """Rows of neighbouring groups, one each."""
        assert self._sums is not None
        total = self._sums[first : first + len(x)]
        if times is None:
            total += x
        elif self._rows < self._count:
            np.multiply(x, times, out=total)
        else:
            fma(x, times, total, out=total)

    def total(self) -> Array:
        """[D]."""
        assert self._sums is not None
        if self._rows == 0:
            return np.zeros(self._sums.shape[1], self._sums.dtype)
        blocks = fold(np.moveaxis(self._sums.reshape(-1, self._groups, self._sums.shape[1]), 1, -1))
        return interleaved_sum(blocks.T, self._interleave)


def column_sum(x: Array, times: Array | None = None, *, groups: int = 1, blocks: int = 1, interleave: int = 1) -> Array:
    """The ``ColumnSum`` of all rows at once, [M, D] -> [D]."""
    total = ColumnSum(len(x), groups, blocks, interleave)
    total.add(x, times)
    return total.total()


def set_sum(
    x: Array, times: Array | None = None, *, stretch: int, least: int, long: int, groups: int = 1, interleave: int = 1
) -> Array:
    """The sum over the rows of one set, [n, D] -> [D].

    The set is cut into stretches (``lngen.rules.Stretch``). Row i of a stretch belongs to group i % groups; a group
    adds its rows in increasing order, the groups are folded. The sums of stretches are added in partial sums
    (``interleaved_sum``): ``interleave`` of them where each has four terms at least, else a quarter of that many.
    """
    rows = Stretch(stretch, least, long, groups).of(len(x))
    parts = [slice(first, first + rows) for first in range(0, len(x), rows)]
    if not parts:
        return column_sum(x, times)
    found = [column_sum(x[p], None if times is None else times[p], groups=groups) for p in parts]
    strands = interleave if len(found) >= 4 * interleave else max(interleave // 4, 1)
    return interleaved_sum(np.stack(found, axis=-1), strands)


class ColumnMax:
    """The largest element of each column, [M, D] -> [D], of rows that come in blocks; of no rows, -inf."""

    def __init__(self) -> None:
        self._largest: Array | None = None

    def add(self, x: Array) -> None:
        """The next rows."""
        own = row_max(x.T) if len(x) else np.full(x.shape[1], -np.inf, x.dtype)
        self._largest = own if self._largest is None else maximum(self._largest, own)

    def total(self) -> Array:
        """[D]."""
        assert self._largest is not None
        return self._largest


def column_max(x: Array) -> Array:
    """The ``ColumnMax`` of all rows at once; the same in every order."""
    found = ColumnMax()
    found.add(x)
    return found.total()
