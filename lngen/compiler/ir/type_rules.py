"""The type rules of the op table: from the operands' types and the attributes to the result's type.

Each raises a ValueError that says what was expected.
"""

from __future__ import annotations

from lngen.compiler.ir.axes import WIDE, Axis, D, M, along, axes_union
from lngen.compiler.ir.types import F32, Attrs, Type
from lngen.dtypes import QUANTISED, DType
from lngen.errors import short


def arithmetic(args: tuple[Type, ...], attrs: Attrs) -> Type:
    dtype = args[0].dtype
    if not dtype.arithmetic:
        raise ValueError(f"arithmetic is done in f32 or f64, got {dtype}; cast it first")
    if any(a.dtype is not dtype for a in args):
        raise ValueError(f"operands of one dtype expected, got {', '.join(str(a.dtype) for a in args)}")
    if any(axis.of_table and axis not in a.axes for b in args for axis in b.axes for a in args if a.axes):
        raise ValueError(f"rows of a table are not those of others; gather them first, got {', '.join(map(str, args))}")
    return Type(dtype, axes_union(*(a.axes for a in args)))


def sealed(args: tuple[Type, ...], attrs: Attrs) -> Type:
    if (whole := arithmetic(args, attrs)) != args[0]:
        raise ValueError(f"what is sealed is expected to have the axes of the other operand, got {args[0]}, {args[1]}")
    return whole


def fma(args: tuple[Type, ...], attrs: Attrs) -> Type:
    if args[0].dtype is not F32:
        raise ValueError(f"fma is defined in f32 only (NumPy has none in f64 to define it by), got {args[0].dtype}")
    return arithmetic(args, attrs)


def function(args: tuple[Type, ...], attrs: Attrs) -> Type:
    if args[0].dtype is not F32:
        raise ValueError(f"functions are defined in f32 only (their polynomials are for f32), got {args[0].dtype}")
    return arithmetic(args, attrs)


def clamp(args: tuple[Type, ...], attrs: Attrs) -> Type:
    low, high = (dict(attrs).get(key) for key in ("low", "high"))
    if not (isinstance(low, int | float) and isinstance(high, int | float) and low <= high):
        raise ValueError(f"expected {{high=number, low=number}}, low not above high, got high={high}, low={low}")
    return arithmetic(args, ())


def div_scale(args: tuple[Type, ...], attrs: Attrs) -> Type:
    least, bounded = (dict(attrs).get(key) for key in ("least", "bounded"))
    if not (isinstance(least, int | float) and least >= 0 and bounded in (0, 1)):
        raise ValueError(f"expected {{bounded=0|1, least=number}} from 0, got bounded={bounded}, least={least}")
    return arithmetic(args, ())


def by_columns(args: tuple[Type, ...], attrs: Attrs) -> Type:
    (given,) = args
    if len(given.axes) != 2 or given.axes[0] is not M or given.axes[1].base is not D:
        raise ValueError(f"a value over M and an axis derived from D is expected, got {given}")
    return Type(given.dtype, given.axes[::-1])


# The attributes that define the order of a sum, each a number from 1.
ORDER = ("chunk", "run", "segment", "groups", "blocks", "interleave", "stretch", "least", "long")


def reduction(args: tuple[Type, ...], attrs: Attrs) -> Type:
    axis, to = (dict(attrs).get(key) for key in ("axis", "to"))
    _order(attrs)
    if not isinstance(axis, Axis):
        raise ValueError(f"expected {{axis=...}} to be M or D, got {_kind(axis)}")
    if not any(axis in a.axes for a in args):
        raise ValueError(
            f"a reduction over {axis} expects an operand that has that axis, got {', '.join(map(str, args))}"
        )
    out = arithmetic(args, ())
    if axis not in out.axes:
        finer = along(out.axes, axis.root)
        raise ValueError(
            f"the operands vary along {finer}, so the reduction is expected to be over {finer}, not {axis}"
        )
    if axis is M and any(a.of_order for a in out.axes):
        raise ValueError(f"a reduction over M expects operands that no segment has, got {', '.join(map(str, args))}")
    if to is None:
        return Type(out.dtype, tuple(a for a in out.axes if a is not axis))
    if not isinstance(to, Axis) or to is axis or not axis.is_finer(to):
        raise ValueError(f"expected {{to=...}} to be an axis derived from {axis}, got {_kind(to)}")
    return Type(out.dtype, tuple(to if a is axis else a for a in out.axes))


def _kind(value: object) -> str:
    """An attribute for a message, in which the text 'D' is not the axis D."""
    if isinstance(value, Axis) and value.is_declared:
        return value.declaration
    known = value is None or isinstance(value, Axis | DType)
    return str(value) if known else short(f"{type(value).__name__} {value!r}")


def _order(attrs: Attrs) -> None:
    """ValueError for an attribute of an order that is not a number from 1, or does not divide the next longer part."""
    for key, value in attrs:
        if key in ORDER and not (isinstance(value, int) and value >= 1):
            raise ValueError(f"'{key}' is expected to be a whole number from 1, got {value}")
    order = {key: value for key, value in attrs if key in ORDER and isinstance(value, int)}
    run, chunk, segment = (order.get(key, 1) for key in ("run", "chunk", "segment"))
    if "run" in order and (chunk % run or segment % chunk):
        raise ValueError(f"'run' divides 'chunk', and 'chunk' 'segment', got {run}, {chunk}, {segment}")


def dot(args: tuple[Type, ...], attrs: Attrs) -> Type:
    fma(args, ())
    if _is_of_order(dict(attrs).get("axis")):
        raise ValueError("a sum over S is a reduce_sum; multiply its terms first")
    return reduction(args, attrs)


def _is_of_order(axis: object) -> bool:
    return isinstance(axis, Axis) and axis.of_order


def mean(args: tuple[Type, ...], attrs: Attrs) -> Type:
    if any(map(_is_of_order, dict(attrs).values())):
        raise ValueError("segments differ in length, so their mean is not a mean of elements; take their sum")
    return reduction(args, attrs)


def maximum(args: tuple[Type, ...], attrs: Attrs) -> Type:
    if any(map(_is_of_order, dict(attrs).values())):
        raise ValueError("over S there are sums only; a maximum is taken over D or M")
    return reduction(args, attrs)


def cast(args: tuple[Type, ...], attrs: Attrs) -> Type:
    to = dict(attrs).get("to")
    if not isinstance(to, DType):
        raise ValueError(f"expected {{to=dtype}}, got {_kind(to)}")
    if not to.digits and to not in (*QUANTISED, DType.I32):
        raise ValueError(
            f"a cast is to floating-point numbers, int8 or i32, got {to}; other whole numbers are inputs only"
        )
    if to is DType.I32 and args[0].dtype is not F32:
        raise ValueError(f"a cast to i32 is one of f32, got {args[0].dtype}")
    return Type(to, args[0].axes)


INDICES = (DType.I32, DType.I64)


def iota(args: tuple[Type, ...], attrs: Attrs) -> Type:
    axis, dtype = (dict(attrs).get(key) for key in ("axis", "dtype"))
    if not isinstance(axis, Axis) or axis.of_order:
        raise ValueError(f"expected {{axis=...}} to be M, D or an axis derived from them, got {_kind(axis)}")
    if dtype not in INDICES:
        raise ValueError(f"places are i32 or i64, got {_kind(dtype)}")
    assert isinstance(dtype, DType)
    return Type(dtype, (axis,))


def select_eq(args: tuple[Type, ...], attrs: Attrs) -> Type:
    a, b, chosen = args
    if a.dtype.digits and b.dtype.digits:
        return arithmetic(args, attrs)
    if a.dtype is not b.dtype or a.dtype not in INDICES:
        raise ValueError(f"two numbers, two i32 or two i64 are compared, got {a.dtype}, {b.dtype}")
    return Type(arithmetic((chosen,), attrs).dtype, axes_union(*(t.axes for t in args)))


def take(args: tuple[Type, ...], attrs: Attrs) -> Type:
    x, index = args
    if x.axes not in (WIDE, (D,)) or not x.dtype.digits or index.dtype not in INDICES or index.axes != (M,):
        raise ValueError(f"an input over D and an i32 or i64 for each row are expected, got {x}, {index}")
    return Type(x.dtype, index.axes)


def constant(args: tuple[Type, ...], attrs: Attrs) -> Type:
    dtype = dict(attrs).get("dtype")
    if not isinstance(dtype, DType) or not dtype.arithmetic:
        raise ValueError(f"a constant is f32 or f64, got {_kind(dtype)}")
    return Type(dtype)


def const(args: tuple[Type, ...], attrs: Attrs) -> Type:
    value = dict(attrs).get("value")
    if not isinstance(value, int | float):
        raise ValueError(f"expected {{value=number}}, got {value}")
    return constant(args, attrs)


def size(args: tuple[Type, ...], attrs: Attrs) -> Type:
    axis, per = (dict(attrs).get(key) for key in ("axis", "per"))
    _order(attrs)
    if not isinstance(axis, Axis) or axis.of_order:
        raise ValueError(f"expected {{axis=...}} to be M or D, got {_kind(axis)}")
    if per is None:
        return constant(args, attrs)
    if not isinstance(per, Axis) or per is axis or not axis.is_finer(per):
        raise ValueError(f"expected {{per=...}} to be an axis derived from {axis}, got {_kind(per)}")
    return Type(constant(args, attrs).dtype, (per,) if per.of_order else ())


PLANES = ("halves", "pairs")  # of a head: feature j and the one half of the width on, or neighbours


def rotate(args: tuple[Type, ...], attrs: Attrs) -> Type:
    head, width, by = (dict(attrs).get(key) for key in ("head", "width", "by"))
    if not (isinstance(head, int) and isinstance(width, int) and 2 <= width <= head) or width % 2:
        raise ValueError(f"a width is expected to be even, and from 2 to the features of a head, got {width} of {head}")
    if by not in PLANES:
        raise ValueError(f"a plane is one of {', '.join(PLANES)}, got {_kind(by)}")
    if D not in args[0].axes:
        raise ValueError(f"rotate turns the features of rows, so an operand over D is expected, got {args[0]}")
    return arithmetic(args, ())


def gather(args: tuple[Type, ...], attrs: Attrs) -> Type:
    table, index = args
    rows = table.along(M)
    if rows is None or not rows.of_table or index.dtype not in INDICES or index.axes != (M,):
        raise ValueError(f"a table over M @ name, and an i32 or i64 for each row, are expected, got {table}, {index}")
    return Type(table.dtype, (M, *table.axes[1:]))


def expand(args: tuple[Type, ...], attrs: Attrs) -> Type:
    axis = dict(attrs).get("axis")
    has = along(args[0].axes, axis.root) if isinstance(axis, Axis) else None
    if not isinstance(axis, Axis) or axis.of_order or has is axis or (has is not None and not axis.is_finer(has)):
        raise ValueError(f"expected {{axis=...}} to be an axis, M or D, that {args[0]} lacks, got {_kind(axis)}")
    return Type(args[0].dtype, axes_union(args[0].axes, (axis,)))
