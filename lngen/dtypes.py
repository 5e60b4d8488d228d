"""The table of storage dtypes. It imports the standard library alone, so that compiler and launcher read one table.

    DType("bf16").bits            16
    DType.of(torch.float32)       DType.F32
    [t for t in DType if t.ctype] what kernels read

Arithmetic is done in the dtypes that are marked so; all others are stored, and are cast first.
"""

from __future__ import annotations

from enum import Enum
from typing import Any


class DType(str, Enum):
    """How an element is stored; the value is its name in graphs, specs and manifests.

    bits        of an element
    library     its name in NumPy, ml_dtypes and PyTorch
    ctype       its type in kernels; empty if no kernel reads it yet
    ptx         its type in PTX
    digits      of a significand, in bits; 0 for whole numbers
    least       the smallest number above 0
    largest     the largest finite number
    arithmetic  kernels compute in it
    """

    _value_: str
    bits: int
    library: str
    ctype: str
    ptx: str
    digits: int
    least: float
    largest: float
    arithmetic: bool

    F16 = "f16", 16, "float16", "f16", "f16", 11, 2.0**-24, 65504.0, False
    BF16 = "bf16", 16, "bfloat16", "bf16", "bf16", 8, 2.0**-133, (2 - 2.0**-7) * 2.0**127, False
    F32 = "f32", 32, "float32", "float", "f32", 24, 2.0**-149, (2 - 2.0**-23) * 2.0**127, True
    F64 = "f64", 64, "float64", "double", "f64", 53, 2.0**-1074, (2 - 2.0**-52) * 2.0**1023, True
    INT8 = "int8", 8, "int8", "signed char", "s8", 0, 1.0, 2.0**7 - 1, False
    I32 = "i32", 32, "int32", "int", "s32", 0, 1.0, 2.0**31 - 1, False
    I64 = "i64", 64, "int64", "long long", "s64", 0, 1.0, 2.0**63 - 1, False
    BOOL = "bool", 8, "bool", "unsigned char", "u8", 0, 1.0, 1.0, False
    U32 = "u32", 32, "uint32", "", "u32", 0, 1.0, 2.0**32 - 1, False
    E4M3 = "e4m3", 8, "float8_e4m3fn", "e4m3", "e4m3", 4, 2.0**-9, 448.0, False
    E5M2 = "e5m2", 8, "float8_e5m2", "e5m2", "e5m2", 3, 2.0**-16, 57344.0, False
    E2M1 = "e2m1", 4, "float4_e2m1fn", "", "e2m1", 2, 0.5, 6.0, False
    E8M0 = "e8m0", 8, "float8_e8m0fnu", "", "ue8m0", 1, 2.0**-127, 2.0**127, False

    def __new__(cls, name: str, *columns: Any) -> DType:
        """A row."""
        row = str.__new__(cls, name)
        row._value_ = name
        row.bits, row.library, row.ctype, row.ptx, row.digits, row.least, row.largest, row.arithmetic = columns
        return row

    @classmethod
    def of(cls, value: object) -> DType:
        """By its own name or any library's: f32, "float32", np.float32, np.dtype("float32"), torch.float32.

        ValueError for anything else.
        """
        if isinstance(value, cls):
            return value
        word = value if isinstance(value, str) else getattr(value, "__name__", None) or getattr(value, "name", value)
        text = str(word).removeprefix("torch.")
        return next((t for t in cls if t.library == text), None) or cls(text)

    @property
    def size(self) -> int:
        """Bytes of an element; 0 where a byte holds several."""
        return self.bits // 8

    @property
    def roundoff(self) -> float:
        """The unit roundoff: half a unit in the last place of 1; 0 for whole numbers."""
        return 2.0**-self.digits if self.digits else 0.0

    @property
    def floor(self) -> float:
        """Half of the smallest number above 0; 0 for f64, whose 2^-1075 is no f64 number."""
        return self.least / 2

    @property
    def normal(self) -> float:
        """The smallest number that has all digits; below it numbers are subnormal."""
        return self.least * 2.0 ** (self.digits - 1)

    def numpy(self) -> Any:
        """NumPy's dtype, or that of ml_dtypes."""
        import ml_dtypes
        import numpy as np

        return np.dtype(getattr(ml_dtypes, self.library, self.library))

    __str__ = str.__str__

    def __format__(self, spec: str) -> str:
        """As that of the name."""
        return str.__format__(self, spec)


READ = tuple(t for t in DType if t.ctype)  # by kernels
FLOATS = tuple(t for t in READ if t.digits and t.bits > 8)  # the dtypes of specs and gradients
FLOATS_OF_8_BITS = DType.E4M3, DType.E5M2
QUANTISED = DType.INT8, *FLOATS_OF_8_BITS  # a cast to them saturates
WRITTEN = *FLOATS, *QUANTISED  # by kernels
BYTES = FLOATS_OF_8_BITS  # also taken as uint8, where a library of arrays lacks them
