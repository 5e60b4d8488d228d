"""Register values: dtypes of PTX types, immediates, and reading a register as another type."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Value = Any  # an array over all threads of a batch, or a NumPy scalar for all of them
DT = np.dtype[Any]
Adapter = Callable[[Value], Value]

INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?")

BOOL: DT = np.dtype(np.bool_)
UNSIGNED: dict[int, DT] = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}
SIGNED: dict[int, DT] = {1: np.dtype("i1"), 2: np.dtype("i2"), 4: np.dtype("i4"), 8: np.dtype("i8")}

DTYPES: dict[str, DT] = {
    **{f"{k}{8 * n}": d for k in "ub" for n, d in UNSIGNED.items()},
    **{f"s{8 * n}": d for n, d in SIGNED.items()},
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f16x2": UNSIGNED[4],
    "bf16x2": UNSIGNED[4],
    "pred": BOOL,
}


def integer(text: str) -> int:
    """The value of an integer constant; as in C, a leading 0 means octal."""
    sign, body = (-1, text[1:]) if text.startswith("-") else (1, text)
    body = body.removesuffix("U")
    return sign * int(body, 8 if body.isdigit() and body.startswith("0") else 0)


def immediate(text: str, dtype: DT) -> Value:
    """The scalar of an immediate operand."""
    prefix = text[:2].lower()
    if prefix == "0f":
        bits = np.uint32(int(text[2:], 16)).view(np.float32)
        return _cast(bits, dtype)
    if prefix == "0d":
        return _cast(np.float64(struct.unpack(">d", bytes.fromhex(text[2:]))[0]), dtype)
    if not INTEGER.fullmatch(text):
        return dtype.type(float(text))
    number = integer(text)
    if dtype == BOOL:
        return np.bool_(number != 0)
    if dtype.kind == "f" or dtype.kind == "V":
        return dtype.type(number)
    return UNSIGNED[dtype.itemsize].type(number & ((1 << 8 * dtype.itemsize) - 1)).view(dtype)


def _cast(number: Value, dtype: DT) -> Value:
    if dtype.kind == "f":
        return number.astype(dtype)
    return number.view(UNSIGNED[number.dtype.itemsize]).astype(UNSIGNED[dtype.itemsize]).view(dtype)


def adapter(have: DT, want: DT) -> Adapter | None:
    """The conversion of a value held as ``have`` to ``want``: its low bits, or extended by the sign of ``have``."""
    if have == want:
        return None
    if have == BOOL or want == BOOL:
        return lambda v: v.astype(want)
    if have.itemsize == want.itemsize:
        return lambda v: v.view(want)
    whole = have if have.kind in "iu" else UNSIGNED[have.itemsize]
    part = (SIGNED if whole.kind == "i" else UNSIGNED)[want.itemsize]
    return lambda v: v.view(whole).astype(part).view(want)
