"""Weights with which backward can rebuild a normalised row from a saved result: checked when forward saves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lngen.errors import ArrayError
from lngen.interpret import interpret
from lngen.ir import WIDE, D, Graph, M, Value
from lngen.ir.numerics import NUMPY_DTYPE, Array
from lngen.passes import rebuilt
from lngen.passes.edit import extract
from lngen.spec import Spec

LARGEST_ERROR = 1 / 16  # of a rebuilt number, of which those of a normalised row have a mean square of 1


@dataclass(frozen=True)
class Rebuilt:
    """The rebuilding of one spec: its graph, the saved result, and the weights that it reads."""

    spec: Spec
    graph: Graph
    result: Value

    @classmethod
    def of(cls, backward: Spec) -> Rebuilt | None:
        """That of a backward; None if it takes nothing from forward that has to be rebuilt."""
        graph = rebuilt(backward.trace()["save"], backward.forward())
        if graph is None:
            return None
        return cls(backward, graph, next(p for p in graph.params if p.type.axes == WIDE))

    @property
    def weights(self) -> tuple[Value, ...]:
        """The inputs without rows that it reads."""
        return tuple(p for p in self.graph.params if M not in p.type.axes)

    def errors(self, weights: Mapping[str, Array]) -> Array:
        """[D]: a bound of the error of each rebuilt number that is at most 1, infinite where a weight is 0.

        The result is a * value + b, with a and b of the weights, and rounded: to u |a + b|, at least by half
        of the smallest subnormal number. So the value is off by (u (|a| + |b|) + floor) / |a|.
        """
        rows = np.array([[0.0], [1.0]], NUMPY_DTYPE[self.result.type.dtype])
        inputs: dict[str, Array] = dict(weights)
        for p in self.graph.params:
            if p.type.axes == WIDE:
                inputs[p.name] = np.repeat(rows, self.spec.d, axis=1)
            elif M in p.type.axes:
                inputs[p.name] = np.ones(2, NUMPY_DTYPE[p.type.dtype])
        at_zero, at_one = interpret(self.graph, inputs)[self.graph.results[0].name].astype(np.float64)
        slope = np.abs(at_one - at_zero)  # 1 / |a|
        dtype = self.result.type.dtype
        errors = dtype.roundoff * (1 + np.abs(at_zero)) + dtype.floor * slope
        return np.asarray(np.where(self._lost(weights), np.inf, errors))

    def _lost(self, weights: Mapping[str, Array]) -> Array:
        """[D]: True where a weight that multiplies is 0, so that the result says nothing about the value."""
        lost = np.zeros(self.spec.d, bool)
        for eqn in self.graph.eqns:
            if eqn.op == "select_eq" and eqn.out.type.axes == (D,):
                weight = extract(self.graph, self.graph.name, self.graph.params, (eqn.args[0],))
                lost |= interpret(weight, weights)[eqn.args[0].name] == 0
        return lost

    def check(self, weights: Mapping[str, Array]) -> None:
        """ArrayError if a weight is so small that the rounding of the saved result leaves no value to rebuild."""
        errors = self.errors(weights)
        worst = int(np.argmax(np.where(np.isnan(errors), np.inf, errors)))
        if errors[worst] <= LARGEST_ERROR:
            return
        at = ", ".join(f"{v.name}[{worst}] is {float(weights[v.name][worst]):g}" for v in self.weights if v.type.axes)
        raise ArrayError(
            f"'{self.spec}' rebuilds the normalised row from '{self.result.name}', but {at}: rounding "
            f"'{self.result.name}' to {self.result.type.dtype} moves it by up to {errors[worst]:.2g}, and "
            f"{LARGEST_ERROR:g} is allowed; compile with save=stats."
        )
