"""What the functions of lngen.torch are given: refused, or made into tensors that kernels take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lngen.ir import M
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
    leads = {
        name: tuple(t.shape[:-dims] if len(ops.axes[name]) == 2 else t.shape)
        for name, t in given.items()
        if M in ops.axes[name]
    }
    lead = first = leads[ops.lead]
    for name, other in leads.items():
        if len(other) != len(lead) or not all(a == b or 1 in (a, b) for a, b in zip(other, lead, strict=True)):
            raise TorchError(
                f"'{name}' is expected to have leading dimensions that broadcast with {list(lead)}, those of "
                f"'{ops.lead}', got shape {list(given[name].shape)}; expand it."
            )
        lead = tuple(b if a == 1 else a for a, b in zip(other, lead, strict=True))
    if any(t.is_nested for t in given.values()):
        return _values(ops, given, first, dims)
    if all(other == lead for other in leads.values()):
        return None
    return {n: t.expand(*lead, *t.shape[len(lead) :]) if n in leads else t for n, t in given.items()}, lambda y: y


def _values(ops: GraphOps, given: Mapping[str, Tensor], lead: tuple[int, ...], dims: int) -> Fitted:
    """The values of jagged tensors; TorchError for one beside one that is none, or with features of several lengths."""
    x: Any = given[ops.lead]
    for name, tensor in given.items():
        if tensor.is_nested != (M in ops.axes[name]):
            kind = "a jagged tensor" if M in ops.axes[name] else "a dense tensor"
            raise TorchError(f"'{name}' is expected to be {kind} where '{ops.lead}' is jagged, got another.")
    ragged = x._ragged_idx
    if ragged >= len(lead):
        raise TorchMissing(f'"{ops.name}" not implemented for a jagged dimension of features; pass a padded tensor.')

    def jagged(y: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(y, x.offsets(), x.lengths(), jagged_dim=ragged)

    return {n: t.values() if t.is_nested else t for n, t in given.items()}, jagged
