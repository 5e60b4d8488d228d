"""A case: a spec at a number of rows with its argument sets, for which a provider prepares itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lngen.bench.engines import Array, Engine
from lngen.ir import Graph
from lngen.spec import Spec

Tensors = dict[str, Array]


@dataclass(frozen=True)
class Case:
    """The input of ``Provider.prepare``.

    chain  the input in which a launch takes the main result of the previous launch, or an empty text
    """

    spec: Spec
    rows: int
    graph: Graph
    engine: Engine
    sets: Sequence[Tensors]
    chain: str = ""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the graph's inputs."""
        return tuple(v.name for v in self.graph.params)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the graph's results, the main one first."""
        return tuple(v.name for v in self.graph.results)

    @property
    def forward(self) -> Graph:
        """The forward graph as described, whose inputs every set holds."""
        return self.spec.with_direction("fwd").forward()

    @property
    def differentiable(self) -> tuple[str, ...]:
        """Names of the forward graph's outputs, and also of its statistics if one of them has a cotangent."""
        outputs = self.spec.definition.outputs(self.spec.options)
        return outputs if {*self.spec.differentiated} <= {*outputs} else tuple(r.name for r in self.forward.results)
