"""If these fail, torch.func or autograd sees other derivatives of lngen.torch than of PyTorch, or silently none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import lngen.torch as L
from torch_calls import CALLS, THEIRS, D, Function, gradients, leaves, same_bits

pytestmark = pytest.mark.filterwarnings(  # PyTorch's own deprecations
    "ignore:`torch.jit.script.*` is deprecated:DeprecationWarning"
)
NARROW = ("softmax", "log_softmax")  # of which PyTorch computes float64
# Results are of order 1. Both sides round some hundred times, for float32 (softmax, whose float64 is PyTorch's) 2**-24.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


def dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name in NARROW else torch.float64


def close(name: str, found: Any, wanted: Any) -> None:
    tolerance = TOLERANCE[dtype_of(name)]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def layer_norm(x: Any, w: Any, b: Any) -> Any:
    """In elementary operators, for derivatives that PyTorch's own has wrong."""
    c = x - x.mean(-1, keepdim=True)
    return c * (c.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w + b


# ---- torch.func ----

TRANSFORMS: dict[str, Callable[..., Any]] = {
    "vmap": lambda f, x, w, b: vmap(lambda x: f(x, w, b))(x),
    "vmap over another dimension": lambda f, x, w, b: vmap(lambda x: f(x, w, b), 1, 1)(x),
    "vmap over rows": lambda f, x, w, b: vmap(lambda x: f(x, w, b))(x[0]),
    "vmap over weights": lambda f, x, w, b: vmap(lambda w, b: f(x, w, b))(torch.stack([w, b]), torch.stack([b, w])),
    "grad": lambda f, x, w, b: grad(lambda *t: (f(*t) ** 3).sum(), (0, 1, 2))(x, w, b),
    "gradient of each sample": lambda f, x, w, b: vmap(grad(lambda w, x: (f(x, w, b) ** 3).sum()), (None, 0))(w, x),
    "vjp": lambda f, x, w, b: vjp(f, x, w, b)[1](x * 2 + 1),
    "jvp": lambda f, x, w, b: jvp(f, (x, w, b), (x * 2 + 1, b, w)),
    "hessian": lambda f, x, w, b: hessian(lambda x: (f(x, w, b) ** 3).sum())(x[0]),
    "jacrev": lambda f, x, w, b: jacrev(lambda x: f(x, w, b))(x[0]),
    "jacfwd": lambda f, x, w, b: jacfwd(lambda x: f(x, w, b))(x[0]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", THEIRS)
def test_a_transform_is_that_of_pytorchs_function(name: str, transform: str) -> None:
    inputs = [t.detach() for t in leaves(dtype_of(name))]
    found, wanted = (TRANSFORMS[transform](function, *inputs) for function in (CALLS[name], THEIRS[name]))
    close(name, found, wanted)


@pytest.mark.parametrize("name", CALLS)
def test_a_transform_of_every_function_is_its_backward(name: str) -> None:
    """grad of each sample, against autograd of the kernels."""
    x, w, b = leaves()
    found = vmap(grad(lambda x: (CALLS[name](x[None], w, b) ** 3).sum()))(x)
    (wanted,) = torch.autograd.grad((CALLS[name](x, w, b) ** 3).sum(), x)
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


def dual(function: Function, inputs: list[Any]) -> Any:
    with forward_ad.dual_level():
        y = function(*(forward_ad.make_dual(t, t * 2 + 1) for t in inputs))
        return forward_ad.unpack_dual(y).tangent


@pytest.mark.parametrize("name", THEIRS)
def test_forward_mode_differentiation(name: str) -> None:
    """Also of inputs that require gradients."""
    inputs = leaves(dtype_of(name))
    found, wanted = (dual(function, inputs) for function in (CALLS[name], THEIRS[name]))
    close(name, found, wanted)


def test_a_tensor_without_a_tangent_has_none() -> None:
    """A backward inside a level of forward differentiation runs the kernels."""
    inputs = leaves()
    y = CALLS["layer_norm"](*inputs)
    with forward_ad.dual_level():
        found = gradients(y, inputs)
        assert torch.ops.lngen.layernorm_fwd(*(t.detach() for t in inputs), eps=1e-5)[0].shape == y.shape
    assert same_bits(found, gradients(CALLS["layer_norm"](*inputs), inputs))


LOUD: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda x: vmap(lambda x: L.layer_norm(x, (D,)))(x),
    "grad": lambda x: grad(lambda x: (L.layer_norm(x, (D,)) ** 3).sum())(x),
    "jvp": lambda x: jvp(lambda x: L.layer_norm(x, (D,)), (x,), (x,))[1],
}


@pytest.mark.parametrize("name", LOUD)
def test_a_compiled_transform_raises_rather_than_be_wrong(name: str) -> None:
    """torch.compile cannot see which of PyTorch's operators the transform would need."""
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="lngen"):
        torch.compile(LOUD[name], backend="aot_eager", fullgraph=True)(leaves()[0].detach())


def test_a_compiled_function_of_dual_numbers_raises() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(CALLS["layer_norm"], backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="forward AD"):
        dual(compiled, [t.detach() for t in leaves()])


def test_an_operator_raises_rather_than_drop_a_tangent() -> None:
    function = lambda *t: torch.ops.lngen.layernorm_fwd(*t, eps=1e-5)[0]  # noqa: E731
    with pytest.raises(NotImplementedError, match=r"Trying to use forward AD with 'layernorm.*outside torch.compile"):
        dual(function, [t.detach() for t in leaves()])
    with pytest.raises(NotImplementedError, match="jvp"):  # PyTorch's words
        dual(function, leaves())


# ---- higher derivatives ----


def derivatives(function: Function, inputs: list[Any], order: int) -> list[Any]:
    """Of x, each of the square of the one before."""
    found, y = [], function(*inputs)
    for _ in range(order):
        (y,) = torch.autograd.grad((y**2 * 0.5 + y).sin().sum(), inputs[:1], create_graph=True)
        found.append(y)
    return found


@pytest.mark.parametrize("name", THEIRS)
def test_second_and_third_derivatives(name: str) -> None:
    """PyTorch's layer_norm has a wrong third derivative, as torch.autograd.gradcheck of its second says."""
    inputs = leaves(dtype_of(name), rows=(1, 2))
    theirs = layer_norm if name == "layer_norm" else THEIRS[name]
    for found, wanted in zip(*(derivatives(f, inputs, 3) for f in (CALLS[name], theirs)), strict=True):
        size = float(wanted.detach().abs().max())
        torch.testing.assert_close(found, wanted, rtol=0, atol=20 * TOLERANCE[dtype_of(name)] * max(1.0, size))


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "l2_norm", "add_layer_norm"])
def test_all_modes_of_differentiation_are_those_of_differences(name: str) -> None:
    """Backward, forward, forward over backward, and batches of cotangents (is_grads_batched) and tangents."""
    inputs = leaves(torch.float64, rows=(1, 2))[: 1 if name == "l2_norm" else 2 if name == "rms_norm" else 3]

    def function(*some: Any) -> Any:
        return CALLS[name](*some, *[None] * (3 - len(some)))

    both = {"check_batched_grad": True, "fast_mode": False}
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, check_batched_forward_grad=True, **both)
    assert torch.autograd.gradgradcheck(function, inputs, check_fwd_over_rev=True, **both)


# ---- tensors without content ----


@pytest.mark.parametrize("name", CALLS)
def test_fake_and_meta_tensors_have_shape_dtype_and_device(name: str) -> None:
    inputs = leaves()
    y = CALLS[name](*inputs)
    given = gradients(y, inputs)
    meta = CALLS[name](*(t.detach().to("meta").requires_grad_() for t in inputs))
    assert (meta.shape, meta.dtype, meta.device.type) == (y.shape, y.dtype, "meta")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(t) for t in inputs]
        fake = CALLS[name](*fakes)
        assert (fake.shape, fake.dtype, fake.device) == (y.shape, y.dtype, y.device)
        for found, wanted in zip(gradients(fake, fakes), given, strict=True):
            assert (found is None) == (wanted is None)
            assert found is None or (found.shape, found.dtype) == (wanted.shape, wanted.dtype)


# ---- autograd ----


def test_hooks_on_saved_tensors() -> None:
    plain, hooked = leaves(), leaves()
    wanted = gradients(CALLS["layer_norm"](*plain), plain)
    with torch.autograd.graph.save_on_cpu():
        y = CALLS["layer_norm"](*hooked)
    assert same_bits(gradients(y, hooked), wanted)
    packed: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or len(packed) - 1, packed.__getitem__):
        y = CALLS["layer_norm"](*hooked)
    assert same_bits(gradients(y, hooked), wanted)
    assert {tuple(t.shape) for t in packed} == {(2, 3, D), (D,), (2, 3)}  # x, gamma; mean and rstd


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "softmax"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_saved_tensor_that_is_modified_is_noticed(name: str, which: int) -> None:
    """Where PyTorch notices it; softmax does not read a weight."""
    inputs = leaves()
    y = CALLS[name](*inputs)
    with torch.no_grad():
        inputs[which].mul_(2)
    if name == "softmax" and which == 1:
        y.sum().backward()
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_an_output_may_be_modified(name: str, dtype: torch.dtype) -> None:
    """As by an activation in place: the backward reads only what is saved."""
    inputs, plain = leaves(dtype), leaves(dtype)
    CALLS[name](*inputs).relu_().sum().backward()
    CALLS[name](*plain).relu().sum().backward()
    assert same_bits([t.grad for t in inputs], [t.grad for t in plain])


def test_a_saved_output_that_is_modified_is_noticed() -> None:
    x, w, b = leaves()
    y, h = L.add_layer_norm(x, x, (D,), w, b)
    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_graph_is_kept_if_asked() -> None:
    inputs = leaves()
    y = CALLS["layer_norm"](*inputs).square().sum()
    y.backward(retain_graph=True)
    once = [t.grad.clone() for t in inputs]
    y.backward()
    assert same_bits([t.grad for t in inputs], [2 * g for g in once])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


def test_deterministic_mode_and_anomaly_detection() -> None:
    inputs = leaves()
    wanted = gradients(CALLS["layer_norm"](*inputs), inputs)
    torch.use_deterministic_algorithms(True)
    try:
        assert same_bits(gradients(CALLS["layer_norm"](*inputs), inputs), wanted)
    finally:
        torch.use_deterministic_algorithms(False)
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        assert same_bits(gradients(CALLS["layer_norm"](*inputs), inputs), wanted)


COTANGENTS: dict[str, Callable[[Any], Any]] = {
    "of a sum": lambda y: torch.ones(()).expand_as(y),  # all strides are 0
    "expanded rows": lambda y: torch.linspace(-1, 1, D).expand_as(y),
    "transposed": lambda y: torch.linspace(-1, 1, y.numel()).reshape(3, 2, D).transpose(0, 1),
    "columns": lambda y: torch.linspace(-1, 1, y.numel()).reshape(D, 2, 3).permute(1, 2, 0),
    "of a slice": lambda y: torch.linspace(-1, 1, 2 * y.numel()).reshape(2, 3, 2 * D)[..., ::2],
}


@pytest.mark.parametrize("layout", COTANGENTS)
@pytest.mark.parametrize("name", ["layer_norm", "add_rms_norm", "softmax"])
def test_cotangents_of_any_layout(name: str, layout: str) -> None:
    function = CALLS[name] if "add" not in name else lambda x, w, b: L.add_rms_norm(x, x, (D,), w)[0]
    inputs = leaves()
    y = function(*inputs)
    dy = COTANGENTS[layout](y)
    found = torch.autograd.grad(y, inputs, dy, allow_unused=True, retain_graph=True)
    assert same_bits(found, torch.autograd.grad(y, inputs, dy.contiguous(), allow_unused=True))


@pytest.mark.parametrize("name", CALLS)
def test_no_rows(name: str) -> None:
    inputs = leaves(rows=(0, 3))
    y = CALLS[name](*inputs)
    y.sum().backward()
    assert inputs[0].grad.shape == (0, 3, D)
    assert all(t.grad is None or not t.grad.any() for t in inputs[1:])


@pytest.mark.parametrize("wanted", range(1, 8))
def test_any_subset_of_inputs_requires_gradients(wanted: int) -> None:
    """The others are not computed, and change no bit."""
    inputs, every = leaves(), leaves()
    for place, tensor in enumerate(inputs):
        tensor.requires_grad_(bool(wanted >> place & 1))
    for some in (inputs, every):
        CALLS["layer_norm"](*some).square().sum().backward()
    for tensor, other in zip(inputs, every, strict=True):
        assert torch.equal(tensor.grad, other.grad) if tensor.requires_grad else tensor.grad is None


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_two_outputs_may_go_unused(used: int) -> None:
    """Its cotangent is None, as good as zeros."""
    inputs = leaves()
    outputs = L.add_layer_norm(inputs[0], inputs[0] * 2, (D,), *inputs[1:])
    found = torch.autograd.grad(outputs[used].sum(), inputs, allow_unused=True, retain_graph=True)
    zeros = [torch.ones_like(y) if n == used else torch.zeros_like(y) for n, y in enumerate(outputs)]
    for some, other in zip(found, torch.autograd.grad(outputs, inputs, zeros), strict=True):
        torch.testing.assert_close(torch.zeros_like(other) if some is None else some, other, rtol=1e-6, atol=1e-6)


def test_statistics_have_no_gradient() -> None:
    y, mean, rstd = torch.ops.lngen.layernorm_fwd(*leaves(), eps=1e-5)
    assert (y.requires_grad, mean.requires_grad, rstd.requires_grad) == (True, False, False)
