"""If these fail, the cross-entropy of lngen.torch is not PyTorch's, or loses a gradient."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import lngen.torch as L  # noqa: E402
from direct_tensors import forget, go_the_direct_way  # noqa: E402
from lngen.errors import LngenError  # noqa: E402
from lngen.torch.graph_ops import INDEX  # noqa: E402
from lngen.torch.losses import _factor  # noqa: E402

C, IGNORED = 9, 2
WEIGHT = torch.linspace(0.5, 1.5, C)
TARGET = torch.tensor([1, IGNORED, 0, 8, 5])


def logits(*shape: int, dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    return torch.randn(*(shape or (5, C))).mul(2).to(dtype).requires_grad_()


OPTIONS = [
    {"reduction": reduction, "label_smoothing": smoothing, "weight": weight, "ignore_index": ignored}
    for reduction, smoothing, weight, ignored in itertools.product(
        ("none", "mean", "sum"), (0.0, 0.1), (None, WEIGHT), (-100, IGNORED)
    )
]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: " ".join(str(v).partition("(")[0] for v in o.values()))
def test_losses_and_gradients_are_pytorch_s(options: dict[str, Any], at_once: bool) -> None:
    x, cotangent = logits(), 3.0
    want = F.cross_entropy(x, TARGET, **options)
    (wanted,) = torch.autograd.grad(want.sum() * cotangent, x)
    given = x.clone() if at_once else x
    loss = L.cross_entropy(given, TARGET, **options, x_grad=at_once)
    (found,) = torch.autograd.grad(loss.sum() * cotangent, given)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert (found.data_ptr() == given.data_ptr()) is at_once
    module = L.CrossEntropyLoss(**options)
    assert torch.equal(module(x, TARGET), L.cross_entropy(x, TARGET, **options))


class Seen(TorchDispatchMode):
    """The operators of PyTorch that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(op.overloadpacket.__name__)
        return op(*args, **(kwargs or {}))


def test_the_factor_of_a_mean_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of lngen's, none of PyTorch's. A count has PyTorch's bits."""
    x, target, gpu = logits(), torch.arange(3000) % 10 - 1, go_the_direct_way(monkeypatch)
    for weight, dtype in itertools.product((None, WEIGHT), (torch.int64, torch.int32)):
        classes = target.to(dtype)
        with Seen() as seen:
            wanted = _factor(x, classes, weight, -1, "mean")  # by the interpreter
        assert not gpu.launched
        assert seen.names <= {"detach", "lift_fresh", "view", "_unsafe_view"}
        for launches in (1, 2):
            assert torch.equal(_factor(x, classes, weight, -1, "mean"), wanted)
            assert len(gpu.launched) == launches
        gpu.launched.clear()
        each = torch.ones(C) if weight is None else weight.double()
        kept = each[target[target >= 0]].sum().reciprocal().float()
        torch.testing.assert_close(wanted, kept, rtol=0 if weight is None else 1e-6, atol=0)
    forget()


def model_s(x: Any, weight: Any = None) -> Any:
    """With lngen's options, in PyTorch's words."""
    z = 3 * torch.tanh(x / 3)
    loss = F.cross_entropy(z, TARGET, weight, reduction="none", label_smoothing=0.1)
    return (loss + 0.1 * torch.logsumexp(z, -1) ** 2).sum()


def own(x: Any, **more: Any) -> Any:
    return L.cross_entropy(x, TARGET, z_loss=0.1, softcap=3.0, label_smoothing=0.1, reduction="sum", **more)


def test_first_and_second_derivatives_with_the_keys_of_lngen() -> None:
    found: list[Any] = []
    for function, x in ((own, logits()), (model_s, logits().detach().double().requires_grad_())):
        (first,) = torch.autograd.grad(function(x), x, create_graph=True)
        found.append((first, *torch.autograd.grad(first.pow(2).sum(), x)))
    for one, wanted in zip(*found, strict=True):
        torch.testing.assert_close(one.double(), wanted, rtol=1e-5, atol=1e-6)


def test_one_compiled_graph_and_transforms() -> None:
    x = logits()
    compiled = torch.compile(own, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(compiled, own(x))
    torch.testing.assert_close(torch.func.grad(own)(x.detach()), torch.autograd.grad(own(x), x)[0])


@pytest.mark.parametrize("shards", [(6, 3), (2, 3, 4)])
def test_shards_of_a_vocabulary_have_the_loss_of_the_whole(shards: tuple[int, ...]) -> None:
    x = logits()
    parts = [p.contiguous() for p in x.split(shards, 1)]
    firsts = [0, *itertools.accumulate(shards[:-1])]
    numbers = [L.cross_entropy_shard(p, TARGET, f, C, softcap=3.0) for p, f in zip(parts, firsts, strict=True)]
    joined = [torch.stack(of_shards, -1) for of_shards in zip(*numbers, strict=True)]
    loss = L.cross_entropy_join(*joined, TARGET, C, z_loss=0.1, ignore_index=IGNORED)
    whole = L.cross_entropy(x, TARGET, softcap=3.0, z_loss=0.1, ignore_index=IGNORED)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(torch.autograd.grad(loss, x), torch.autograd.grad(whole, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keys", ["", "reduction=mean,lse=yes", "target_dtype=i32,save=none"])
@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_the_operator_passes_pytorchs_own_checks(keys: str, weight: Any) -> None:
    target = TARGET.int() if "i32" in keys else TARGET
    torch.library.opcheck(INDEX.fwd, (logits(), target, weight), {"keys": keys})


def test_a_16_bit_loss_is_float32_and_shapes_are_pytorch_s() -> None:
    half = logits(dtype=torch.bfloat16)
    loss = L.cross_entropy(half, TARGET)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(half.float(), TARGET))
    one = logits(C)
    torch.testing.assert_close(L.cross_entropy(one, TARGET[0]), F.cross_entropy(one, TARGET[0]))
    images, probabilities = logits(2, C, 4), torch.softmax(logits(), -1)
    pixels = torch.zeros(2, 4, dtype=torch.long)
    assert torch.equal(L.cross_entropy(images, pixels), F.cross_entropy(images, pixels))
    assert torch.equal(L.cross_entropy(logits(), probabilities), F.cross_entropy(logits(), probabilities))
    with pytest.warns(UserWarning, match="size_average"):
        torch.testing.assert_close(L.cross_entropy(one, TARGET[0], None, False), F.cross_entropy(one, TARGET[0]))


def test_the_gradient_at_once_is_used_once() -> None:
    x = logits().clone()
    loss = L.cross_entropy(x, TARGET, x_grad=True)
    torch.autograd.grad(loss, x, retain_graph=True)
    with pytest.raises(LngenError, match="is used up by the first backward"):
        torch.autograd.grad(loss, x)
    x = logits().clone()
    saved = torch.tanh(x).sum() + x.pow(2).sum()  # whose backward needs x
    loss = L.cross_entropy(x, TARGET, x_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (saved + loss).backward()
    with torch.no_grad():
        before = x.clone()
        L.cross_entropy(x, TARGET, x_grad=True)
        assert torch.equal(x, before)


def test_patch_takes_the_loss_and_unpatch_gives_it_back() -> None:
    model = nn.ModuleDict({"norm": nn.LayerNorm(C), "loss": nn.CrossEntropyLoss(ignore_index=IGNORED)})
    with pytest.warns(UserWarning, match="interpreter"):
        found = L.patch(model)
    assert found.patched == {"norm": "layer_norm", "loss": "cross_entropy"}
    x = logits()
    torch.testing.assert_close(model["loss"](x, TARGET), F.cross_entropy(x, TARGET, ignore_index=IGNORED))
    assert "lngen" in type(model["loss"](x, TARGET).grad_fn).__name__
    assert L.patch(model).already["loss"] == "cross_entropy"
    assert L.unpatch(model) == 2
    assert type(model["loss"]) is nn.CrossEntropyLoss


def both(reduction: str) -> tuple[Any, ...]:
    """The loss, and its gradient where there is one."""
    x = logits().requires_grad_(torch.is_grad_enabled())
    loss = L.cross_entropy(x, TARGET, WEIGHT, reduction=reduction)
    return (loss.detach(), *(torch.autograd.grad(loss.sum(), x) if loss.requires_grad else ()))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_the_direct_way_has_the_bits_of_the_dispatchers(
    monkeypatch: pytest.MonkeyPatch, reduction: str, grad: bool
) -> None:
    with torch.set_grad_enabled(grad):
        wanted = both(reduction)
        gpu = go_the_direct_way(monkeypatch)
        for _ in range(2):
            before = len(gpu.launched)
            assert all(map(torch.equal, both(reduction), wanted))
            assert len(gpu.launched) > before
    forget()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a class too large": (lambda: L.cross_entropy(logits(), TARGET + 1), "classes from 0 to 8, or ignore_index=-100"),
    "another length": (lambda: L.cross_entropy(logits(), TARGET[:3]), "'target' is expected to have"),
    "weights of another length": (lambda: L.cross_entropy(logits(), TARGET, WEIGHT[:3]), "'class_weight' is expected"),
    "a float target": (lambda: L.cross_entropy(logits(), TARGET.float(), z_loss=0.1), "not implemented for 'Float'"),
    "smoothing": (lambda: L.cross_entropy(logits(), TARGET, label_smoothing=2.0), "label_smoothing is expected"),
    "a reduction": (lambda: L.cross_entropy(logits(), TARGET, reduction="max"), "there is no reduction 'max'"),
    "a shard beyond": (
        lambda: L.cross_entropy_shard(logits(), TARGET, 3, 11),
        "lie in a vocabulary of 11, got first_c",
    ),
    "a shard before": (
        lambda: L.cross_entropy_shard(logits(), TARGET, -1, 11),
        "lie in a vocabulary of 11, got first_c",
    ),
    "without logits": (
        lambda: L.function("cross_entropy", target="index", vocabulary="none"),
        r"an \[M, D\] input, of which an operator takes D and dtype, got target; call lngen.compile\('cross_entropy'",
    ),
    "not contiguous": (lambda: L.cross_entropy(logits(C, 5).t(), TARGET, x_grad=True), "expected to be contiguous"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_in_one_sentence(name: str) -> None:
    call, why = REFUSED[name]
    with pytest.raises(LngenError, match=why) as error:
        call()
    assert "\n" not in str(error.value)
