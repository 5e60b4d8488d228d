"""If these fail, rounding, fma or the order of a sum is no longer what its definition says, bit for bit."""

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lngen.compiler.ir import BF16, F16, F32, F64, DType, sums
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array, fma, round_to
from lngen.compiler.ir.sums import column_sum, fold, interleaved_sum, segment_sums

# The segments of a row are added in four partial sums, as by order v1.
row_sum = partial(sums.row_sum, interleave=4)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """NaN, infinity and underflow are meant."""
    with np.errstate(all="ignore"):
        yield


# ---- one rounding ----

# Bits of the significand, exponent of the smallest subnormal, the largest finite number.
FORMATS = {
    F16: (11, -24, Fraction(65504)),
    BF16: (8, -133, Fraction(2**128 - 2**120)),
    F32: (24, -149, Fraction(2**128 - 2**104)),
}


def nearest(exact: Fraction, to: DType) -> float:
    """``exact`` rounded to nearest, ties to even; a zero is +0."""
    bits, least, most = FORMATS[to]
    if not exact:
        return 0.0
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    ulp = Fraction(2) ** max(exponent - bits + 1, least)
    rounded = round(exact / ulp) * ulp  # of a Fraction: to the even whole number
    return math.copysign(math.inf if abs(rounded) > most else float(rounded), exact)


def same(found: Any, expected: Any) -> bool:
    """Equal to the bit, all NaNs alike."""
    a, b = np.asarray(found), np.asarray(expected)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    nan = np.isnan(a.astype(np.float64)) & np.isnan(b.astype(np.float64))
    return bool((nan | ((a == b) & (np.signbit(a) == np.signbit(b)))).all())


def test_the_reference_knows_ties_the_ends_of_the_range_zeros_and_nans() -> None:
    tiny = Fraction(1, 2**149)
    assert nearest(Fraction(2**24 + 1), F32) == 2.0**24
    assert nearest(Fraction(2**24 + 3), F32) == 2.0**24 + 4
    assert nearest(tiny / 2, F32) == 0
    assert nearest(tiny * 3 / 2, F32) == 2 * float(tiny)
    assert nearest(Fraction(65519), F16) == 65504
    assert nearest(Fraction(-65520), F16) == -math.inf
    assert same(np.float32(np.nan), -np.float32(np.nan))
    assert not same(np.float32(0.0), np.float32(-0.0))
    assert not same(np.float32(1.0), np.float64(1.0))


@st.composite
def near_ties(draw: st.DrawFn, to: DType) -> float:
    """A float64 at, or a hair beside, the middle of two neighbours in ``to``."""
    bits, least, _ = FORMATS[to]
    whole = draw(st.integers(0, 2**bits)) + Fraction(1, 2)
    ulp = draw(st.integers(max(least - 2, -1000), least + 300 if to is BF16 else least + 40))
    hair = draw(st.sampled_from([0, 1, -1])) * Fraction(2) ** (ulp - draw(st.integers(1, 30)))
    return draw(st.sampled_from([1, -1])) * float(whole * Fraction(2) ** ulp + hair)


@pytest.mark.parametrize("to", FORMATS)
@given(data=st.data())
def test_from_f64_rounds_once(to: DType, data: st.DataObject) -> None:
    value = data.draw(st.one_of(st.floats(allow_nan=False, allow_infinity=False), near_ties(to)))
    expected = math.copysign(nearest(Fraction(value), to), value)
    assert same(round_to(np.array([value]), to)[0], NUMPY_DTYPE[to].type(expected))


def test_f64_to_bf16_by_way_of_f32_would_round_twice() -> None:
    x = np.array([1 + 2.0**-8 + 2.0**-40, -1 - 2.0**-8 - 2.0**-40])
    assert round_to(x, BF16).tolist() == [1 + 2.0**-7, -1 - 2.0**-7]
    assert round_to(x.astype(np.float32), BF16).tolist() == [1, -1]


@pytest.mark.parametrize("to", [F16, BF16])
@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False))
@example(1.00390625)  # a tie of bf16, to even: down
@example(1.01171875)  # up
@example(float(np.float32(3.3895314e38)))  # bf16's largest
@example(3.4e38)  # beyond it
@example(1e-45)
@example(-0.0)
def test_from_f32_rounds_to_nearest_even(to: DType, value: float) -> None:
    single = np.float32(value)
    expected = math.copysign(nearest(Fraction(float(single)), to), single)
    assert same(round_to(np.array([single]), to)[0], NUMPY_DTYPE[to].type(expected))


@pytest.mark.parametrize("to", [F16, BF16, F32, F64])
@pytest.mark.parametrize("given_as", [np.float32, np.float64])
def test_rounding_keeps_what_is_not_finite(to: DType, given_as: type[Any]) -> None:
    found = round_to(np.array([np.inf, -np.inf, np.nan, -np.nan], given_as), to).astype(np.float64)
    assert same(found, np.array([np.inf, -np.inf, np.nan, np.nan]))


# ---- fma ----


def exact_fma(a: float, b: float, c: float) -> float:
    """a * b + c with one rounding to f32, by fractions."""
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c  # no rounding is involved, and the product of two f32 cannot overflow a Python float
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact:
        return math.copysign(nearest(exact, F32), exact)
    product = math.copysign(1, a) * math.copysign(1, b)
    negative = product < 0 and math.copysign(1, c) < 0 and (not a or not b)  # -0 only from -0 + -0
    return -0.0 if negative else 0.0


singles = st.floats(width=32)
EDGES = st.sampled_from(
    [0.0, -0.0, 1e-45, -1e-45, 2.0**-126, 3.4028234663852886e38, 2.0**-75, 1 + 2.0**-23, 4097.0, -1.0]
).map(lambda x: float(np.float32(x)))


def check_fma(a: float, b: float, c: float) -> None:
    """For the f32 nearest to a, b and c."""
    a, b, c = (float(np.float32(x)) for x in (a, b, c))
    found = fma(*(np.array([[x]], np.float32) for x in (a, b, c)))
    assert same(found, np.array([[exact_fma(a, b, c)]], np.float32)), (a, b, c, found)


@given(a=st.one_of(singles, EDGES), b=st.one_of(singles, EDGES), c=st.one_of(singles, EDGES))
@example(4097.0, 4097.0, -16785408.0)
@example(1e-45, 0.5, 0.0)  # a tie between 0 and the smallest subnormal
@example(1e-45, 0.5, 1e-45)  # the tie above it
@example(2.0**-75, 2.0**-75, -0.0)
@example(-1e-45, 1e-45, 0.0)  # underflows to -0
@example(-1e-45, 1e-45, 3.4028234663852886e38)
@example(3.4028234663852886e38, 1.0, 2.0**103)  # the tie at the end of the range
@example(math.inf, 0.0, 1.0)
@example(math.inf, 1.0, -math.inf)
@example(-0.0, 1.0, -0.0)
@example(-0.0, 1.0, 0.0)
def test_fma_is_exact_then_rounded_once(a: float, b: float, c: float) -> None:
    check_fma(a, b, c)


@given(
    a=st.integers(2**23, 2**24 - 1),
    b=st.integers(2**23, 2**24 - 1),
    shift=st.integers(-30, 80),
    sign=st.sampled_from([1, -1]),
)
def test_fma_breaks_ties_by_the_smallest_addend(a: int, b: int, shift: int, sign: int) -> None:
    """The product has up to 48 bits; an addend of any size decides, or cancels, its low half."""
    check_fma(float(a), float(b), sign * 2.0**shift)
    check_fma(float(a), float(b), -float(np.float32(a * b)))
    check_fma(float(a | 1), 2.0**-23, sign * 2.0**-140)
    check_fma(a * 2.0**-100, 2.0**-65, sign * float(b) * 2.0**-172)  # subnormal products


odd = st.integers(2**11, 2**12 - 1).map(lambda n: 2.0 * n + 1)


@given(a=odd, b=odd, shift=st.integers(10, 149), sign=st.sampled_from([1, -1]), side=st.sampled_from([1, -1]))
def test_fma_sees_an_addend_far_below_a_tie(a: float, b: float, shift: int, sign: int, side: int) -> None:
    """The product lies in the middle of two f32; f64 loses the addend, which yet decides."""
    check_fma(side * a, b, sign * 2.0**-shift)
    check_fma(a * 2.0**-60, side * b, sign * 2.0 ** -max(shift, 80))


SHAPE = 40, 50  # so many that numbers of few bits go their own way


def scaled(rng: np.random.Generator, bits: int, low: int, high: int) -> Array:
    """Whole numbers of so many bits times powers of two from ``low`` on."""
    return rng.integers(-(1 << bits), 1 << bits, SHAPE) * 2.0 ** rng.integers(low, high, SHAPE)


FACTORS: dict[str, Callable[[np.random.Generator], tuple[Array, Array, Array]]] = {
    "any bits": lambda rng: tuple(rng.integers(0, 1 << 32, SHAPE, np.uint32).view(np.float32) for _ in range(3)),
    "few bits": lambda rng: (scaled(rng, 2, -2, 2), scaled(rng, 2, -2, 2), scaled(rng, 3, -2, 2)),
    "bf16": lambda rng: (scaled(rng, 8, -8, 0), scaled(rng, 8, -8, 0), scaled(rng, 24, -24, 0)),
    "middles": lambda rng: (scaled(rng, 13, 0, 9), scaled(rng, 12, 0, 9), 2.0 ** rng.integers(-149, 60, SHAPE)),
    "beside middles": lambda rng: (scaled(rng, 12, -90, -70), scaled(rng, 12, 0, 9), scaled(rng, 1, -149, -80)),
    "a hair below middles": lambda rng: (
        np.full(SHAPE, 1 + 2.0**-23), np.full(SHAPE, 2.0**-24 - 2.0**-47), 1 + scaled(rng, 22, -23, -22),
    ),
    "subnormal": lambda rng: (scaled(rng, 24, -99, -90), scaled(rng, 24, -99, -90), scaled(rng, 9, -149, -147)),
    "end of the range": lambda rng: (scaled(rng, 24, 40, 41), scaled(rng, 1, 63, 64), scaled(rng, 2, 100, 104)),
    "infinite": lambda rng: tuple(rng.choice([0.0, -0.0, 1.0, -math.inf, math.inf, math.nan], SHAPE) for _ in range(3)),
}  # fmt: skip


@pytest.mark.parametrize("kind", FACTORS)
def test_fma_of_arrays_is_that_of_their_elements(kind: str) -> None:
    """Also into an array, which may be the addend, and of operands that are broadcast."""
    a, b, c = (x.astype(np.float32) for x in FACTORS[kind](np.random.default_rng(0)))
    for x, y, z in ((a, b, c), (a, b[:1], c[:, :1]), (a[:, :1], b[:, :1], c), (a[:1, :1], b[:1, :1], c[:1])):
        elements = np.broadcast_arrays(x, y, z)
        triples = zip(*(e.ravel().tolist() for e in elements), strict=True)
        expected = np.array([exact_fma(*t) for t in triples], np.float32).reshape(elements[0].shape)
        out = elements[2].copy()
        assert fma(x, y, out, out=out) is out
        assert same(out, expected)
        assert same(fma(x, y, z), expected)


# ---- sums in their one order, written again from their definition over scalars ----


def add(a: Any | None, b: Any | None) -> Any | None:
    """a + b, an absent term skipped."""
    return b if a is None else a if b is None else a + b


def take(acc: Any | None, term: Any) -> Any:
    """A term added to what is there; a pair of factors, rounded together with the addition."""
    if not isinstance(term, tuple):
        return add(acc, term)
    x, w = term
    return x * w if acc is None else fma(np.array([x]), np.array([w]), np.array([acc]))[0]


def scalar_fold(parts: list[Any]) -> Any:
    """While more than one part is left, the upper half onto the lower half; padded to a power of two."""
    n = 1
    while n < len(parts):
        n *= 2
    padded = [*parts, *[None] * (n - len(parts))]
    while n > 1:
        n //= 2
        padded = [add(padded[i], padded[n + i]) for i in range(n)]
    return padded[0]


def scalar_row_sum(row: list[Any], chunk: int, segment: int, run: int | None = None) -> Any:
    """Segments of chunks: chunks left to right, folded. Runs of a chunk take turns with those of the others."""
    segments = []
    run = run or chunk
    for s in range(0, len(row), segment):
        part = row[s : s + segment]
        there = segment if run < chunk else -(-len(part) // chunk) * chunk
        sums: list[Any] = [None] * (there // chunk)
        for i, term in enumerate(part):
            c = i // run % len(sums)
            sums[c] = take(sums[c], term)
        segments.append(scalar_fold(sums))
    return scalar_interleaved(segments, 4)


def scalar_interleaved(terms: list[Any], interleave: int) -> Any:
    """Term i: partial sum i % interleave; those are folded."""
    sums: list[Any] = [None] * interleave
    for i, term in enumerate(terms):
        sums[i % interleave] = add(sums[i % interleave], term)
    return scalar_fold(sums)


def scalar_column_sum(column: list[Any], groups: int, blocks: int, interleave: int) -> Any:
    """Row r: block (r // g) % p and its group r % g; block b: partial sum b % interleave."""
    acc: list[list[Any]] = [[None] * groups for _ in range(blocks)]
    for r, term in enumerate(column):
        block, group = r // groups % blocks, r % groups
        acc[block][group] = take(acc[block][group], term)
    of_block = [scalar_fold(a) for a in acc]
    total = scalar_interleaved(of_block, interleave)
    return np.float32(0) if total is None else total


def wild(*shape: int) -> Array:
    """Numbers of many sizes, so that another order of adding them has other bits; some are zeros."""
    rng = np.random.default_rng(shape)
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-12, 12, shape)
    x = np.where(rng.random(shape) < 0.1, rng.choice([0.0, -0.0], shape), x)
    return x.astype(np.float32)


def of_few_bits(*shape: int) -> Array:
    """Numbers whose sums of products often lie in the middle of two float32, exactly or nearly."""
    rng = np.random.default_rng(shape)
    return (rng.integers(-4097, 4098, shape) * 2.0 ** rng.choice([0, 0, 0, 12, -40], shape)).astype(np.float32)


def check_rows(x: Array, *order: int, times: Array | None = None) -> Array:
    """The sums, which are those of scalars; ``order``: chunk, segment, run."""
    terms = x if times is None else [zip(*rows, strict=True) for rows in zip(x, times, strict=True)]
    expected = np.array([scalar_row_sum([*row], *order) for row in terms], x.dtype)
    found = row_sum(x, times, **dict(zip(("chunk", "segment", "run"), order, strict=False)))
    assert same(found, expected), (x.shape, order)
    return found


@pytest.mark.parametrize(("chunk", "segment", "run", "lengths"), [
    *((chunk, segment, None, range(1, 41)) for chunk in (2, 4, 8) for segment in (16384, 16)),
    (8, 16384, None, (1000, 16383, 16384, 16385, 16384 + 4099)),
    (4, 8192, None, (8193, 2 * 8192 + 77)),
    (2, 4096, None, (4097, 3 * 4096)),
    (1, 8, None, (1, 7, 8, 9, 40)),
    *((chunk, segment, run, [run * n for n in (1, 3, 5, 11, 31, 77)]) for chunk, run, segment in (
        (8, 1, 16), (8, 2, 48), (4, 1, 1024), (2, 1, 6), (8, 4, 512),
    )),
], ids=str)  # fmt: skip
def test_row_sums(chunk: int, segment: int, run: int | None, lengths: tuple[int, ...]) -> None:
    """And those of products, which are rounded with the addition, but for a chunk of one term."""
    for d in lengths:
        count = 20 if d in (40, 77) else 3 if d < 1000 else 1
        x, w = wild(count, d), wild(count + 1, d)[1:]
        order = (chunk, segment, run) if run else (chunk, segment)
        found, products = check_rows(x, *order), check_rows(x, *order, times=w)
        assert d != 40 or chunk == 2 or same(products, check_rows(x * w, *order)) == (chunk == 1)
        check_rows(of_few_bits(count, d), *order, times=of_few_bits(count + 1, d)[1:])
    assert not run or not same(found, row_sum(x, chunk=chunk, segment=segment)), "the run shows"
    check_rows(wild(2, 37).astype(np.float64) / 3, chunk, segment)


@pytest.mark.parametrize(("d", "chunk", "run", "segment"), [(64, 4, 4, 64), (200, 8, 8, 64), (333, 4, 1, 12)])
def test_segment_sums_are_sums_of_short_rows(d: int, chunk: int, run: int, segment: int) -> None:
    x, w, order = wild(6, d), wild(7, d)[1:], {"chunk": chunk, "run": run, "segment": segment}
    for start in range(0, d, segment):
        a, b = x[:, start : start + segment], w[:, start : start + segment]
        assert same(segment_sums(x, **order)[:, start // segment], sums.row_sum(a, **order))
        assert same(segment_sums(x, w, **order)[:, start // segment], sums.row_sum(a, b, **order))


def test_rows_may_be_stacked() -> None:
    """A row alone, and rows of rows, have the sums they have in a matrix."""
    x, order = wild(6, 37), {"chunk": 2, "segment": 8}
    matrix = row_sum(x, **order)
    np.testing.assert_array_equal(row_sum(x.reshape(2, 3, 37), **order), matrix.reshape(2, 3))
    np.testing.assert_array_equal(np.array([row_sum(row, **order) for row in x]), matrix)


def test_the_order_of_a_sum_shows() -> None:
    x = wild(50, 100)
    orders = [{"chunk": 4, "segment": 32}, {"chunk": 8, "segment": 64}, {"chunk": 8, "segment": 32}]
    *others, found = (row_sum(x, **order) for order in orders)
    for other in (*others, row_sum(x[:, ::-1], **orders[-1]), np.cumsum(x, axis=1)[:, -1], x.sum(axis=1)):
        assert not same(found, other)
    x = wild(1000, 40)
    found = column_sum(x, groups=4, blocks=6, interleave=4)
    for groups, blocks, interleave in [(2, 6, 4), (4, 12, 4), (4, 6, 2), (1, 1, 1)]:
        assert not same(found, column_sum(x, groups=groups, blocks=blocks, interleave=interleave))


ORDERS = [(1, 1, 1), (2, 3, 2), (4, 5, 4), (1, 132, 16), (8, 33, 3), (2, 7, 16), (128, 4, 4), (1, 126, 16), (3, 5, 4)]


@pytest.mark.parametrize(("groups", "blocks", "interleave"), ORDERS)
def test_column_sums(groups: int, blocks: int, interleave: int) -> None:
    n = groups * blocks
    for m in sorted({0, 1, 2, 3, 5, groups, groups + 1, max(n - 1, 0), n, n + 1, 2 * n + 3}):
        x, w = wild(m, 3), wild(m, 4)[:, 1:]
        pairs = [zip(*p, strict=True) for p in zip(x.T, w.T, strict=True)]
        for times, terms in ((None, x.T), (w, pairs)):
            expected = [scalar_column_sum([*column], groups, blocks, interleave) for column in terms]
            found = column_sum(x, times, groups=groups, blocks=blocks, interleave=interleave)
            assert same(found, np.array(expected, np.float32)), m
            total = sums.ColumnSum(m, groups, blocks, interleave)
            for start in range(0, m, 3) if m else [0]:
                total.add(x[start : start + 3], None if times is None else times[start : start + 3])
            assert same(total.total(), found), "of blocks of rows"


def test_fold() -> None:
    for count in range(1, 18):
        x = wild(4, count)
        assert same(fold(x), np.array([scalar_fold(list(row)) for row in x], np.float32))


@pytest.mark.parametrize("d", [1, 3, 8, 9, 40])
def test_absent_terms_keep_minus_zero(d: int) -> None:
    minus = np.full((2, d), -0.0, np.float32)
    mixed = minus.copy()
    mixed[0, d // 2] = 0.0
    for x, times, first in ((minus, None, -0.0), (mixed, None, 0.0), (mixed, np.ones_like(mixed), 0.0)):
        columns = x.T, None if times is None else times.T
        assert same(row_sum(x, times, chunk=8, segment=16), np.array([first, -0.0], np.float32))
        assert same(column_sum(*columns, groups=4, blocks=5, interleave=4), np.array([first, -0.0], np.float32))


@pytest.mark.parametrize("at", [0, 7, 8, 20, 36])
def test_sums_pass_on_what_is_not_finite(at: int) -> None:
    x = np.ones((4, 37), np.float32)
    x[0, at], x[1, at], x[2, at], x[2, (at + 5) % 37] = np.nan, np.inf, np.inf, -np.inf
    expected = np.array([np.nan, np.inf, np.nan, 37], np.float32)
    assert same(row_sum(x, chunk=8, segment=16), expected)
    assert same(column_sum(x.T, groups=2, blocks=3, interleave=2), expected)


@pytest.mark.parametrize("interleave", [1, 2, 3, 4, 8])
def test_segments_are_added_in_so_many_partial_sums(interleave: int) -> None:
    x = wild(5, 44)
    expected = [scalar_interleaved(list(row), interleave) for row in x]
    assert same(interleaved_sum(x, interleave), np.array(expected, np.float32))
    segments = [row_sum(x[:, i : i + 4], chunk=2, segment=4) for i in range(0, 44, 4)]
    found = sums.row_sum(x, chunk=2, segment=4, interleave=interleave)
    assert same(found, interleaved_sum(np.stack(segments, axis=-1), interleave))
    assert interleave == 4 or not same(found, row_sum(x, chunk=2, segment=4))
