"""lngen as a provider of vLLM's IR: vLLM finds ``register`` by its entry point, and a priority list chooses it.

    vllm serve MODEL --ir-op-priority.rms_norm=lngen --ir-op-priority.fused_add_rms_norm=lngen

The kernels round where vLLM's own definitions do: ``casts=t5``, and ``round_sum=no`` for the norm of a sum. Below are
the operators that quantise, as functions; vLLM has no providers of these (``lngen help quantised``).
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import torch
from torch import Tensor

from lngen.torch.peer_specs import quantise
from lngen.torch.torch_functions import add_rms_norm
from lngen.torch.torch_functions import rms_norm as norm_of

PROVIDER = "lngen"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def register() -> None:
    """Offer the norms to vLLM, any number of times; a vLLM without an IR, or with other operators, does without.

    No GPU is touched: vLLM may yet fork.
    """
    try:
        from vllm import ir
        from vllm.platforms import current_platform
    except ImportError:
        return
    supported = current_platform.is_cuda() and find_spec("cupy") is not None
    for impl, fits in ((rms_norm, rms_norm_fits), (fused_add_rms_norm, fused_add_rms_norm_fits)):
        op = getattr(ir.ops, impl.__name__, None)
        if op is None or PROVIDER in op.impls:
            continue
        try:
            op.register_impl(PROVIDER, supported=supported, supports_args=fits)(impl)
        except ValueError as e:  # must not stop a vLLM that is to run without lngen
            warnings.warn(f"lngen does not implement '{impl.__name__}' of this vLLM: {e}", stacklevel=2)


# vLLM compares the parameters with those of its operators: names, types and defaults.


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """vLLM's ``rms_norm``."""
    return norm_of(x, x.shape[-1:], weight, epsilon, casts="t5")


def rms_norm_fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """True for what ``rms_norm`` computes as vLLM does. It is asked on every call, and of tensors without content.

    A product with a 16-bit weight of another dtype than x's is rounded twice by vLLM, once by lngen.
    """
    d = x.shape[-1]
    return (
        variance_size is None
        and x.dtype in DTYPES
        and isinstance(d, int)
        and d > 0
        and (weight is None or (weight.dtype in (x.dtype, torch.float32) and tuple(weight.shape) == (d,)))
    )


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """vLLM's ``fused_add_rms_norm``: the norm of the sum before it is rounded, and the sum."""
    return add_rms_norm(x, x_residual, x.shape[-1:], weight, epsilon, casts="t5", round_sum=False)


def fused_add_rms_norm_fits(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    """As ``rms_norm_fits``, for ``fused_add_rms_norm``."""
    same = x_residual.dtype == x.dtype and x_residual.shape == x.shape
    return same and rms_norm_fits(x, weight, epsilon, variance_size)


# ---- vLLM's operators that quantise, by their names and parameters (torch.ops._C) ----


def rms_norm_static_fp8_quant(result: Tensor, input: Tensor, weight: Tensor, scale: Tensor, epsilon: float) -> None:
    """The quantised norm, with one scale that is given, in ``result``."""
    quantise("rms_norm_static_fp8_quant", epsilon, [result], x=input, gamma=weight, q_scale=scale)


def fused_add_rms_norm_static_fp8_quant(
    result: Tensor, input: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, epsilon: float
) -> None:
    """The same of the sum, which is written to ``residual``."""
    inputs = {"x": input, "residual": residual, "gamma": weight, "q_scale": scale}
    quantise("fused_add_rms_norm_static_fp8_quant", epsilon, [result, residual], **inputs)


def rms_norm_dynamic_per_token_quant(
    result: Tensor,
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    epsilon: float,
    scale_ub: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    """The quantised norm, of a sum if there is a ``residual``; ``scale``, [M, 1], gets a scale for each row."""
    inputs = {"x": input, "residual": residual, "gamma": weight, "amax_max": scale_ub}
    quantise("rms_norm_dynamic_per_token_quant", epsilon, [result, scale.flatten(), residual], **inputs)


def rms_norm_per_block_quant(
    result: Tensor,
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    epsilon: float,
    scale_ub: Tensor | None = None,
    residual: Tensor | None = None,
    group_size: int = 128,
    is_scale_transposed: bool = False,
) -> None:
    """The same with a scale for each ``group_size`` features, in ``scale``, [M, D / group_size], of any strides."""
    inputs = {"x": input, "residual": residual, "gamma": weight, "amax_max": scale_ub}
    quantise("rms_norm_per_block_quant", epsilon, [result, scale, residual], block=group_size, **inputs)
