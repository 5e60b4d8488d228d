"""The op table: one row per op. Its method, type rule, NumPy meaning, CUDA text and derivative stand side by side.

A row is a method of ``Ops`` under the decorator ``op``. The method gives the op its name and its operands, and its
docstring says what the op computes. The table has the columns:

- ``typ(args, attrs)``   the type of the result, or a ValueError that says what was expected;
- ``numpy(args, eqn, size, out)``  the value, on arrays over M and D, of size 1 along axes they lack: in the array
  ``out``, or in one of its own;
- ``real(args, eqn, setting)``  the value in real numbers and its error bound, by which derivations are validated;
- ``cuda(args, eqn)``    a C expression over the C names of the operands; None for ops that lowering makes a phase of;
- ``expand(b, eqn)``     in place of both: the equations that the op stands for. The interpreter evaluates them, and
  ``passes.decompose`` writes them, so the function is defined once;
- ``vjp(b, eqn, ct)``    the cotangent of each operand, None for an operand without one. The column is None for ops that
  passes write after the derivation. A cotangent that lacks an axis is constant along it; ``passes.vjp`` sums a
  cotangent over the axes that its operand lacks.

``lngen.compiler.ir.functions`` has the rows of functions, beside their equations.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from lngen.compiler.ir import meanings, numerics, real, type_rules
from lngen.compiler.ir.axes import Axis
from lngen.compiler.ir.meanings import CudaMeaning, NumpyMeaning, each
from lngen.compiler.ir.names import of_size
from lngen.compiler.ir.types import Attr, Attrs, Eqn, Type, Value, compute_dtype
from lngen.dtypes import DType

Cotangents = tuple[Value | None, ...]
TypeRule = Callable[[tuple[Type, ...], Attrs], Type]
RealMeaning = real.Meaning
Derivative = Callable[["Ops", Eqn, Value], Cotangents]
Expansion = Callable[["Ops", Eqn], Value]
Method = TypeVar("Method", bound=Callable[..., Value])


@dataclass(frozen=True)
class Op:
    """One row. ``attrs``: the attributes that an equation may have."""

    name: str
    arity: int
    typ: TypeRule
    real: RealMeaning
    numpy: NumpyMeaning | None
    cuda: CudaMeaning | None
    expand: Expansion | None
    vjp: Derivative | None
    attrs: tuple[str, ...]

    @property
    def lowered_by(self) -> str:
        """The step that removes an op without a CUDA meaning."""
        return "" if self.cuda else "decompose" if self.expand else "lower"


OPS: dict[str, Op] = {}


def op(
    typ: TypeRule,
    real: RealMeaning,
    *,
    numpy: NumpyMeaning | None = None,
    cuda: CudaMeaning | str | None = None,
    expand: Expansion | None = None,
    vjp: Derivative | None = None,
    attrs: tuple[str, ...] = (),
    called: str = "",
) -> Callable[[Method], Method]:
    """Adds the row of an op to the table, for a method that emits it: ``method(b, name, *operands, **attrs)``.

    The op has the name of the method, or the name ``called``.

    In a text for ``cuda``, ``{0}`` is the first operand, ``{zero}`` the number 0, and ``{f}`` the end of the name of a
    C function of floats. A value that has an operator of that name gets the docstring of the method.
    """

    def row(method: Method) -> Method:
        name = called or method.__name__
        _, _, *given = inspect.signature(method).parameters
        arity = len([key for key in given if key not in attrs])
        OPS[name] = Op(
            name,
            arity,
            typ,
            real,
            numpy,
            meanings.cuda_text(cuda) if isinstance(cuda, str) else cuda,
            expand,
            vjp,
            attrs,
        )
        if operator := vars(Value).get(name):
            operator.__doc__ = method.__doc__
        return method

    return row


# ---- parts of the columns ----


def _of_bits(meaning: Callable[..., real.Array], cuda: str) -> Callable[[Method], Method]:
    """A row of an op on the bits of f32."""
    return op(type_rules.function, real.of_bits(meaning), numpy=each(meaning), cuda=cuda)


def _left(**axes: Axis | None) -> dict[str, Attr]:
    """The attributes that are given."""
    return {key: axis for key, axis in axes.items() if axis is not None}


def _neg_cotangent(b: Ops, e: Eqn, ct: Value) -> Cotangents:
    return (b.neg("ct", ct),)


def _product_cotangents(b: Ops, e: Eqn, ct: Value) -> tuple[Value, Value]:
    return b.mul("ct", ct, e.args[1]), b.mul("ct", ct, e.args[0])


def _cast_cotangent(b: Ops, e: Eqn, ct: Value) -> Cotangents:
    # Cotangents keep the compute dtype; the one rounding to the input's dtype is the last step.
    to = compute_dtype(e.args[0].type.dtype)
    return (ct if ct.type.dtype is to else b.cast("ct", ct, to=to),)


def _div_cotangents(b: Ops, e: Eqn, ct: Value) -> Cotangents:
    over = b.div("ct", ct, e.args[1])
    return over, b.neg("ct", b.mul("ct", over, e.out))


def _sqrt_cotangent(b: Ops, e: Eqn, ct: Value) -> Cotangents:
    return (b.div("ct", b.mul("ct", ct, b.const("half", 0.5, ct.type.dtype)), e.out),)


def _rsqrt_cotangent(b: Ops, e: Eqn, ct: Value) -> Cotangents:
    cube = b.mul("ct", b.mul("ct", e.out, e.out), e.out)
    return (b.mul("ct", b.mul("ct", ct, b.const("half", -0.5, ct.type.dtype)), cube),)


def _weighted(b: Ops, e: Eqn) -> Value:
    weight, x = e.args
    zero = b.const("zero", 0.0, weight.type.dtype)
    return b.mul("weighted", weight, b.select_gt("kept", b.abs("abs_weight", weight), zero, x))


def _rsqrt(b: Ops, e: Eqn) -> Value:
    root = b.sqrt(f"{e.out.name}_root", e.args[0])
    return b.div("ratio", b.const("one", 1.0, e.out.type.dtype), root)


def _mean(b: Ops, e: Eqn) -> Value:
    # A product with a rounded reciprocal of the length would move the mean of a constant row.
    total = b.reduce_sum(f"{e.out.name}_sum", e.args[0], axis=e.axis, to=e.to)
    return b.div("ratio", total, b.size(of_size(e.axis, e.to), e.axis, e.out.type.dtype, per=e.to))


def _extreme_cotangents(b: Ops, e: Eqn, ct: Value) -> Cotangents:
    # At a tie each operand gets half of the cotangent, so that the halves add up to it.
    x, y = e.args
    tied = b.select_eq("tied", x, y, b.const("half", 0.5, ct.type.dtype))
    share = b.mul("ct", ct, b.sub("share", b.const("one", 1.0, ct.type.dtype), tied))
    return tuple(b.select_eq("ct", a, e.out, share) for a in e.args)


def _reduce_max_cotangent(b: Ops, e: Eqn, ct: Value) -> Cotangents:
    largest = b.select_eq("largest", e.args[0], e.out, b.const("one", 1.0, ct.type.dtype))
    share = b.div("ct", ct, b.reduce_sum("ties", largest, axis=e.axis, to=e.to))
    return (b.select_eq("ct", e.args[0], e.out, share),)


def _select_cotangents(b: Ops, e: Eqn, ct: Value) -> Cotangents:
    return None, None, b.emit(e.op, "ct", (*e.args[:2], ct))


def _where_cotangents(b: Ops, e: Eqn, ct: Value) -> Cotangents:
    over, under, zero = e.args[0], e.args[1], b.const("number", 0.0, ct.type.dtype)
    return None, None, b.select_gt("ct", over, under, ct), b.where_gt("ct", over, under, zero, ct)


def _abs_cotangent(b: Ops, e: Eqn, ct: Value) -> Cotangents:
    x, zero = e.args[0], b.const("number", 0.0, ct.type.dtype)
    below = b.select_gt("below", zero, x, b.const("number", -1.0, ct.type.dtype))
    return (b.mul("ct", ct, b.where_gt("slope", x, zero, b.const("number", 1.0, ct.type.dtype), below)),)


# ---- the rows ----


class Ops(ABC):
    """Every op is a method that takes the name of its result first and returns the new value."""

    @abstractmethod
    def emit(self, op: str, name: str, args: tuple[Value, ...], **attrs: Attr) -> Value:
        """A new equation; ``name`` gets a suffix if it is taken or reserved."""

    @op(
        type_rules.const,
        lambda a, e, at: real.number(e.value, e, at),
        numpy=lambda a, e, n, out: meanings.number(e.value, e),
        cuda=lambda a, e: meanings.literal(float(e.value), e.out.type.dtype),
        vjp=lambda b, e, ct: (),
        attrs=("dtype", "value"),
    )
    def const(self, name: str, value: float, dtype: DType) -> Value:
        """A constant of no axes."""
        return self.emit("const", name, (), value=float(value), dtype=dtype)

    @op(
        type_rules.size,
        real.size,
        numpy=meanings.size,
        cuda=lambda a, e: f"static_cast<{meanings.ctype(e.out.type.dtype)}>(rows_)",  # D is a constant after decompose
        vjp=lambda b, e, ct: (),
        attrs=("axis", "dtype", "per", "segment"),
    )
    def size(self, name: str, axis: Axis, dtype: DType, *, per: Axis | None = None) -> Value:
        """The length of an axis as a number, or how many of its elements one of ``per`` has."""
        return self.emit("size", name, (), axis=axis, dtype=dtype, **_left(per=per))

    @op(type_rules.iota, real.iota, numpy=meanings.counted, vjp=lambda b, e, ct: (), attrs=("axis", "dtype"))
    def iota(self, name: str, axis: Axis, dtype: DType = DType.I32) -> Value:
        """0, 1, 2, ... along an axis, as whole numbers."""
        return self.emit("iota", name, (), axis=axis, dtype=dtype)

    @op(
        type_rules.cast,
        real.cast,
        numpy=lambda a, e, n, out: numerics.round_to(a[0], e.out.type.dtype, out),
        cuda=meanings.cuda_cast,
        vjp=_cast_cotangent,
        attrs=("to",),
    )
    def cast(self, name: str, x: Value, *, to: DType) -> Value:
        """x rounded to ``to``."""
        return self.emit("cast", name, (x,), to=to)

    @op(
        type_rules.expand, real.expand, numpy=meanings.expanded, cuda="{0}", vjp=lambda b, e, ct: (ct,), attrs=("axis",)
    )
    def expand(self, name: str, x: Value, *, axis: Axis) -> Value:
        """x, repeated along an axis it lacks."""
        return self.emit("expand", name, (x,), axis=axis)

    @op(type_rules.arithmetic, real.neg, numpy=each(np.negative), cuda="-{0}", vjp=_neg_cotangent)
    def neg(self, name: str, x: Value) -> Value:
        """-x."""
        return self.emit("neg", name, (x,))

    @op(type_rules.arithmetic, real.add, numpy=each(np.add), cuda="{0} + {1}", vjp=lambda b, e, ct: (ct, ct))
    def add(self, name: str, a: Value, b: Value) -> Value:
        """a + b."""
        return self.emit("add", name, (a, b))

    @op(
        type_rules.arithmetic,
        real.sub,
        numpy=each(np.subtract),
        cuda="{0} - {1}",
        vjp=lambda b, e, ct: (ct, b.neg("ct", ct)),
    )
    def sub(self, name: str, a: Value, b: Value) -> Value:
        """a - b."""
        return self.emit("sub", name, (a, b))

    @op(type_rules.arithmetic, real.mul, numpy=each(np.multiply), cuda="{0} * {1}", vjp=_product_cotangents)
    def mul(self, name: str, a: Value, b: Value) -> Value:
        """a * b."""
        return self.emit("mul", name, (a, b))

    @op(type_rules.arithmetic, real.weighted, expand=_weighted, vjp=_product_cotangents)
    def weighted(self, name: str, weight: Value, x: Value) -> Value:
        """weight * x, and 0 where the weight is 0, also if x is infinite; the derivatives are those of the product."""
        return self.emit("weighted", name, (weight, x))

    @op(type_rules.arithmetic, real.div, numpy=each(np.divide), cuda="{0} / {1}", vjp=_div_cotangents)
    def div(self, name: str, a: Value, b: Value) -> Value:
        """a / b, correctly rounded."""
        return self.emit("div", name, (a, b))

    @op(
        type_rules.fma,
        real.fma,
        numpy=each(numerics.fma),
        cuda="fmaf({0}, {1}, {2})",
        vjp=lambda b, e, ct: (*_product_cotangents(b, e, ct), ct),
    )
    def fma(self, name: str, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once."""
        return self.emit("fma", name, (a, b, c))

    @op(type_rules.arithmetic, real.sqrt, numpy=each(np.sqrt), cuda="sqrt{f}({0})", vjp=_sqrt_cotangent)
    def sqrt(self, name: str, x: Value) -> Value:
        """The square root, correctly rounded."""
        return self.emit("sqrt", name, (x,))

    @op(type_rules.arithmetic, real.rsqrt, expand=_rsqrt, vjp=_rsqrt_cotangent)
    def rsqrt(self, name: str, x: Value) -> Value:
        """1 / sqrt(x), two correctly rounded steps."""
        return self.emit("rsqrt", name, (x,))

    @op(type_rules.arithmetic, real.abs_, numpy=each(np.abs), cuda="fabs{f}({0})", vjp=_abs_cotangent)
    def abs(self, name: str, x: Value) -> Value:
        """|x|; no cotangent passes at 0."""
        return self.emit("abs", name, (x,))

    @op(type_rules.arithmetic, real.rint, numpy=each(np.rint), cuda="rint{f}({0})", vjp=lambda b, e, ct: (None,))
    def rint(self, name: str, x: Value) -> Value:
        """The nearest whole number, of two the even one; no cotangent passes."""
        return self.emit("rint", name, (x,))

    @op(type_rules.arithmetic, real.same, numpy=each(np.positive), cuda="{0}", vjp=lambda b, e, ct: (None,))
    def detach(self, name: str, x: Value) -> Value:
        """x, through which no cotangent passes, because its effects on the results cancel."""
        return self.emit("detach", name, (x,))

    @op(
        type_rules.arithmetic,
        real.same,
        numpy=each(np.positive),
        cuda="{0}",
        vjp=lambda b, e, ct: (None,),
        called="stop_gradient",
    )
    def stopped(self, name: str, x: Value) -> Value:
        """x, whose gradient is 0 by definition, whatever its effects are."""
        return self.emit("stop_gradient", name, (x,))

    # ---- choices ----

    @op(
        type_rules.arithmetic,
        real.maximum,
        numpy=each(numerics.maximum),
        cuda="maximum({0}, {1})",
        vjp=_extreme_cotangents,
    )
    def maximum(self, name: str, a: Value, b: Value) -> Value:
        """The larger one, a NaN if either is one; equal operands share the cotangent equally.

        For ``maximum(x, 0)`` half of the cotangent goes to x where x = 0, for ``relu`` none.
        """
        return self.emit("maximum", name, (a, b))

    @op(
        type_rules.arithmetic,
        real.minimum,
        numpy=each(numerics.minimum),
        cuda="minimum({0}, {1})",
        vjp=_extreme_cotangents,
    )
    def minimum(self, name: str, a: Value, b: Value) -> Value:
        """The smaller one, a NaN if either is one; equal operands share the cotangent equally."""
        return self.emit("minimum", name, (a, b))

    @op(
        type_rules.arithmetic,
        real.select_gt,
        numpy=each(numerics.select_gt),
        cuda="{0} > {1} ? {2} : {zero}",
        vjp=_select_cotangents,
    )
    def select_gt(self, name: str, a: Value, b: Value, c: Value) -> Value:
        """c where a is greater than b, else 0."""
        return self.emit("select_gt", name, (a, b, c))

    @op(
        type_rules.select_eq,
        real.select_eq,
        numpy=each(numerics.select_eq),
        cuda="{0} == {1} ? {2} : {zero}",
        vjp=_select_cotangents,
    )
    def select_eq(self, name: str, a: Value, b: Value, c: Value) -> Value:
        """c where a equals b, else 0; a and b may be whole numbers."""
        return self.emit("select_eq", name, (a, b, c))

    @op(
        type_rules.arithmetic,
        real.where_gt,
        numpy=each(numerics.where_gt),
        cuda="{0} > {1} ? {2} : {3}",
        vjp=_where_cotangents,
    )
    def where_gt(self, name: str, a: Value, b: Value, c: Value, d: Value) -> Value:
        """c where a is greater than b, else d, also where a or b is a NaN."""
        return self.emit("where_gt", name, (a, b, c, d))

    @op(
        type_rules.arithmetic,
        real.relu,
        numpy=each(numerics.relu),
        cuda="{0} <= {zero} ? {zero} : {0}",
        vjp=lambda b, e, ct: (b.select_gt("ct", e.args[0], b.const("zero", 0.0, ct.type.dtype), ct),),
    )
    def relu(self, name: str, x: Value) -> Value:
        """x where x > 0, a NaN where x is one, else 0; the cotangent passes only where x > 0."""
        return self.emit("relu", name, (x,))

    # ---- reductions: in the order of their attributes; lowering turns each into a phase ----

    @op(
        type_rules.reduction,
        real.reduce_sum,
        numpy=meanings.reduced_sum,
        vjp=lambda b, e, ct: (ct,),
        attrs=("axis", "to", *type_rules.ORDER),
    )
    def reduce_sum(self, name: str, x: Value, *, axis: Axis, to: Axis | None = None) -> Value:
        """The sum over an axis, or of its elements that belong to one of ``to``."""
        return self.emit("reduce_sum", name, (x,), axis=axis, **_left(to=to))

    @op(
        type_rules.dot,
        real.reduce_sum,
        numpy=meanings.reduced_sum,
        vjp=_product_cotangents,
        attrs=("axis", "to", *type_rules.ORDER),
    )
    def reduce_dot(self, name: str, a: Value, b: Value, *, axis: Axis, to: Axis | None = None) -> Value:
        """The sum of a * b over an axis, each product rounded together with its addition; ``to`` as in a sum."""
        return self.emit("reduce_dot", name, (a, b), axis=axis, **_left(to=to))

    @op(
        type_rules.mean,
        real.reduce_mean,
        expand=_mean,
        vjp=lambda b, e, ct: (b.div("ct", ct, b.size("count", e.axis, ct.type.dtype, per=e.to)),),
        attrs=("axis", "to"),
    )
    def reduce_mean(self, name: str, x: Value, *, axis: Axis, to: Axis | None = None) -> Value:
        """The sum over an axis divided by its length; ``to`` as in a sum."""
        return self.emit("reduce_mean", name, (x,), axis=axis, **_left(to=to))

    @op(
        type_rules.maximum, real.reduce_max, numpy=meanings.reduced_max, vjp=_reduce_max_cotangent, attrs=("axis", "to")
    )
    def reduce_max(self, name: str, x: Value, *, axis: Axis, to: Axis | None = None) -> Value:
        """The largest element, a NaN if there is one; equal maxima share its cotangent equally; ``to`` as in a sum."""
        return self.emit("reduce_max", name, (x,), axis=axis, **_left(to=to))

    # ---- operations on the bits of f32, for the equations of functions ----
    # The result for numbers that they are not made for is that of the bits, so that kernels and NumPy agree, except for
    # a NaN, whose bits are not defined. They have no derivative.

    @op(type_rules.function, real.copysign, numpy=each(np.copysign), cuda="copysign_of({0}, {1})")
    def copysign(self, name: str, a: Value, b: Value) -> Value:
        """|a| with the sign of b."""
        return self.emit("copysign", name, (a, b))

    @_of_bits(numerics.limited, "limited_of({0}, {1})")
    def limited(self, name: str, x: Value, most: Value) -> Value:
        """x, but with a magnitude of ``most``, a positive number, where it is larger; a NaN stays one."""
        return self.emit("limited", name, (x, most))

    @_of_bits(numerics.exp2_biased, "__uint_as_float(__float_as_uint({0}) << 23)")
    def exp2_biased(self, name: str, x: Value) -> Value:
        """2^n for x = n + 1.5 * 2^23 + 127, n whole from -126 to 127: the low bits of x as the exponent."""
        return self.emit("exp2_biased", name, (x,))

    @_of_bits(numerics.exp2_whole, "exp2_whole({0})")
    def exp2_whole(self, name: str, x: Value) -> Value:
        """2^n for x = n + 1.5 * 2^23, n whole from -126 to 127: the low bits of x, and those of 1, as the exponent."""
        return self.emit("exp2_whole", name, (x,))

    @_of_bits(numerics.exponent, "exponent({0})")
    def exponent(self, name: str, x: Value) -> Value:
        """The whole number k with x / 2^k in [2/3, 4/3), of a positive normal x."""
        return self.emit("exponent", name, (x,))

    @_of_bits(numerics.significand, "significand({0})")
    def significand(self, name: str, x: Value) -> Value:
        """x / 2^k in [2/3, 4/3), of a positive normal x."""
        return self.emit("significand", name, (x,))

    @_of_bits(numerics.reciprocal_guess, f"__uint_as_float({numerics.RECIPROCAL:#x}u - __float_as_uint({{0}}))")
    def reciprocal_guess(self, name: str, x: Value) -> Value:
        """1 / x to within 5.1 percent, for x from 2^-126 to 1.89 * 2^125."""
        return self.emit("reciprocal_guess", name, (x,))
