"""Random inputs for checks, and the comparison of bits.

In the inputs nothing is zero, one or symmetric, which could hide a wrong formula. Inputs that have to be positive are,
so that every result is a number. They are found backwards from the operands of ``sqrt``, ``rsqrt`` and ``log``, by
sufficient rules: a sum, a product or a quotient of positive numbers is positive. A difference is of either sign, so
nothing is found beyond it; a graph declares such inputs: ``b.input(name, M, D, positive=True)``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lngen.interpret import interpret
from lngen.ir import Eqn, Value, values_of
from lngen.ir.numerics import Array, round_to
from lngen.spec import Spec

POISON = 0xFE  # a byte pattern no kernel computes, so that an element never written is detected

ROOTS = {"sqrt", "rsqrt", "log"}
ALWAYS = {"exp", "exp2", "sigmoid", "softplus", "normal_cdf", "abs", "size", "segment_size"}  # positive, or zero
SQUARES = {"mul", "reduce_dot", "segment_dot", "fma"}  # if their first two operands are the same
IF_ALL_ARE = {  # positive if every operand is
    "cast", "expand", "detach", "add", "mul", "fma", "div", "sqrt", "rsqrt", "minimum", "relu", "tanh", "erf", "gelu",
    "gelu_tanh", "silu", "reduce_sum", "reduce_dot", "reduce_mean", "reduce_max", "segment_sum", "segment_dot",
}  # fmt: skip


def forward_inputs(
    spec: Spec, rows: int, seed: int = 0, mean: float = 0.5, eps: float | None = None
) -> dict[str, Array]:
    """The forward graph's inputs by name; ``eps`` is what a call with ``eps=run`` gives, None for the default."""
    forward, eps = spec.forward(), spec.eps_or_default if eps is None else eps
    rng = np.random.default_rng([seed, rows, spec.d])
    positive = positive_inputs(spec)
    drawn = {p.name: draw(rng, p, rows, spec.d, mean, positive=p.name in positive) for p in forward.tensors}
    return drawn | values_of(forward, eps)


def random_inputs(
    spec: Spec, rows: int, seed: int = 0, mean: float = 0.5, eps: float | None = None
) -> dict[str, Array]:
    """The spec's inputs by name; those that backward takes from forward are computed by forward. ``eps`` as above."""
    inputs = forward_inputs(spec, rows, seed, mean, eps)
    if spec.direction == "bwd":
        inputs |= interpret(spec.with_direction("fwd").graph(), inputs)
    rng = np.random.default_rng([seed + 1, rows, spec.d])
    params = spec.graph().params
    return {p.name: inputs[p.name] if p.name in inputs else draw(rng, p, rows, spec.d, 0.3) for p in params}


def draw(
    rng: np.random.Generator, value: Value, rows: int, d: int, mean: float, std: float = 1.0, *, positive: bool = False
) -> Array:
    """Numbers as ``normal`` draws them, in the value's shape and dtype."""
    return round_to(normal(rng, value.type.shape(rows, d), mean, std, positive=positive), value.type.dtype)


def normal(
    rng: np.random.Generator, shape: tuple[int, ...], mean: float, std: float = 1.0, *, positive: bool = False
) -> Array:
    """Normal numbers in float64; if ``positive``, their absolute values and a quarter of ``std``."""
    drawn = rng.normal(mean, std, shape)
    return np.abs(drawn) + std / 4 if positive else drawn


def positive_inputs(spec: Spec) -> tuple[str, ...]:
    """Names of the forward's inputs that have to be positive, found or declared, in their order."""
    forward = spec.forward()
    found = set(spec.definition.positive(spec.options))
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


def same_bits(a: Array, b: Array) -> Array:
    """Elementwise: equal bits, or both NaN (all NaNs count as equal)."""
    kind = f"u{a.dtype.itemsize}"
    with np.errstate(invalid="ignore"):
        return np.asarray((a.view(kind) == b.view(kind)) | ((a != a) & (b != b)))


def differing(got: Array, want: Array) -> int:
    """The number of elements whose bits differ; all NaNs count as equal."""
    return int((~same_bits(got, want)).sum())


def mismatches(got: Mapping[str, Array], want: Mapping[str, Array]) -> list[str]:
    """The results whose bits differ, and the number of elements of each."""
    wrong = {n: differing(got[n], want[n]) for n in want}
    return [f"{n}: {count} of {want[n].size} differ" for n, count in wrong.items() if count]
