"""The op table's row for an element by its index: the logit of a class, which no loop over the row has to look for."""

from __future__ import annotations

from lngen.compiler.ir import numerics, real, type_rules
from lngen.compiler.ir.axes import D
from lngen.compiler.ir.ops import Cotangents, Ops, op
from lngen.compiler.ir.scales import Scales
from lngen.compiler.ir.types import Eqn, Value


def _take_cotangents(b: Ops, e: Eqn, ct: Value) -> Cotangents:
    index = e.args[1]
    return b.select_eq("ct", index, b.iota("column", D, index.type.dtype), ct), None


class Indices(Scales):
    """Every op as a method."""

    @op(type_rules.take, real.take, numpy=lambda a, e, size, out: numerics.take(*a), vjp=_take_cotangents)
    def take(self, name: str, x: Value, index: Value) -> Value:
        """The element at ``index`` of each row of an input x over D, [M]; 0 where that is outside the row.

        A kernel reads it from memory, which the text of a row says (``lngen.compiler.lower.cuda.spelling``).
        """
        return self.emit("take", name, (x, index))
