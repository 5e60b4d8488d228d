"""Random numbers for the inputs of a graph, at which it is evaluated.

Nothing is zero, one or symmetric, which could hide a wrong formula. Inputs that have to be positive are, so that every
result is a number. They are found backwards from the operands of ``sqrt``, ``rsqrt`` and ``log``, by sufficient rules:
a sum, a product or a quotient of positive numbers is positive. A difference is of either sign, so nothing is found
beyond it; a graph declares such inputs: ``b.input(name, M, D, positive=True)``.
"""

from __future__ import annotations

from collections.abc import Collection
from math import lcm

import numpy as np

from lngen.compiler.ir import Axis, D, Eqn, Graph, Lengths, M, Value, derived_axes, values_of
from lngen.compiler.ir.numerics import Array, stored
from lngen.compiler.ir.real import Real

ROOTS = {"sqrt", "rsqrt", "log"}
ALWAYS = {"exp", "decay", "exp2", "sigmoid", "softplus", "normal_cdf", "abs", "size"}  # positive, or zero
SQUARES = {"mul", "reduce_dot", "fma"}  # if their first two operands are the same
IF_ALL_ARE = {  # positive if every operand is
    "cast", "expand", "detach", "stop_gradient", "add", "mul", "fma", "div", "sqrt", "rsqrt", "minimum", "relu", "tanh",
    "erf", "gelu", "gelu_tanh", "silu", "reduce_sum", "reduce_dot", "reduce_mean", "reduce_max",
}  # fmt: skip
ROWS, FEATURES = 5, 7  # of an instance: few enough to take milliseconds, and no two lengths are alike
NAMED = 3  # the number of an axis that an array says


def lengths(graph: Graph, rows: int | None = None, d: int | None = None, sets: int | None = None) -> Lengths:
    """The length of every axis for about ``rows`` rows of ``d`` elements: the next lengths that derived axes divide.

    None: the least from ``ROWS`` or ``FEATURES`` on with which each derived axis has two elements. ``sets``: how many
    sets of rows there are, if there are rows, of a graph whose calls say that.
    """
    least, divisor = {M: ROWS if rows is None else rows, D: FEATURES if d is None else d}, {M: 1, D: 1}
    heads = [e.int_attr("head") for e in graph.eqns if e.op == "rotate"]
    divisor[D] = lcm(1, *heads)
    least[D] = max(least[D], *(2 * n for n in heads)) if d is None and heads else least[D]
    for axis in (a for a in derived_axes(graph) if not a.of_table):
        named = NAMED if sets is None or axis.base is not M else max(1, sets)
        number = axis.number if isinstance(axis.number, int) else named
        divisor[axis.root] = lcm(divisor[axis.root], number)
        if (rows if axis.root is M else d) is None:
            least[axis.root] = max(least[axis.root], 2 * number)
    found = {root: -(-least[root] // n) * n for root, n in divisor.items()}
    by_call = [a for a in derived_axes(graph) if isinstance(a.number, str)]
    of = {a: found[a.root] // NAMED if a.by == "/" else NAMED for a in by_call}
    if sets is not None:
        of |= {a: sets * bool(found[M]) for a in by_call if a.base is M and a.by == "/"}
    return Lengths(found | of)


def normal(
    rng: np.random.Generator, shape: tuple[int, ...], mean: float, std: float = 1.0, *, positive: bool = False
) -> Array:
    """Normal numbers in float64; if ``positive``, their absolute values and a quarter of ``std``."""
    drawn = rng.normal(mean, std, shape)
    return np.abs(drawn) + std / 4 if positive else drawn


def drawn(
    rng: np.random.Generator, value: Value, sizes: Lengths, of: Axis | None, mean: float, std: float = 1.0, **more: bool
) -> Array:
    """Numbers as ``normal`` draws them, in the shape of a value; whole numbers below the length of the axis ``of``."""
    numbers = normal(rng, value.type.shape_of(sizes), mean, std, **more)
    return numbers if of is None else np.floor(np.abs(numbers) * 7919.0 % max(sizes[of], 1))


def indexed(graph: Graph) -> dict[Value, Axis]:
    """The inputs that ``select_eq`` compares with the places along an axis, or ``take`` and ``gather`` take, with it.

    They may be cast before.
    """
    axis_of = {e.out: e.axis for e in graph.eqns if e.op == "iota"}
    origin = {p: p for p in graph.params}
    for eqn in graph.eqns:
        if eqn.op == "cast" and eqn.args[0] in origin:
            origin[eqn.out] = origin[eqn.args[0]]
    pairs = [(a, b) for e in graph.eqns if e.op == "select_eq" for a, b in (e.args[:2], e.args[1::-1])]
    taken = {origin[e.args[1]]: D for e in graph.eqns if e.op == "take" and e.args[1] in origin}
    taken |= {e.args[1]: e.args[0].type.axes[0] for e in graph.eqns if e.op == "gather" and e.args[1] in origin}
    return taken | {origin[a]: axis_of[b] for a, b in pairs if b in axis_of and a in origin}


def instance(forward: Graph, eps: float, positive: Collection[str] = (), seed: int = 0) -> dict[str, Array]:
    """Numbers in float64 for the inputs of a forward graph, by name; ``positive`` are the inputs declared to be so."""
    rng, above = np.random.default_rng([seed, ROWS, FEATURES]), positive_inputs(forward, positive)
    sizes, of = lengths(forward), indexed(forward)
    found = {p.name: drawn(rng, p, sizes, of.get(p), 0.5, positive=p.name in above) for p in forward.tensors}
    whole = {p.name: stored(found[p.name], p.type.dtype) for p in forward.tensors if not p.type.dtype.digits}
    return found | {name: a.astype(np.float64) for name, a in whole.items()} | values_of(forward, eps)


def cotangents(results: dict[str, Real], seed: int = 0) -> dict[str, Array]:
    """Numbers for the cotangents of results, by their names."""
    rng = np.random.default_rng([seed + 1, ROWS, FEATURES])
    return {f"d{name}": rng.normal(0.3, 1.0, r.value.shape) for name, r in results.items()}


def positive_inputs(forward: Graph, declared: Collection[str] = ()) -> tuple[str, ...]:
    """Names of the forward's inputs that have to be positive, found or ``declared``, in their order."""
    found = {*declared}
    # What is passed by value follows from an eps above zero.
    needed: dict[Value, set[str] | None] = {p: {p.name} for p in forward.tensors}
    needed |= {p: set() for p in forward.by_value}
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
