"""The row that backward rebuilds from a saved result, and the weights with which it can."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lngen.compiler.interpret import interpret
from lngen.compiler.ir import WIDE, D, Graph, M, Value
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array
from lngen.compiler.ir.places import extract
from lngen.compiler.spec import Spec
from lngen.errors import ArrayError
from lngen.launch.runtime.remembered import rebuilding

LARGEST_ERROR = 1 / 16  # of a rebuilt number; the numbers of a normalised row have a mean square of 1


@dataclass(frozen=True)
class Rebuilt:
    """How backward rebuilds the normalised row from a saved result: the graph that does it, and the result.

    The weights decide whether it can: they are checked when forward saves the result.
    """

    spec: Spec
    graph: Graph
    result: Value

    @classmethod
    def of(cls, backward: Spec) -> Rebuilt | None:
        """The rebuilding of a backward; None if it has none."""
        graph = rebuilding(backward)
        if graph is None:
            return None
        return cls(backward, graph, next(p for p in graph.params if p.type.axes == WIDE))

    @property
    def weights(self) -> tuple[Value, ...]:
        """The inputs without rows that the rebuilding reads."""
        return tuple(p for p in self.graph.tensors if M not in p.type.axes)

    def errors(self, weights: Mapping[str, Array]) -> Array:
        """[D]: a bound of the error of each rebuilt number of at most 1, infinite where a weight is 0.

        The result is a * value + b, where a and b follow from the weights. It is rounded by at most u |a + b|, or half
        of the smallest subnormal number. So the rebuilt value is off by at most (u (|a| + |b|) + floor) / |a|.
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
        """[D]: True where a factor is 0, so that nothing can be rebuilt from the result."""
        lost = np.zeros(self.spec.d, bool)
        for eqn in self.graph.eqns:
            if eqn.op == "select_eq" and eqn.out.type.axes == (D,):
                weight = extract(self.graph, self.graph.name, self.graph.params, (eqn.args[0],))
                lost |= interpret(weight, weights)[eqn.args[0].name] == 0
        return lost

    def check(self, weights: Mapping[str, Array], numbers: Mapping[str, Array]) -> None:
        """ArrayError if a weight is so small that rounding the saved result loses the value.

        ``numbers`` are those that a call passes by value.
        """
        errors = self.errors({**weights, **numbers})
        worst = int(np.argmax(np.where(np.isnan(errors), np.inf, errors)))
        if errors[worst] <= LARGEST_ERROR:
            return
        at = ", ".join(f"{v.name}[{worst}] is {float(weights[v.name][worst]):g}" for v in self.weights if v.type.axes)
        raise ArrayError(
            f"'{self.spec}' rebuilds the normalised row from '{self.result.name}', but {at}: rounding "
            f"'{self.result.name}' to {self.result.type.dtype} moves it by up to {errors[worst]:.2g}, and "
            f"{LARGEST_ERROR:g} is allowed; compile with save=stats."
        )
