"""The arithmetic of instructions that one line cannot say: integers, bits and conversions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lngen.compiler.ir import BF16, F16, numerics
from lngen.dtypes import DType
from lngen.proof.ptx.opcodes import Opcode
from lngen.proof.ptx.program import DT, DTYPES, UNSIGNED, Value


@dataclass(frozen=True)
class Pure:
    """A function from operands to a result (a tuple if there are several ``outs``)."""

    outs: tuple[DT, ...]
    ins: tuple[DT, ...]
    fn: Callable[..., Any]


Maker = Callable[[Opcode], Pure | None]  # None: the modifiers exclude each other


def mul_high(m: Opcode) -> Pure:
    """The upper half of a product."""
    t = DTYPES[m["t"]]
    if t.itemsize < 8:
        to = UNSIGNED[2 * t.itemsize]  # also of signed operands: the bits kept are the same
        width = to.type(8 * t.itemsize)
        return Pure((t,), (t, t), lambda a, b: (a.astype(to) * b.astype(to) >> width).astype(t))

    def high(a: Value, b: Value) -> Value:
        u, half, low = UNSIGNED[8], np.uint64(32), np.uint64(0xFFFFFFFF)
        x, y = a.view(u), b.view(u)
        middle = (x >> half) * (y & low) + ((x & low) * (y & low) >> half)
        rest = (x & low) * (y >> half) + (middle & low)
        product = (x >> half) * (y >> half) + (middle >> half) + (rest >> half)
        if t.kind == "i":
            product = product - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
        return product.view(t)

    return Pure((t,), (t, t), high)


def quotient(a: Value, b: Value) -> Value:
    """Rounded toward zero, as PTX divides."""
    floor = a // b
    return floor + ((a - floor * b != 0) & ((a < 0) != (b < 0))).astype(a.dtype)


def remainder(a: Value, b: Value) -> Value:
    """What ``quotient`` leaves."""
    return a - quotient(a, b) * b


def permute(m: Opcode) -> Pure:
    """prmt: four bytes chosen from eight; the selector's top bits replicate a sign."""
    u4, u8 = UNSIGNED[4], UNSIGNED[8]

    def fn(a: Value, b: Value, selector: Value) -> Value:
        both = a.astype(u8) | b.astype(u8) << np.uint64(32)
        total: Value = np.uint32(0)
        for i in range(4):
            pick = selector >> np.uint32(4 * i)
            byte = (both >> ((pick & np.uint32(7)) * np.uint32(8)).astype(u8)).astype(u4) & np.uint32(0xFF)
            sign = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
            total = total | np.where(pick & np.uint32(8), sign, byte) << np.uint32(8 * i)
        return total

    return Pure((u4,), (u4,) * 3, fn)


def _field(a: Value, start: Value, length: Value, width: int) -> tuple[Value, Value, Value]:
    """Start, and the mask of a bit field before and after its shift to the start."""
    t = a.dtype
    at, n = (start & np.uint32(0xFF)).astype(t), (length & np.uint32(0xFF)).astype(t)
    low = np.where(n >= t.type(width), ~t.type(0), (t.type(1) << n) - t.type(1))
    return at, low, low << at


def extract(m: Opcode) -> Pure:
    """bfe: a bit field, sign-extended for a signed type."""
    t = DTYPES[m["t"]]
    u, width = UNSIGNED[t.itemsize], 8 * t.itemsize

    def fn(a: Value, start: Value, length: Value) -> Value:
        x = a.view(u)
        at, low, _ = _field(x, start, length, width)
        found = (x >> at) & low
        if t.kind == "u":
            return found
        top = np.minimum((start & np.uint32(255)) + (length & np.uint32(255)), np.uint32(width)) - np.uint32(1)
        sign = (x >> top.astype(u)) & u.type(1)
        own = low & (~u.type(0) >> at)  # the part of the field inside the number
        return np.where((sign != 0) & (low != 0), found | ~own, found).view(t)

    return Pure((t,), (t, UNSIGNED[4], UNSIGNED[4]), fn)


def insert(m: Opcode) -> Pure:
    """bfi: a bit field inserted into another number."""
    t = DTYPES[m["t"]]

    def fn(a: Value, b: Value, start: Value, length: Value) -> Value:
        at, low, there = _field(b, start, length, 8 * t.itemsize)
        return (b & ~there) | ((a & low) << at)

    return Pure((t,), (t, t, UNSIGNED[4], UNSIGNED[4]), fn)


def funnel(m: Opcode) -> Pure:
    """shf: the upper or lower half of a 64-bit number, shifted."""
    u4, u8 = UNSIGNED[4], UNSIGNED[8]
    wraps, left = m["w"] == "wrap", m["d"] == "l"

    def fn(a: Value, b: Value, c: Value) -> Value:
        n = (c & np.uint32(31) if wraps else np.minimum(c, np.uint32(32))).astype(u8)
        both = a.astype(u8) | b.astype(u8) << np.uint64(32)
        shifted = both << n >> np.uint64(32) if left else both >> n
        return shifted.astype(u4)

    return Pure((u4,), (u4,) * 3, fn)


def counting(m: Opcode) -> Pure:
    """popc, clz and brev: number of ones, leading zeros, bits in reverse."""
    t = UNSIGNED[int(m["t"][1:]) // 8]
    width = 8 * t.itemsize

    def bits(a: Value) -> Value:
        """One row per number, its lowest bit first."""
        return np.unpackbits(np.atleast_1d(a)[:, None].view(np.uint8), axis=1, bitorder="little")

    def reverse(a: Value) -> Value:
        return np.packbits(bits(a)[:, ::-1], axis=1, bitorder="little").copy().view(t)[:, 0]

    def zeros(a: Value) -> Value:
        upper = np.logical_or.accumulate(bits(a)[:, ::-1], axis=1)
        return (width - upper.sum(axis=1)).astype(UNSIGNED[4])

    if m["op"] == "brev":
        return Pure((t,), (t,), lambda a: reverse(a)[0] if np.ndim(a) == 0 else reverse(a))
    if m["op"] == "popc":
        return Pure((UNSIGNED[4],), (t,), lambda a: np.bitwise_count(a).astype(UNSIGNED[4]))
    return Pure((UNSIGNED[4],), (t,), lambda a: zeros(a)[0] if np.ndim(a) == 0 else zeros(a))


def logic(m: Opcode) -> Pure:
    """lop3: any function of three bits, by its table."""
    u4 = UNSIGNED[4]

    def fn(a: Value, b: Value, c: Value, table: Value) -> Value:
        total: Value = np.uint32(0)
        for i in range(8):
            term = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
            total = total | np.where(table >> np.uint32(i) & np.uint32(1), term, np.uint32(0))
        return total

    return Pure((u4,), (u4,) * 4, fn)


TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_TOWARD = {"rz": 0.0, "rm": -np.inf, "rp": np.inf}
_HALVES = {DTYPES["f16"]: F16, DTYPES["bf16"]: BF16}
_NARROWING = {("f64", "f32"), ("f64", "f16"), ("f64", "bf16"), ("f32", "f16"), ("f32", "bf16")}
_NARROWING |= {("f16", "bf16"), ("bf16", "f16")}  # neither type represents all numbers of the other


def convert(m: Opcode) -> Pure | None:
    """cvt: a conversion that may be inexact names a rounding, an exact one names none."""
    rounding = m["r"]
    to, source = DTYPES[m["t"]], DTYPES[m["s"]]
    fn = _conversion(m["t"], m["s"], rounding)
    return Pure((to,), (source,), fn) if fn else None


def _conversion(t: str, s: str, rounding: str | None) -> Callable[[Value], Value] | None:
    to, source = DTYPES[t], DTYPES[s]
    whole, was_whole = (kind[0] in "su" for kind in (t, s))
    if was_whole and whole:
        return (lambda a: a.astype(to)) if rounding is None else None
    if was_whole:
        if source.itemsize == 8:  # float64 cannot represent all of them: NumPy's own conversion rounds to nearest
            return (lambda a: a.astype(to)) if rounding == "rn" and t in ("f32", "f64") else None
        return _rounding(to, rounding)
    if whole:
        return (lambda a: _to_integer(a, to, TO_INTEGER[rounding])) if rounding in TO_INTEGER else None
    if t == s and rounding in TO_INTEGER:
        return lambda a: TO_INTEGER[rounding](a).astype(to)
    if (s, t) in _NARROWING:
        return _rounding(to, rounding)
    return (lambda a: a.astype(to)) if rounding is None else None


def _rounding(to: DT, rounding: str | None) -> Callable[[Value], Value] | None:
    """A value that float64 represents exactly, rounded once."""
    if rounding == "rn":
        return lambda a: _nearest(a.astype(np.float64), to)
    if rounding not in _TOWARD:
        return None
    toward = to.type(_TOWARD[rounding])

    def fn(a: Value) -> Value:
        exact = a.astype(np.float64)
        near = _nearest(exact, to)
        back = near.astype(np.float64)
        over = {"rz": np.abs(back) > np.abs(exact), "rm": back > exact, "rp": back < exact}[rounding]
        return np.where(over, np.nextafter(near, toward), near)

    return fn


def _nearest(exact: Value, to: DT) -> Value:
    return numerics.round_to(np.asarray(exact), _HALVES[to]) if to in _HALVES else exact.astype(to)


def _to_integer(a: Value, to: DT, rounded: Callable[[Value], Value]) -> Value:
    """Clamped to the range of ``to``; a NaN becomes 0, from float64 or to 64 bits 1 << width - 1."""
    whole = rounded(a.astype(np.float64))
    info, wide = np.iinfo(to), a.dtype.itemsize == 8 or to.itemsize == 8
    nan = UNSIGNED[to.itemsize].type(1 << 8 * to.itemsize - 1).view(to) if wide else to.type(0)
    inside = (whole >= float(info.min)) & (whole < float(int(info.max) + 1))  # a power of two is a float64
    edge = np.where(whole < 0, info.min, info.max).astype(to)
    return np.where(inside, np.where(inside, whole, 0.0).astype(to), np.where(whole == whole, edge, nan))


def convert_two(m: Opcode) -> Pure:
    """cvt of two f32 to one register: the first operand goes into the upper half."""
    part, f32 = DType(m["t"].removesuffix("x2")), DTYPES["f32"]
    whole, own = UNSIGNED[2 * part.size], UNSIGNED[part.size]

    def fn(a: Value, b: Value) -> Value:
        high, low = (numerics.round_to(np.asarray(v), part).view(own).astype(whole) for v in (a, b))
        return high << whole.type(part.bits) | low

    return Pure((whole,), (f32, f32), fn)


def widen_two(m: Opcode) -> Pure:
    """cvt of the two numbers of a register to two of f16."""
    part, f16 = DType(m["s"].removesuffix("x2")), DTYPES["f16"]

    def fn(a: Value) -> Value:
        high, low = (np.asarray(a >> np.uint16(n)).astype(np.uint8).view(part.numpy()).astype(f16) for n in (8, 0))
        return high.view(np.uint16).astype(UNSIGNED[4]) << np.uint32(16) | low.view(np.uint16)

    return Pure((UNSIGNED[4],), (UNSIGNED[2],), fn)
