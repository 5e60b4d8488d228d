"""Norms with a projection inside, with the names, parts and results of those of diffusers."""

from typing import Any

import torch
from torch import Tensor, nn


class Projected(nn.Module):  # type: ignore[misc]
    """A norm, and what an embedding becomes: ``parts`` times as many features."""

    parts = 2

    def __init__(self, features: int, norm: nn.Module | None = None, emb: nn.Module | None = None) -> None:
        super().__init__()
        self.emb = emb
        self.silu = nn.SiLU()
        self.linear = nn.Linear(features, self.parts * features)
        self.norm = nn.LayerNorm(features, elementwise_affine=False, eps=1e-6) if norm is None else norm

    def projected(self, emb: Tensor, dim: int = 1) -> tuple[Tensor, ...]:
        return self.linear(self.silu(emb)).chunk(self.parts, dim=dim)


def modulated(y: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return y * (1 + scale[:, None]) + shift[:, None]


class AdaLayerNorm(Projected):
    def __init__(self, features: int, chunk_dim: int = 0, **more: Any) -> None:
        super().__init__(features, **more)
        self.chunk_dim = chunk_dim

    def forward(self, x: Tensor, timestep: Any = None, temb: Any = None) -> Tensor:
        temb = temb if self.emb is None else self.emb(timestep)
        if self.chunk_dim:
            shift, scale = (part[:, None, :] for part in self.projected(temb))
        else:
            scale, shift = self.projected(temb, 0)
        return self.norm(x) * (1 + scale) + shift


class Labels(nn.Module):  # type: ignore[misc]
    """An embedding of two numbers."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.table = nn.Embedding(10, features)

    def forward(self, timestep: Tensor, labels: Tensor, hidden_dtype: Any = None) -> Tensor:
        return (self.table(timestep) + self.table(labels)).to(hidden_dtype)


class AdaLayerNormZero(Projected):
    parts = 6

    def forward(
        self, x: Tensor, timestep: Any = None, class_labels: Any = None, hidden_dtype: Any = None, emb: Any = None
    ) -> Any:
        emb = emb if self.emb is None else self.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
        shift, scale, *rest = self.projected(emb)
        return modulated(self.norm(x), shift, scale), *rest


class AdaLayerNormZeroSingle(Projected):
    parts = 3

    def forward(self, x: Tensor, emb: Any = None) -> Any:
        shift, scale, gate = self.projected(emb)
        return modulated(self.norm(x), shift, scale), gate


class SD35AdaLayerNormZeroX(Projected):
    parts = 9

    def forward(self, hidden_states: Tensor, emb: Any = None) -> Any:
        shift, scale, *rest, shift2, scale2, gate2 = self.projected(emb)
        y = self.norm(hidden_states)
        return modulated(y, shift, scale), *rest, modulated(y, shift2, scale2), gate2


class AdaLayerNormContinuous(Projected):
    def forward(self, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
        scale, shift = self.linear(self.silu(conditioning_embedding).to(x.dtype)).chunk(2, dim=1)
        return self.norm(x) * (1 + scale)[:, None, :] + shift[:, None, :]


class Root(nn.Module):  # type: ignore[misc]
    """An RMSNorm in float32, without a weight."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.weight, self.bias = eps, None, None

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class LuminaRMSNormZero(Projected):
    parts = 4

    def forward(self, x: Tensor, emb: Any = None) -> Any:
        scale, *rest = self.projected(emb)
        return self.norm(x) * (1 + scale[:, None]), *rest
