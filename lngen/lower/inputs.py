"""The C expressions of a kernel for the values of its graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lngen.ir import OPS, DType, Eqn, Value, ctype, print_eqn
from lngen.lower.c_names import c_name
from lngen.lower.parts import Statement


@dataclass(frozen=True)
class Inputs:
    """The C expressions for the [M, D] and [D] inputs.

    element   the element ``i_`` of each
    vector    the statement, once per loop, that loads the vector ``v_`` of inputs that are not in registers
    widened   f16 inputs that are stored as floats
    at_use    f16 is converted at every use
    """

    element: Mapping[Value, str]
    vector: Mapping[Value, str] = field(default_factory=dict)
    widened: frozenset[Value] = frozenset()
    at_use: bool = False

    def spell(self, value: Value) -> str:
        """``value`` in C."""
        return self.element.get(value) or c_name(value)

    def statement(self, eqn: Eqn) -> Statement:
        """The C line of one equation: its IR name, its op's CUDA meaning, its IR text as note."""
        meaning = OPS[eqn.op].cuda
        assert meaning is not None, f"'{eqn.op}' is lowered by the pass '{OPS[eqn.op].lowered_by}', which has not run"
        text = meaning(tuple(map(self.spell, eqn.args)), eqn)
        if eqn.op == "cast" and eqn.args[0] in self.widened:
            text = self.spell(eqn.args[0])
        elif eqn.op == "cast" and self.at_use and eqn.args[0].type.dtype is DType.F16:
            text = text.replace("f32_from_f16(", "f32_from_f16_at_use(")
        return Statement(f"const {ctype(eqn.out.type.dtype)} {c_name(eqn.out)} = {text};", note(eqn))


def note(eqn: Eqn) -> str:
    """The equation without its type, which the C declaration has."""
    return print_eqn(eqn).replace(f" : {eqn.out.type}", "", 1)
