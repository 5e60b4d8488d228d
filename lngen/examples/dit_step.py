"""Times a training step of a small diffusion transformer: as it is, and with lngen's norms by ``lngen.torch.patch``.

    python -m lngen.examples.dit_step                              two sizes, on a GPU
    python -m lngen.examples.dit_step --tokens 1024 --samples 8    of other samples; --extension: launched in C++
    python -m lngen.examples.dit_step --tiny                       one small step on the CPU: the losses agree

Blocks are those of DiT (adaLN-Zero, Peebles and Xie, 2023): an embedding of a time, projected, shifts and scales each
norm and is the gate of what is added. Each norm has the name and the results of a class of diffusers, which ``patch``
takes: ``AdaLayerNormZero`` and ``AdaLayerNormContinuous``.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lngen.examples.gpt_step import timed
from lngen.torch import ada_layer_norm, patch, use_extension

LAYERS, HEAD, LATENT = 12, 64, 16  # the width of a head, and the features of a token of the image
WIDTHS, TOKENS, SAMPLES = "1152,1536", 1024, 8


class AdaLayerNormZero(nn.Module):  # type: ignore[misc]
    """The norm before attention, modulated, and what is left of the projection: of attention and of the next norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.emb = None
        self.silu = nn.SiLU()
        self.linear = nn.Linear(width, 6 * width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)

    def forward(
        self,
        x: Tensor,
        timestep: Tensor | None = None,
        class_labels: Tensor | None = None,
        hidden_dtype: torch.dtype | None = None,
        emb: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        shift, scale, *others = self.linear(self.silu(emb)).chunk(6, dim=1)
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None], *others


class AdaLayerNormContinuous(nn.Module):  # type: ignore[misc]
    """The last norm, modulated."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.silu = nn.SiLU()
        self.linear = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)

    def forward(self, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
        scale, shift = self.linear(self.silu(conditioning_embedding).to(x.dtype)).chunk(2, dim=1)
        return self.norm(x) * (1 + scale)[:, None, :] + shift[:, None, :]


class Block(nn.Module):  # type: ignore[misc]
    """Attention and two linear layers, each behind a modulated norm and times a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = AdaLayerNormZero(width), nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x: Tensor) -> Tensor:
        samples, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(samples, tokens, 3, -1, HEAD).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.out(attended.transpose(1, 2).reshape(x.shape))

    def layers(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        y, gate, shift, scale, gate2 = self.norm1(x, emb=emb)
        x = x + gate[:, None] * self.attention(y)
        y = self.norm2(x) * (1 + scale[:, None]) + shift[:, None]
        return x + gate2[:, None] * self.layers(y)


class FusedBlock(Block):
    """The same with lngen's functions: a gate, the sum and the norm behind them are one kernel."""

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        y, gate, shift, scale, gate2 = self.norm1(x, emb=emb)
        y, x = ada_layer_norm(self.attention(y), shift, scale, gate, x, eps=1e-6)
        return x + gate2[:, None] * self.layers(y)


class DiT(nn.Module):  # type: ignore[misc]
    """From noisy tokens and times to the noise."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.tokens, self.time = nn.Linear(LATENT, width), nn.Linear(1, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.last = AdaLayerNormContinuous(width), nn.Linear(width, LATENT)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x, emb = self.tokens(x), self.time(time)
        for block in self.blocks:
            x = block(x, emb)
        return self.last(self.norm(x, emb))


def patched(model: nn.Module) -> nn.Module:
    """The line."""
    patch(model)
    return model


def fused(model: nn.Module) -> nn.Module:
    """The line, and blocks whose second norm is fused with the gate and the sum before it."""
    patch(model)
    for block in model.blocks:
        block.__class__ = FusedBlock
    return model


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {"torch": lambda model: model, "patched": patched, "fused": fused}


def stepper(model: nn.Module, tokens: int, samples: int) -> Callable[[], Tensor]:
    """A training step, which returns its loss: forward, backward, AdamW."""
    first = next(model.parameters())
    generator = torch.Generator().manual_seed(1)
    shapes = (samples, tokens, LATENT), (samples, tokens, LATENT), (samples, 1)
    image, noise, time = (torch.randn(shape, generator=generator).to(first.device, first.dtype) for shape in shapes)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    def step() -> Tensor:
        loss = F.mse_loss(model(image + time.sigmoid()[:, None] * noise, time).float(), noise.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def main() -> int:
    """0 if the losses agree; 3 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default=WIDTHS, help=f"features of a token, comma separated, times of {HEAD}")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens of a sample")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="samples of a step")
    parser.add_argument("--tiny", action="store_true", help="one small size, a step")
    parser.add_argument("--extension", action="store_true", help="launch in C++; builds lngen.torch's extension")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        print("a GPU is expected, and PyTorch finds none; --tiny runs on the CPU", file=sys.stderr)
        return 3
    if options.extension:
        use_extension()
    warnings.filterwarnings("ignore", "lngen.torch.patch", UserWarning)  # which patch gives on the CPU
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    layers, tokens, samples = (2, 8, 2) if options.tiny else (LAYERS, options.tokens, options.samples)
    agree = True
    for width in [HEAD] if options.tiny else map(int, options.widths.split(",")):
        torch.manual_seed(0)
        model = DiT(layers, width).to(device, dtype)
        steps = {name: stepper(way(copy.deepcopy(model)), tokens, samples) for name, way in WAYS.items()}
        times, losses = timed(steps, *((1, 1) if options.tiny else (7, 5)))
        ratios = ", ".join(f"{name} {ms:.2f} ms ({times['torch'] / ms:.2f})" for name, ms in times.items())
        spread = max(abs(loss - losses["torch"]) for loss in losses.values())
        print(f"{layers} layers of {width}, {samples} x {tokens} tokens: {ratios}; losses agree to {spread:.1e}")
        agree = agree and spread < 1e-2
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
