"""What the functions of lngen.torch are given: refused, or made into tensors that kernels take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lngen.compiler.ir import M
from lngen.torch.bridge import TorchError, TorchMissing, TorchTypeError
from lngen.torch.graph_ops import GraphOps

CALLED = {"x": "input", "gamma": "weight", "beta": "bias"}  # in the functions that are PyTorch's


def check_tensors(graph: str, given: Iterable[tuple[str, Any]]) -> None:
    """TypeError for what is no tensor, NotImplementedError for a sparse one and other layouts without strides."""
    for name, tensor in given:
        if not isinstance(tensor, Tensor):
            if hasattr(tensor, "__torch_function__"):  # such as a proxy of torch.fx
                continue
            kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}".removeprefix("builtins.")
            raise TorchTypeError(f"'{graph}': '{name}' must be Tensor, not {kind}; torch.as_tensor makes one of data.")
        if kind := _strange(tensor):
            raise TorchMissing(f"\"{graph}\" not implemented for {kind}: '{name}' is one; pass a dense or jagged one.")


def _strange(tensor: Tensor) -> str:
    """What kind of tensor without numbers in strides it is; empty for one that is dense or jagged."""
    if tensor.is_nested:
        return "" if tensor.layout is torch.jagged else "a nested tensor without layout=torch.jagged"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    return "a quantized tensor" if tensor.is_quantized else ""


Fitted = tuple[dict[str, Tensor], Callable[[Tensor], Tensor]]


def fitted(ops: GraphOps, given: Mapping[str, Tensor], dims: int = 1) -> Fitted | None:
    """Other tensors that give the results, and what makes the results of theirs; None if all stay as they are.

    Leading dimensions broadcast where all tensors with rows have as many; those of jagged tensors are those of their
    values. ``dims``: so many last dimensions are features. TorchError for rows that do not fit.
    """
    axes = ops.axes
    leads = {n: t.shape[:-dims] if len(axes[n]) == 2 else t.shape for n, t in given.items() if M in axes[n]}
    first = leads[ops.lead]
    if any(t.is_nested for t in given.values()):
        return _values(ops, given, leads)
    if all(lead == first for lead in leads.values()):
        return None
    lead = _broadcast(ops, given, leads)
    return {n: t.expand(*lead, *t.shape[len(lead) :]) if n in leads else t for n, t in given.items()}, lambda y: y


def _broadcast(ops: GraphOps, given: Mapping[str, Tensor], leads: Mapping[str, Sequence[int]]) -> Sequence[int]:
    lead = leads[ops.lead]
    for name, other in leads.items():
        if len(other) != len(lead) or not all(a == b or 1 in (a, b) for a, b in zip(other, lead, strict=True)):
            raise TorchError(
                f"'{name}' is expected to have leading dimensions that broadcast with {list(lead)}, those of "
                f"'{ops.lead}', got shape {list(given[name].shape)}; expand it."
            )
        lead = [b if a == 1 else a for a, b in zip(other, lead, strict=True)]
    return lead


def _values(ops: GraphOps, given: Mapping[str, Tensor], leads: Mapping[str, Sequence[int]]) -> Fitted:
    """The values of jagged tensors; TorchError beside one that is none, or for features of several lengths."""
    x: Any = given[ops.lead]
    for name, tensor in given.items():
        if tensor.is_nested != (name in leads) or leads.get(name, leads[ops.lead]) != leads[ops.lead]:
            raise TorchError(
                f"'{name}' is expected to be {'jagged' if name in leads else 'dense'}: beside a jagged tensor all with "
                f"rows are, with the same offsets, and no others; got shape {list(tensor.shape)}."
            )
    ragged = x._ragged_idx
    if ragged >= len(leads[ops.lead]):
        raise TorchMissing(f'"{ops.name}" not implemented for a jagged dimension of features; pass a padded tensor.')

    def jagged(y: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(y, x.offsets(), x.lengths(), jagged_dim=ragged)

    return {n: t.values() if t.is_nested else t for n, t in given.items()}, jagged
