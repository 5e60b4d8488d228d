"""Rows of the table that need more than one line: conversions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lngen.ir import numerics
from lngen.ir.types import BF16, F16
from lngen.ptx.opcodes import Opcode
from lngen.ptx.pure import Pure
from lngen.ptx.values import DT, DTYPES, UNSIGNED, Value

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
    """cvt.rn.bf16x2.f32: the first operand goes into the upper half."""
    half, f32, u4 = (BF16 if m["t"] == "bf16x2" else F16), DTYPES["f32"], UNSIGNED[4]

    def fn(a: Value, b: Value) -> Value:
        high, low = (numerics.round_to(np.asarray(v), half).view(np.uint16).astype(u4) for v in (a, b))
        return high << np.uint32(16) | low

    return Pure((u4,), (f32, f32), fn)
