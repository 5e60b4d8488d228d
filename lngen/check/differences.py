"""Backward against central differences of the forward alone, in float64: for graphs no closed form is known of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from lngen.check import oracles
from lngen.check.inputs import forward_inputs, random_inputs
from lngen.interpret import interpret
from lngen.ir import DType
from lngen.ir.numerics import Array
from lngen.spec import Spec

ROWS, FEATURES = 3, 17
STEP = 1e-3
ALLOWED = 1e-7


def gradient_excess(spec: Spec) -> dict[str, float]:
    """For each gradient its error along random directions, relative to its size, in units of 1e-7.

    The graph is taken at f64 and a small size: the formulas do not depend on either. The 4th-order
    stencil with step 1e-3 leaves about 1e-10.
    """
    f64 = replace(spec, dtype=DType.F64, weight=DType.F64, out=DType.F64, d=FEATURES)
    forward = f64.with_direction("fwd").graph()
    inputs = random_inputs(f64, ROWS, seed=7)
    primals = forward_inputs(f64, ROWS, seed=7)
    gradients = interpret(f64.graph(), inputs)
    rng = np.random.default_rng(11)
    excess = {}

    def function(**at: Array) -> Array:
        results = interpret(forward, at)
        return np.concatenate([results[name].ravel() for name in f64.differentiated])

    # A cotangent that the backward does not take counts, too: its part of every gradient is expected to be zero.
    given = {f"d{name}": rng.normal(size=a.shape) for name, a in interpret(forward, primals).items()} | inputs
    cotangents = np.concatenate([given[f"d{name}"].ravel() for name in f64.differentiated])
    for name in [r.name.removeprefix("d") for r in f64.graph().results]:
        found = along(rng, function, primals, name, gradients[f"d{name}"], cotangents)
        excess[f"d{name}"] = found.error / (ALLOWED * max(found.size, 1e-300))
    return excess


@dataclass(frozen=True)
class Along:
    """A gradient along a direction: how far from the differences it is, and how large it could be."""

    direction: Array
    error: float
    size: float


def along(
    rng: np.random.Generator,
    forward: Callable[..., Array],
    inputs: Mapping[str, Array],
    wrt: str,
    gradient: Array,
    dy: Array,
) -> Along:
    """The ``gradient`` in ``wrt`` of ``sum(dy * forward(**inputs))`` along a random direction."""
    direction = rng.normal(size=inputs[wrt].shape)
    slope = oracles.directional(forward, inputs, wrt, direction, STEP, dy=dy)
    size = float(np.sqrt((gradient**2).sum() * (direction**2).sum()))
    return Along(direction, abs(float((gradient * direction).sum()) - slope), size)
