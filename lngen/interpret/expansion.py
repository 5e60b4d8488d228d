"""The value of one equation: the NumPy meaning of its op or, of an op with an expansion, that of the expansion."""

from __future__ import annotations

from collections.abc import Mapping

from lngen.ir import OPS, Axis, Eqn, Value
from lngen.ir.methods import Methods
from lngen.ir.numerics import Array
from lngen.ir.types import Attr


def value_of(eqn: Eqn, args: tuple[Array, ...], size: Mapping[Axis, int]) -> Array:
    """The value, for operands that have size 1 along the axes they lack."""
    op = OPS[eqn.op]
    if op.numpy:
        return op.numpy(args, eqn, size)
    assert op.expand, eqn.op
    evaluator = _Evaluator(dict(zip(eqn.args, args, strict=True)), size)
    return evaluator.known[op.expand(evaluator, eqn)]


class _Evaluator(Methods):
    """Computes each equation as it is written."""

    def __init__(self, known: dict[Value, Array], size: Mapping[Axis, int]) -> None:
        self.known, self._sizes = known, size

    def emit(self, op: str, name: str, args: tuple[Value, ...], **attrs: Attr) -> Value:
        """A value of its own, computed."""
        listed = tuple(sorted(attrs.items()))
        out = Value(f"{name}_{len(self.known)}", OPS[op].typ(tuple(a.type for a in args), listed))
        self.known[out] = value_of(Eqn(out, op, args, listed), tuple(self.known[a] for a in args), self._sizes)
        return out
