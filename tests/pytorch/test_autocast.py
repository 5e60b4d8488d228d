"""If these fail, a model under autocast gets other dtypes from lngen.torch than from PyTorch."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import lngen.torch as L
from lngen.torch.graph_ops import OPS, backward_text
from torch_calls import CALLS, THEIRS, D, gradients, leaves

pytestmark = pytest.mark.filterwarnings(
    "ignore:Mismatch dtype between input and weight:UserWarning",  # what PyTorch says of its own rms_norm
    "ignore:User provided device_type of 'cuda', but CUDA is not available:UserWarning",
)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_the_cpu_results_and_gradients_have_pytorchs_dtypes(name: str, dtype: Any) -> None:
    """bf16 with weights of f32 stays bf16; also where PyTorch has a list of functions that autocast widens."""
    inputs = leaves()
    inputs[0] = inputs[0].detach().to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, expected = CALLS[name](*inputs), THEIRS[name](*inputs)
    assert y.dtype == expected.dtype
    found, wanted = gradients(y, inputs), gradients(expected, inputs)
    assert [g if g is None else g.dtype for g in found] == [g if g is None else g.dtype for g in wanted]


@pytest.fixture
def cuda_autocast() -> Iterator[FakeTensorMode]:
    """Autocast for CUDA as torch.autocast sets it, which refuses without a GPU, and tensors without content for it."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with FakeTensorMode() as mode:
            yield mode
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
        torch.clear_autocast_cache()


PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    **{name: (CALLS[name], THEIRS[name]) for name in THEIRS},
    "softmax of columns": (lambda x, w, b: L.softmax(x, 0), lambda x, w, b: F.softmax(x, 0)),
    "add_layer_norm": (
        lambda x, w, b: torch.cat(L.add_layer_norm(x, x, (D,), w, b)[:1]),
        lambda x, w, b: F.layer_norm(x + x, (D,), w, b),
    ),
    "the sum of add_layer_norm": (lambda x, w, b: L.add_layer_norm(x, x, (D,), w, b)[1], lambda x, w, b: x + x),
    "gated_rms_norm": (
        lambda x, w, b: L.gated_rms_norm(x, x, (D,), w),
        lambda x, w, b: F.rms_norm(x, (D,), w) * F.silu(x),
    ),
    "layer_norm_act": (
        lambda x, w, b: L.layer_norm_act(x, (D,), w, b),
        lambda x, w, b: F.silu(F.layer_norm(x, (D,), w, b)),
    ),
}
NARROW = ("gated_rms_norm", "layer_norm_act")  # lngen has no functions in float64


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "dtype"), [(n, t) for n in PAIRS for t in FLOATS if not (n in NARROW and t == torch.float64)]
)
def test_on_a_gpu_results_have_pytorchs_dtypes(cuda_autocast: Any, name: str, dtype: Any, weight: Any) -> None:
    """float32 for bf16 and f16, in one kernel that stores it."""
    w = torch.empty(D, dtype=weight, device="cuda")
    x = torch.empty(2, 3, D, dtype=dtype, device="cuda")
    ours, theirs = PAIRS[name]
    assert ours(x, w, w).dtype == theirs(x, w, w).dtype


def test_without_autocast_on_a_gpu_nothing_is_widened() -> None:
    with FakeTensorMode():
        x, w = torch.empty(4, D, dtype=torch.bfloat16, device="cuda"), torch.empty(D, device="cuda")
        for name in THEIRS:
            assert CALLS[name](x, w, w).dtype == THEIRS[name](x, w, w).dtype == torch.bfloat16


def test_gradients_on_a_gpu_have_the_dtypes_of_their_inputs(cuda_autocast: Any) -> None:
    """By the operators: PyTorch's autograd engine needs a real GPU for tensors of one."""
    x, w = torch.empty(4, D, dtype=torch.bfloat16, device="cuda"), torch.empty(D, device="cuda")
    ops = OPS["layernorm"]
    y, mean, rstd = ops.fwd(x, w, w, eps=1e-5, keys="out=f32")
    spec = ops.side((x, w, w), "out=f32").spec
    assert y.dtype == CALLS["layer_norm"](x, w, w).dtype
    assert str(spec) == "layernorm.fwd:d=8,dtype=bf16,weight=f32,out=f32,eps=run"
    dx, *dw = ops.bwd(y, x, w, w, mean, rstd, eps=1e-5, spec=backward_text(spec, ("x", "gamma", "beta"), ops.outputs))
    assert [t.dtype for t in (dx, *dw)] == [torch.bfloat16, torch.float32, torch.float32]
