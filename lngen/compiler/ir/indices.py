"""Rows of the op table that move elements, by an index or in planes, and the one that seals rows from a gradient."""

from __future__ import annotations

import numpy as np

from lngen.compiler.ir import numerics, real, type_rules
from lngen.compiler.ir.axes import D
from lngen.compiler.ir.ops import Cotangents, Ops, op
from lngen.compiler.ir.scales import Scales
from lngen.compiler.ir.types import Eqn, Value


def _take_cotangents(b: Ops, e: Eqn, ct: Value) -> Cotangents:
    index = e.args[1]
    return b.select_eq("ct", index, b.iota("column", D, index.type.dtype), ct), None


def _rotate_cotangent(b: Ops, e: Eqn, ct: Value) -> Cotangents:
    return (b.neg("ct", b.emit("rotate", "ct", (ct,), **dict(e.attrs))),)


def _sealed_cotangents(b: Ops, e: Eqn, ct: Value) -> Cotangents:
    return b.select_gt("ct", b.const("half", 0.5, ct.type.dtype), e.args[1], ct), None


class Indices(Scales):
    """Every op as a method."""

    @op(type_rules.take, real.take, numpy=lambda a, e, size, out: numerics.take(*a), vjp=_take_cotangents)
    def take(self, name: str, x: Value, index: Value) -> Value:
        """The element at ``index`` of each row of an input x over D, [M]; 0 where that is outside the row.

        A kernel reads it from memory, which the text of a row says (``lngen.compiler.lower.cuda.spelling``).
        """
        return self.emit("take", name, (x, index))

    @op(
        type_rules.gather,
        real.gather,
        numpy=lambda a, e, size, out: numerics.gather(*a),
        vjp=lambda b, e, ct: (None, None),
    )
    def gather(self, name: str, table: Value, index: Value) -> Value:
        """The row at ``index`` of a table, for each row: [P, E] to [M, E], without a derivative by the table.

        An index outside the table is an ArrayError of the interpreter; a GPU does not check it.
        """
        return self.emit("gather", name, (table, index))

    @op(
        type_rules.rotate,
        real.rotate,
        numpy=lambda a, e, size, out: numerics.turned(a[0], **numerics.planes(e.attrs)),
        vjp=_rotate_cotangent,
        attrs=("by", "head", "width"),
    )
    def rotate(self, name: str, x: Value, *, head: int, width: int = 0, by: str = "halves") -> Value:
        """(-b, a) of each plane (a, b) of the first ``width`` features of each ``head``, 0 of the others.

        A plane has a feature of the first half of the width and the one as far into the second, or a pair of
        neighbours. So x * cos + rotate(x) * sin is x turned by an angle (RoPE). ``width=0``: all features of a head.
        """
        return self.emit("rotate", name, (x,), by=by, head=head, width=width or head)

    @op(
        type_rules.sealed,
        lambda args, eqn, at: args[0],
        numpy=lambda a, e, n, out: np.positive(a[0], out=out),
        cuda="{0}",
        vjp=_sealed_cotangents,
    )
    def sealed(self, name: str, x: Value, closed: Value) -> Value:
        """x, through which no cotangent passes where ``closed`` is 1; it is 0 elsewhere.

        So the derivative is 0 where the results do not depend on x, also if x is a NaN.
        """
        return self.emit("sealed", name, (x, closed))
