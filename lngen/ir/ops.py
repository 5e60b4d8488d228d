"""The op table: one row per op, its type rule, NumPy meaning, CUDA meaning and derivative side by side.

Adding an op is adding a row. A row's columns:

- ``typ(args, attrs)``   the type of the result, or a ValueError saying what was expected;
- ``numpy(args, eqn, size)``  the value, on arrays that have size 1 along every axis they lack;
- ``cuda(args, eqn)``    a C expression over the arguments' spellings; None for what a pass lowers first;
- ``vjp(b, eqn, ct)``    the cotangent of each argument; a cotangent that lacks an axis is constant along it,
  one that has an axis its argument lacks is yet to be summed over it (``passes.vjp`` does).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lngen.ir import numerics
from lngen.ir.numerics import NUMPY_DTYPE, Array
from lngen.ir.types import F32, F64, Attrs, Axis, D, DType, Eqn, Type, Value, axes_union

if TYPE_CHECKING:
    from lngen.ir.builder import Builder

TypeRule = Callable[[tuple[Type, ...], Attrs], Type]
NumpyMeaning = Callable[[tuple[Array, ...], Eqn, Mapping[Axis, int]], Array]
CudaMeaning = Callable[[tuple[str, ...], Eqn], str]
Derivative = Callable[["Builder", Eqn, Value], tuple[Value, ...]]

CTYPE = {"f16": "f16", "bf16": "bf16", "f32": "float", "f64": "double"}


@dataclass(frozen=True)
class Op:
    """One row of the table. ``attrs``: the attributes an equation may have; ``lowered_by``: the pass that removes an
    op without a CUDA meaning.
    """

    name: str
    arity: int
    typ: TypeRule
    numpy: NumpyMeaning
    cuda: CudaMeaning | None
    vjp: Derivative
    attrs: tuple[str, ...] = ()
    lowered_by: str = ""


def compute_dtype(dtype: DType) -> DType:
    """The dtype arithmetic on ``dtype`` is done in: f64 for f64, else f32."""
    return F64 if dtype is F64 else F32


def literal(value: float, dtype: DType) -> str:
    """A constant as C text that reads back to the same bits."""
    v = NUMPY_DTYPE[dtype].type(value)
    bits = f"0x{np.array(v).view(np.uint32 if dtype is F32 else np.uint64):x}"
    if not np.isfinite(v):
        return f"__int_as_float({bits})" if dtype is F32 else f"__longlong_as_double({bits})"
    return f"{v!s}f" if dtype is F32 else str(v)  # the shortest digits that read back to v


# ---- type rules ----


def _arithmetic(args: tuple[Type, ...], attrs: Attrs) -> Type:
    dtype = args[0].dtype
    if dtype not in (F32, F64):
        raise ValueError(f"arithmetic is done in f32 or f64, got {dtype}; cast it first")
    if any(a.dtype is not dtype for a in args):
        raise ValueError(f"operands of one dtype expected, got {', '.join(str(a.dtype) for a in args)}")
    return Type(dtype, axes_union(*(a.axes for a in args)))


def _fma(args: tuple[Type, ...], attrs: Attrs) -> Type:
    if args[0].dtype is not F32:
        raise ValueError(f"fma is defined in f32 only (NumPy has none in f64 to define it by), got {args[0].dtype}")
    return _arithmetic(args, attrs)


# The attributes that spell the order of a sum, each a number from 1.
ORDER = ("chunk", "segment", "groups", "blocks", "strands")


def _reduction(args: tuple[Type, ...], attrs: Attrs) -> Type:
    axis = dict(attrs).get("axis")
    for key, value in attrs:
        if key in ORDER and not (isinstance(value, int) and value >= 1):
            raise ValueError(f"'{key}' is expected to be a whole number from 1, got {value}")
    if axis not in args[0].axes:
        raise ValueError(f"a reduction over {axis} expects an operand that has that axis, got {args[0]}")
    out = _arithmetic(args, ())
    return Type(out.dtype, tuple(a for a in out.axes if a is not axis))


def _cast(args: tuple[Type, ...], attrs: Attrs) -> Type:
    to = dict(attrs).get("to")
    if not isinstance(to, DType):
        raise ValueError(f"expected {{to=dtype}}, got {to}")
    return Type(to, args[0].axes)


def _constant(args: tuple[Type, ...], attrs: Attrs) -> Type:
    dtype = dict(attrs).get("dtype")
    if dtype not in (F32, F64):
        raise ValueError(f"a constant is f32 or f64, got {dtype}")
    assert isinstance(dtype, DType)
    return Type(dtype)


def _const(args: tuple[Type, ...], attrs: Attrs) -> Type:
    value = dict(attrs).get("value")
    if not isinstance(value, int | float):
        raise ValueError(f"expected {{value=number}}, got {value}")
    return _constant(args, attrs)


def _size(args: tuple[Type, ...], attrs: Attrs) -> Type:
    axis = dict(attrs).get("axis")
    if not isinstance(axis, Axis):
        raise ValueError(f"expected {{axis=...}}, got {axis}")
    return _constant(args, attrs)


def _expand(args: tuple[Type, ...], attrs: Attrs) -> Type:
    axis = dict(attrs).get("axis")
    if not isinstance(axis, Axis) or axis in args[0].axes:
        raise ValueError(f"expected {{axis=...}} to be an axis that {args[0]} lacks, got {axis}")
    return Type(args[0].dtype, axes_union(args[0].axes, (axis,)))


# ---- meanings that are more than one call ----


def _cuda_cast(args: tuple[str, ...], eqn: Eqn) -> str:
    to, given = eqn.out.type.dtype, eqn.args[0].type.dtype
    return args[0] if to is given else f"{to}_from_{given}({args[0]})"


def _numpy_reduce_sum(args: tuple[Array, ...], eqn: Eqn, size: Mapping[Axis, int]) -> Array:
    attrs: dict[str, Any] = dict(eqn.attrs)
    x = args[0]
    if attrs["axis"] is D:
        total = numerics.row_sum(x, chunk=attrs.get("chunk", 1), segment=attrs.get("segment", size[D]))
        return np.asarray(total[..., None])
    order = {k: attrs.get(k, 1) for k in ("groups", "blocks", "strands")}
    return numerics.column_sum(x, **order)[None, :]


def _numpy_reduce_mean(args: tuple[Array, ...], eqn: Eqn, size: Mapping[Axis, int]) -> Array:
    axis = eqn.attr("axis")
    assert isinstance(axis, Axis)
    return np.asarray(_numpy_reduce_sum(args, eqn, size) / args[0].dtype.type(size[axis]))


def _numpy_const(args: tuple[Array, ...], eqn: Eqn, size: Mapping[Axis, int]) -> Array:
    value: Any = eqn.attr("value")
    return np.full((1, 1), value, NUMPY_DTYPE[eqn.out.type.dtype])


def _numpy_size(args: tuple[Array, ...], eqn: Eqn, size: Mapping[Axis, int]) -> Array:
    axis = eqn.attr("axis")
    assert isinstance(axis, Axis)
    return np.full((1, 1), size[axis], NUMPY_DTYPE[eqn.out.type.dtype])


def _numpy_expand(args: tuple[Array, ...], eqn: Eqn, size: Mapping[Axis, int]) -> Array:
    axis = eqn.attr("axis")
    assert isinstance(axis, Axis)
    shape = list(args[0].shape)
    shape[list(Axis).index(axis)] = size[axis]
    return np.ascontiguousarray(np.broadcast_to(args[0], shape))


# ---- derivatives that are more than one equation ----


def _vjp_cast(b: Builder, e: Eqn, ct: Value) -> tuple[Value, ...]:
    # Cotangents stay in the compute dtype; the one rounding to the input's dtype is the last thing done.
    to = compute_dtype(e.args[0].type.dtype)
    return (ct if ct.type.dtype is to else b.cast("ct", ct, to=to),)


def _vjp_div(b: Builder, e: Eqn, ct: Value) -> tuple[Value, ...]:
    over = b.div("ct", ct, e.args[1])
    return over, b.neg("ct", b.mul("ct", over, e.out))


def _vjp_rsqrt(b: Builder, e: Eqn, ct: Value) -> tuple[Value, ...]:
    cube = b.mul("ct", b.mul("ct", e.out, e.out), e.out)
    return (b.mul("ct", b.mul("ct", ct, b.const("half", -0.5, ct.type.dtype)), cube),)


def _vjp_sqrt(b: Builder, e: Eqn, ct: Value) -> tuple[Value, ...]:
    return (b.div("ct", b.mul("ct", ct, b.const("half", 0.5, ct.type.dtype)), e.out),)


def _vjp_mean(b: Builder, e: Eqn, ct: Value) -> tuple[Value, ...]:
    axis = e.attr("axis")
    assert isinstance(axis, Axis)
    return (b.div("ct", ct, b.size("count", axis, ct.type.dtype)),)


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op(
            "const", 0, _const,
            numpy=_numpy_const,
            cuda=lambda a, e: literal(float(e.attr("value")), e.out.type.dtype),  # type: ignore[arg-type]
            vjp=lambda b, e, ct: (),
            attrs=("dtype", "value"),
        ),
        Op(
            "size", 0, _size,
            numpy=_numpy_size,
            cuda=lambda a, e: f"static_cast<{CTYPE[e.out.type.dtype.value]}>(rows)",  # D's is a constant by then
            vjp=lambda b, e, ct: (),
            attrs=("axis", "dtype"),
        ),
        Op(
            "cast", 1, _cast,
            numpy=lambda a, e, n: numerics.round_to(a[0], e.out.type.dtype),
            cuda=_cuda_cast,
            vjp=_vjp_cast,
            attrs=("to",),
        ),
        Op(
            "expand", 1, _expand,
            numpy=_numpy_expand,
            cuda=lambda a, e: a[0],
            vjp=lambda b, e, ct: (ct,),
            attrs=("axis",),
        ),
        Op(
            "neg", 1, _arithmetic,
            numpy=lambda a, e, n: -a[0],
            cuda=lambda a, e: f"-{a[0]}",
            vjp=lambda b, e, ct: (b.neg("ct", ct),),
        ),
        Op(
            "add", 2, _arithmetic,
            numpy=lambda a, e, n: a[0] + a[1],
            cuda=lambda a, e: f"{a[0]} + {a[1]}",
            vjp=lambda b, e, ct: (ct, ct),
        ),
        Op(
            "sub", 2, _arithmetic,
            numpy=lambda a, e, n: a[0] - a[1],
            cuda=lambda a, e: f"{a[0]} - {a[1]}",
            vjp=lambda b, e, ct: (ct, b.neg("ct", ct)),
        ),
        Op(
            "mul", 2, _arithmetic,
            numpy=lambda a, e, n: a[0] * a[1],
            cuda=lambda a, e: f"{a[0]} * {a[1]}",
            vjp=lambda b, e, ct: (b.mul("ct", ct, e.args[1]), b.mul("ct", ct, e.args[0])),
        ),
        Op(
            "div", 2, _arithmetic,
            numpy=lambda a, e, n: a[0] / a[1],
            cuda=lambda a, e: f"{a[0]} / {a[1]}",
            vjp=_vjp_div,
        ),
        Op(
            "fma", 3, _fma,
            numpy=lambda a, e, n: numerics.fma(*a),
            cuda=lambda a, e: f"fmaf({a[0]}, {a[1]}, {a[2]})",
            vjp=lambda b, e, ct: (b.mul("ct", ct, e.args[1]), b.mul("ct", ct, e.args[0]), ct),
        ),
        Op(
            "sqrt", 1, _arithmetic,
            numpy=lambda a, e, n: np.sqrt(a[0]),
            cuda=lambda a, e: f"{'sqrtf' if e.out.type.dtype is F32 else 'sqrt'}({a[0]})",
            vjp=_vjp_sqrt,
        ),
        Op(  # 1 / sqrt(x), two correctly rounded steps
            "rsqrt", 1, _arithmetic,
            numpy=lambda a, e, n: a[0].dtype.type(1) / np.sqrt(a[0]),
            cuda=None, lowered_by="decompose",
            vjp=_vjp_rsqrt,
        ),
        Op(
            "reduce_mean", 1, _reduction,
            numpy=_numpy_reduce_mean,
            cuda=None, lowered_by="decompose",
            vjp=_vjp_mean,
            attrs=("axis",),
        ),
        Op(  # over the order its attributes spell; lowering turns it into a phase
            "reduce_sum", 1, _reduction,
            numpy=_numpy_reduce_sum,
            cuda=None, lowered_by="lower",
            vjp=lambda b, e, ct: (ct,),
            attrs=("axis", *ORDER),
        ),
    )
}  # fmt: skip
