"""If these fail, a wrong call of lngen.torch does not raise what PyTorch's own function raises, or does not say why."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import lngen.torch as L

D = 8
BF16, F32 = torch.bfloat16, torch.float32
NORMS = {"layer_norm": (L.layer_norm, F.layer_norm), "rms_norm": (L.rms_norm, F.rms_norm)}
SOFTMAXES = {"softmax": (L.softmax, F.softmax), "log_softmax": (L.log_softmax, F.log_softmax)}


def ones(*shape: int, dtype: Any = F32, device: str = "cpu") -> Any:
    return torch.ones(*shape, dtype=dtype, device=device)


def message(function: Callable[..., Any], *args: Any, **keys: Any) -> tuple[type[BaseException], str]:
    with pytest.raises(Exception) as caught:  # noqa: PT011  the caller compares it with PyTorch's
        function(*args, **keys)
    return caught.type, str(caught.value)


def check(pair: tuple[Callable[..., Any], Callable[..., Any]], advice: str, *args: Any) -> None:
    """The class of PyTorch's error and its words, but for the name of a kernel, and then the advice."""
    (ours, text), (theirs, wanted) = (message(function, *args) for function in pair)
    theirs = RuntimeError if issubclass(theirs, RuntimeError) and theirs is not NotImplementedError else theirs
    assert issubclass(ours, theirs), (ours, theirs)
    text, wanted = (re.sub(r'^"\w+"', '""', t.replace("[*7]", "[*, 7]")) for t in (text, wanted))
    words = wanted.rstrip(".!")
    assert text.startswith(words), f"{text}\n{wanted}"
    assert re.search(advice, text[len(words) :]), text


SHAPES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "another shape": ("names the last dimensions of input", ((7,),)),
    "more dimensions": ("names the last dimensions of input", ((2, 4, D),)),  # ValueError of rms_norm alone
    "empty shape": ("Name the dimensions to normalise", ((),)),
    "another weight": ("Reshape weight, or leave it out", ((D,), ones(D - 1))),
    "another bias": ("Reshape bias, or leave it out", ((D,), None, ones(D - 1))),
}


@pytest.mark.parametrize("what", SHAPES)
@pytest.mark.parametrize("name", NORMS)
def test_shapes_that_do_not_fit(name: str, what: str) -> None:
    advice, args = SHAPES[what]
    if name == "layer_norm" or what != "another bias":
        check(NORMS[name], advice, ones(4, D), *args)


def test_weights_of_two_dtypes() -> None:
    args = ones(4, D, dtype=BF16), (D,), ones(D), ones(D, dtype=BF16)
    check(NORMS["layer_norm"], "'beta' is BFloat16; cast it", *args)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", [*NORMS, *SOFTMAXES])
def test_a_dtype_that_neither_has(name: str, dtype: Any) -> None:
    args = (-1,) if name in SOFTMAXES else ((D,),)
    check({**NORMS, **SOFTMAXES}[name], "expected to be one of torch.float16, .*; cast it", ones(4, D).to(dtype), *args)


@pytest.mark.parametrize("name", ["layer_norm", *SOFTMAXES])
def test_complex_numbers(name: str) -> None:
    """PyTorch's rms_norm alone takes them."""
    args = (-1,) if name in SOFTMAXES else ((D,),)
    check({**NORMS, **SOFTMAXES}[name], "cast it", ones(4, D, dtype=torch.complex64), *args)


@pytest.mark.parametrize(("x", "weight"), [("cuda", "cpu"), ("cpu", "cuda")])
@pytest.mark.parametrize("name", NORMS)
def test_a_weight_on_another_device(name: str, x: str, weight: str) -> None:
    with FakeTensorMode():
        args = ones(4, D, device=x), (D,), ones(D, device=weight)
        check(NORMS[name], "'gamma' is not where 'x' is; move it there", *args)


@pytest.mark.parametrize("name", SOFTMAXES)
def test_a_dimension_that_is_none(name: str) -> None:
    """PyTorch's own function raises it."""
    assert message(SOFTMAXES[name][0], ones(4, D), 5) == message(SOFTMAXES[name][1], ones(4, D), 5)


# ---- what PyTorch takes, or has no function for ----


def test_weights_of_two_dtypes_on_a_gpu() -> None:
    """In the words of PyTorch's kernel for CUDA."""
    with FakeTensorMode():
        gamma, beta = (ones(D, dtype=t, device="cuda") for t in (F32, BF16))
        kind, text = message(L.layer_norm, ones(4, D, device="cuda"), (D,), gamma, beta)
    assert kind is L.bridge.TorchError
    assert text.startswith("expected scalar type Float but found BFloat16. 'beta' is BFloat16; cast it")


def test_what_pytorch_refuses_and_lngen_takes() -> None:
    """A number for the shape, and weights narrower or wider than the rows, whose dtype the result has."""
    for x, weight in ((F32, BF16), (torch.float64, F32)):
        y = L.layer_norm(ones(4, D, dtype=x), D, ones(D, dtype=weight))
        assert y.dtype == x
        assert message(F.layer_norm, ones(4, D, dtype=x), (D,), ones(D, dtype=weight))[0] is RuntimeError


NO_TENSORS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "list": lambda: [1.0] * D,
    "NumPy": lambda: np.ones((4, D), np.float32),
    "COO": lambda: ones(4, D).to_sparse(),
    "CSR": lambda: ones(4, D).to_sparse_csr(),
    "MKL-DNN": lambda: ones(4, D).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([ones(2, D), ones(3, D)]),
    "quantized": lambda: torch.quantize_per_tensor(ones(4, D), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore")  # of PyTorch's, that such tensors are in beta
@pytest.mark.parametrize("what", NO_TENSORS)
def test_what_is_no_dense_tensor(what: str) -> None:
    """The class of PyTorch's error, where it has one function; but an AttributeError of F.softmax is a TypeError."""
    given, kind = NO_TENSORS[what](), TypeError if what in ("None", "list", "NumPy") else NotImplementedError
    calls: dict[str, Callable[[], Any]] = {
        "input": lambda: L.layer_norm(given, (D,)),
        "weight": lambda: L.rms_norm(ones(4, D), (D,), given),
        "residual": lambda: L.add_layer_norm(ones(4, D), given, (D,)),
        "x": lambda: L.function("rmsnorm", gamma=False)(given, eps=1e-5),
    }
    calls |= {f"input {name}": lambda f=f: f(given, -1) for name, (f, _) in SOFTMAXES.items()}
    calls |= {"input of a norm": lambda: L.l2_norm(given), "input of DyT": lambda: L.dyt(given, ones(1))}
    for name, call in calls.items():
        if given is None and name in ("weight", "x"):  # no weight, and an input that is missing
            continue
        with pytest.raises(kind, match=f"'{name.split()[0]}'") as raised:
            call()
        assert isinstance(raised.value, L.bridge.TorchError)


def test_jagged_tensors_that_do_not_fit() -> None:
    x = torch.nested.nested_tensor([ones(2, D), ones(3, D)], layout=torch.jagged)
    with pytest.raises(RuntimeError, match="'residual' is expected to be jagged"):
        L.add_layer_norm(x, x.values(), (D,))
    with pytest.raises(RuntimeError, match="'x' is expected to be jagged"):
        L.add_layer_norm(x.values(), x, (D,))
    with pytest.raises(NotImplementedError, match="jagged dimension of features"):
        L.layer_norm(x.transpose(1, 2), x.transpose(1, 2).shape[-1:])
