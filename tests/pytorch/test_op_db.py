"""If these fail, lngen.torch does not take what PyTorch's own tests give the same function, or computes otherwise."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import lngen.torch as L

pytestmark = pytest.mark.filterwarnings(  # PyTorch's own samples cause them
    "ignore:ComplexHalf support is experimental:UserWarning",
    "ignore:Casting complex values to real discards the imaginary part:UserWarning",
    "ignore:Mismatch dtype between input and weight:UserWarning",
)

Function = Callable[..., Any]
FUNCTIONS: dict[str, tuple[Function, Function]] = {
    "nn.functional.layer_norm": (L.layer_norm, F.layer_norm),
    "native_layer_norm": (L.layer_norm, F.layer_norm),
    "nn.functional.rms_norm": (L.rms_norm, F.rms_norm),
    "softmax": (L.softmax, F.softmax),
    "log_softmax": (L.log_softmax, F.log_softmax),
}
REAL = "bfloat16 float16 float32 float64"
CONVERTED = f"{REAL} bool int8 int16 int32 int64 uint8 complex64 complex128"
DTYPES = {  # of PyTorch's samples: the module that has them takes seconds to import, and a run collects more than once
    "nn.functional.layer_norm": REAL,
    "native_layer_norm": REAL,
    "nn.functional.rms_norm": f"{REAL} complex64 complex128",
    "softmax": REAL,
    "softmax with_dtype": CONVERTED,
    "log_softmax": REAL,
    "log_softmax with_dtype": f"{CONVERTED} complex32",
}
CASES = [(name, getattr(torch, dtype)) for name, dtypes in DTYPES.items() for dtype in dtypes.split()]
REFUSING = "native_layer_norm", "nn.functional.rms_norm"  # of which PyTorch has wrong samples
NO_COMPLEX = "lngen has kernels for real numbers only, as PyTorch's layer_norm"
LISTED = {  # of which each sample fails
    ("nn.functional.rms_norm", torch.complex64): NO_COMPLEX,
    ("nn.functional.rms_norm", torch.complex128): NO_COMPLEX,
}
UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@cache
def ops() -> dict[str, Any]:
    """What PyTorch knows of each function, by name and variant."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {f"{op.name} {op.variant_test_name}".strip(): op for op in op_db if op.name in FUNCTIONS}


def leaves(arguments: list[Any]) -> list[Any]:
    return [t for t in arguments if isinstance(t, torch.Tensor)]


def wide(arguments: list[Any]) -> list[Any]:
    """The same numbers in float64."""
    return [a.detach().double().requires_grad_() if isinstance(a, torch.Tensor) else a for a in arguments]


def magnitude(arguments: list[Any], dy: Any, eps: float) -> float:
    """What roundings multiply: the largest product of an input, 1 / a deviation, a weight and a cotangent."""
    x, shape = arguments[0], arguments[1]
    factors = [*arguments, dy]
    if isinstance(shape, tuple):
        rows = x.flatten(-len(shape))
        factors.append(((rows - rows.mean(-1, keepdim=True)).square().mean(-1) + eps).abs().rsqrt())
    product = 1.0
    for factor in leaves(factors):
        product *= max(1.0, float(factor.detach().abs().max())) if factor.numel() else 1.0
    return product


def check(found: Any, theirs: Any, truth: Any, size: float) -> None:
    """The bits of PyTorch's result, or float64's within a rounding of the dtype and 64 of what is computed in."""
    assert (found.dtype, found.shape) == (theirs.dtype, theirs.shape)
    if not torch.equal(found, theirs):
        units = 64 * min(UNIT[found.dtype], 2.0**-24)
        torch.testing.assert_close(found.double(), truth, rtol=2 * UNIT[found.dtype], atol=units * size, equal_nan=True)


def check_sample(name: str, sample: Any, dtype: Any) -> None:
    """Forward and the gradients of all tensors."""
    ours, theirs = FUNCTIONS[name.split()[0]]
    arguments = [sample.input, *sample.args]
    y, expected = ours(*arguments, **sample.kwargs), theirs(*arguments, **sample.kwargs)
    if not dtype.is_floating_point:
        assert torch.equal(y, expected)
        return
    exact = wide(arguments)
    truth = theirs(*exact, **sample.kwargs)
    dy = torch.randn_like(expected)
    eps = next((a for a in (*sample.args, *sample.kwargs.values()) if isinstance(a, float)), 1e-5)
    size = magnitude(exact, dy.double(), eps)
    check(y, expected, truth, size)
    found = torch.autograd.grad(y, leaves(arguments), dy)
    wanted = torch.autograd.grad(expected, leaves(arguments), dy)
    for some in zip(found, wanted, torch.autograd.grad(truth, leaves(exact), dy.double()), strict=True):
        check(*some, size)


def samples(name: str, dtype: Any) -> list[Any]:
    found = list(ops()[name].sample_inputs("cpu", dtype, requires_grad=dtype.is_floating_point or dtype.is_complex))
    assert found
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]}")
def test_samples_pass_or_are_listed(case: tuple[str, Any]) -> None:
    torch.manual_seed(0)
    for sample in samples(*case):
        if case in LISTED:
            with pytest.raises(NotImplementedError, match=r"not implemented for 'Complex\w+'"):
                check_sample(case[0], sample, case[1])
        else:
            check_sample(case[0], sample, case[1])


def test_the_check_can_fail() -> None:
    (sample, *_) = samples("nn.functional.layer_norm", torch.float32)
    sample.kwargs["eps"] = 0.5
    ours = FUNCTIONS["nn.functional.layer_norm"]
    FUNCTIONS["nn.functional.layer_norm"] = (lambda *a, eps: L.layer_norm(*a, eps=eps * 1.01), F.layer_norm)
    try:
        with pytest.raises(AssertionError):
            check_sample("nn.functional.layer_norm", sample, torch.float32)
    finally:
        FUNCTIONS["nn.functional.layer_norm"] = ours


def test_the_cases_are_pytorchs() -> None:
    assert {*LISTED} <= {*CASES} == {(name, dtype) for name, op in ops().items() for dtype in op.dtypes}
    assert {*REFUSING} == {name for name, op in ops().items() if op.error_inputs_func}


def test_statistics_are_those_of_native_layer_norm() -> None:
    for sample in samples("native_layer_norm", torch.float64):
        shape, *weights, eps = sample.args
        flat = [None if t is None else t.flatten(-len(shape)) for t in (sample.input, *weights)]
        _, *found = torch.ops.lngen.layernorm_fwd(*flat, eps=eps)
        _, *wanted = torch.native_layer_norm(sample.input, *sample.args)
        for statistic, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(statistic, expected.reshape(statistic.shape), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", REFUSING)
def test_wrong_samples_raise_pytorchs_errors(name: str) -> None:
    for wrong in ops()[name].error_inputs("cpu"):
        sample = wrong.sample_input
        with pytest.raises(wrong.error_type, match=wrong.error_regex):
            FUNCTIONS[name][0](sample.input, *sample.args, **sample.kwargs)
