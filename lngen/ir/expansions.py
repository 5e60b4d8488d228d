"""Ops that are a few others, each correctly rounded."""

from __future__ import annotations

from lngen.ir.methods import Methods
from lngen.ir.types import Eqn, Value


def rsqrt(b: Methods, e: Eqn) -> Value:
    """1 / sqrt(x), two steps."""
    root = b.sqrt(f"{e.out.name}_root", e.args[0])
    return b.div("ratio", b.const("one", 1.0, e.out.type.dtype), root)


def reduce_mean(b: Methods, e: Eqn) -> Value:
    """The sum divided by the length: a product with a rounded reciprocal would move the mean of a constant row."""
    total = b.reduce_sum(f"{e.out.name}_sum", e.args[0], axis=e.axis)
    return b.div("ratio", total, b.size(f"{e.axis.value.lower()}_size", e.axis, e.out.type.dtype))
