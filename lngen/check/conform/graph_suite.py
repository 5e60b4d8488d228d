"""Calls of lngen's kernels of any graph, judged by the graph in float64, with running bounds of its roundings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from lngen.check.conform.contract import Found, SkippedError
from lngen.check.conform.suite import Calls, Inputs, of_bounds
from lngen.check.conform.targets import Target
from lngen.check.differences import real_results
from lngen.check.inputs import draw, positive_inputs
from lngen.check.tolerances import SLACK, excess
from lngen.errors import SpecError
from lngen.interpret import interpret
from lngen.ir import WIDE, D, M, Type, independent_rows
from lngen.ir.numerics import Array
from lngen.spec import Spec


class GraphSuite(Calls):
    """The kernels of ``spec``, at any D.

    ``positive`` are the inputs that have to be, ``weights`` those over D alone that may have either sign. SpecError for
    a graph without an [M, D] input, which no case has rows of, and for gradients that are added to arrays.
    """

    def __init__(self, target: Target, spec: Spec) -> None:
        super().__init__(target, spec.dtype, spec.d)
        self.spec, self.forward = spec, spec.with_direction("fwd").forward()
        if spec.accumulate:
            raise SpecError(f"conform compares gradients with expected ones; leave accumulate out of '{spec}'.")
        self._given = {p.name: p for p in self.forward.params}
        self._cotangents = {
            f"d{r.name}": replace(r, name=f"d{r.name}")
            for r in self.forward.results
            if spec.direction == "bwd" and r.name in spec.differentiated
        }
        self._types = {v.name: v.type for g in (spec.graph(), self.forward) for v in (*g.params, *g.results)}
        self._types |= {name: v.type for name, v in self._cotangents.items()}
        self._types |= {name: self._types[same] for name, same in spec.graph().shared.items()}
        outputs = spec.definition.outputs(spec.options)
        self.matrices = tuple(n for n in (*self._given, *self._cotangents) if self.type_of(n).axes == WIDE)
        self.rowwise = tuple(n for n in (*outputs, *target.gradients) if M in self.type_of(n).axes)
        self.columns = tuple(n for n in target.gradients if M not in self.type_of(n).axes)
        self.joined = not independent_rows(self.forward)
        self.positive = positive_inputs(spec)
        self.weights = tuple(n for n in self._given if self.type_of(n).axes == (D,) and n not in self.positive)
        if not any(n in self._given for n in self.matrices):
            raise SpecError(f"conform expects a graph with an [M, D] input, '{spec}' has none; try lngen check {spec}")

    def type_of(self, name: str) -> Type:
        return self._types[name]

    def inputs(self, m: int | None = None, d: int | None = None, *, mean: float = 0.5, std: float = 1.0) -> Inputs:
        """[M, D] inputs around ``mean``, others and cotangents as in ``lngen check``: nothing at zero or one."""
        d = self.d if d is None else d
        m = self.rows(37, d) if m is None else m
        rng = np.random.default_rng([m, d])
        found = {}
        for name, v in self._given.items():
            around = (mean, std) if v.type.axes == WIDE else (0.5, 1.0)
            found[name] = draw(rng, v, m, d, *around, positive=name in self.positive)
        return found | {n: draw(rng, v, m, d, 0.3) for n, v in self._cotangents.items()}

    def judged(self, inputs: Mapping[str, Array], results: Mapping[str, Array]) -> Found:
        """Outputs by the graph as described; gradients by the derived graph, whose formulas ``differences`` checks.

        SkippedError where the graph has no bound: a number beyond the largest, or a divisor that may be zero.
        """
        spec = replace(self.spec, d=inputs[self.matrices[0]].shape[1])
        forward, given = spec.with_direction("fwd"), {n: inputs[n] for n in self._given}
        wanted = real_results(forward, given)
        if any(n in results for n in self.target.gradients):
            known = {**interpret(forward.graph(), given), **inputs}
            wanted |= real_results(spec, {p.name: known[p.name] for p in spec.graph().params})
            wanted |= {name: wanted[same] for name, same in spec.graph().shared.items()}
        measured: dict[str, float] = {}
        for name, got in results.items():
            value, error = wanted[name].value, wanted[name].error
            if not bool(np.isfinite(value).all() and np.isfinite(error).all()):
                raise SkippedError(f"no error bound for such numbers: {name} or its bound is infinite")
            measured[name] = excess(got.reshape(value.shape), value, SLACK * error)
        return of_bounds(measured)
