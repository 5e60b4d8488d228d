"""Names of values that operators make: short ones say what they are, ``x_plus_residual``; others name the op alone."""

from __future__ import annotations

from collections.abc import Sequence

from lngen.ir import Value

LONGEST = 24  # characters of a name that is made of the operands' names
_BINARY = {
    "add": "{}_plus_{}",
    "sub": "{}_minus_{}",
    "mul": "{}_{}",
    "div": "{}_over_{}",
    "maximum": "max_{}_{}",
    "minimum": "min_{}_{}",
}
_UNARY = "{op}_{}"


def describing(op: str, operands: Sequence[Value | float]) -> str:
    """A name for the result of an op; a Builder makes it unique."""
    words = [_word(operand) for operand in operands]
    if op == "mul" and operands[0] == operands[1]:
        name = f"{words[0]}_squared"
    else:
        name = _BINARY.get(op, _UNARY).format(*words, op=op)
    return name if all(words) and len(name) <= LONGEST else op


def _word(operand: Value | float) -> str:
    """The name of a value without the width of the compute dtype; "" for a number, of which a name has no digits."""
    if not isinstance(operand, Value):
        return ""
    return operand.name.removesuffix("32").rstrip("_") or operand.name
