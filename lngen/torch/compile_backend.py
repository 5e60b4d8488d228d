"""torch.compile with residual sums fused: the backend ``lngen``, and a pass for Inductor.

torch.compile(model, backend="lngen")                                           all else runs as in eager
torch.compile(model, options={"pre_grad_custom_pass": lngen.torch.FusePass()})  all else is Inductor's

The backend's graphs call norms the direct way, as functions do in eager: a call by the dispatcher takes the host ten
times as long.
"""

from __future__ import annotations

import hashlib
import operator
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.registry import register_backend
from torch.fx import Graph, GraphModule, Node

from lngen.torch import fused_sums
from lngen.torch.fused_sums import fuse, norms_in
from lngen.torch.graph_ops import OPS, GraphOps
from lngen.torch.graph_way import Direct
from lngen.torch.torch_functions import outputs_of

try:
    from torch._inductor.custom_graph_pass import CustomGraphPass
except ImportError:  # before PyTorch 2.6 a pass is any function of a graph
    CustomGraphPass = object


class FusePass(CustomGraphPass):  # type: ignore[misc]
    """``fuse`` for Inductor's ``pre_grad_custom_pass``; compiled graphs stay in Inductor's cache."""

    def __call__(self, graph: Graph) -> None:
        fuse(graph.owning_module)

    def uuid(self) -> str:
        """What that cache tells this pass by: the text of the module that has ``fuse``."""
        return hashlib.sha256(Path(fused_sums.__file__).read_bytes()).hexdigest()


def backend(graph_module: GraphModule, example_inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """The graph with its sums fused, run as in eager; a warning, once, for a program without norms of lngen's."""
    if norms_in(fuse(graph_module)):
        WithoutNorms.settled = True
    run: Callable[..., Any] = called_directly(graph_module).forward
    return run if WithoutNorms.settled else WithoutNorms(run)


def called_directly(graph_module: GraphModule) -> GraphModule:
    """The same module, whose calls of lngen's operators go the direct way where what is read are outputs alone."""
    by_target = {ops.fwd: ops for ops in OPS.values()}
    for module in graph_module.modules():
        nodes = module.graph.nodes if isinstance(module, GraphModule) else ()
        found = [(n, by_target[n.target]) for n in nodes if n.target in by_target]
        for node, ops in found:
            count = len(outputs_of(ops.name, str(node.kwargs.get("keys", ""))))
            if all(_reads_below(count, user) for user in node.users):
                node.target = calls_of(ops)
        if found:
            module.recompile()
    return graph_module


def _reads_below(count: int, user: Node) -> bool:
    """True for a node that reads one of the first results."""
    return user.target is operator.getitem and user.args[1] in range(count)


@cache
def calls_of(ops: GraphOps) -> DirectCalls:
    """Those of a forward, which remember earlier ones for all graphs."""
    return DirectCalls(ops)


class DirectCalls:
    """A forward for tensors of a graph: its outputs, by the operator where the direct way does not take them."""

    def __init__(self, ops: GraphOps) -> None:
        self.ops, self.direct = ops, Direct(ops.name, ops.inputs)
        self.__name__ = self.__qualname__ = ops.name

    def __call__(self, *tensors: torch.Tensor | None, keys: str = "", eps: float = 0.0) -> Sequence[torch.Tensor]:
        given = (*tensors, *(None,) * (len(self.ops.inputs) - len(tensors)), None)
        outputs = self.direct(given, (keys, eps))
        if outputs is None:
            outputs = self.direct.prepare(self.ops, given, (keys, eps), keys, eps)
        if outputs is None:
            outputs = self.ops.fwd(*tensors, keys=keys, **({"eps": eps} if self.ops.takes_eps else {}))
        return outputs


class WithoutNorms:
    """A graph before which no norm was seen. Its second run warns if none has been seen since.

    A model with breaks has several graphs, and the first may have no norms. When one runs again, all have been seen.
    """

    settled = False  # a norm was seen, or the warning was given

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run, self.runs = run, 0

    def __call__(self, *inputs: Any) -> Any:
        self.runs += 1
        if self.runs == 2 and not WithoutNorms.settled:
            WithoutNorms.settled = True
            warnings.warn(
                "torch.compile with backend='lngen' has met no norm of lngen's, so it fuses nothing; call "
                "lngen.torch.patch(model) before.",
                stacklevel=2,
            )
        return self.run(*inputs)


if not entry_points(group="torch_dynamo_backends", name="lngen"):  # of an installed lngen, which PyTorch looks for
    register_backend(backend, name="lngen")
