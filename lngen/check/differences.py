"""A graph of any kind against itself in float64: its forward evaluated, its backward by differences of that forward.

Two questions, so that neither answer drowns in the other. Are the gradients' formulas right: in float64, where nothing
rounds, are they what differences of the forward say, to 1e-7? Is the arithmetic right: are the interpreter's results
within rounding of what the formulas give in float64?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from lngen.check import oracles
from lngen.check.real import evaluate
from lngen.check.tolerances import SLACK, excess
from lngen.ir.numerics import Array
from lngen.spec import Spec

ROWS = 3
FEATURES = 17  # of rows too long for many evaluations
LONGEST = 2**18
STEP = 1e-3  # of inputs that may be far from zero; FINE of those near it, where few elements pass a kink
FINE = 1e-5
ALLOWED = 1e-7
ROUNDING = 2.0**-50  # a few roundings of each result that is taken a difference of
KINK = 4.0  # times what two steps disagree by: where a maximum changes sides between them, differences are off


def result_excess(spec: Spec, inputs: Mapping[str, Array], results: Mapping[str, Array]) -> dict[str, float]:
    """For each result its largest distance from float64, in units of what rounding may make of it.

    A forward is held against the graph that was described, before any pass; a backward, whose formulas
    ``gradient_excess`` is for, against its own. What it takes from forward counts as exact.
    """
    graph = spec.forward() if spec.direction == "fwd" else spec.graph()
    wanted = evaluate(graph, inputs)
    return {name: excess(got, wanted[name].value, SLACK * wanted[name].error) for name, got in results.items()}


def gradient_excess(spec: Spec) -> dict[str, float]:
    """For each gradient its error along random directions, relative to its size, in units of 1e-7; all in float64.

    A cotangent that the backward does not take counts, too: its part of every gradient is expected to be zero.
    """
    spec = replace(spec, d=min(spec.d, FEATURES)) if spec.d > LONGEST else spec
    forward, backward = spec.with_direction("fwd").forward(), spec.graph()
    rng = np.random.default_rng(11)
    # Not rounded to any dtype, so that no two elements are equal, where a maximum has no derivative.
    primals = {p.name: rng.normal(0.5, 1.0, p.type.shape(ROWS, spec.d)) for p in forward.params}
    outputs = {name: r.value for name, r in evaluate(forward, primals).items()}
    given = {f"d{name}": rng.normal(0.3, 1.0, a.shape) for name, a in outputs.items()}
    known = primals | outputs | given  # what is saved is as exact as what it is saved for
    gradients = evaluate(backward, {p.name: known[p.name] for p in backward.params})
    cotangents = np.concatenate([given[f"d{name}"].ravel() for name in spec.differentiated])

    def function(**at: Array) -> Array:
        results = evaluate(forward, at)
        return np.concatenate([results[name].value.ravel() for name in spec.differentiated])

    found = {}
    for result, gradient in gradients.items():
        one = along(rng, function, primals, result.removeprefix("d"), gradient.value, cotangents, FINE)
        found[result] = one.error / (ALLOWED * one.size + one.doubt)
    return found


@dataclass(frozen=True)
class Along:
    """A gradient along a direction: how far from the differences it is, how large it could be, and their own error."""

    direction: Array
    error: float
    size: float
    doubt: float


def along(
    rng: np.random.Generator,
    forward: Callable[..., Array],
    inputs: Mapping[str, Array],
    wrt: str,
    gradient: Array,
    dy: Array,
    step: float = STEP,
) -> Along:
    """The ``gradient`` in ``wrt`` of ``sum(dy * forward(**inputs))`` along a random direction."""
    direction = rng.normal(size=inputs[wrt].shape)
    wide, slope = (oracles.directional(forward, inputs, wrt, direction, h, dy=dy) for h in (step, step / 2))
    size = float(np.sqrt((gradient**2).sum() * (direction**2).sum()))
    error = abs(float((gradient * direction).sum()) - slope)
    rounding = ROUNDING * float(np.abs(dy * forward(**inputs)).sum()) / step
    return Along(direction, error, size, KINK * abs(wide - slope) + rounding)
