"""Where a graph is defined: the inputs that have to be positive for its roots and logarithms.

They are found backwards from the operands of ``sqrt``, ``rsqrt`` and ``log``, by sufficient rules: a sum, a product or
a quotient of positive numbers is positive. A difference is of either sign, so nothing is found beyond it; a graph
declares such inputs: ``b.input(name, M, D, positive=True)``.
"""

from __future__ import annotations

from collections.abc import Mapping

from lngen.ir import Eqn, Value
from lngen.spec import Spec

ROOTS = {"sqrt", "rsqrt", "log"}
ALWAYS = {"exp", "exp2", "sigmoid", "softplus", "normal_cdf", "abs", "size", "segment_size"}  # positive, or zero
SQUARES = {"mul", "reduce_dot", "segment_dot", "fma"}  # if their first two operands are the same
IF_ALL_ARE = {  # positive if every operand is
    "cast", "expand", "detach", "add", "mul", "fma", "div", "sqrt", "rsqrt", "minimum", "relu", "tanh", "erf", "gelu",
    "gelu_tanh", "silu", "reduce_sum", "reduce_dot", "reduce_mean", "reduce_max", "segment_sum", "segment_dot",
}  # fmt: skip


def positive_inputs(spec: Spec) -> tuple[str, ...]:
    """Names of the forward's inputs that have to be positive, found or declared, in their order."""
    forward = spec.forward()
    eqns = forward.producers()
    found = set(spec.definition.positive(spec.options))
    for eqn in forward.eqns:
        if eqn.op in ROOTS:
            found |= _inputs(eqn.args[0], eqns) or set()
    return tuple(p.name for p in forward.params if p.name in found)


def _inputs(value: Value, eqns: Mapping[Value, Eqn]) -> set[str] | None:
    """Names of inputs that make ``value`` positive if they are; None if no rule says so."""
    if value not in eqns:
        return {value.name}
    eqn = eqns[value]
    args = eqn.args
    if eqn.op in ALWAYS:
        return set()
    if eqn.op == "const":
        return set() if eqn.value > 0 else None
    if eqn.op == "clamp" and eqn.number_attr("low") > 0:
        return set()
    if eqn.op == "maximum":
        either = [names for a in args if (names := _inputs(a, eqns)) is not None]
        return min(either, key=len, default=None)
    if eqn.op in SQUARES and args[0] == args[1]:
        args = args[2:]
    elif eqn.op not in IF_ALL_ARE:
        return None
    needed = [_inputs(a, eqns) for a in args]
    return None if None in needed else set().union(*(names for names in needed if names is not None))
