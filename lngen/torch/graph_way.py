"""The direct way of a graph: its kernels for tensors, compiled at their first use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

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

        The dispatcher knows of results that differ in having a gradient, and of sets that are not all alike.
        """
        given = {name: t for name, t in zip(self.names, tensors, strict=True) if t is not None}
        wrt = tuple([name for name, t in given.items() if t.requires_grad])
        found = ops.side([given.get(name) for name in ops.inputs], keys)
        if wrt and quantises(found.spec):
            return None
        if found.spec.by_sets and not _alike(found, given, wrt):
            return None
        return self.prepared(lambda named: OfGraph.of(ops, keys, named), tensors, fixed, eps)


def _alike(forward: Side, given: Mapping[str, Tensor], wrt: tuple[str, ...]) -> bool:
    """Whether kernels take tensors of sets as they lie, and backward knows how many sets there are."""
    if any(t.dim() > 3 and not t.is_contiguous() for t in given.values()):
        return False
    if len({given[t.name].shape for t in forward.call.inputs if t.of_sets}) > 1:
        return False
    if not wrt:
        return True
    backward = side(backward_text(forward.spec, wrt, forward.spec.differentiated))
    return any(t.of_sets for t in backward.call.inputs)
