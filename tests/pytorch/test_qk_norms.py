"""If these fail, a norm of heads with RoPE is wrong in PyTorch, or refuses in the words of a graph."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import lngen.torch as L
from sampling import grid

HEADS, HEAD, EPS = (4, 2, 2), 80, 1e-6
ROWS = (2, 5)
NAMES = ("pairs", "width", "positions")


def angles(width: int, positions: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """cos and sin of a table and positions in it, or of each row."""
    angle = torch.rand(11, width // 2) * 6
    at = torch.randint(0, 11, ROWS)
    return (angle.cos(), angle.sin(), at) if positions else (angle[at].cos(), angle[at].sin(), None)


def leaves(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (*ROWS, sum(HEADS) * HEAD), (HEAD,), (HEAD,)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def rotated(n: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
    """The first features of heads by PyTorch's operators, of the planes that cos and sin have."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turned, rest = n.split([2 * cos.shape[-1], n.shape[-1] - 2 * cos.shape[-1]], -1)
    a, b = (turned[..., 0::2], turned[..., 1::2]) if pairs else turned.chunk(2, -1)
    planes = a * cos - b * sin, b * cos + a * sin
    return torch.cat([torch.stack(planes, -1).flatten(-2) if pairs else torch.cat(planes, -1), rest], -1)


def composed(given: Sequence[Tensor], cos: Tensor, sin: Tensor, at: Tensor | None, pairs: bool) -> tuple[Tensor, ...]:
    qkv, *weights = given
    q, k, v = qkv.unflatten(-1, (sum(HEADS), HEAD)).split(HEADS, -2)
    cos, sin = (cos, sin) if at is None else (cos[at], sin[at])
    heads = [x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * w for x, w in zip((q, k), weights, strict=True)]
    return *(rotated(n, cos, sin, pairs) for n in heads), v


@grid(NAMES, [(p, w, a) for p in (False, True) for w in (HEAD, 16) for a in (True, False)], strength=2)
def test_results_and_gradients_are_those_of_the_formula(pairs: bool, width: int, positions: bool) -> None:
    given, (cos, sin, at) = leaves(), angles(width, positions)
    found = L.qk_norm_rope(*given, cos, sin, at, HEADS, EPS, pairs)
    exact = [t.detach().double().requires_grad_() for t in given]
    wanted = composed(exact, cos.double(), sin.double(), at, pairs)
    cotangents = [torch.randn_like(y) for y in found]
    for y, want in zip(found, wanted, strict=True):
        assert y.shape == want.shape
        torch.testing.assert_close(y.double(), want, rtol=0, atol=4e-6)
    gradients = torch.autograd.grad(found, given, cotangents)
    expected = torch.autograd.grad(wanted, exact, [c.double() for c in cotangents])
    for g, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(g.double(), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("positions", [True, False])
def test_in_place_has_the_same_bits_and_leaves_v(positions: bool) -> None:
    given, (cos, sin, at) = leaves(torch.bfloat16), angles(32, positions)
    with torch.no_grad():
        wanted = L.qk_norm_rope(*given, cos, sin, at, HEADS)
        qkv, version = given[0].clone(), given[0].clone()._version
        found = L.qk_norm_rope(qkv, *given[1:], cos, sin, at, HEADS, in_place=True)
    assert all(map(torch.equal, found, wanted))
    assert {y.untyped_storage().data_ptr() for y in found} == {qkv.untyped_storage().data_ptr()}
    assert wanted[2].untyped_storage().data_ptr() == given[0].untyped_storage().data_ptr()  # v is a view
    assert qkv._version > version
    assert torch.equal(qkv[..., -HEADS[2] * HEAD :], given[0][..., -HEADS[2] * HEAD :])


def test_qwen_3_rounds_each_step() -> None:
    """Its norm rounds before the weight, and its rotation after every operator; a few sums round otherwise."""
    given, (cos, sin, at) = leaves(torch.bfloat16), angles(HEAD, True)
    cos, sin = cos.bfloat16(), sin.bfloat16()
    q, k, _ = L.qk_norm_rope(*given, cos, sin, at, HEADS, EPS, casts="llama", rotate_in="x")
    packed = given[0].unflatten(-1, (sum(HEADS), HEAD)).split(HEADS, -2)
    for found, x, weight in zip((q, k), packed, given[1:], strict=False):
        wide = x.float()
        n = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)
        c, s = (torch.cat([t[at], t[at]], -1).unsqueeze(-2) for t in (cos, sin))
        half = torch.cat([-n[..., HEAD // 2 :], n[..., : HEAD // 2]], -1)
        assert (found == n * c + half * s).float().mean() > 0.99


def test_the_second_derivative_is_that_of_the_formula() -> None:
    given, (cos, sin, at) = leaves(), angles(16, True)

    def penalty(y: Sequence[Tensor], x: Sequence[Tensor]) -> Tensor:
        first = torch.autograd.grad(sum(t.sin().sum() for t in y[:2]), x, create_graph=True)
        return sum(g.square().sum() for g in first)

    found = torch.autograd.grad(penalty(L.qk_norm_rope(*given, cos, sin, at, HEADS, EPS), given), given)
    exact = [t.detach().double().requires_grad_() for t in given]
    wanted = torch.autograd.grad(penalty(composed(exact, cos.double(), sin.double(), at, False), exact), exact)
    for g, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(g.double(), want, rtol=2e-4, atol=2e-3)


def test_it_is_traced_as_one_operator() -> None:
    given, (cos, sin, at) = leaves(), angles(32, True)
    seen = list[torch.fx.GraphModule]()

    def backend(module: Any, inputs: Any) -> Any:
        seen.append(module)
        return module.forward

    run = torch.compile(lambda *t: L.qk_norm_rope(*t, HEADS, EPS), backend=backend, fullgraph=True)
    assert all(map(torch.equal, run(*given, cos, sin, at), L.qk_norm_rope(*given, cos, sin, at, HEADS, EPS)))
    assert sum("lngen" in str(node.target) for node in seen[0].graph.nodes) == 1


def test_a_module_has_the_weights() -> None:
    (qkv, *weights), (cos, sin, at) = leaves(), angles(32, True)
    module = L.QKNormRope(HEADS, HEAD)
    assert [*module.state_dict()] == ["q_weight", "k_weight"]
    module.load_state_dict(dict(zip(module.state_dict(), weights, strict=True)))
    found, wanted = module(qkv, cos, sin, at), L.qk_norm_rope(qkv, *weights, cos, sin, at, HEADS)
    assert all(map(torch.equal, found, wanted))
    assert L.QKNormRope(HEADS, HEAD, casts="gemma").q_weight.eq(0).all()
