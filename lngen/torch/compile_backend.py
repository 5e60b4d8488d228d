"""torch.compile with residual sums fused: the backend ``lngen``, and a pass for Inductor.

torch.compile(model, backend="lngen")                                           all else runs as in eager
torch.compile(model, options={"pre_grad_custom_pass": lngen.torch.FusePass()})  all else is Inductor's
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.registry import register_backend
from torch.fx import Graph, GraphModule

from lngen.torch import fused_sums
from lngen.torch.fused_sums import fuse, norms_in

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
    run: Callable[..., Any] = fuse(graph_module).forward
    if norms_in(graph_module):
        WithoutNorms.settled = True
    return run if WithoutNorms.settled else WithoutNorms(run)


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
