"""Rows of the table that need more than a line: conversions."""

from __future__ import annotations

import re

import numpy as np

from lngen.ir import numerics
from lngen.ir.types import BF16, F16
from lngen.ptx.pure import Pure
from lngen.ptx.values import DT, DTYPES, UNSIGNED, Value


def convert(m: re.Match[str]) -> Pure:
    """cvt between any two types, rounded as it says."""
    to, source = DTYPES[m["t"]], DTYPES[m["s"]]
    floats = {"f", "V"}
    if source.kind not in floats:
        return Pure((to,), (source,), lambda a: a.astype(to))
    if to.kind not in floats:
        return Pure((to,), (source,), lambda a: _to_integer(a, to, m["r"] or "rzi"))
    if m["r"] == "rz":
        return Pure((to,), (source,), lambda a: _toward_zero(a, to))
    if m["t"] == "bf16":
        return Pure((to,), (source,), lambda a: numerics.round_to(np.asarray(a), BF16))
    if m["t"] == "f16":
        return Pure((to,), (source,), lambda a: numerics.round_to(np.asarray(a), F16))
    return Pure((to,), (source,), lambda a: a.astype(to))


def _toward_zero(a: Value, to: DT) -> Value:
    near = a.astype(to)
    over = np.abs(near.astype(a.dtype)) > np.abs(a)
    return np.where(over, np.nextafter(near, to.type(0)), near)


def _to_integer(a: Value, to: DT, rounding: str) -> Value:
    whole = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[rounding](a.astype(np.float64))
    info = np.iinfo(to)
    inside = (whole >= float(info.min)) & (whole < float(info.max) + (1.0 if to.itemsize < 8 else 0.0))
    edge = np.where(whole < 0, info.min, info.max)
    return np.where(inside, np.where(inside, whole, 0.0).astype(to), np.where(whole == whole, edge, 0).astype(to))


def convert_two(m: re.Match[str]) -> Pure:
    """cvt.rn.bf16x2.f32: the first operand goes into the upper half."""
    half, f32, u4 = (BF16 if m["t"] == "bf16x2" else F16), DTYPES["f32"], UNSIGNED[4]

    def fn(a: Value, b: Value) -> Value:
        high, low = (numerics.round_to(np.asarray(v), half).view(np.uint16).astype(u4) for v in (a, b))
        return high << np.uint32(16) | low

    return Pure((u4,), (f32, f32), fn)
