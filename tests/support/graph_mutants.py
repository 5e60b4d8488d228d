"""Every mistake of a few kinds that an equation of a graph may have, made by rule; and those that nobody sees."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from lngen.compiler.ir import Axis, D, Eqn, Graph, M, Type, Value, verify
from lngen.compiler.ir.numerics import Array
from lngen.errors import VerifyError

# The op that one may confuse with another.
CONFUSED = {
    "add": "sub", "sub": "add", "mul": "div", "div": "mul", "maximum": "minimum", "sqrt": "rsqrt", "rsqrt": "sqrt",
    "reduce_sum": "reduce_mean", "reduce_mean": "reduce_sum", "exp": "exp2", "log": "sqrt", "tanh": "sigmoid",
    "sigmoid": "tanh", "silu": "sigmoid", "gelu": "silu", "gelu_tanh": "silu", "relu": "abs", "neg": "abs",
}  # fmt: skip
NEUTRAL = {"add": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0}
OTHER = {M: D, D: M}
# Other ways to write the same sum, as the mean of a centred row is 0; and what is chosen only where numbers are equal.
SAME = re.compile(
    r"%xc2 = mul (%(x|x32|total|h32) %xc|%xc %(x|x32|total|h32))$"
    r"|%(dy_\w*xhat|dx_terms) = mul (%dx32_part\w* %xhat|%xhat %dx32_part\w*)$"
    r"|%tied = select_eq %square_eps "
)
Results = dict[str, Array]


def survivors(graph: Graph, results: Callable[[Graph], Results], caught: Callable[[Results], bool]) -> list[str]:
    """The mutants that are not caught though the value of the changed equation is another."""
    values = results(replace(graph, results=tuple(e.out for e in graph.eqns)))
    found, listed = [], [*mutants(graph)]
    assert len(listed) > len(graph.eqns)
    for mistake, mutant in listed:
        if not caught(results(mutant)) and not SAME.match(mistake):
            changed = mistake[1 : mistake.index(" ")]
            out = mutant.values()[changed]
            value = results(replace(mutant, results=(out,)))[changed]
            if value.shape != values[changed].shape or not _near(value, values[changed]):
                found.append(mistake)
    return found


def _near(one: Array, other: Array) -> bool:
    with np.errstate(all="ignore"):
        return bool(np.abs(one - other).max() <= 1e-6 * np.abs(other).max())


def mutants(graph: Graph) -> Iterator[tuple[str, Graph]]:
    """Another op, a factor or a term left out, another operand, a sum along the other axis: each where types allow it.

    The text is the new equation.
    """
    for place, eqn in enumerate(graph.eqns):
        known = [*graph.params, *(e.out for e in graph.eqns[:place])]
        for before, new in _changes(eqn, known):
            made = replace(graph, eqns=(*graph.eqns[:place], *before, new, *graph.eqns[place + 1 :]))
            try:
                yield " ".join(map(str, (new.out, "=", new.op, *new.args))), verify(made, "mutant")
            except VerifyError:
                continue


def _changes(eqn: Eqn, known: list[Value]) -> Iterator[tuple[tuple[Eqn, ...], Eqn]]:
    """The mistakes of one equation, each with the equations before it that it needs."""
    if eqn.op in CONFUSED:
        yield (), replace(eqn, op=CONFUSED[eqn.op])
    for place, arg in enumerate(eqn.args):
        for other in known:
            if other.type.dtype is arg.type.dtype and other != arg:
                yield (), replace(eqn, args=(*eqn.args[:place], other, *eqn.args[place + 1 :]))
        if eqn.op in NEUTRAL:
            left_out = Value("left_out", Type(arg.type.dtype))
            const = Eqn(left_out, "const", (), (("dtype", arg.type.dtype), ("value", NEUTRAL[eqn.op])))
            yield (const,), replace(eqn, args=(*eqn.args[:place], left_out, *eqn.args[place + 1 :]))
    if eqn.op.startswith("reduce_"):
        along: Axis = OTHER[eqn.axis]
        attrs = tuple((k, along if k == "axis" else v) for k, v in eqn.attrs)
        out = replace(eqn.out, type=Type(eqn.out.type.dtype, (OTHER[along],)))
        yield (), replace(eqn, out=out, attrs=attrs)
