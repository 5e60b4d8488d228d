"""The op table's rows for quantised results: division by a scale, powers of two, scales that are stored by columns.

``div_scale`` stands for a division whose quotient is rounded to 8 bits next. The reciprocal of the scale is taken once
a row or block, and an element costs three operations where a division costs ten. A quotient from 2^-18 to 2^17 has the
bits of the division: the product with the correctly rounded reciprocal, corrected by its exact remainder, is the
correctly rounded quotient (P. Markstein, Computation of elementary functions on the IBM RISC System/6000 processor, IBM
J. Res. Dev. 34, 1990; N. Brisebarre, J.-M. Muller, S. K. Raina, Accelerating correctly rounded floating-point division
when the divisor is known in advance, IEEE Trans. Comput. 53, 2004). A smaller one is below 2^-17, half of the least
number of e5m2, so 0 in 8 bits; a larger one is above all numbers of 8 bits. A zero keeps its sign.
"""

from __future__ import annotations

import math

import numpy as np

from lngen.compiler.ir import real, type_rules
from lngen.compiler.ir.functions import BIAS, Functions
from lngen.compiler.ir.meanings import each
from lngen.compiler.ir.ops import Cotangents, Ops, op
from lngen.compiler.ir.types import F32, Eqn, Value

SCALE_MIN = 2.0**-126  # the smallest number whose reciprocal is finite

# The remainder of a quotient from 2^-18 by a scale from 2^-86 is not below 2^-149, so it is exact. Scales that may be
# below SMALL are raised, and the numbers that they divide, by RAISE.
SMALL, RAISE = 2.0**-60, 2.0**64
BEYOND = 2.0**17  # above every number of 8 bits


def _div_scale(b: Ops, e: Eqn) -> Value:
    """v / s by 1 / s and one correction; see the module."""
    v, s = e.args
    if v.type.dtype is not F32:
        return b.div("quotient", v, s)

    def number(name: str, value: float) -> Value:
        return b.const(name, value, F32)

    one, bounded = number("one", 1.0), bool(e.attr("bounded"))
    if not bounded or float(e.number_attr("least")) < SMALL:
        small, raised = number("small", SMALL), number("raise", RAISE)
        kept = one if bounded else b.where_gt("lower", s, number("big", 1 / SMALL), number("lowering", 1 / RAISE), one)
        step = b.where_gt("step", small, s, raised, kept)
        v, s = b.mul("raised", v, step), b.mul("divisor", s, step)
    if not bounded:
        most = b.mul("most", s, number("beyond", BEYOND))
        v = b.maximum("clamped", b.minimum("clamped", v, most), b.neg("least", most))
    inverse = b.div("inverse", one, s)
    # Of an infinite scale the inverse is 0, and so is every quotient but that of infinity, which is a NaN.
    finite = b.select_gt("finite", number("infinity", math.inf), s, s)
    near = b.mul("near", v, inverse)
    # The remainder is negated, so that that of a zero, +0, keeps the zero's sign.
    over = b.fma("over", near, finite, b.neg("minus", v))
    return b.fma("quotient", b.neg("under", over), inverse, near)


def _ceil_power(b: Ops, e: Eqn) -> Value:
    """2^k or 2^(k + 1), by the significand m of x = m 2^k in [2/3, 4/3); an infinity and a NaN stay."""
    (x,) = e.args
    one = b.const("one", 1.0, F32)
    above = b.select_gt("above", b.significand("significand", x), one, one)
    k = b.add("exponent", b.exponent("exponent", x), above)
    power = b.exp2_biased("power", b.add("biased", k, b.const("bias", BIAS, F32)))
    return b.where_gt("ceiled", b.const("infinity", math.inf, F32), x, power, x)


def _quotient_cotangents(b: Ops, e: Eqn, ct: Value) -> Cotangents:
    return b.div("ct", ct, e.args[1]), None


class Scales(Functions):
    """The functions, and the ops of scales, as methods."""

    @op(
        type_rules.div_scale,
        real.div,
        expand=_div_scale,
        vjp=_quotient_cotangents,
        attrs=("bounded", "least"),
    )
    def div_scale(self, name: str, v: Value, s: Value, *, least: float, bounded: bool) -> Value:
        """v / s, to be rounded to 8 bits, by a scale s of ``least`` or more, which takes no cotangent.

        ``bounded``: |v| is at most s times the largest number of 8 bits, and s below 2^126, infinite or a NaN.
        Otherwise v is any number, and s any positive one. By an s of 8 bits the quotient is that of the division from
        2^-126 on, and for all finite v.
        """
        return self.emit("div_scale", name, (v, s), least=float(least), bounded=int(bounded))

    def over_largest(self, name: str, amax: Value, largest: float) -> Value:
        """amax / ``largest``, a number of 8 bits, correctly rounded from 2^-126 on; of an infinity that."""
        dtype = amax.type.dtype
        by = self.const("largest", largest, dtype)
        if dtype is not F32:
            return self.div(name, amax, by)
        over = self.div_scale(f"{name}_over", amax, by, least=largest, bounded=True)
        return self.where_gt(name, self.const("infinity", math.inf, F32), amax, over, amax)

    def least_scale(self, name: str, amax: Value, largest: float, scale_min: float) -> Value:
        """The scale of numbers up to ``amax`` in a dtype of 8 bits up to ``largest``: ``scale_min`` at least."""
        if scale_min < SCALE_MIN:  # so that a subnormal ratio stays
            ratio = self.div(f"{name}_ratio", amax, self.const("largest", largest, amax.type.dtype))
        else:
            ratio = self.over_largest(f"{name}_ratio", amax, largest)
        return self.maximum(f"{name}_least", ratio, self.const("scale_min", scale_min, amax.type.dtype))

    @op(
        type_rules.function,
        real.function(lambda x: np.exp2(np.ceil(np.log2(x))), 0.0),
        expand=_ceil_power,
        vjp=lambda b, e, ct: (None,),
    )
    def ceil_power(self, name: str, x: Value) -> Value:
        """The least power of two that is not below x, for x from 2^-126 to 2^127; no cotangent passes."""
        return self.emit("ceil_power", name, (x,))

    @op(type_rules.by_columns, real.same, numpy=each(np.positive), cuda="{0}", vjp=lambda b, e, ct: (ct,))
    def by_columns(self, name: str, x: Value) -> Value:
        """x over M and blocks of D, a result that is stored by columns: [B, M], see ``Type``."""
        return self.emit("by_columns", name, (x,))
