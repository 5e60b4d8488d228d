"""If these fail, a program that is compiled, exported or checkpointed computes other bits with lngen.torch, or not."""

import io
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_fw_bw_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lngen.torch as L
from lngen import D as W
from lngen import M
from torch_calls import CALLS, D, gradients, leaves, same_bits

pytestmark = pytest.mark.filterwarnings(  # PyTorch's own deprecations
    "ignore:`torch.jit.script.*` is deprecated:DeprecationWarning",
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning",
)
COMPILER = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="inductor needs a C++ compiler")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def check(function: Callable[..., Any], compiled: Callable[..., Any], inputs: list[Any]) -> None:
    """The bits of the function, forward and backward."""
    y, expected = compiled(*inputs), function(*inputs)
    assert torch.equal(y, expected)
    assert y.requires_grad
    assert same_bits(gradients(y, inputs), gradients(expected, inputs))


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_has_the_bits_of_eager_for_any_number_of_rows(name: str) -> None:
    """And is compiled once."""
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(CALLS[name], backend=backend, fullgraph=True)
    for count in (2, 5, 40):
        inputs = leaves(rows=(count, 3))
        torch._dynamo.mark_dynamic(inputs[0], 0)
        check(CALLS[name], compiled, inputs)
    assert backend.frame_count == 1


def test_another_number_of_rows_compiles_once_more_and_never_again() -> None:
    """Without a mark: PyTorch's own rule."""
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(CALLS["layer_norm"], backend=backend, fullgraph=True)
    for count in (2, 5, 7, 40):
        check(CALLS["layer_norm"], compiled, leaves(rows=(count, 3)))
    assert backend.frame_count == 2


INDUCTOR: dict[str, Callable[..., Any]] = {  # what inductor adds is exact
    "layer_norm": lambda x, w, b: L.layer_norm(x * 2, (D,), w, b) * 0.5,
    "two norms": lambda x, w, b: L.rms_norm(L.softmax(x, -1), (D,), w).relu(),
}


@COMPILER
@pytest.mark.parametrize("name", INDUCTOR)
def test_inductor_has_the_bits_of_eager(name: str) -> None:
    check(INDUCTOR[name], torch.compile(INDUCTOR[name], fullgraph=True), leaves())


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_frozen_input_gets_no_gradient(frozen: int) -> None:
    inputs = leaves()
    inputs[frozen].requires_grad_(False)
    rest = [t for t in inputs if t.requires_grad]
    compiled = torch.compile(CALLS["layer_norm"], backend="aot_eager", fullgraph=True)
    found, wanted = (gradients(f(*inputs), rest) for f in (compiled, CALLS["layer_norm"]))
    assert same_bits(found, wanted)


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_two_outputs(used: int) -> None:
    def function(x: Any, w: Any, b: Any) -> Any:
        return L.add_layer_norm(x, x * 2, (D,), w, b)[used]

    inputs = leaves()
    y, expected = torch.compile(function, backend="aot_eager", fullgraph=True)(*inputs), function(*inputs)
    zeros = [torch.zeros_like(t) for t in inputs]  # what a compiled backward has for a gradient that is None
    given = [zip(gradients(t, inputs), zeros, strict=True) for t in (y, expected)]
    found, wanted = ([z if g is None else g for g, z in pairs] for pairs in given)
    assert same_bits([y, *found], [expected, *wanted])


def test_without_gradients() -> None:
    inputs, compiled = leaves(), torch.compile(CALLS["layer_norm"], backend="aot_eager", fullgraph=True)
    expected = CALLS["layer_norm"](*inputs)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            found = [compiled(*inputs), CALLS["layer_norm"](*inputs)]
        assert same_bits(found, [expected, expected])
        assert not any(y.requires_grad for y in found)


def test_autocast_inside() -> None:
    """The linear layer gives bf16; the weights of the norm are f32."""

    def function(x: Any, w: Any, b: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return L.layer_norm(F.linear(x, torch.eye(D)), (D,), w, b)

    assert function(*leaves()).dtype == torch.bfloat16
    check(function, torch.compile(function, backend="aot_eager", fullgraph=True), leaves())


# ---- export ----


class Net(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rms = L.LayerNorm(D), L.RMSNorm(D)

    def forward(self, x: Any) -> Any:
        return self.rms(self.layer(x)) + L.softmax(x, -1)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_takes_any_number_of_rows(strict: bool) -> None:
    """Also saved and loaded, and after its decompositions, which leave lngen's operators whole."""
    net, dims = Net(), {"x": {0: torch.export.Dim("rows", min=1)}}
    program = torch.export.export(net, (torch.randn(4, 3, D),), dynamic_shapes=dims, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    names = {"lngen.layernorm_fwd.default", "lngen.rmsnorm_fwd.default", "lngen.softmax_fwd.default"}
    for some in (program, torch.export.load(file), program.run_decompositions()):
        assert names <= {str(node.target) for node in some.graph.nodes}
        for rows in (1, 9):
            x = torch.randn(rows, 3, D)
            assert torch.equal(some.module()(x), net(x))


# ---- decompositions ----


def operators(graph: Any) -> set[str]:
    """Those of lngen's in a graph of torch.fx."""
    return {name for node in graph.nodes if (name := str(node.target)).startswith("lngen.")}


def scaled(b: Any) -> None:
    x = b.input("x", M, W)
    b.output("y", x * (b.mean(x * x) + b.eps()).rsqrt() * b.input("factor", M))


def own(x: Any, w: Any, b: Any) -> Any:
    return L.function(scaled)(x, x[..., 0], eps=1e-5)


class Called(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.inputs = function, torch.nn.ParameterList(leaves()[1:])

    def forward(self, x: Any) -> Any:
        return self.function(x, *self.inputs)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in (*CALLS, "own")), *((name, torch.bfloat16) for name in ("rms_norm", "own"))],
)
def test_a_decomposed_program_has_pytorchs_operators_and_any_number_of_rows(name: str, dtype: torch.dtype) -> None:
    module = Called({**CALLS, "own": own}[name]).to(dtype)
    dims = {"x": {0: torch.export.Dim("rows", min=1)}}
    program = torch.export.export(module, (torch.randn(4, 3, D, dtype=dtype),), dynamic_shapes=dims)
    some = program.run_decompositions({**torch.export.default_decompositions(), **L.decompositions()})
    assert operators(program.graph)
    assert not operators(some.graph)
    for rows in (1, 9):
        x = torch.randn(rows, 3, D, dtype=dtype)
        torch.testing.assert_close(some.module()(x), module(x))


UNUSED: dict[str, Any] = {"allow_unused": True}


def used(gradients: Any) -> list[Any]:
    return [g for g in gradients if g is not None]


@pytest.mark.parametrize("name", CALLS)
def test_backward_and_second_derivatives_decompose(name: str) -> None:
    """For another number of rows than that of the trace."""

    def function(*inputs: Any) -> list[Any]:
        inputs = tuple(t.detach().requires_grad_() for t in inputs)
        first = used(torch.autograd.grad(CALLS[name](*inputs).square().sum(), inputs, create_graph=True, **UNUSED))
        return [*first, *used(torch.autograd.grad(sum(g.square().sum() for g in first), inputs, **UNUSED))]

    whole, some = (
        make_fx(function, decomposition_table=table, tracing_mode="symbolic")(*leaves())
        for table in (None, L.decompositions())
    )
    assert {name[-11:] for name in operators(whole.graph)} == {"fwd.default", "bwd.default"}
    assert not operators(some.graph)
    inputs = leaves(rows=(5, 3))
    for found, wanted in zip(some(*inputs), function(*inputs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@COMPILER
def test_operators_stay_whole_unless_the_decompositions_are_asked_for() -> None:
    """For torch.compile and Inductor; for export above."""
    table = L.decompositions()
    assert not {str(op) for op in torch._decomp.global_decomposition_table["post_autograd"]} & {*map(str, table)}
    compiled = torch.compile(CALLS["layer_norm"], fullgraph=True)
    _, code = run_fw_bw_and_get_code(lambda: compiled(*leaves()))
    assert all(f"torch.ops.lngen.layernorm_{way}.default" in "".join(code) for way in ("fwd", "bwd"))


def test_symbolic_tracing_and_make_fx() -> None:
    net, x = torch.nn.Sequential(L.LayerNorm(D), L.RMSNorm(D)), torch.randn(4, D)
    for graph in (torch.fx.symbolic_trace(net), make_fx(net)(x)):
        calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        assert any("layer" in call for call in calls)
        assert any("rms" in call for call in calls)
        assert torch.equal(graph(x), net(x))


# ---- activation checkpointing ----


class Count(TorchDispatchMode):  # type: ignore[misc]
    """How often the forward of layer_norm ran."""

    forwards = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.forwards += func is torch.ops.lngen.layernorm_fwd.default
        return func(*args, **(kwargs or {}))


def keep_norms(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op is torch.ops.lngen.layernorm_fwd.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = partial(create_selective_checkpoint_contexts, keep_norms)


@pytest.mark.parametrize(
    ("options", "forwards"),
    [
        ({"use_reentrant": True}, 2),
        ({"use_reentrant": False}, 2),
        ({"use_reentrant": False, "context_fn": SELECTIVE}, 1),
    ],
    ids=["reentrant", "non-reentrant", "selective"],
)
def test_checkpointing_changes_no_bit(options: dict[str, Any], forwards: int) -> None:
    """A policy that keeps the results of the norm spares its second forward."""

    def function(x: Any, w: Any, b: Any) -> Any:
        return F.gelu(L.layer_norm(F.gelu(x), (D,), w, b))

    inputs, plain = leaves(), leaves()
    function(*plain).square().sum().backward()
    with Count() as count:
        checkpoint(function, *inputs, **options).square().sum().backward()
    assert count.forwards == forwards
    assert same_bits([t.grad for t in inputs], [t.grad for t in plain])


def test_checkpointing_in_a_compiled_function() -> None:
    def function(x: Any, w: Any, b: Any) -> Any:
        return checkpoint(CALLS["add_layer_norm"], x, w, b, use_reentrant=False, context_fn=SELECTIVE)

    check(CALLS["add_layer_norm"], torch.compile(function, backend="aot_eager", fullgraph=True), leaves())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which PyTorch reads itself
@pytest.mark.parametrize("name", ["layer_norm", "add_rms_norm"])
def test_compiled_autograd_takes_an_eager_forward(name: str) -> None:
    inputs, again = leaves(), leaves()
    (CALLS[name](*again) ** 2).sum().backward()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        (CALLS[name](*inputs) ** 2).sum().backward()
    assert same_bits([t.grad for t in inputs], [t.grad for t in again])
