"""Modules in the place of torch.nn's: they take its arguments and its state dict."""

from __future__ import annotations

import torch
from torch import fx, nn

from lngen.torch.torch_functions import layer_norm, rms_norm

fx.wrap("layer_norm")  # a call in the graph of torch.fx.symbolic_trace, which cannot look inside
fx.wrap("rms_norm")


class LayerNorm(nn.LayerNorm):  # type: ignore[misc]
    """torch.nn.LayerNorm on lngen's kernels."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):  # type: ignore[misc]
    """torch.nn.RMSNorm on lngen's kernels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)
