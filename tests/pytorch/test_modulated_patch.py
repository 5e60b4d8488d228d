"""If these fail, patch takes a modulated norm that computes something else, or leaves one that lngen has."""

import copy
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diffusion_norms as D
import lngen.torch as L
from lngen.torch import modulated_norms
from sampling import grid

WIDTH = 64
pytestmark = pytest.mark.filterwarnings("ignore:lngen.torch.patch")

Call = Callable[[Any, Tensor, Tensor], Any]
MODULES: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "classic": (lambda: D.AdaLayerNorm(WIDTH), lambda m, x, e: m(x, None, e[0])),
    "classic of samples": (
        lambda: D.AdaLayerNorm(WIDTH, 1, norm=nn.LayerNorm(WIDTH)),
        lambda m, x, e: m(x, temb=e),
    ),
    "zero": (lambda: D.AdaLayerNormZero(WIDTH), lambda m, x, e: m(x, emb=e)),
    "zero of labels": (
        lambda: D.AdaLayerNormZero(WIDTH, emb=D.Labels(WIDTH)),
        lambda m, x, e: m(x, torch.tensor([1, 2]), torch.tensor([3, 4]), x.dtype),
    ),
    "single": (lambda: D.AdaLayerNormZeroSingle(WIDTH), lambda m, x, e: m(x, e)),
    "twice": (lambda: D.SD35AdaLayerNormZeroX(WIDTH), lambda m, x, e: m(x, emb=e)),
    "continuous": (
        lambda: D.AdaLayerNormContinuous(WIDTH, norm=nn.LayerNorm(WIDTH, eps=1e-5)),
        lambda m, x, e: m(x, e.float()),
    ),
    "continuous root": (lambda: D.AdaLayerNormContinuous(WIDTH, norm=D.Root()), lambda m, x, e: m(x, e)),
    "lumina": (lambda: D.LuminaRMSNormZero(WIDTH, norm=D.Root(1e-5)), lambda m, x, e: m(x, e)),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of lngen's functions."""
    made = list[str]()
    for name in ("ada_layer_norm", "ada_rms_norm"):
        real = getattr(modulated_norms, name)
        heard = lambda *a, real=real, name=name, **k: (made.append(name), real(*a, **k))[1]  # noqa: E731
        monkeypatch.setattr(modulated_norms, name, heard)
    return made


def several(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


@grid(("name", "dtype"), product(MODULES, (torch.float32, torch.bfloat16)), strength=1)
def test_results_and_gradients_stay(calls: list[str], name: str, dtype: torch.dtype) -> None:
    """In 16 bits each step is rounded as PyTorch rounds it."""
    make, call = MODULES[name]
    torch.manual_seed(0)
    own = make().to(dtype)
    module = copy.deepcopy(own)
    assert "of its projection" in str(L.patch(module))
    x, embedding = torch.randn(2, 50, WIDTH).to(dtype).requires_grad_(), torch.randn(2, WIDTH).to(dtype)
    wanted = several(call(own, x, embedding))
    calls.clear()
    found = several(call(module, x, embedding))
    assert calls
    tolerance = 4e-6 if dtype == torch.float32 else 0.02
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    if dtype == torch.bfloat16:
        assert all((a == b).float().mean() > 0.998 for a, b in zip(found, wanted, strict=True))
        return
    cotangents = [torch.randn_like(y) for y in wanted]
    gradients = (torch.autograd.grad(y, [x, *m.parameters()], cotangents) for y, m in ((found, module), (wanted, own)))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_it_stays_its_class_and_is_given_back() -> None:
    module = D.AdaLayerNormZero(WIDTH)
    names = [*module.state_dict()]
    assert len(L.patch(module).patched) == 2  # it, and the norm inside
    assert isinstance(module, D.AdaLayerNormZero)
    assert [*copy.deepcopy(module).state_dict()] == names
    assert type(pickle.loads(pickle.dumps(module))) is D.AdaLayerNormZero
    assert "already patched" in str(L.patch(module))
    assert L.unpatch(module) == 2
    assert type(module) is D.AdaLayerNormZero


class Swapped(D.AdaLayerNormZeroSingle):
    def forward(self, x: Tensor, emb: Any = None) -> Any:
        scale, shift, gate = self.projected(emb)
        return D.modulated(self.norm(x), shift, scale), gate


class WithoutOne(D.AdaLayerNormZeroSingle):
    def forward(self, x: Tensor, emb: Any = None) -> Any:
        shift, scale, gate = self.projected(emb)
        return self.norm(x) * scale[:, None] + shift[:, None], gate


class Detached(D.AdaLayerNormZeroSingle):
    def forward(self, x: Tensor, emb: Any = None) -> Any:
        shift, scale, gate = self.projected(emb)
        return D.modulated(self.norm(x), shift, scale.detach()), gate


def test_another_function_of_the_same_name_is_left() -> None:
    for other in (Swapped, WithoutOne, Detached):
        module = type("AdaLayerNormZeroSingle", (other,), {})(WIDTH)
        assert "computes another function" in L.patch(module).left[""], other


def test_hooks_inside_and_other_shapes_keep_the_own_forward(calls: list[str]) -> None:
    module = D.AdaLayerNormZeroSingle(WIDTH)
    module.norm.register_forward_hook(lambda *given: None)
    assert "" in L.patch(module).left
    module = D.AdaLayerNormContinuous(WIDTH)
    L.patch(module)
    calls.clear()
    module(torch.randn(2, 12, WIDTH), torch.randn(2, WIDTH))
    assert calls == ["ada_layer_norm"]
    module(torch.randn(2, WIDTH), torch.randn(2, WIDTH))  # no rows of samples: [2, 2, D]
    assert calls == ["ada_layer_norm"]


# ---- norms of heads ----


class HeadNorm(nn.Module):  # type: ignore[misc]
    """LayerNorm of each head in float32, with weights of its own."""

    def __init__(self, heads: int, features: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.randn(heads, features)), 1e-5

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        far = x - x.mean(-1, keepdim=True)
        y = far * torch.rsqrt(far.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.float() * y).to(hidden_states.dtype)


class HeadRootNorm(HeadNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.float() * y).to(hidden_states.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("cls", "kind"), [(HeadNorm, "head_layer_norm"), (HeadRootNorm, "head_rms_norm")])
def test_norms_of_heads_are_taken(cls: type[HeadNorm], kind: str, dtype: torch.dtype) -> None:
    own = cls(4, 32).to(dtype)
    module = copy.deepcopy(own)
    assert L.patch(module).patched == {"": kind}
    x = torch.randn(2, 5, 4, 32).to(dtype).requires_grad_()
    found, wanted = module(x), own(x)
    torch.testing.assert_close(found, wanted, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    dy = torch.randn_like(found)
    gradients = [torch.autograd.grad(y, [x, m.weight], dy) for y, m in ((found, module), (wanted, own))]
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-3
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    other = torch.randn(5, 4, 2, 32).to(dtype)
    with pytest.raises(RuntimeError, match="must match the size"):  # its own forward's words
        module(other)


def test_heads_of_another_length_are_left() -> None:
    assert "its weight has 2 dimensions" in L.patch(HeadNorm(4, 20)).left[""]
