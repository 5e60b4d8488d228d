"""No pass is trusted: every derived backward is compared with its definition, at numbers, where it is derived.

The definition is the derivative of each forward equation, added up in reverse: nothing is simplified, nothing is taken
for a constant, and only ``stop_gradient`` stops a cotangent. Both graphs are evaluated in float64, where no cast
rounds, each with its running error bound (``ir.real``): results of a right derivation differ by no more than both
bounds together. A relative error would take the rounding errors of a gradient that cancels to zero for wrong.

The graphs are those before ``decompose``: behind it functions are bits of f32, the length of a row is a constant, and
the order of sums changes nothing that float64 shows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from lngen.compiler.ir import Graph, Value
from lngen.compiler.ir.evaluate import evaluate
from lngen.compiler.ir.numerics import Array
from lngen.compiler.ir.real import Real
from lngen.compiler.passes.edit import substitute
from lngen.compiler.passes.instance import cotangents, instance, lengths
from lngen.compiler.passes.vjp import vjp
from lngen.errors import ValidationError

STEPS = ("vjp", "simplify", "save", "cse")  # that derive a backward, in their order


@dataclass(frozen=True)
class Excess:
    """By how much a gradient is beyond its bound: the distance, the largest number, the element."""

    name: str
    distance: float
    most: float
    at: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name}{list(self.at)} is off by {self.distance:.3g}, where the largest is {self.most:.3g}"


def validate(
    forward: Graph, raw: Graph, trace: Mapping[str, Graph], eps: float, positive: Collection[str] = ()
) -> None:
    """ValidationError if the graph ``trace["cse"]`` is not the derivative of ``forward``; names the first wrong pass.

    ``raw`` is that derivative, see ``defined``; ``positive`` are the inputs declared positive. Arrays to which
    gradients are added are zeros.
    """
    definition = _Definition(forward, raw, eps, positive)
    if definition.excess(trace["cse"]) is None:
        return
    step, found = next((s, e) for s in STEPS if (e := definition.excess(trace[s])) is not None)
    raise ValidationError(
        f"internal error of lngen: graph @{trace[step].name}: behind the pass '{step}' the gradient is not that of the "
        f"forward, {found}; please report it with the output of LNGEN_DEBUG=3."
    )


def defined(forward: Graph, wrt: tuple[str, ...], of: tuple[str, ...]) -> Graph:
    """The derivative of ``of`` by ``wrt`` as it is defined, of all inputs of the forward and cotangents of ``of``."""
    return vjp(_without_detach(forward), wrt, of)


class _Definition:
    """The derivative as it is defined, evaluated at one instance."""

    def __init__(self, forward: Graph, raw: Graph, eps: float, positive: Collection[str]) -> None:
        inputs, self._sizes = instance(forward, eps, positive), lengths(forward)
        results = evaluate(forward, inputs, wide=True)
        self._known: dict[str, Array] = inputs | {name: r.value for name, r in results.items()} | cotangents(results)
        self._errors = {name: r.error for name, r in results.items() if name not in inputs}
        self._wanted = self._evaluated(raw)

    def _evaluated(self, graph: Graph) -> dict[str, Real]:
        absent = {p.name: np.zeros(p.type.shape_of(self._sizes)) for p in graph.params if p.name not in self._known}
        known = {p.name: (self._known | absent)[p.name] for p in graph.params}
        found = evaluate(graph, known, {n: e for n, e in self._errors.items() if n in known}, wide=True)
        return found | {name: found[same] for name, same in graph.shared.items()}

    def excess(self, graph: Graph) -> Excess | None:
        """The first result that is farther from its definition than both error bounds allow; None if all agree.

        Where the definition overflows, or has no bound, there is nothing to compare with.
        """
        found = self._evaluated(graph)
        for name, want in self._wanted.items():
            got = found[name]
            with np.errstate(invalid="ignore"):
                distance, allowed = np.abs(got.value - want.value), want.error + got.error
                wrong = np.isfinite(want.value + want.error) & ~(distance <= allowed)
            wrong &= ~np.isfinite(got.value) | np.isfinite(got.error)
            if wrong.any():
                at = tuple(int(n) for n in np.unravel_index(np.argmax(np.where(wrong, distance, -1.0)), wrong.shape))
                return Excess(name, float(distance[at]), float(np.abs(want.value).max()), at)
        return None


def _without_detach(graph: Graph) -> Graph:
    """The graph in which what is detached is differentiated."""
    new: dict[Value, Value] = {}
    for eqn in graph.eqns:
        if eqn.op == "detach":
            new[eqn.out] = new.get(eqn.args[0], eqn.args[0])
    return replace(substitute(graph, new), results=graph.results)
