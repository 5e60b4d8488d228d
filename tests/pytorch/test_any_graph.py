"""If these fail, a graph of a program's own, or one with all its options, is not a function of tensors."""

import copy
import io
import math
import pickle
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import lngen
import lngen.torch
from direct_tensors import forget, go_the_direct_way
from fake_driver import FakeDriver
from lngen import D, GraphBuilder, M
from lngen.compiler.ir import parse

WIDTH = 64


def add_rmsnorm(b: GraphBuilder) -> None:
    """Called as one of lngen's, and another graph: gamma comes first, and a constant factor."""
    gamma = b.input("gamma", D)
    h = b.input("u", M, D) + b.input("residual", M, D)
    rstd = (b.mean(h * h) + b.eps()).rsqrt()
    b.output("y", h * rstd * gamma * b.input("factor", M, differentiable=False))
    b.output("h", h)
    b.statistic(rstd, "rstd")


def leaves() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(*shape).requires_grad_() for shape in ((WIDTH,), (2, 3, WIDTH), (2, 3, WIDTH)))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    yield go_the_direct_way(monkeypatch)
    forget()


def test_a_graph_of_ones_own_has_the_bits_of_its_norm_and_the_derivative_of_autograd() -> None:
    own, (gamma, u, residual), factor = lngen.torch.function(add_rmsnorm), leaves(), torch.rand(2, 3)
    y, h = own(gamma, u, residual, factor, eps=1e-3)
    norm = lngen.compile(add_rmsnorm, d=WIDTH, eps=1e-3)
    (wanted, total), _ = norm.forward(*(t.detach().numpy() for t in (gamma, u, residual, factor)))
    assert np.array_equal(y.detach().numpy(), wanted)
    assert np.array_equal(h.detach().numpy(), total)
    expected = F.rms_norm(u + residual, (WIDTH,), gamma, 1e-3) * factor[..., None]
    dy = torch.randn_like(y)
    for found, theirs in zip(
        torch.autograd.grad(y, (gamma, u, residual), dy),
        torch.autograd.grad(expected, (gamma, u, residual), dy),
        strict=True,
    ):
        torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-5)


def test_a_graph_without_kernels_runs_on_the_cpu_with_a_warning() -> None:
    def scaled_by_a_sum(b: GraphBuilder) -> None:
        b.output("y", b.input("x", M, D) * b.sum(b.input("gamma", D)))

    own, x, gamma = lngen.torch.function(scaled_by_a_sum), torch.randn(3, 8, requires_grad=True), torch.randn(8)
    with pytest.warns(UserWarning, match=r"^graph @\w+_fwd: '%sum_gamma' reduces over D a value that has no rows, "):
        y = own(x, gamma)
    torch.testing.assert_close(y, x * gamma.sum())
    with pytest.warns(UserWarning, match=r"^graph @\w+_bwd: '%sum_gamma' reduces over D a value that has no rows, "):
        y.sum().backward()


def test_equal_graphs_share_operators_and_others_of_the_name_do_not() -> None:
    one, again = (lngen.torch.function(add_rmsnorm).__name__ for _ in range(2))
    assert one == again
    assert re.fullmatch(r"add_rmsnorm_[0-9a-f]{8}", one)
    assert lngen.torch.function("add_rmsnorm").__name__ == "add_rmsnorm"
    assert hasattr(torch.ops.lngen, f"{one}_bwd")


def test_it_goes_the_direct_way(gpu: FakeDriver) -> None:
    own, (gamma, u, residual), factor = lngen.torch.function(add_rmsnorm), leaves(), torch.rand(2, 3)
    for _ in range(2):
        y, h = own(gamma, u, residual, factor, eps=1e-3)
        found = torch.autograd.grad((y, h), (gamma, u, residual), (torch.ones_like(y), torch.ones_like(y)))
    assert gpu.launched
    gpu.launched.clear()
    with torch.autocast("cpu", torch.bfloat16):
        again, _ = own(gamma, u, residual, factor, eps=1e-3)
    assert not gpu.launched
    assert torch.equal(y, again)
    assert all(t.isfinite().all() for t in found)


@pytest.mark.filterwarnings("ignore")
def test_it_is_compiled_whole() -> None:
    own, given, factor = lngen.torch.function(add_rmsnorm), leaves(), torch.rand(2, 3)
    compiled = torch.compile(lambda *t: own(*t, eps=1e-3)[0], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given, factor), own(*given, factor, eps=1e-3)[0])


def test_a_graph_as_it_stands_and_options() -> None:
    _, x, residual = leaves()
    text = str(lngen.parse_spec(f"l2norm.fwd:d={WIDTH}").forward())
    assert torch.equal(lngen.torch.function(parse(text))(x), lngen.torch.function("l2norm")(x, eps=1e-5))
    post = lngen.torch.function("add_layernorm", h=False, beta=False, gamma=False)
    torch.testing.assert_close(post(x, residual, eps=1e-5), F.layer_norm(x + residual, (WIDTH,)), rtol=1e-5, atol=1e-5)
    scaled = lngen.torch.function("softmax", scale=0.125)
    torch.testing.assert_close(scaled(x), torch.softmax(x * 0.125, -1))


def test_cross_entropy_with_probabilities() -> None:
    _, x, other = leaves()
    target = torch.softmax(other.detach(), -1)
    loss = lngen.torch.function("cross_entropy")(x, target)
    expected = F.cross_entropy(x.flatten(0, 1), target.flatten(0, 1), reduction="none").reshape(2, 3)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)


def test_a_masked_class_adds_nothing_to_a_cross_entropy() -> None:
    """0 log 0 is 0, as F.cross_entropy has it for an index."""
    x = torch.tensor([[-math.inf, 0.0, 2.0], [1.0, -math.inf, 0.5]], requires_grad=True)
    index = torch.tensor([2, 0])
    loss = lngen.torch.function("cross_entropy")(x, F.one_hot(index, 3).float())
    expected = F.cross_entropy(x, index, reduction="none")
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(of.sum(), x)[0] for of in (loss, expected)]
    torch.testing.assert_close(*gradients)


def switched(b: GraphBuilder) -> None:
    """An input of another name than its option's, and one that has its name."""
    y = b.input("x", M, D)
    if b.flag("scaled", False):
        y = y * b.input("w", D)
    b.output("y", y if (c := b.optional_input("c", D)) is None else y + c)


ROW, ROWS, WEIGHT = torch.randn(1, 4), torch.randn(2, 4), torch.full((4,), 10.0)
RIGHT: list[tuple[Any, dict[str, Any], tuple[torch.Tensor, ...], dict[str, float]]] = [
    ("add_rmsnorm", {"h": False}, (ROW, ROW, WEIGHT), {"eps": 1e-5}),
    ("add_rmsnorm", {"h": False, "x1": True}, (ROWS, ROWS, ROWS, WEIGHT), {"eps": 1e-5}),
    ("add_rmsnorm", {"h": False, "residual": False, "x1": True}, (ROWS, ROWS, WEIGHT), {"eps": 1e-5}),
    ("layernorm", {"gamma": False, "beta": True}, (ROWS, WEIGHT), {"eps": 1e-5}),
    (switched, {}, (ROWS, WEIGHT), {}),
    (switched, {"scaled": True}, (ROWS, WEIGHT, WEIGHT / 2), {}),
    (switched, {"scaled": True, "c": False}, (ROWS, WEIGHT), {}),
]  # fmt: skip


@pytest.mark.parametrize(("graph", "options", "inputs", "number"), RIGHT)
def test_positions_are_those_of_compile(graph: Any, options: Any, inputs: Any, number: Any) -> None:
    norm = lngen.compile(graph, d=4, **options, **number)
    found = lngen.torch.function(graph, **options)(*inputs, **number)
    assert np.array_equal(found.numpy(), norm.forward(*(t.numpy() for t in inputs))[0])


def test_a_result_that_is_saved_by_choice() -> None:
    x = torch.randn(2, 3, WIDTH, requires_grad=True)
    expected, found = (lngen.torch.function("l2norm", save=save)(x, eps=1e-5).pow(2).sum() for save in ("stats", "y"))
    torch.testing.assert_close(torch.autograd.grad(found, x), torch.autograd.grad(expected, x), rtol=1e-5, atol=1e-5)


class Block(torch.nn.Module):
    """A module that holds a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function


@pytest.mark.parametrize(("graph", "options", "inputs", "number"), RIGHT)
@pytest.mark.parametrize("again", [
    copy.copy, copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f)),
    lambda f: torch.load(io.BytesIO(saved(Block(f))), weights_only=False).function,
], ids=["copy", "deepcopy", "pickle", "save"])  # fmt: skip
def test_a_copy_is_the_same_function(again: Any, graph: Any, options: Any, inputs: Any, number: Any) -> None:
    function = lngen.torch.function(graph, **options)
    assert torch.equal(again(function)(*inputs, **number), function(*inputs, **number))


def saved(module: torch.nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(module, file)
    return file.getvalue()


def test_a_graph_as_it_stands_is_pickled() -> None:
    function = lngen.torch.function(lngen.parse_spec("l2norm.fwd:d=4").forward())
    assert torch.equal(pickle.loads(pickle.dumps(function))(ROWS), function(ROWS))
