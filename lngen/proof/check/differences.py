"""Any graph against itself in float64: its forward evaluated, its backward by differences of that forward.

Two separate checks, so that neither error hides the other. The gradients' formulas: in float64, with negligible
rounding, they agree with differences of the forward to 1e-7. The arithmetic: the interpreter's results are within
rounding of the formulas in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from lngen.compiler.ir import D, Graph, values_of
from lngen.compiler.ir.evaluate import evaluate
from lngen.compiler.ir.numerics import Array
from lngen.compiler.ir.real import Real
from lngen.compiler.passes.instance import drawn, indexed, lengths
from lngen.compiler.spec import Spec
from lngen.proof.check.oracles import SLACK, excess

ROWS = 3
FEATURES = 17  # in place of rows too long for many evaluations
LONGEST = 2**18
STEP = 1e-3  # for inputs that may be far from zero; FINE for inputs near zero, where few elements pass a kink
FINE = 1e-5
ALLOWED = 1e-7
ROUNDING = 2.0**-50  # a few roundings of each result in a difference
# Ops that keep their numbers in differences, and why.
HELD = {"rint": "between which it jumps", "stop_gradient": "whose effects the graph stops"}
KINK = 4.0  # times the disagreement of two steps, which is large where a maximum changes sides between them


def real_results(spec: Spec, inputs: Mapping[str, Array]) -> dict[str, Real]:
    """The spec's results in real numbers with their error bounds; see ``result_excess``."""
    if spec.dx_quant is not None:
        return evaluate(spec.trace()["quantise"], inputs)
    return evaluate(spec.forward() if spec.direction == "fwd" else _formulas(spec), inputs)


def result_excess(spec: Spec, inputs: Mapping[str, Array], results: Mapping[str, Array]) -> dict[str, float]:
    """For each result its largest distance from float64, in units of the rounding that is allowed.

    A forward is compared with the graph as described, before any pass; a backward with its own graph, because
    ``gradient_excess`` checks its formulas. The values it takes from forward count as exact. Numbers without a bound,
    such as quotients whose divisor may be zero, are not compared.
    """
    return compared(real_results(spec, inputs), results)


def compared(wanted: Mapping[str, Real], results: Mapping[str, Array]) -> dict[str, float]:
    """The same for the real numbers that are ``wanted``."""
    known = {name: ~without_bound(wanted[name]) for name in results}
    return {
        name: excess(got[known[name]], wanted[name].value[known[name]], SLACK * wanted[name].error[known[name]])
        for name, got in results.items()
    }


def without_bound(real: Real) -> Array:
    """True for the numbers that have no error bound."""
    return np.isfinite(real.value) & ~np.isfinite(real.error)


def gradient_excess(spec: Spec) -> dict[str, float]:
    """For each gradient its error along random directions, relative to its size, in units of 1e-7; all in float64.

    A cotangent that the backward does not take is included: its part of every gradient must be zero. Arrays to which
    gradients are added are zeros. Values of ``HELD`` keep their number in the differences, as their derivative is 0.
    """
    if spec.d > LONGEST:
        spec = replace(spec, d=lengths(spec.with_direction("fwd").forward(), d=FEATURES)[D])
    forward, backward = spec.with_direction("fwd").forward(), _formulas(spec)
    sizes = lengths(forward, ROWS, spec.d)
    rng = np.random.default_rng(11)
    # Not rounded to any dtype, so that no two elements are equal, where a maximum has no derivative.
    positive = spec.positive_inputs()
    of = indexed(forward)
    primals = {
        p.name: drawn(rng, p, sizes, of.get(p), 0.5, positive=p.name in positive) for p in forward.tensors
    } | values_of(forward, spec.eps_or_default)
    outputs = {name: r.value for name, r in evaluate(forward, primals).items()}
    given = {f"d{name}": rng.normal(0.3, 1.0, a.shape) for name, a in outputs.items()}
    known = primals | outputs | given  # saved values are as exact as the results they are saved for
    known |= {p.name: np.zeros(p.type.shape_of(sizes)) for p in backward.params if p.name not in known}
    gradients = evaluate(backward, {p.name: known[p.name] for p in backward.params})
    gradients |= {name: gradients[same] for name, same in backward.shared.items()}
    cotangents = np.concatenate([given[f"d{name}"].ravel() for name in spec.differentiated])

    held = tuple(e.out for e in forward.eqns if e.op in HELD)
    numbers = {name: real.value for name, real in evaluate(replace(forward, results=held), primals).items()}
    smooth = replace(forward, params=(*forward.params, *held), eqns=tuple(e for e in forward.eqns if e.out not in held))

    def function(**at: Array) -> Array:
        results = evaluate(smooth, at | numbers, wide=True)  # no cast saturates: the derivative passes it unchanged
        return np.concatenate([results[name].value.ravel() for name in spec.differentiated])

    found = {}
    for result, gradient in gradients.items():
        one = along(rng, function, primals, result.removeprefix("d"), gradient.value, cotangents, FINE)
        # A graph whose results are all 0 has nothing to divide by, and no error.
        found[result] = one.error and one.error / (ALLOWED * one.size + one.doubt)
    return found


def _formulas(spec: Spec) -> Graph:
    """The graph before ``decompose``, in which functions are one equation each, as they are in float64."""
    return spec.trace()["cse"]


@dataclass(frozen=True)
class Along:
    """A gradient along a direction: its distance from the differences, its largest possible size, their own error."""

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
    wide, slope = (directional(forward, inputs, wrt, direction, h, dy=dy) for h in (step, step / 2))
    size = float(np.sqrt((gradient**2).sum() * (direction**2).sum()))
    error = abs(float((gradient * direction).sum()) - slope)
    rounding = ROUNDING * float(np.abs(dy * forward(**inputs)).sum()) / step
    return Along(direction, error, size, KINK * abs(wide - slope) + rounding)


def directional(
    fn: Callable[..., Array],
    inputs: Mapping[str, Array],
    wrt: str,
    direction: Array,
    h: float,
    *,
    dy: Array,
) -> float:
    """The derivative of ``sum(dy * fn(**inputs))`` along ``direction`` in the input ``wrt``; forward only.

    Fourth-order central differences, ``(8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12h``: truncation is O(h^4),
    so h can stay near 1e-3, where rounding, O(u |x| / h), is small even at a mean of 1e4 standard deviations.
    """

    def at(step: float) -> Array:
        return fn(**{**inputs, wrt: inputs[wrt] + step * direction})

    difference = 8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))
    return float((dy * difference).sum() / (12 * h))


def differences(fn: Callable[..., Array], inputs: Mapping[str, Array], wrt: str, h: float, *, dy: Array) -> Array:
    """The whole gradient in ``wrt``, one ``directional`` per element: for small arrays."""
    gradient = np.zeros_like(inputs[wrt])
    for index in np.ndindex(gradient.shape):
        direction = np.zeros_like(gradient)
        direction[index] = 1
        gradient[index] = directional(fn, inputs, wrt, direction, h, dy=dy)
    return gradient
