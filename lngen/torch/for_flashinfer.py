"""lngen in the place of FlashInfer's norms, by its Trace Apply, for whoever calls FlashInfer.

    enable(4096, 8192, eps=1e-5)            # all calls with these hidden sizes
    enable_apply({**solutions(4096), ...})  # beside solutions of others

FlashInfer gives a solution the tensors of a call but not its epsilon, which in its definitions is 1e-6: ``eps`` has to
be the model's. The kernels round where those definitions do: once, and the norm is of the sum before it is rounded.
``rmsnorm_quant`` and ``fused_add_rmsnorm_quant`` are functions in the place of FlashInfer's (``lngen help quantised``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lngen.torch.peer_specs import quantise, results_in
from lngen.torch.torch_functions import layer_norm, rms_norm


def enable(*hidden_sizes: int, eps: float = 1e-6) -> int:
    """Replace FlashInfer's norms of these sizes; how many of its attributes that wraps.

    FlashInfer keeps one set of solutions: this one takes the place of an earlier one.
    """
    from flashinfer.trace_apply import enable_apply

    count: int = enable_apply(solutions(*hidden_sizes, eps=eps))
    return count


def solutions(*hidden_sizes: int, eps: float = 1e-6) -> dict[str, Callable[..., Any]]:
    """What ``flashinfer.trace_apply.enable_apply`` takes, by the names of FlashInfer's definitions."""
    functions = {
        "rmsnorm": _rmsnorm,
        "gemma_rmsnorm": partial(_rmsnorm, zero_centred=True),
        "fused_add_rmsnorm": _fused_add_rmsnorm,
        "layernorm": _layernorm,
    }
    return {f"{name}_h{d}": partial(f, eps=eps) for d in hidden_sizes for name, f in functions.items()}


@torch.no_grad()  # type: ignore[untyped-decorator]
def _rmsnorm(hidden_states: Tensor, weight: Tensor, *, eps: float, zero_centred: bool = False) -> Tensor:
    return rms_norm(hidden_states, hidden_states.shape[-1:], weight, eps, zero_centred=zero_centred)


@torch.no_grad()  # type: ignore[untyped-decorator]
def _layernorm(hidden_states: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    return layer_norm(hidden_states, hidden_states.shape[-1:], weight, bias, eps)


@torch.no_grad()  # type: ignore[untyped-decorator]
def _fused_add_rmsnorm(hidden_states: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Sequence[Tensor]:
    """The norm and the sum, in the places of the inputs where the kernels can; else new, and FlashInfer copies them."""
    given = {"x": hidden_states, "residual": residual, "gamma": weight}
    return tuple(results_in("add_rmsnorm", "round_sum=no", given, eps, (hidden_states, residual)))


# ---- FlashInfer's own signatures: a solution is not told the dtype of a quantised result ----


def rmsnorm_quant(
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    scale: float | Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """FlashInfer's ``rmsnorm_quant``: ``out`` is e4m3 or e5m2, and ``scale`` what it is multiplied by to get values.

    lngen decides itself how launches overlap, whatever ``enable_pdl``.
    """
    quantise("rmsnorm_quant", eps, [out], x=input, gamma=weight, q_scale=scale)


def fused_add_rmsnorm_quant(
    out: Tensor,
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    scale: float | Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """FlashInfer's ``fused_add_rmsnorm_quant``: the same of the sum, which is written to ``residual``."""
    quantise("fused_add_rmsnorm_quant", eps, [out, residual], x=input, residual=residual, gamma=weight, q_scale=scale)
