"""What a row of the op table is, and how its dtypes and constants are written in C."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from lngen.ir.methods import Methods
from lngen.ir.numerics import NUMPY_DTYPE, Array
from lngen.ir.types import F32, F64, Attrs, Axis, DType, Eqn, Type, Value

TypeRule = Callable[[tuple[Type, ...], Attrs], Type]
NumpyMeaning = Callable[[tuple[Array, ...], Eqn, Mapping[Axis, int]], Array]
CudaMeaning = Callable[[tuple[str, ...], Eqn], str]
Derivative = Callable[[Methods, Eqn, Value], tuple[Value | None, ...]]
Expansion = Callable[[Methods, Eqn], Value]


@dataclass(frozen=True)
class Op:
    """One row of the table. ``attrs``: the attributes an equation may have; ``lowered_by``: the step that removes an
    op without a CUDA meaning: ``decompose`` those with an expansion.
    """

    name: str
    arity: int
    typ: TypeRule
    vjp: Derivative | None
    numpy: NumpyMeaning | None = None
    cuda: CudaMeaning | None = None
    expand: Expansion | None = None
    attrs: tuple[str, ...] = ()
    lowered_by: str = ""

    @classmethod
    def expanded(
        cls, name: str, arity: int, typ: TypeRule, expand: Expansion, vjp: Derivative, attrs: tuple[str, ...] = ()
    ) -> Op:
        """A row whose meaning, in NumPy and in CUDA, is that of the equations that ``expand`` writes."""
        return cls(name, arity, typ, vjp, expand=expand, attrs=attrs, lowered_by="decompose")


def compute_dtype(*dtypes: DType) -> DType:
    """The dtype of arithmetic on ``dtypes``: f64 if any is f64, else f32."""
    return F64 if F64 in dtypes else F32


def ctype(dtype: DType) -> str:
    """The C type of an element."""
    return {F32: "float", F64: "double"}.get(dtype, dtype.value)


def literal(value: float, dtype: DType) -> str:
    """A constant as C text that reads back to the same bits."""
    with np.errstate(over="ignore"):  # a constant beyond the largest number rounds to infinity
        v = NUMPY_DTYPE[dtype].type(value)
    bits = f"0x{np.array(v).view(np.uint32 if dtype is F32 else np.uint64):x}"
    if not np.isfinite(v):
        return f"__int_as_float({bits})" if dtype is F32 else f"__longlong_as_double({bits})"
    return f"{v!s}f" if dtype is F32 else str(v)  # the shortest digits that parse back to v
