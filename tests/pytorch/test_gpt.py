"""If these fail, a GPT trains otherwise with lngen.torch's LayerNorm than with PyTorch's."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lngen.torch as L

WIDTH, HEADS, WORDS, LENGTH, BATCH, STEPS = 32, 4, 50, 8, 4, 20
# Two norms differ by roundings of 2**-24. Five norms and their gradients in 20 steps are 200 of them, whose signs are
# as good as random: 14 of them, and 64 with what the layers between add. A wrong sign of a gradient near 0, which AdamW
# makes a whole step, adds no more: the loss hardly depends on such a weight. The wrong norms are off by 10 times that.
BOUND = 64 * 2.0**-24


class Block(nn.Module):  # type: ignore[misc]
    """Attention and a layer of 4 * WIDTH, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layer = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Any) -> Any:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.layer(self.norm2(x))


class GPT(nn.Module):  # type: ignore[misc]
    """Two blocks; ``kept``: activations are kept for the backward, not computed again."""

    def __init__(self, kept: bool = True) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head, self.kept = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS), kept

    def forward(self, words: Any) -> Any:
        x = self.words(words) + self.places.weight
        for block in self.blocks:
            x = block(x) if self.kept else checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def swap(model: Any, make: Callable[..., Any]) -> Any:
    """The model with another module in the place of each LayerNorm, with its weights, or patched."""
    if make is L.patch:
        assert len(L.patch(model).patched) == 5
        return model
    for module in [*model.modules()]:
        for name, norm in [*module.named_children()]:
            if type(norm) is nn.LayerNorm:
                other = make(norm.normalized_shape, norm.eps)
                other.load_state_dict(norm.state_dict())
                setattr(module, name, other)
    return model


@cache
def losses(make: Callable[..., Any] | None, way: str = "plain") -> list[float]:
    """Of the steps of a training that begins the same in every call."""
    torch.manual_seed(0)
    model = GPT(kept=way != "checkpointed")
    text = torch.randint(WORDS, (STEPS, BATCH, LENGTH + 1)).sort(-1).values  # what can be learnt: words ascend
    model = swap(model, make) if make else model
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if way == "compiled" else model
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for batch in text:
        loss = F.cross_entropy(run(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def difference(found: list[float]) -> float:
    """The largest, relative."""
    return max(abs(a - b) / b for a, b in zip(found, losses(None), strict=True))


@pytest.mark.filterwarnings("ignore:lngen.torch.patch")
@pytest.mark.parametrize("make", [L.LayerNorm, L.patch])
@pytest.mark.parametrize("way", ["plain", "compiled", "checkpointed"])
def test_a_gpt_trains_as_with_pytorchs_layer_norm(make: Callable[..., Any], way: str) -> None:
    torch._dynamo.reset()
    assert difference(losses(make, way)) < BOUND
    assert losses(None)[-1] < 0.8 * losses(None)[0]


class NoMean(L.LayerNorm):
    """Without the mean."""

    def forward(self, input: Any) -> Any:
        return L.rms_norm(input, self.normalized_shape, self.weight, self.eps) + self.bias


def wrong_eps(shape: Any, eps: float) -> Any:
    return L.LayerNorm(shape, 1000 * eps)


@pytest.mark.parametrize("make", [NoMean, wrong_eps])
def test_a_wrong_norm_is_seen(make: Callable[..., Any]) -> None:
    assert difference(losses(make)) > 10 * BOUND


@pytest.mark.parametrize("way", ["compiled", "checkpointed"])
def test_a_way_to_train_changes_no_bit(way: str) -> None:
    torch._dynamo.reset()
    assert losses(L.LayerNorm, way) == losses(L.LayerNorm)
