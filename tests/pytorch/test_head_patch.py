"""If these fail, patch takes a norm of heads with weights of their own for another, or copies what eager does not."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lngen.torch as L
from lngen.torch.patching import PatchedNorm
from lngen.torch.probe import agree
from lngen.torch.variants import Variant

H, HEAD = 3, 80
pytestmark = pytest.mark.filterwarnings("ignore:lngen.torch.patch")


class CohereNorm(nn.Module):  # type: ignore[misc]
    """A LayerNorm in float32, whose weight may be that of each head."""

    def __init__(self, shape: tuple[int, ...] = (H, HEAD)) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 + torch.rand(shape))
        self.variance_epsilon = 1e-5

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide - wide.mean(-1, keepdim=True)
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.float() * scaled).to(hidden.dtype)


class ChameleonNorm(nn.LayerNorm):  # type: ignore[misc]
    """PyTorch's norm of heads, then weights; its eps is a number."""

    def __init__(self) -> None:
        super().__init__((H, HEAD))
        self.normalized_shape = (HEAD,)
        nn.init.uniform_(self.weight)
        nn.init.normal_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.layer_norm(hidden, self.normalized_shape, None, None, 1e-5) * self.weight + self.bias


class RootNorm(CohereNorm):
    """Rounded before the weight."""

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * scaled.to(hidden.dtype)


class NormOfAllHeads(CohereNorm):
    """One mean square of all heads."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.square().mean((-1, -2), keepdim=True) + self.variance_epsilon)


BOTH = (torch.float32, torch.bfloat16)
TAKEN: dict[str, tuple[Callable[[], nn.Module], str, tuple[torch.dtype, ...]]] = {
    "cohere": (CohereNorm, "head_layer_norm", BOTH),
    "chameleon": (ChameleonNorm, "head_layer_norm, casts=eager", BOTH),
    "root": (RootNorm, "head_rms_norm, casts=llama", BOTH),
}


def heads(dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn((64, 5, H, HEAD), generator=torch.Generator().manual_seed(1)) + 0.5).to(dtype)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The arguments of lngen's functions."""
    made, call = list[Tensor](), Variant.__call__
    monkeypatch.setattr(Variant, "__call__", lambda self, module, x: made.append(x) or call(self, module, x))
    return made


@pytest.mark.parametrize(("name", "dtype"), [(n, t) for n, (*_, dtypes) in TAKEN.items() for t in dtypes], ids=str)
def test_a_norm_of_heads_becomes_the_one_of_their_weights(name: str, dtype: torch.dtype, calls: list[Tensor]) -> None:
    make, expected, _ = TAKEN[name]
    own = make().to(dtype)
    model = copy.deepcopy(own)
    assert L.patch(model).patched == {"": expected}
    x, dy = heads(dtype).requires_grad_(), heads(dtype).flip(0)
    calls.clear()
    y, wanted = model(x), own(x)
    assert len(calls) == 1
    assert agree(wanted, y)
    gradients = (torch.autograd.grad(r, [x, *m.parameters()], dy) for r, m in ((y, model), (wanted, own)))
    for found, exact in zip(*gradients, strict=True):
        assert found.shape == exact.shape
        assert (found - exact).norm() <= 8 * torch.finfo(dtype).eps * exact.norm()


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "other heads": (lambda: CohereNorm((2, 100)), "its weight has 2 dimensions"),
    "all heads": (NormOfAllHeads, "computes another function"),
}


def test_others_are_left() -> None:
    for make, reason in LEFT.values():
        assert L.patch(make()).left[""].startswith(reason)


def test_heads_that_lie_apart_run_the_norms_own_forward(calls: list[Tensor]) -> None:
    """A copy would take longer than the norm; a part of a packed projection is no copy."""
    own, packed = CohereNorm(), torch.randn(4, 6, 2 * H, HEAD)
    model = copy.deepcopy(own)
    L.patch(model)
    calls.clear()
    for x, taken in ((packed[:, :, :H], True), (packed[:, :, ::2], False), (packed[..., :1, :], False)):
        assert agree(own(x), model(x))
        assert bool(calls) is taken
        calls.clear()


def test_it_is_given_back_and_traced() -> None:
    model, x = nn.Sequential(CohereNorm()), heads()
    L.patch(model)
    assert isinstance(model[0], PatchedNorm)
    whole = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(whole(x), model(x))
    assert L.unpatch(model) == 1
    assert type(model[0]) is CohereNorm
