"""The type rules of the op table: from the operands' types and the attributes to the result's type.

Each raises a ValueError that says what was expected.
"""

from __future__ import annotations

from lngen.ir.types import F32, F64, Attrs, Axis, DType, M, Type, axes_union


def arithmetic(args: tuple[Type, ...], attrs: Attrs) -> Type:
    dtype = args[0].dtype
    if dtype not in (F32, F64):
        raise ValueError(f"arithmetic is done in f32 or f64, got {dtype}; cast it first")
    if any(a.dtype is not dtype for a in args):
        raise ValueError(f"operands of one dtype expected, got {', '.join(str(a.dtype) for a in args)}")
    return Type(dtype, axes_union(*(a.axes for a in args)))


def fma(args: tuple[Type, ...], attrs: Attrs) -> Type:
    if args[0].dtype is not F32:
        raise ValueError(f"fma is defined in f32 only (NumPy has none in f64 to define it by), got {args[0].dtype}")
    return arithmetic(args, attrs)


# The attributes that spell the order of a sum, each a number from 1.
ORDER = ("chunk", "run", "segment", "groups", "blocks", "strands")


def reduction(args: tuple[Type, ...], attrs: Attrs) -> Type:
    axis = dict(attrs).get("axis")
    for key, value in attrs:
        if key in ORDER and not (isinstance(value, int) and value >= 1):
            raise ValueError(f"'{key}' is expected to be a whole number from 1, got {value}")
    order = {key: value for key, value in attrs if key in ORDER and isinstance(value, int)}
    run, chunk, segment = (order.get(key, 1) for key in ("run", "chunk", "segment"))
    if "run" in order and (chunk % run or segment % chunk):
        raise ValueError(f"'run' divides 'chunk', and 'chunk' 'segment', got {run}, {chunk}, {segment}")
    if not any(axis in a.axes for a in args):
        raise ValueError(
            f"a reduction over {axis} expects an operand that has that axis, got {', '.join(map(str, args))}"
        )
    out = arithmetic(args, ())
    return Type(out.dtype, tuple(a for a in out.axes if a is not axis))


def dot(args: tuple[Type, ...], attrs: Attrs) -> Type:
    fma(args, ())
    return reduction(args, attrs)


def spread(args: tuple[Type, ...], attrs: Attrs) -> Type:
    fma(args, ())
    if dict(attrs).get("axis") is M:
        raise ValueError("rows have segments along D only, over the rows there are none to be measured from")
    return reduction(args, attrs)


def segment_mean(args: tuple[Type, ...], attrs: Attrs) -> Type:
    spread(args, attrs)
    return args[0]


def row_reduction(args: tuple[Type, ...], attrs: Attrs) -> Type:
    if dict(attrs).get("axis") is M:
        raise ValueError("a maximum is taken over D only; over the rows there is no order-free kernel for it yet")
    return reduction(args, attrs)


def cast(args: tuple[Type, ...], attrs: Attrs) -> Type:
    to = dict(attrs).get("to")
    if not isinstance(to, DType):
        raise ValueError(f"expected {{to=dtype}}, got {to}")
    return Type(to, args[0].axes)


def constant(args: tuple[Type, ...], attrs: Attrs) -> Type:
    dtype = dict(attrs).get("dtype")
    if dtype not in (F32, F64):
        raise ValueError(f"a constant is f32 or f64, got {dtype}")
    assert isinstance(dtype, DType)
    return Type(dtype)


def const(args: tuple[Type, ...], attrs: Attrs) -> Type:
    value = dict(attrs).get("value")
    if not isinstance(value, int | float):
        raise ValueError(f"expected {{value=number}}, got {value}")
    return constant(args, attrs)


def size(args: tuple[Type, ...], attrs: Attrs) -> Type:
    axis = dict(attrs).get("axis")
    if not isinstance(axis, Axis):
        raise ValueError(f"expected {{axis=...}}, got {axis}")
    return constant(args, attrs)


def expand(args: tuple[Type, ...], attrs: Attrs) -> Type:
    axis = dict(attrs).get("axis")
    if not isinstance(axis, Axis) or axis in args[0].axes:
        raise ValueError(f"expected {{axis=...}} to be an axis that {args[0]} lacks, got {axis}")
    return Type(args[0].dtype, axes_union(args[0].axes, (axis,)))
