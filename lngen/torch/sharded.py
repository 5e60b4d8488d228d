"""DTensors whose rows are sharded: each rank normalises its own, and gradients of weights are sums over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lngen.compiler.ir import M
from lngen.launch.direct import PLAIN
from lngen.torch.bridge import TorchError
from lngen.torch.graph_ops import GraphOps


def locally(ops: GraphOps, tensors: Sequence[torch.Tensor | None], **keys: Any) -> Sequence[torch.Tensor]:
    """The results of a forward; of DTensors, whose rows are on the ranks that have those of the leading one."""
    if not all(t is None or type(t) in PLAIN for t in tensors) and torch.distributed.is_available():
        from torch.distributed import tensor as module

        if any(isinstance(t, module.DTensor) for t in tensors):
            return _sharded(module, ops, tensors, keys)
    result: Sequence[torch.Tensor] = ops.fwd(*tensors, **keys)
    return result


def _sharded(
    module: Any, ops: GraphOps, tensors: Sequence[torch.Tensor | None], keys: dict[str, Any]
) -> Sequence[torch.Tensor]:
    x: Any = tensors[ops.inputs.index(ops.lead)]
    if not isinstance(x, module.DTensor):
        raise TorchError(
            "got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before calling lngen: "
            "input is a plain tensor, another is not; distribute_tensor(input, mesh, placements) distributes it."
        )
    rows = [_of_rows(module, p, x.dim()) for p in x.placements]
    apart = [module.Replicate() if isinstance(p, module.Replicate) else module.Partial() for p in rows]
    local: list[Any] = []
    for name, tensor in zip(ops.inputs, tensors, strict=True):
        if tensor is None:
            local.append(None)
        elif M in ops.axes[name]:
            local.append(_placed(module, tensor, x, rows).to_local(grad_placements=rows))
        else:
            whole = [module.Replicate()] * len(rows)
            local.append(_placed(module, tensor, x, whole).to_local(grad_placements=apart))
    found = []
    for y in ops.fwd(*local, **keys):  # all have rows; some have no features, or as many scales as blocks
        shape = (*x.shape[: y.dim()][: x.dim() - 1], *y.shape[x.dim() - 1 :])
        stride = torch.empty(shape, device="meta").stride()
        found.append(module.DTensor.from_local(y, x.device_mesh, rows, run_check=False, shape=shape, stride=stride))
    return found


def _of_rows(module: Any, placement: Any, dims: int) -> Any:
    """The placement of rows: whole features, no partial sums."""
    if isinstance(placement, module.Shard) and placement.dim % dims != dims - 1:
        return placement
    return module.Replicate()


def _placed(module: Any, tensor: Any, x: Any, placements: Any) -> Any:
    """The tensor on the mesh of ``x``; a plain tensor counts as replicated."""
    if not isinstance(tensor, module.DTensor):
        raise TorchError(
            "got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before calling lngen: "
            "distribute_tensor(weight, mesh) replicates a weight."
        )
    return tensor.redistribute(x.device_mesh, placements)
