"""The derivatives in the op table that need more than one equation.

Each takes a builder, an equation and the cotangent of its result, and returns the cotangents of the arguments.
"""

from __future__ import annotations

from lngen.ir.methods import Methods
from lngen.ir.types import Eqn, Value


def div(b: Methods, e: Eqn, ct: Value) -> tuple[Value, ...]:
    over = b.div("ct", ct, e.args[1])
    return over, b.neg("ct", b.mul("ct", over, e.out))


def rsqrt(b: Methods, e: Eqn, ct: Value) -> tuple[Value, ...]:
    cube = b.mul("ct", b.mul("ct", e.out, e.out), e.out)
    return (b.mul("ct", b.mul("ct", ct, b.const("half", -0.5, ct.type.dtype)), cube),)


def sqrt(b: Methods, e: Eqn, ct: Value) -> tuple[Value, ...]:
    return (b.div("ct", b.mul("ct", ct, b.const("half", 0.5, ct.type.dtype)), e.out),)


def maximum(b: Methods, e: Eqn, ct: Value) -> tuple[Value, ...]:
    # At a tie each operand gets half of the cotangent, so that the halves add up to it.
    x, y = e.args
    tied = b.select_eq("tied", x, y, b.const("half", 0.5, ct.type.dtype))
    share = b.mul("ct", ct, b.sub("share", b.const("one", 1.0, ct.type.dtype), tied))
    return tuple(b.select_eq("ct", a, e.out, share) for a in e.args)


def reduce_max(b: Methods, e: Eqn, ct: Value) -> tuple[Value, ...]:
    largest = b.select_eq("largest", e.args[0], e.out, b.const("one", 1.0, ct.type.dtype))
    share = b.div("ct", ct, b.reduce_sum("ties", largest, axis=e.axis))
    return (b.select_eq("ct", e.args[0], e.out, share),)


def mean(b: Methods, e: Eqn, ct: Value) -> tuple[Value, ...]:
    return (b.div("ct", ct, b.size("count", e.axis, ct.type.dtype)),)
