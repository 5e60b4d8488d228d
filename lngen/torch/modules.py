"""Modules in the place of torch.nn's: they take its arguments and its state dict."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from lngen.torch.torch_functions import ada_layer_norm, ada_rms_norm, layer_norm, rms_norm

fx.wrap("layer_norm")  # a call in the graph of torch.fx.symbolic_trace, which cannot look inside
fx.wrap("rms_norm")
fx.wrap("ada_layer_norm")
fx.wrap("ada_rms_norm")


class LayerNorm(nn.LayerNorm):  # type: ignore[misc]
    """torch.nn.LayerNorm on lngen's kernels."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):  # type: ignore[misc]
    """torch.nn.RMSNorm on lngen's kernels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)


class AdaLayerNorm(nn.LayerNorm):  # type: ignore[misc]
    """A LayerNorm whose result a sample scales and shifts; the arguments of torch.nn.LayerNorm, and its state dict."""

    def forward(
        self,
        x: torch.Tensor,
        shift: torch.Tensor,
        scale: torch.Tensor,
        gate: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> Any:
        return ada_layer_norm(x, shift, scale, gate, residual, self.weight, self.bias, self.eps)


class AdaRMSNorm(nn.RMSNorm):  # type: ignore[misc]
    """The same of an RMSNorm; ``shift`` may be None."""

    def forward(
        self,
        x: torch.Tensor,
        shift: torch.Tensor | None,
        scale: torch.Tensor,
        gate: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> Any:
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        return ada_rms_norm(x, shift, scale, gate, residual, self.weight, eps)
