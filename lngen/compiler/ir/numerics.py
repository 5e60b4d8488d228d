"""The arithmetic of the IR on NumPy: exact fma, single rounding, operations on bits.

Every function is elementwise, so IEEE 754 determines its bits on any machine. Those of operands write to the array
``out`` if one is given.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterable, Sequence
from math import ceil, log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lngen.compiler.ir.types import BF16, F32, Graph
from lngen.dtypes import QUANTISED, DType
from lngen.errors import ArrayError
from lngen.rules import RULES, padded

Array = NDArray[Any]

NUMPY_DTYPE: dict[DType, np.dtype[Any]] = {dtype: dtype.numpy() for dtype in DType}
FROM_NUMPY = {own: dtype for dtype, own in NUMPY_DTYPE.items()}
# NumPy's own, for files: unsigned integers of the same bits for a dtype of ml_dtypes.
PLAIN_DTYPE = {t: own if own.isbuiltin == 1 else np.dtype(f"u{own.itemsize}") for t, own in NUMPY_DTYPE.items()}


def round_to(x: Array, to: DType, out: Array | None = None) -> Array:
    """x rounded once, to nearest even, to the dtype ``to``.

    What has the digits of bfloat16 or fewer goes from float64 through a float32 rounded to odd, so that the second
    rounding meets no false tie (Boldo and Melquiond, Emulation of FMA and correctly rounded sums, IEEE Trans.
    Computers 57(4), 2008). e4m3, e5m2, int8 and i32 saturate (``_saturated``); other dtypes overflow.
    """
    if to is DType.I32:
        return _saturated(x.astype(np.float64), to)  # which has its ends
    if to.digits <= BF16.digits and x.dtype == np.float64:
        x = _to_odd_f32(x)
    if to in QUANTISED:
        return _saturated(x, to)
    if out is None:
        return np.asarray(x.astype(NUMPY_DTYPE[to]))
    np.copyto(out, x, casting="unsafe")
    return out


def _saturated(x: Array, to: DType) -> Array:
    """Numbers beyond the range become its ends, infinities too; a NaN becomes 0x7f, a whole one 0: cvt of PTX."""
    number, least = x == x, -to.largest if to.digits else -to.largest - 1
    near = np.clip(np.where(number, x, x.dtype.type(0)), least, to.largest)
    if not to.digits:
        return np.asarray(np.rint(near).astype(NUMPY_DTYPE[to]))
    return np.where(number, near.astype(NUMPY_DTYPE[to]).view(np.uint8), np.uint8(0x7F)).view(NUMPY_DTYPE[to])


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


Kind = tuple[tuple[int, ...], Any]
KEPT, MOST = 1 << 24, 256  # bytes of memory, and sets of arrays on it, at most


class Scratch(threading.local):
    """Arrays for the time of a call, on memory that each thread keeps: new memory is slow at its first touch."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._known: dict[tuple[Kind, ...], list[Array]] = {}

    def arrays(self, *kinds: Kind) -> list[Array]:
        """An array of each kind, a shape and a dtype; good until the next call."""
        found = self._known.get(kinds)
        if found is None:
            found = self._made(kinds)
        return found

    def _made(self, kinds: tuple[Kind, ...]) -> list[Array]:
        sizes = [-(-math.prod(shape) * np.dtype(dtype).itemsize // 64) * 64 for shape, dtype in kinds]
        if sum(sizes) > KEPT:
            return [np.empty(*kind) for kind in kinds]
        if self._memory.size < sum(sizes) or len(self._known) == MOST:
            self._memory = np.empty(max(sum(sizes), self._memory.size), np.uint8)
            self._known.clear()
        starts = itertools.accumulate(sizes, initial=0)
        found = [np.ndarray(*kind, self._memory, start) for kind, start in zip(kinds, starts, strict=False)]
        self._known[kinds] = found
        return found


_products, _sums = Scratch(), Scratch()

# The low bits of a float64 that are 0 if it is a float32, or the middle of two.
_BELOW_MIDDLE = np.int64((1 << 28) - 1)
_MANY = 256  # places from which whole arrays are examined, if they are as many in 64


def fma(a: Array, b: Array, c: Array, out: Array | None = None) -> Array:
    """a * b + c in float32, rounded once.

    In float64 the product of two float32 is exact: it has 48 bits and a size from 2^-298 to 2^256. Let s be its sum
    with c, rounded to float64. The middle of two neighbouring float32, subnormal ones and the end of the range
    included, has at most 25 bits, none below 2^-150, so it is a float64. Rounding never passes one: s lies on the side
    of a middle on which the exact sum lies, or it is the middle. So s rounds to the float32 of the exact sum unless it
    is a middle that the exact sum is not; then it is moved one step of float64 to the side of the exact sum. Zeros have
    the sign of float64: another exact sum is no less than 2^-298.
    """
    (product,) = _products.arrays((np.broadcast(a, b).shape, np.float64))
    np.multiply(a, b, out=product, dtype=np.float64)
    shape = np.broadcast(product, c).shape
    total, low, middle = _sums.arrays((shape, np.float64), (shape, np.int64), (shape, np.bool_))
    np.add(product, c, out=total)
    places, steps = _inexact_middles(total, product, c, low, middle)
    if places.size:
        total.reshape(-1).view(np.int64)[places] += steps
    if out is None:
        out = np.empty(shape, np.float32)
    np.copyto(out, total, casting="same_kind")
    return out


def add_products(total: Array, factors: Sequence[tuple[Array, Array]]) -> Array:
    """``total`` and the products of pairs of factors, all of one shape, added in turn by ``fma``.

    Whether a sum has to be moved is asked once for all; then, which is seldom, they are added one by one.
    """
    if not factors:
        return total
    shape = len(factors), *total.shape
    products, addends = _products.arrays((shape, np.float64), ((len(factors) + 1, *total.shape), np.float32))
    sums, low, middle = _sums.arrays((shape, np.float64), (shape, np.int64), (shape, np.bool_))
    addends[0] = total
    for n, (a, b) in enumerate(factors):
        np.multiply(a, b, out=products[n], dtype=np.float64)
        np.add(products[n], addends[n], out=sums[n])
        np.copyto(addends[n + 1], sums[n], casting="same_kind")
    places, _ = _inexact_middles(sums, products, addends[:-1], low, middle)
    if not places.size:
        return np.asarray(addends[-1].copy())
    for a, b in factors:
        total = fma(a, b, total)
    return total


def _inexact_middles(total: Array, product: Array, c: Array, low: Array, middle: Array) -> tuple[Array, Array]:
    """The places of sums that are a middle, as the exact sum is not, and the steps of their bits to its side.

    ``low`` and ``middle`` are overwritten.
    """
    np.bitwise_and(total.view(np.int64), _BELOW_MIDDLE, out=low)
    np.equal(low, 0, out=middle)
    count = np.count_nonzero(middle)
    if not count:
        return _NOWHERE
    if count > max(middle.size // 64, _MANY):  # numbers of few bits, whose sums are mostly exact
        # The difference to the larger operand is exact (Dekker), so it is the other one only if the sum is exact, too.
        middle &= (total - product != c) | (total - c != product)
    places, sums = np.flatnonzero(middle), total.reshape(-1)
    places = places[sums[places].astype(np.float32) != sums[places]]
    if not places.size:
        return _NOWHERE
    at = np.unravel_index(places, total.shape or (1,))
    found, x, y = sums[places], _picked(product, at), _picked(c, at).astype(np.float64)
    # TwoSum (Knuth): found + error is the exact sum.
    shadow = found - x
    error = (x - (found - shadow)) + (y - shadow)
    inexact = (error > 0) | (error < 0)  # not that of a NaN
    # In sign-magnitude order: outward if the error has the sum's sign.
    return places[inexact], np.where((error > 0) == (found > 0), 1, -1)[inexact]


_NOWHERE = np.empty(0, np.intp), np.empty(0, np.int64)


def _picked(x: Array, at: tuple[Array, ...]) -> Array:
    """Elements of an array that is broadcast along its axes of size 1."""
    own = at[len(at) - x.ndim :]
    return np.asarray(x[tuple(place if n > 1 else 0 for place, n in zip(own, x.shape, strict=True))])


# ---- choices, and operations on bits ----


def maximum(a: Array, b: Array, out: Array | None = None) -> Array:
    """The larger one; a NaN if either is one, and +0 is larger than -0, so the order of operands does not matter."""
    return _of_two(np.maximum(a, b, out=out), a, b, negative=False)


def minimum(a: Array, b: Array, out: Array | None = None) -> Array:
    """The smaller one; a NaN if either is one, and -0 is smaller than +0, so the order of operands does not matter."""
    return _of_two(np.minimum(a, b, out=out), a, b, negative=True)


def _of_two(found: Array, a: Array, b: Array, *, negative: bool) -> Array:
    """``found``, in which two zeros give the one with that sign, whichever NumPy took."""
    found, equal = np.asarray(found), np.asarray(a == b)
    if np.count_nonzero(equal):
        np.copyto(found, np.where(np.signbit(a) == negative, a, b), where=equal)
    return found


def where_gt(a: Array, b: Array, c: Array, d: Array, out: Array | None = None) -> Array:
    """c where a > b, else d."""
    return _choose(a > b, c, d, out)


def select_gt(a: Array, b: Array, c: Array, out: Array | None = None) -> Array:
    """c where a > b, else 0."""
    return _choose(a > b, c, c.dtype.type(0), out)


def select_eq(a: Array, b: Array, c: Array, out: Array | None = None) -> Array:
    """c where a = b, else 0."""
    return _choose(a == b, c, c.dtype.type(0), out)


def take(x: Array, index: Array) -> Array:
    """The element of each row at its index, [M, 1]; 0 where that is outside the row."""
    inside = (index >= 0) & (index < x.shape[1])
    rows = np.broadcast_to(x, (len(index), x.shape[1]))
    found = np.take_along_axis(rows, np.where(inside, index, 0).astype(np.intp), axis=1)
    found[~inside] = 0
    return found


def gather(table: Array, index: Array) -> Array:
    """The row of a table at the index of each row, [M, E]; ArrayError for an index outside the table."""
    rows = index[:, 0].astype(np.intp)
    wrong = rows[(rows < 0) | (rows >= len(table))]
    if wrong.size:
        raise ArrayError(f"a position is expected to be one of the {len(table)} rows of its table, got {wrong[0]}.")
    return np.take(table, rows, axis=0)


def planes(attrs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The features of a head, those of them that turn, and whether neighbours share a plane."""
    found = dict(attrs)
    return {"head": found["head"], "width": found["width"], "pairs": found["by"] == "pairs"}


def turned(x: Array, head: int, width: int, pairs: bool) -> Array:
    """(-b, a) of each plane (a, b) of the first ``width`` features of heads, and 0 of the others."""
    found = np.zeros_like(x)
    given, target = (a.reshape(len(x), x.shape[1] // head, head)[..., :width] for a in (x, found))
    half = width // 2
    first, second = (slice(0, None, 2), slice(1, None, 2)) if pairs else (slice(0, half), slice(half, None))
    target[..., first], target[..., second] = -given[..., second], given[..., first]
    return found


def relu(x: Array, out: Array | None = None) -> Array:
    """0 where x <= 0, else x."""
    return _choose(x <= 0, x.dtype.type(0), x, out)


def _choose(first: Array, c: Array, d: Array, out: Array | None) -> Array:
    if out is None:
        return np.where(first, c, d)
    np.copyto(out, d)
    np.copyto(out, c, where=first)
    return out


def exp2_biased(t: Array, out: Array | None = None) -> Array:
    """2^n for t = n + 1.5 * 2^23 + 127 in float32, n whole from -126 to 127: the low bits of t as the exponent."""
    return _float(np.left_shift(_bits(t), np.uint32(23), out=_bits(out)))


_ONE = np.uint32(0x3F800000)  # the bits of 1 in float32


def exp2_whole(t: Array, out: Array | None = None) -> Array:
    """2^n for t = n + 1.5 * 2^23 in float32, n whole from -126 to 127: the bits of 1, n added to its exponent."""
    return _float(np.add(np.left_shift(_bits(t), np.uint32(23), out=_bits(out)), _ONE, out=_bits(out)))


def limited(x: Array, most: Array, out: Array | None = None) -> Array:
    """x, but with a magnitude of ``most``, a positive number, where it is larger; a NaN stays one."""
    return np.asarray(np.copysign(np.minimum(np.abs(x), most), x, out=out))


# The bits of 2/3 in float32, rounded up: differences of bits count in exponents from there.
_TWO_THIRDS = np.uint32(0x3F2AAAAB)


def exponent(x: Array, out: Array | None = None) -> Array:
    """The whole number k with x / 2^k in [2/3, 4/3), of a positive normal float32."""
    shifted = np.subtract(_bits(x), _TWO_THIRDS, out=_bits(out)).view(np.int32)
    return round_to(np.right_shift(shifted, np.int32(23), out=shifted), F32, out)


def significand(x: Array, out: Array | None = None) -> Array:
    """x / 2^k in [2/3, 4/3), of a positive normal float32; exact."""
    power = np.subtract(_bits(x), _TWO_THIRDS, out=_bits(out))
    power &= np.uint32(0xFF800000)
    return _float(np.subtract(_bits(x), power, out=power))


# The difference of bits is near that of logarithms (J. F. Blinn, Floating-point tricks, IEEE Computer Graphics and
# Applications 17(4), 1997). This number makes the largest error of a reciprocal least.
RECIPROCAL = 0x7EF33000


def reciprocal_guess(x: Array, out: Array | None = None) -> Array:
    """1 / x to within 5.1 percent, of a float32 from 2^-126 to 1.89 * 2^125: the bits subtracted from a number."""
    return _float(np.subtract(np.uint32(RECIPROCAL), _bits(x), out=_bits(out)))


def _bits(x: Array | None) -> Any:
    return None if x is None else x.view(np.uint32)


def _float(bits: Array) -> Array:
    return np.asarray(bits).view(np.float32)


def columns_of(x: Array) -> Array:
    """Rows of numbers stored by columns: a part of an array that has zeros behind each column."""
    found = np.zeros((x.shape[1], padded(len(x))), x.dtype)[:, : len(x)]
    found[...] = x.T
    return found


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
