"""Times a training step of small GPTs: with PyTorch's LayerNorm, with lngen's by ``lngen.torch.patch``, with Liger's.

    python -m lngen.examples.gpt_step              three sizes, on a GPU; --extension: with calls launched in C++
    python -m lngen.examples.gpt_step --tiny       one small step on the CPU, to see that the losses agree

The third size is bound by the host: its kernels are shorter than the time to launch them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lngen.torch import patch, use_extension

SIZES = {"12 layers of 1024, 8192 tokens": (12, 1024, 8, 1024), "4 layers of 2560, 8192 tokens": (4, 2560, 8, 1024)}
SIZES |= {"12 layers of 512, 512 tokens": (12, 512, 1, 512)}  # layers, width, sequences, tokens of each
TINY = {"2 layers of 64, 32 tokens": (2, 64, 2, 16)}
WORDS, HEAD = 4096, 64  # the vocabulary, and the width of a head


class Block(nn.Module):  # type: ignore[misc]
    """A pre-LN block: attention, then two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, -1, HEAD).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def gpt(layers: int, width: int) -> nn.Module:
    """A model with ``2 * layers + 1`` norms."""
    torch.manual_seed(0)
    blocks = [Block(width) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(WORDS, width), *blocks, nn.LayerNorm(width), nn.Linear(width, WORDS))


def liger(model: nn.Module) -> None:
    """Liger's LayerNorm in the place of PyTorch's."""
    liger_layer_norm = import_module("liger_kernel.transformers.functional").liger_layer_norm
    for module in model.modules():
        if type(module) is nn.LayerNorm:
            module.forward = lambda x, n=module: liger_layer_norm(x, n.weight, n.bias, n.eps)


NORMS: dict[str, Callable[[nn.Module], object]] = {"torch": lambda model: None, "lngen": patch}
NORMS |= {"liger": liger} if find_spec("liger_kernel") and torch.cuda.is_available() else {}


def stepper(norm: str, size: tuple[int, int, int, int]) -> Callable[[], Tensor]:
    """A training step, which returns its loss: forward, backward, AdamW, in bf16 on a GPU."""
    layers, width, batch, tokens = size
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model = gpt(layers, width).to(device, dtype)
    NORMS[norm](model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    words = torch.randint(WORDS, (batch, tokens + 1), generator=torch.Generator().manual_seed(1)).to(device)

    def step() -> Tensor:
        logits = model(words[:, :-1])
        loss = F.cross_entropy(logits.view(-1, WORDS).float(), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def timed(steps: dict[str, Callable[[], Tensor]], rounds: int, count: int) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of a step, the median of interleaved rounds, and the loss after as many steps as were timed."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses = dict.fromkeys(steps, 0.0)
    for _ in range(rounds + 1):  # the first one warms up
        for name, step in steps.items():
            wait()
            start = time.perf_counter()
            for _ in range(count):
                loss = step()
            wait()
            times[name].append(1e3 * (time.perf_counter() - start) / count)
            losses[name] = loss.item()
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}, losses


def main() -> int:
    """0 if the losses agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="one small size, a step")
    parser.add_argument("--extension", action="store_true", help="launch in C++; builds lngen.torch's extension")
    options = parser.parse_args()
    tiny = options.tiny
    if options.extension:
        use_extension()
    if not tiny and not torch.cuda.is_available():
        print("a GPU is expected, and PyTorch finds none; --tiny runs on the CPU", file=sys.stderr)
        return 3
    warnings.filterwarnings("ignore", "lngen.torch.patch", UserWarning)  # which patch gives on the CPU
    agree = True
    for text, size in (TINY if tiny else SIZES).items():
        times, losses = timed({norm: stepper(norm, size) for norm in NORMS}, *((1, 1) if tiny else (7, 10)))
        ratios = ", ".join(f"{norm} {ms:.2f} ms ({ms / times['torch']:.2f})" for norm, ms in times.items())
        spread = max(abs(loss - losses["torch"]) for loss in losses.values())
        print(f"{text}: {ratios}; losses agree to {spread:.1e}")
        agree = agree and spread < 1e-2
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
