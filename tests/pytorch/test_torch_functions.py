"""If these fail, lngen.torch computes something else than PyTorch, or not what the interpreter does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import lngen.torch as L
from graph_names import HEADS, whole_heads
from lngen.torch.graph_ops import OPS, GraphOps
from sampling import grid
from set_cases import OF_SETS
from torch_calls import CALLS, FORMULAS, D, Function

WEIGHTS = ("gamma", "beta", "gamma1", "beta1", "colscale", "class_weight")


def tensors_of(ops: GraphOps, dtype: torch.dtype = torch.float32, *, every: bool = False) -> list[torch.Tensor | None]:
    """Tensors for each input; the optional ones that are absent by default only with ``every``."""
    torch.manual_seed(0)
    d = whole_heads(ops.name, D)
    shapes: dict[str, tuple[int, ...]] = {**dict.fromkeys(WEIGHTS, (d,)), "alpha": (), "rowscale": (2, 3)}
    shapes |= dict.fromkeys(("cos", "sin"), (2, 3, d // 2))
    found: list[torch.Tensor | None] = []
    for name in ops.inputs:
        if name in ops.numbers or (name in ops.optional and ops.defaults[name] is False and not every):
            found.append(None)
        elif name in ops.whole:
            found.append(torch.arange(6).reshape(2, 3))
        else:
            given = torch.randn(shapes.get(name, (2, 3, d)), dtype=dtype)
            found.append(given.requires_grad_(name not in ("target", "class_weight", "cos", "sin")))
    return found


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_an_operator_passes_pytorchs_own_checks(name: str, every: bool) -> None:
    ops = OPS[name]
    keys = {"eps": 1e-5} if ops.takes_eps else {}
    torch.library.opcheck(ops.fwd, tuple(tensors_of(ops, every=every)), keys)


WITH_F64 = [name for name in OPS if name.endswith(("layernorm", "rmsnorm", "l2norm")) and "gated" not in name]
WITH_F64 = [name for name in WITH_F64 if name not in HEADS]  # which the tests of heads have


@pytest.mark.parametrize("name", WITH_F64)
def test_first_and_second_derivatives_are_those_of_differences(name: str) -> None:
    ops = OPS[name]
    given = [t if t is None else t.detach()[..., :5].double().requires_grad_(t.requires_grad) for t in tensors_of(ops)]
    present = [t for t in given if t is not None]

    def outputs(*some: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rest = iter(some)
        results = ops.fwd(*[t if t is None else next(rest) for t in given], eps=1e-5)
        return tuple(results[: len(ops.outputs)])

    assert torch.autograd.gradcheck(outputs, present)
    assert torch.autograd.gradgradcheck(outputs, present)


@grid(
    ("name", "keys"),
    [(name, keys) for name in ("qk_rmsnorm", "qk_layernorm") for keys in ({"k_heads": 1}, {}, {"head_weights": "own"})],
    lambda name, keys: (name, str(keys)),
    strength=1,
)
def test_derivatives_of_heads_are_those_of_differences(name: str, keys: dict[str, Any]) -> None:
    """The first and second ones, of two heads of q and one of k."""
    torch.manual_seed(1)
    function = L.function(name, head=16, **keys)
    shapes = [p.type.shape(2, 48) for p in function.spec.forward().tensors]
    given = [torch.randn(shape).double().requires_grad_() for shape in shapes]
    assert torch.autograd.gradcheck(lambda *some: function(*some, eps=1e-5), given)
    assert torch.autograd.gradgradcheck(lambda *some: function(*some, eps=1e-5), given)


PAIRS: dict[str, tuple[Function, Function]] = {name: (call, FORMULAS[name]) for name, call in CALLS.items()} | {
    "no weights": (lambda x, w, b: L.layer_norm(x, [D]), lambda x, w, b: F.layer_norm(x, [D])),
    "softmax of columns": (lambda x, w, b: L.softmax(x, 1), lambda x, w, b: F.softmax(x, 1)),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "slice", "no rows"])
def test_a_function_is_pytorchs_forward_and_backward(name: str, layout: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 3, D)
    x = {
        "contiguous": x, "transposed": torch.randn(3, 2, D).transpose(0, 1), "slice": torch.randn(2, 3, 2 * D)[..., :D],
        "no rows": torch.randn(0, 3, D),
    }[layout]  # fmt: skip
    inputs = [x.requires_grad_(), torch.randn(D, requires_grad=True), torch.randn(D, requires_grad=True)]
    ours, theirs = PAIRS[name]
    y, expected = ours(*inputs), theirs(*inputs)
    assert y.shape == expected.shape
    torch.testing.assert_close(y, expected, rtol=5e-6, atol=5e-6)
    dy = torch.randn_like(expected)
    gradients = torch.autograd.grad(y, inputs, dy, allow_unused=True)
    for found, wanted in zip(gradients, torch.autograd.grad(expected, inputs, dy, allow_unused=True), strict=True):
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_of_no_rows_have_the_strides_of_new_tensors(dtype: torch.dtype) -> None:
    x = torch.randn(0, D, dtype=dtype, requires_grad=True)
    results = torch.ops.lngen.layernorm_fwd(x, None, None, eps=1e-5)
    (dx,) = torch.autograd.grad(results[0], x, torch.empty_like(results[0]))
    assert [t.stride() for t in (*results, dx)] == [(D, 1), (1,), (1,), (D, 1)]


BROADCAST: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "add_rms_norm": (
        lambda x, r, w: L.add_rms_norm(x, r, (D,), w, 1e-6),
        lambda x, r, w: (F.rms_norm(x + r, (D,), w, 1e-6), x + r),
        ((2, 1, D), (2, 5, D)),
    ),
    "of two dimensions": (
        lambda x, r, w: L.add_layer_norm(x, r, (3, D), w.expand(3, D)),
        lambda x, r, w: (F.layer_norm(x + r, (3, D), w.expand(3, D)), x + r),
        ((4, 3, D), (1, 3, D)),
    ),
    "gated_rms_norm": (
        lambda x, z, w: (L.gated_rms_norm(x, z, (D,), w, 1e-6),),
        lambda x, z, w: (F.rms_norm(x, (D,), w, 1e-6) * F.silu(z),),
        ((1, 5, D), (2, 1, D)),
    ),
    "numbers of rows": (
        lambda x, s, w: (L.function("add_rmsnorm", rowscale=True, residual=False, h=False)(x, s[..., 0], w, eps=1e-6),),
        lambda x, s, w: (F.rms_norm(x * s[..., :1], (D,), w, 1e-6),),
        ((2, 5, D), (2, 1, D)),
    ),
}


@pytest.mark.parametrize("name", BROADCAST)
def test_leading_dimensions_broadcast_and_gradients_are_summed(name: str) -> None:
    ours, theirs, shapes = BROADCAST[name]
    torch.manual_seed(1)
    inputs = [torch.randn(*shape).requires_grad_() for shape in (*shapes, (D,))]
    found, expected = ours(*inputs), theirs(*inputs)
    dys = [torch.randn_like(y) for y in expected]
    for y, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(y, wanted, rtol=5e-6, atol=5e-6)
    gradients = torch.autograd.grad(found, inputs, dys)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, inputs, dys), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-5)


JAGGED: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "layer_norm": (lambda x, w: L.layer_norm(x, (D,), w, w), (D,)),
    "layer_norm of two dimensions": (lambda x, w: L.layer_norm(x, (2, D)), (2, D)),
    "module": (lambda x, w: L.RMSNorm(D)(x), (D,)),
    "softmax": (lambda x, w: L.softmax(x, -1), (D,)),
    "add_rms_norm": (lambda x, w: L.add_rms_norm(x, x * 2, (D,), w)[1], (3, D)),
    "function": (lambda x, w: L.function("rmsnorm")(x, w, eps=1e-5), (D,)),
}


@pytest.mark.parametrize("name", JAGGED)
def test_a_jagged_tensor_is_that_of_its_values(name: str) -> None:
    call, shape = JAGGED[name]
    parts, w = [torch.randn(rows, *shape) for rows in (2, 0, 5)], torch.randn(D, requires_grad=True)
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    y = call(x, w)
    assert y.shape == x.shape
    values = torch.cat(parts).requires_grad_()
    expected = call(values, w)
    assert torch.equal(y.values(), expected)
    (dx,) = torch.autograd.grad(y.values().pow(2).sum(), x)
    assert torch.equal(dx.values(), torch.autograd.grad(expected.pow(2).sum(), values)[0])


@pytest.mark.parametrize("weight", ["colscale", "beta"])
@pytest.mark.parametrize("name", [n for n in OPS if "parallel" not in n and n not in OF_SETS | HEADS.keys()])
def test_each_weight_alone_may_be_wider_than_the_rows(name: str, weight: str) -> None:
    """Also one that is absent by default."""
    ops = OPS[name]
    if weight in ops.optional:
        given = {n: torch.randn(2, D).half() for n in ("x", "residual", "z")} | {"alpha": torch.ones(())}
        given[weight] = torch.randn(D, requires_grad=True)
        y = ops.fwd(*[given.get(n) for n in ops.inputs], **({"eps": 1e-5} if ops.takes_eps else {}))[0]
        assert y.dtype is torch.float16
        assert torch.autograd.grad(y.sum(), given[weight])[0].dtype is torch.float32
