"""The direct way of a graph: its kernels for tensors, compiled at their first use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lngen.compiler.ir import M
from lngen.launch import direct
from lngen.launch.array_call import ArrayCall
from lngen.torch.bridge import Side, side, text_of
from lngen.torch.graph_ops import GraphOps, backward_text, quantises


class OfGraph:
    """The kernels of a graph for tensors of some dtypes, by the forward of these."""

    def __init__(self, ops: GraphOps, one: Side) -> None:
        self.ops, self.side = ops, one
        self.forward: ArrayCall = self.side.call
        self.alone: ArrayCall = self.forward
        if len(self.forward.outputs) > len(self.side.spec.differentiated):
            self.alone = side(text_of(replace(self.side.spec, save="none"))).call

    @classmethod
    def of(cls, ops: GraphOps, keys: str, tensors: Mapping[str, Tensor]) -> OfGraph:
        """Those for these tensors; ``keys`` as of the operator."""
        return cls(ops, ops.side([tensors.get(name) for name in ops.inputs], keys))

    def backward(self, wrt: tuple[str, ...]) -> ArrayCall:
        """Gradients of these inputs."""
        return side(backward_text(self.side.spec, wrt, self.side.spec.differentiated)).call

    def gradients(
        self, wrt: tuple[str, ...], eps: float, cotangents: Sequence[Tensor | None], saved: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor | None]:
        """The same by the registered operators."""
        found = self.ops.gradients(self.side, wrt, eps, cotangents, saved)
        return dict(zip(self.ops.inputs, found, strict=True))


class Direct(direct.Direct):
    """The direct way of a function whose kernels are compiled."""

    def prepare(
        self, ops: GraphOps, tensors: Sequence[Tensor | None], fixed: Any, keys: str, eps: float
    ) -> Sequence[Tensor] | None:
        """The outputs of the first call of its kind; None if it has to go the dispatcher's way.

        The dispatcher knows of results that differ in having a gradient, of saved ones without rows, and of sets.
        """
        if any(a.root is M and a.by == "/" for axes in ops.axes.values() for a in axes):
            return None
        if any(t is not None and t.requires_grad for t in tensors):
            given = dict(zip(self.names, tensors, strict=True))
            found = ops.side([given.get(name) for name in ops.inputs], keys)
            saved = found.results[len(found.spec.differentiated) :]
            if quantises(found.spec) or not all(t.axes for t in saved):
                return None
        return self.prepared(lambda given: OfGraph.of(ops, keys, given), tensors, fixed, eps)
