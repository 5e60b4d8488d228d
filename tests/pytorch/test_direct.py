"""If these fail, a call past PyTorch's dispatcher gives other bits, or is taken for one that it is not like."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lngen.torch as L
from direct_tensors import forget, go_the_direct_way
from fake_driver import FakeDriver
from lngen.errors import LngenError
from lngen.launch import direct
from lngen.launch.array_call import ArrayCall
from lngen.launch.direct import Kernels, Prepared
from lngen.torch.graph_way import Direct
from native_launches import go_native

D = 64


class Passing(TorchFunctionMode):
    """Sees every function and changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["python", pytest.param("native", marks=pytest.mark.full(sample=False))])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    driver = go_the_direct_way(monkeypatch)
    native = go_native(monkeypatch, driver) if request.param == "native" else None
    yield driver
    forget()
    assert native is None or not native.errors


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x, residual = (drawn(2, 3, D, dtype=dtype) for _ in range(2))
    return x, drawn(D, dtype=dtype), drawn(D, dtype=dtype), residual


def qk_norm_rope(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of heads of 16 features, with positions in a table of three."""
    angle = torch.arange(24.0).view(3, 8)
    at = torch.tensor([[0, 2, 1]] * 2)
    return L.qk_norm_rope(x, w[:16], b[:16], angle.cos(), angle.sin(), at, (2, 1, 1))[:2]


CALLS: dict[str, Callable[..., Any]] = {
    "layernorm": lambda x, w, b, r: L.layer_norm(x, (D,), w, b),
    "layernorm without weights": lambda x, w, b, r: L.layer_norm(x, [D]),
    "layernorm with bias alone": lambda x, w, b, r: L.layer_norm(x, D, None, b),
    "layernorm of two dimensions": lambda x, w, b, r: L.layer_norm(x, (3, D)),
    "rmsnorm": lambda x, w, b, r: L.rms_norm(x, (D,), w, casts="llama"),
    "add_layernorm": lambda x, w, b, r: torch.cat(L.add_layer_norm(x, r, (D,), w, b)),
    "add_rmsnorm": lambda x, w, b, r: torch.cat(L.add_rms_norm(x, r, (D,), w)),
    "gated_rmsnorm": lambda x, w, b, r: L.gated_rms_norm(x, r, (D,), w),
    "softmax": lambda x, w, b, r: L.softmax(x, -1),
    "dyt": lambda x, w, b, r: L.dyt(x, b[:1], w, b),
    "one weight twice": lambda x, w, b, r: L.layer_norm(x, (D,), w, w),
    "ada_layer_norm": lambda x, w, b, r: L.ada_layer_norm(x, r[:, :1], r[:, 1:2]),
    "ada_layer_norm with a gate": lambda x, w, b, r: torch.cat(L.ada_layer_norm(x, r[:, 0], r[:, 1], r[:, 2], x * 2)),
    "ada_rms_norm of rows": lambda x, w, b, r: L.ada_rms_norm(x, None, r, weight=w),
    "cross_entropy": lambda x, w, b, r: L.cross_entropy(x.flatten(0, 1), torch.arange(6)),
    "cross_entropy, weighted": lambda x, w, b, r: L.cross_entropy(x.flatten(0, 1), torch.arange(6), w.detach().abs()),
    "qk_norm_rope": lambda x, w, b, r: torch.cat([y.flatten(-2) for y in qk_norm_rope(x, w, b)], -1),
}


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.full(sample=False))], ids=str
)
@pytest.mark.parametrize("name", CALLS)
def test_the_bits_are_those_of_the_dispatchers_way(gpu: FakeDriver, name: str, dtype: torch.dtype) -> None:
    given = inputs(dtype)
    with Passing():  # which the direct way does not take
        expected = CALLS[name](*given)
        dy = torch.randn(expected.shape).to(dtype)
        gradients = torch.autograd.grad(expected, given, dy, allow_unused=True)
    assert not gpu.launched
    for _ in range(2):  # the first call of its kind, and one that is like it
        before = len(gpu.launched)
        y = CALLS[name](*given)
        assert torch.equal(y, expected)
        for found, wanted in zip(torch.autograd.grad(y, given, dy, allow_unused=True), gradients, strict=True):
            assert (found is None) == (wanted is None)
            assert found is None or (torch.equal(found, wanted) and found.stride() == wanted.stride())
        assert len(gpu.launched) >= before + 2
    with torch.no_grad():
        assert torch.equal(CALLS[name](*given), expected)


def test_heads_are_written_over_their_projection_the_direct_way(gpu: FakeDriver) -> None:
    """x is an input and the result; the same weight is that of q and of k."""
    qkv, w = torch.randn(4, 8, D), torch.randn(16)  # so many rows as a block has
    angle = torch.arange(256.0).view(4, 8, 8)
    expected = [t.clone() for t in L.qk_norm_rope(qkv, w, w, angle.cos(), angle.sin(), heads=(2, 1, 1))]
    for _ in range(2):
        before, own = len(gpu.launched), qkv.clone()
        found = L.qk_norm_rope(own, w, w, angle.cos(), angle.sin(), heads=(2, 1, 1), in_place=True)
        assert len(gpu.launched) == before + 1
        assert all(map(torch.equal, found, expected))
        assert all(t.untyped_storage().data_ptr() == own.untyped_storage().data_ptr() for t in found)


def summed(x: Any, w: Any, r: Any) -> Any:
    h = x + r
    return L.rms_norm(L.rms_norm(h, (D,), w), (D,)) + h


def test_graphs_of_the_backend_call_norms_the_direct_way(gpu: FakeDriver) -> None:
    x, w, _, r = given = inputs()
    with Passing():
        expected = summed(x, w, r)
        gradients = torch.autograd.grad(expected.sum(), (x, w, r))
    torch._dynamo.reset()
    run = torch.compile(summed, backend="lngen", fullgraph=True)
    for kernels in (2, 2):
        before = len(gpu.launched)
        y = run(x, w, r)
        assert torch.equal(y, expected)
        assert len(gpu.launched) == before + kernels
        for found, wanted in zip(torch.autograd.grad(y.sum(), (x, w, r)), gradients, strict=True):
            torch.testing.assert_close(found, wanted)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which it leaves to the dispatcher
        before = len(gpu.launched)
        run(*(given[n] for n in (0, 1, 3)))
        assert len(gpu.launched) == before


def test_a_tensor_that_is_there_twice_is_prepared_once(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = list[int](), Prepared.__init__
    monkeypatch.setattr(Prepared, "__init__", lambda *given: (made.append(1), real(*given))[1])
    x, w, b, _ = (t.detach() for t in inputs())
    for weight in (w, w, b, b):
        L.layer_norm(x, (D,), weight, weight)
    assert len(made) == 1
    L.layer_norm(x, (D,), w, b)  # which differ
    assert len(made) == 2


def test_a_step_prepares_the_kernels_that_it_takes(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with gradients has no use for results alone; the extension gets both at once."""
    made, real = list[str](), Kernels.__init__

    def heard(kernels: Kernels, call: ArrayCall, *given: Any, **more: Any) -> None:
        made.append("alone" if "save=none" in call.text else call.text.partition(":")[0])
        real(kernels, call, *given, **more)

    monkeypatch.setattr(Kernels, "__init__", heard)
    x, w, b, _ = inputs()
    y = L.layer_norm(x, (D,), w, b)
    y.backward(torch.ones_like(y))
    assert ("alone" in made) == (direct.native is not None)
    assert made[-2:] == ["layernorm.fwd", "layernorm.bwd"]
    with torch.no_grad():
        L.layer_norm(x, (D,), w, b)
        L.layer_norm(x[:1], (D,), w, b)
    more = ["layernorm.fwd"] if direct.native is not None else []
    assert sorted(made) == ["alone", "alone", "layernorm.bwd", "layernorm.fwd", *more]


def test_a_call_like_an_earlier_one_is_prepared_no_more(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last call is asked first, and then those with rows of the same shape."""
    asked = list[str]()

    def heard(owner: Any, name: str) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (asked.append(name), real(*args))[1])

    heard(Direct, "prepare")
    heard(Prepared, "like")
    x, w, b, _ = inputs()
    longer = x.detach()[:1].clone()

    def calls(*given: Any) -> list[str]:
        asked.clear()
        L.layer_norm(*given)
        return [*asked]

    one, without, other = (x, (D,), w, b), (x, (D,), w), (longer, (D,), w, b)
    assert [calls(*call) for call in (one, without, other)] == [
        ["prepare"],
        ["like", "like", "prepare"],
        ["like", "prepare"],
    ]
    assert [calls(*other), calls(*other)] == [["like"], ["like"]]
    assert calls(*one) == ["like", "like"]
    assert calls(*one) == ["like"]
    assert calls(*without) == ["like"] * 3  # the last, and both of its shape
    assert calls(*without) == ["like"]


# ---- what is not like an earlier call ----


class Seeing(TorchDispatchMode):
    """Writes down the operators it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "mode",
    [Passing, Seeing, lambda: torch.autocast("cpu", torch.bfloat16), forward_ad.dual_level],
    ids=["functions", "dispatch", "autocast", "forward mode"],
)
def test_a_mode_is_seen_before_and_after_it_was_met(gpu: FakeDriver, mode: Callable[[], Any]) -> None:
    x, w, b, _ = inputs()
    for _ in range(2):
        with mode():
            L.layer_norm(x, (D,), w, b)
        assert not gpu.launched
    L.layer_norm(x, (D,), w, b)
    launched = len(gpu.launched)
    assert launched
    with mode():
        L.layer_norm(x, (D,), w, b)
    assert len(gpu.launched) == launched


def test_torch_func_is_seen(gpu: FakeDriver) -> None:
    x, w, b, _ = inputs()
    expected = L.layer_norm(x, (D,), w, b)
    launched = len(gpu.launched)
    mapped = torch.func.vmap(lambda row: L.layer_norm(row, (D,), w, b))(x)
    torch.testing.assert_close(mapped, expected)
    torch.func.grad(lambda t: L.layer_norm(t, (D,), w, b).pow(2).sum())(x.detach())
    assert len(gpu.launched) == launched


UNLIKE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dtype": lambda x: x.detach().bfloat16().requires_grad_(),
    "rows": lambda x: x.detach()[:1].clone().requires_grad_(),
    "strides": lambda x: x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(),
    "gradient": lambda x: x.detach().clone(),
    "class": lambda x: x.detach().as_subclass(Subclass).requires_grad_(),
    "address": lambda x: torch.cat([x.detach().flatten()[:1], x.detach().flatten()])[1:].view(x.shape).requires_grad_(),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_another_tensor_gets_its_own_result(gpu: FakeDriver, what: str) -> None:
    x, w, b, _ = inputs()
    other = UNLIKE[what](x)
    weights = w, b
    if what == "dtype":
        weights = w.detach().bfloat16(), b.detach().bfloat16()
    with Passing():
        expected = L.layer_norm(other, (D,), *weights)
    L.layer_norm(x, (D,), w, b)
    y = L.layer_norm(other, (D,), *weights)
    assert torch.equal(y, expected)
    assert y.requires_grad == expected.requires_grad
    assert y.is_contiguous()


def test_eps_options_and_absent_weights_are_told_apart(gpu: FakeDriver) -> None:
    x, w, _, _ = inputs()
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: L.layer_norm(x, (D,), w), lambda: L.layer_norm(x, (D,), None, w),
        lambda: L.layer_norm(x, (D,), w, eps=0.5), lambda: L.layer_norm(x, (D,), w, zero_centred=True),
        lambda: L.rms_norm(x, (D,), w), lambda: L.rms_norm(x, (D,), w, 0.5), lambda: L.layer_norm(x, (3, D)),
    ]  # fmt: skip
    with Passing():
        expected = [call() for call in calls]
    for _ in range(2):
        for call, wanted in zip(calls, expected, strict=True):
            assert torch.equal(call(), wanted)


def test_a_gradient_of_another_layout_or_of_none_is_taken(gpu: FakeDriver) -> None:
    x, w, b, r = inputs()
    torch.autograd.grad(L.layer_norm(x, (D,), w, b), (x, w), torch.ones(2, 3, D))
    for dy in (torch.ones(()).expand(2, 3, D), torch.randn(2, D, 3).transpose(1, 2)):
        with Passing():
            expected = torch.autograd.grad(L.layer_norm(x, (D,), w, b), (x, w), dy)
        for found, wanted in zip(torch.autograd.grad(L.layer_norm(x, (D,), w, b), (x, w), dy), expected, strict=True):
            assert torch.equal(found, wanted)
    y, _ = L.add_rms_norm(x, r, (D,), w)
    with Passing():
        expected = torch.autograd.grad(L.add_rms_norm(x, r, (D,), w)[0].sum(), (x, r, w))
    for found, wanted in zip(torch.autograd.grad(y.sum(), (x, r, w)), expected, strict=True):
        assert torch.equal(found, wanted)


def test_second_derivatives_are_there(gpu: FakeDriver) -> None:
    x, w, b, _ = inputs()

    def penalty() -> tuple[torch.Tensor, ...]:
        (dx,) = torch.autograd.grad(L.layer_norm(x, (D,), w, b).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(dx.pow(2).sum(), (x, w))

    with Passing():
        expected = penalty()
    for found, wanted in zip(penalty(), expected, strict=True):
        assert torch.equal(found, wanted)


def test_out_has_no_derivative(gpu: FakeDriver) -> None:
    x, w, b, _ = inputs()
    with pytest.raises(RuntimeError, match=r"functions with out=.* arguments don't support automatic differentiation"):
        L.layer_norm(x, (D,), w, b, out=torch.empty_like(x))


@pytest.mark.parametrize("rows", [1, 3])
def test_statistics_of_an_odd_number_of_rows_take_the_fast_launch(
    gpu: FakeDriver, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ArrayCall, "launch", lambda *args: pytest.fail("the general launch"))
    x, w, b, _ = inputs()
    x = x.detach()[0, :rows].clone().requires_grad_()
    L.layer_norm(x, (D,), w, b).backward(torch.ones_like(x))


def test_a_refused_launch_is_reported(gpu: FakeDriver) -> None:
    x, w, b, _ = inputs()
    y = L.layer_norm(x, (D,), w, b)
    gpu.refuse["cuLaunchKernelEx"] = 719
    with pytest.raises(LngenError, match=r"refuses the launch of 'layernorm_fwd.*719"):
        L.layer_norm(x, (D,), w, b)
    with pytest.raises(LngenError, match=r"refuses the launch of 'layernorm_bwd.*719"):
        y.backward(torch.ones_like(y))


def test_a_batch_of_gradients_that_comes_first_is_taken(gpu: FakeDriver) -> None:
    x, w, b, _ = inputs()
    y, dy = L.layer_norm(x, (D,), w, b), torch.randn(2, 2, 3, D)
    found = torch.autograd.grad(y, (x, w), dy, is_grads_batched=True, retain_graph=True)
    for one, wanted in zip(found, torch.autograd.grad(y, (x, w), dy[1]), strict=True):
        torch.testing.assert_close(one[1], wanted)


def test_an_expanded_gradient_that_comes_first_is_taken(gpu: FakeDriver) -> None:
    x, w, b, _ = inputs()
    for _ in range(2):
        with Passing():
            expected = torch.autograd.grad(L.layer_norm(x, (D,), w, b).sum(), (x, w, b))
        found = torch.autograd.grad(L.layer_norm(x, (D,), w, b).sum(), (x, w, b))
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_negated_view_is_negated(gpu: FakeDriver, which: int) -> None:
    """The first call of its kind, and one like an earlier one; a cotangent, too."""
    given = list(inputs()[:3])
    expected = L.layer_norm(given[0], (D,), *given[1:])
    dy = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, given, dy)
    given[which] = torch._neg_view(-given[which].detach()).requires_grad_()
    for _ in range(2):
        y = L.layer_norm(given[0], (D,), *given[1:])
        assert torch.equal(y, expected)
        for found, gradient in zip(torch.autograd.grad(y, given, torch._neg_view(-dy)), wanted, strict=True):
            assert torch.equal(found, gradient)
        forget()


def test_a_result_without_features_goes_back_the_direct_way(gpu: FakeDriver) -> None:
    """The statistics of cross-entropy have the rows of its loss."""
    loss, x = L.function("cross_entropy"), inputs()[0]
    target = torch.softmax(torch.randn(2, 3, D), -1)
    with Passing():
        (expected,) = torch.autograd.grad(loss(x, target).sum(), x)
    y = loss(x, target)
    launched = len(gpu.launched)
    assert torch.equal(torch.autograd.grad(y, x, torch.ones(2, 3))[0], expected)
    assert len(gpu.launched) > launched


@pytest.mark.parametrize("gpu", ["python"], indirect=True)  # it does not work with the extension
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which PyTorch reads itself
def test_compiled_autograd_takes_a_direct_forward(gpu: FakeDriver) -> None:
    x, w, b, _ = inputs()
    y = L.layer_norm(x, (D,), w, b)
    wanted = torch.autograd.grad(y, (x, w, b), torch.ones_like(y), retain_graph=True)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        y.backward(torch.ones_like(y))
    assert all(map(torch.equal, (x.grad, w.grad, b.grad), wanted))
    torch._dynamo.reset()
