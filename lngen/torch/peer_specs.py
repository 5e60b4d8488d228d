"""Operators of vLLM and FlashInfer that quantise the result of a norm, as specs of lngen (``lngen help quantised``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lngen.dtypes import QUANTISED
from lngen.errors import ArrayError
from lngen.rules import PADDED
from lngen.torch.bridge import FROM_TORCH, TorchMissing, run, shown
from lngen.torch.graph_ops import OPS
from lngen.torch.quantised_norms import NUMBERS
from lngen.torch.torch_functions import dispatched, outputs_of

TWO_ROUNDINGS = "casts=llama,quantised=y"  # vLLM multiplies by the weight in its dtype

# The graph of each operator and its keys, besides dtypes and block_size. One that takes a residual or not is written
# without: with a residual it is add_rmsnorm with round_sum=no.
SPECS: Mapping[str, str] = {
    "rmsnorm_quant": "rmsnorm:scales=tensor,apply=mul",
    "fused_add_rmsnorm_quant": "add_rmsnorm:round_sum=no,scales=tensor,apply=mul",
    "rms_norm_static_fp8_quant": f"rmsnorm:{TWO_ROUNDINGS},scales=tensor,apply=mul",
    "fused_add_rms_norm_static_fp8_quant": f"add_rmsnorm:{TWO_ROUNDINGS},scales=tensor,apply=mul",
    "rms_norm_dynamic_per_token_quant": f"rmsnorm:{TWO_ROUNDINGS},scale_min=4.359654e-06",
    "rms_norm_dynamic_per_token_quant, int8": f"rmsnorm:{TWO_ROUNDINGS},apply=mul,scale_min=1.1920929e-07",
    "rms_norm_per_block_quant": f"rmsnorm:{TWO_ROUNDINGS},scales=block,scale_min=4.359654e-06",
    "rms_norm_per_block_quant, int8": f"rmsnorm:{TWO_ROUNDINGS},scales=block,apply=mul,scale_min=1.1920929e-07",
}


@torch.no_grad()  # type: ignore[untyped-decorator]
def quantise(operator: str, eps: float, out: Sequence[Tensor | None], *, block: int = 128, **inputs: Any) -> None:
    """Write what an operator writes: q, its scales if they are computed, and the sum. Rows may have any dimensions.

    ``inputs``: those of the graph by name. TorchMissing for a dtype of q that the operator has not.
    """
    places = [t.view(-1, t.shape[-1]) if t.dim() > 2 else t for t in out if t is not None]
    dtype, int8 = places[0].dtype, ", int8" * (places[0].dtype == torch.int8)
    graph, _, keys = SPECS.get(operator + int8, "").partition(":")
    if not graph or FROM_TORCH.get(dtype) not in QUANTISED:
        raise TorchMissing(f"\"{operator}\" not implemented for '{shown(dtype)}'; pass a result of float8_e4m3fn.")
    given = {name: _shaped(name, t, places[0]) for name, t in inputs.items() if t is not None}
    if graph == "rmsnorm" and "residual" in given:
        graph, keys = "add_rmsnorm", f"round_sum=no,{keys}"
    keys += f",quant={FROM_TORCH[dtype]}"
    if "scales=block" in keys:
        by_columns = lie_by_columns(places[1])
        keys += f",block_size={block}" + ",scale_layout=columns" * by_columns
        places[1] = places[1].T if by_columns else places[1]
    found = results_in(graph, keys, given, eps, places)
    if found is not places:
        for place, t in zip(places, found, strict=True):
            place.copy_(t)


def lie_by_columns(scale: Tensor) -> bool:
    """True for scales of blocks, [M, blocks], of strides (1, A) as kernels write them."""
    inner, outer = scale.stride()
    return bool(inner == 1 and outer >= scale.shape[0] and outer % PADDED == 0)


def _shaped(name: str, value: Any, like: Tensor) -> Tensor:
    """An input as the graph has it: one number, or rows of two dimensions."""
    if name in NUMBERS:
        return torch.as_tensor(value, dtype=torch.float32, device=like.device).reshape(())
    return value.reshape(-1, value.shape[-1]) if value.dim() > 2 else value


def results_in(
    graph: str, keys: str, given: Mapping[str, Tensor], eps: float, out: Sequence[Tensor]
) -> Sequence[Tensor]:
    """The outputs of a graph: ``out`` if its kernels can write there, else new tensors."""
    ops = OPS[graph]
    eager = not torch.compiler.is_compiling()
    if eager and given["x"].dim() == 2 and not any(t.is_neg() for t in given.values()):
        one = ops.side([given.get(name) for name in ops.inputs], f"{keys},save=none")
        try:
            run(one, [given[name] for name in one.names], eps, out)
            return out
        except ArrayError:  # a kernel for long rows reads them again, or the rows lie otherwise
            pass
    return dispatched(ops, given, keys, eps, outputs_of(graph, keys))
