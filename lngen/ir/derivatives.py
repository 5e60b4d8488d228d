"""The derivatives in the op table that need more than one equation.

Those of functions are the cotangent times one forward value, the slope, whose last equation is no product: such a value
is a factor to ``passes.simplify``, and a sum over the row stays one sum.

Each takes a builder, an equation and the cotangent of its result, and returns the cotangents of the arguments.
"""

from __future__ import annotations

import math

from lngen.ir.functions import GELU_CUBIC, GELU_LINEAR, gelu_argument
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


def extreme(b: Methods, e: Eqn, ct: Value) -> tuple[Value, ...]:
    # Of maximum and minimum.
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


def where_gt(b: Methods, e: Eqn, ct: Value) -> tuple[Value | None, ...]:
    over, under, zero = e.args[0], e.args[1], _const(b, 0.0, ct)
    return None, None, b.select_gt("ct", over, under, ct), b.where_gt("ct", over, under, zero, ct)


def absolute(b: Methods, e: Eqn, ct: Value) -> tuple[Value, ...]:
    x, zero = e.args[0], _const(b, 0.0, ct)
    below = b.select_gt("below", zero, x, _const(b, -1.0, ct))
    return (b.mul("ct", ct, b.where_gt("slope", x, zero, _const(b, 1.0, ct), below)),)


def clamp(b: Methods, e: Eqn, ct: Value) -> tuple[Value, ...]:
    # x is its own clamp where low <= x <= high.
    return (b.mul("ct", ct, b.select_eq("slope", e.args[0], e.out, _const(b, 1.0, ct))),)


def exp2(b: Methods, e: Eqn, ct: Value) -> tuple[Value, ...]:
    return (b.mul("ct", ct, b.mul("slope", e.out, _const(b, math.log(2), ct))),)


def tanh(b: Methods, e: Eqn, ct: Value) -> tuple[Value, ...]:
    square = b.mul("square", e.out, e.out)
    return (b.mul("ct", ct, b.sub("slope", _const(b, 1.0, ct), square)),)


def sigmoid(b: Methods, e: Eqn, ct: Value) -> tuple[Value, ...]:
    square = b.mul("square", e.out, e.out)
    return (b.mul("ct", ct, b.sub("slope", e.out, square)),)


def softplus(b: Methods, e: Eqn, ct: Value) -> tuple[Value, ...]:
    return (b.mul("ct", ct, b.sigmoid("slope", e.args[0])),)


def erf(b: Methods, e: Eqn, ct: Value) -> tuple[Value, ...]:
    power = b.exp("power", b.neg("minus", b.mul("square", e.args[0], e.args[0])))
    return (b.mul("ct", ct, b.mul("slope", power, _const(b, 2 / math.sqrt(math.pi), ct))),)


def normal_cdf(b: Methods, e: Eqn, ct: Value) -> tuple[Value, ...]:
    return (b.mul("ct", ct, _density(b, e.args[0], ct)),)


def gelu(b: Methods, e: Eqn, ct: Value) -> tuple[Value, ...]:
    x = e.args[0]
    slope = b.add("slope", b.normal_cdf("phi", x), b.mul("part", x, _density(b, x, ct)))
    return (b.mul("ct", ct, slope),)


def silu(b: Methods, e: Eqn, ct: Value) -> tuple[Value, ...]:
    s = b.sigmoid("sigmoid", e.args[0])
    rest = b.sub("rest", _const(b, 1.0, ct), s)
    return (b.mul("ct", ct, b.add("slope", s, b.mul("part", e.out, rest))),)


def gelu_tanh(b: Methods, e: Eqn, ct: Value) -> tuple[Value, ...]:
    x = e.args[0]
    s = b.sigmoid("sigmoid", gelu_argument(b, x))
    linear, cubic = _const(b, GELU_LINEAR, ct), _const(b, 3 * GELU_CUBIC, ct)
    inner = b.fma("inner", b.mul("square", x, x), cubic, linear)
    rest = b.mul("rest", e.out, b.sub("rest", _const(b, 1.0, ct), s))
    return (b.mul("ct", ct, b.add("slope", s, b.mul("part", rest, inner))),)


def _density(b: Methods, x: Value, ct: Value) -> Value:
    """The density of the normal distribution."""
    power = b.exp("power", b.mul("halved", b.mul("square", x, x), _const(b, -0.5, ct)))
    return b.mul("density", power, _const(b, 1 / math.sqrt(2 * math.pi), ct))


def _const(b: Methods, value: float, ct: Value) -> Value:
    return b.const("number", value, ct.type.dtype)
