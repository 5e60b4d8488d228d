"""Where a graph is defined: the inputs that have to be positive for its roots and logarithms.

They are found backwards from the operands of ``sqrt``, ``rsqrt`` and ``log``, by sufficient rules: a sum, a product or
a quotient of positive numbers is positive. A difference is of either sign, so nothing is found beyond it; a graph
declares such inputs: ``b.input(name, M, D, positive=True)``.
"""

from __future__ import annotations

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
    found = set(spec.definition.positive(spec.options))
    needed: dict[Value, set[str] | None] = {p: {p.name} for p in forward.params}
    for eqn in forward.eqns:
        of_args = [needed[a] for a in eqn.args]
        if eqn.op in ROOTS:
            found |= of_args[0] or set()
        needed[eqn.out] = _needed(eqn, of_args)
    return tuple(p.name for p in forward.params if p.name in found)


def _needed(eqn: Eqn, of_args: list[set[str] | None]) -> set[str] | None:
    """Names of inputs that make a value positive if they are, from those of its operands; None if no rule says so."""
    if eqn.op in ALWAYS:
        return set()
    if eqn.op == "const":
        return set() if eqn.value > 0 else None
    if eqn.op == "clamp" and eqn.number_attr("low") > 0:
        return set()
    if eqn.op == "maximum":
        return min((names for names in of_args if names is not None), key=len, default=None)
    if eqn.op in SQUARES and eqn.args[0] == eqn.args[1]:
        of_args = of_args[2:]
    elif eqn.op not in IF_ALL_ARE:
        return None
    known = [names for names in of_args if names is not None]
    return set().union(*known) if len(known) == len(of_args) else None
