"""Random inputs for checks: nothing is zero, one or symmetric, which could hide a wrong formula.

Inputs that have to be positive are (see ``lngen.check.domain``), so that every result is a number.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lngen.check.domain import positive_inputs
from lngen.interpret import interpret
from lngen.ir import Value
from lngen.ir.numerics import Array, round_to
from lngen.spec import Spec

POISON = 0xFE  # a byte pattern no kernel computes, so that an element never written is detected


def forward_inputs(spec: Spec, rows: int, seed: int = 0, mean: float = 0.5) -> dict[str, Array]:
    """The forward graph's inputs by name."""
    rng = np.random.default_rng([seed, rows, spec.d])
    positive = positive_inputs(spec)
    return {p.name: draw(rng, p, rows, spec.d, mean, positive=p.name in positive) for p in spec.forward().params}


def random_inputs(spec: Spec, rows: int, seed: int = 0, mean: float = 0.5) -> dict[str, Array]:
    """The spec's inputs by name; those that backward takes from forward are computed by forward."""
    inputs = forward_inputs(spec, rows, seed, mean)
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
