"""Layers whose forward takes the place of a model's: ``kernels.kernelize`` gives it the model's layer as ``self``.

They have no state: annotations name what they read of that layer.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import nn

from .functional import LLAMA, ONCE, layer_norm, rms_norm


class LayerNorm(nn.Module):  # type: ignore[misc]
    """In the place of torch.nn.LayerNorm."""

    has_backward: bool = True
    can_torch_compile: bool = True

    normalized_shape: Any
    weight: Optional[torch.Tensor]
    bias: Optional[torch.Tensor]
    eps: float

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):  # type: ignore[misc]
    """In the place of torch.nn.RMSNorm, or of a norm with ``variance_epsilon``, as transformers has them."""

    has_backward: bool = True
    can_torch_compile: bool = True

    weight: Optional[torch.Tensor]
    eps: Optional[float]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = getattr(self, "normalized_shape", x.shape[-1:])
        if hasattr(self, "variance_epsilon"):
            return rms_norm(x, shape, self.weight, self.variance_epsilon, LLAMA)
        return rms_norm(x, shape, self.weight, self.eps, ONCE)


class LlamaRMSNorm(nn.Module):  # type: ignore[misc]
    """In the place of transformers' LlamaRMSNorm."""

    has_backward: bool = True
    can_torch_compile: bool = True

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, hidden_states.shape[-1:], self.weight, self.variance_epsilon, LLAMA)
