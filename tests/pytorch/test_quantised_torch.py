"""If these fail, a quantised result of a graph is another one in PyTorch, or autograd asks for its gradient."""

from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import lngen  # noqa: E402
import lngen.torch  # noqa: E402
from lngen import D, GraphBuilder, M  # noqa: E402
from lngen.compiler.graphs import Definition  # noqa: E402
from lngen.compiler.interpret import interpret  # noqa: E402
from lngen.compiler.spec import make_spec  # noqa: E402
from lngen.dtypes import QUANTISED, DType  # noqa: E402
from lngen.proof.torch_graph import torch_function  # noqa: E402

OWN = {DType.INT8: torch.int8, DType.E4M3: torch.float8_e4m3fn, DType.E5M2: torch.float8_e5m2}


def normed(b: GraphBuilder) -> Any:
    x = b.input("x", M, D)
    return x * (b.mean(x * x) + 1e-5).rsqrt() * b.input("gamma", D)


def only_normed(b: GraphBuilder) -> None:
    b.output("y", normed(b))


def both(dtype: DType) -> Any:
    def describe(b: GraphBuilder) -> None:
        y = normed(b)
        b.output("y", y)
        b.quantise("q", y, dtype)

    return describe


def alone(b: GraphBuilder) -> None:
    b.quantise("q", normed(b))


def restored(b: GraphBuilder) -> None:
    b.output("y", b.input("q", M, D, dtype="e4m3") * b.input("q_scale", M, dtype="f32") + b.input("bias", M, D))


def tensors() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, 16, generator=generator), torch.rand(16, generator=generator)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_results_have_pytorchs_dtypes_and_the_same_bytes(dtype: DType) -> None:
    x, gamma = tensors()
    y, q, scale = lngen.torch.function(both(dtype))(x, gamma)
    found, _ = lngen.compile(both(dtype), d=16).forward(x.numpy(), gamma.numpy())
    assert (q.dtype, scale.dtype) == (OWN[dtype], torch.float32)
    assert q.view(torch.uint8).numpy().tobytes() == found[1].tobytes()
    assert np.array_equal(scale.numpy(), found[2])
    assert torch.allclose(q.float() * scale[:, None], y, atol=float(scale.max()) * dtype.largest * 0.07)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_gradients_come_through_what_is_not_quantised(dtype: DType) -> None:
    """They are those of the same graph without the quantised result."""
    x, gamma = (t.requires_grad_() for t in tensors())
    y, q, scale = lngen.torch.function(both(dtype))(x, gamma)
    assert [t.requires_grad for t in (y, q, scale)] == [True, False, False]
    dy = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
    plain = lngen.torch.function(only_normed)(x, gamma)
    for found, want in zip(
        torch.autograd.grad(y, (x, gamma), dy), torch.autograd.grad(plain, (x, gamma), dy), strict=True
    ):
        assert torch.equal(found, want)


def test_a_graph_without_such_a_result_says_so() -> None:
    x, gamma = tensors()
    own = lngen.torch.function(alone)
    assert own(x, gamma)[0].dtype is torch.float8_e4m3fn
    with pytest.raises(RuntimeError, match=r"no result of the graph 'alone@.*' has a gradient; make the value that is"):
        own(x.requires_grad_(), gamma)


def test_an_input_of_8_bits_is_a_tensor_of_them() -> None:
    x, gamma = tensors()
    q, scale = lngen.torch.function(alone)(x, gamma)
    bias = torch.ones(5, 16, requires_grad=True)
    y = lngen.torch.function(restored)(q, scale, bias)
    assert torch.allclose(y.detach(), q.float() * scale[:, None] + 1, atol=1e-6)  # lngen rounds once
    y.sum().backward()
    assert torch.equal(bias.grad, torch.ones(5, 16))
    with pytest.raises(RuntimeError, match=r"'q' is expected to be one of torch.float8_e4m3fn; cast it"):
        lngen.torch.function(restored)(q.float(), scale, bias)


def test_tensors_without_content_have_the_dtypes() -> None:
    own = lngen.torch.function(both(DType.E5M2))
    with FakeTensorMode() as mode:
        found = own(*map(mode.from_tensor, tensors()))
    assert [(tuple(t.shape), t.dtype) for t in found] == [
        ((5, 16), torch.float32), ((5, 16), torch.float8_e5m2), ((5,), torch.float32),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", QUANTISED)
def test_the_same_graph_in_pytorchs_operators_saturates_as_well(dtype: DType) -> None:
    """Its casts of e5m2 do not, nor those to int8."""

    def cast(b: GraphBuilder) -> None:
        b.output("q", b.input("x", M, D), dtype=dtype)

    x = np.array([[1e6, -1e6, np.inf, -np.inf, np.nan, 0.5, -0.0, 2.5]], np.float32)
    graph = make_spec(Definition("own", cast), "fwd", {"d": 8}).forward()
    (found,) = torch_function(graph)(torch.from_numpy(x))
    assert found.view(torch.uint8).numpy().tolist() == interpret(graph, {"x": x})["q"].view(np.uint8).tolist()
