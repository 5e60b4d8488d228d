"""If these fail, a graph of samples, heads, groups, blocks or class indices is not what NumPy and PyTorch compute."""

from collections.abc import Callable

import numpy as np
import pytest

from lngen import D, Definition, GraphBuilder, M
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import DType, Value, parse, print_graph
from lngen.compiler.ir.numerics import stored
from lngen.compiler.passes.instance import drawn, indexed, lengths
from lngen.compiler.problem import problem
from lngen.compiler.spec import make_spec
from lngen.dtypes import FLOATS
from lngen.errors import LowerError
from lngen.proof.torch_graph import torch_function
from plans import best, run_checked

torch = pytest.importorskip("torch")
Describe = Callable[[GraphBuilder], object]


def adaln(b: GraphBuilder) -> None:
    """A scale and a shift for each sample of neighbouring rows."""
    sample = b.axis("N", M / "n")
    x, scale, shift = b.input("x", M, D), b.input("scale", sample, D), b.input("shift", sample, D)
    c = x - b.mean(x)
    b.output("y", c * (b.mean(c * c) + b.eps()).rsqrt() * (1 + scale) + shift)


def qk_norm(b: GraphBuilder) -> None:
    """A weight for each head, then RoPE: cos and sin for each position."""
    head, position = b.axis("H", M % 4), b.axis("P", M / 4)
    x, gamma = b.input("x", M, D), b.input("gamma", head, D)
    cos, sin = b.input("cos", position, D), b.input("sin", position, D)
    y = x * (b.mean(x * x) + b.eps()).rsqrt() * gamma
    b.output("y", y * cos + b.rotate("turned", y, head=64) * sin)


def group_norm(b: GraphBuilder) -> None:
    """Rows are groups of channels of 16 features: weights for each channel."""
    group, channel = b.axis("G", M % 8), b.axis("C", D / 16)
    x, gamma, beta = b.input("x", M, D), b.input("gamma", group, channel), b.input("beta", group, channel)
    c = x - b.mean(x)
    b.output("y", c * (b.mean(c * c) + b.eps()).rsqrt() * gamma + beta)


def in_row_groups(b: GraphBuilder) -> None:
    """A norm of each group of a row, and a weight for each; the graph has an axis S of its own."""
    group = b.axis("S", D / 16)
    x, gamma, w = b.input("x", M, D), b.input("gamma", D), b.input("w", group)
    b.output("y", x * (b.mean(x * x, to=group) + b.eps()).rsqrt() * (gamma * w))


def class_loss(b: GraphBuilder) -> None:
    """The cross-entropy of a class index."""
    x, target = b.input("x", M, D), b.index("target", M)
    top = b.max(x).detach()
    hit = b.select_eq("hit", target, b.iota("column", D), x)
    b.output("loss", b.sum((x - top).exp()).log() + top - b.sum(hit))


def normed(b: GraphBuilder) -> Value:
    x = b.input("x", M, D)
    return x * (b.mean(x * x) + b.eps()).rsqrt() * b.input("gamma", D)


def block_scale(b: GraphBuilder) -> None:
    """The largest number of each block scales it; the gradient goes through the maximum."""
    y = normed(b)
    scale = b.max(abs(y), to=b.axis("B", D / 16)).maximum(1e-12) / 448.0
    b.output("q", y / scale)
    b.output("scale", scale)


GRAPHS: tuple[Describe, ...] = (adaln, qk_norm, group_norm, in_row_groups, class_loss, block_scale)


@pytest.mark.parametrize("describe", GRAPHS, ids=lambda f: f.__name__)
def test_a_graph_is_that_of_pytorch(describe: Describe) -> None:
    """Results, and gradients by autograd: in f64, or in f32 where a graph has functions."""
    rng = np.random.default_rng(1)
    dtype, off = ("f32", 1e-5) if describe is class_loss else ("f64", 1e-11)
    definition, keys = Definition(describe.__name__, describe), {"d": 64, "dtype": dtype}
    fwd, bwd = (make_spec(definition, way, keys) for way in ("fwd", "bwd"))
    forward = fwd.forward()
    sizes, of = lengths(forward, d=64), indexed(forward)
    inputs = {p.name: stored(drawn(rng, p, sizes, of.get(p), 0.5), p.type.dtype) for p in forward.tensors}
    results = interpret(fwd.graph(), inputs)
    smooth = [p.name for p in forward.tensors if p not in of]
    tensors = {n: torch.tensor(a) for n, a in inputs.items()}
    tensors |= {n: tensors[n].double().requires_grad_() for n in smooth}
    found = torch_function(forward, wide=True)(*(tensors[p.name] for p in forward.tensors))
    cotangents = {f"d{n}": rng.normal(size=a.shape).astype(a.dtype) for n, a in results.items()}
    for r, got in zip(forward.results, found, strict=True):
        np.testing.assert_allclose(got.detach().numpy(), results[r.name], rtol=off, atol=off)
    torch.autograd.backward(found, [torch.tensor(cotangents[f"d{r.name}"]) for r in forward.results])
    known, backward = {**inputs, **results, **cotangents}, bwd.graph()
    gradients = interpret(backward, {p.name: known[p.name] for p in backward.tensors})
    assert {*gradients} == {f"d{n}" for n in smooth}
    for name, values in gradients.items():
        want = tensors[name[1:]].grad.numpy()
        np.testing.assert_allclose(values, want, rtol=100 * off, atol=100 * off * np.abs(want).max())


def static_fp8(b: GraphBuilder) -> None:
    y = normed(b)
    b.output("q", (y * b.input("inverse_scale", dtype="f32")).clamp(-448, 448), dtype="e4m3")


def row_fp8(b: GraphBuilder) -> None:
    y = normed(b)
    scale = b.max(abs(y)).maximum(1e-12) / 448.0
    b.output("q", (y / scale).clamp(-448, 448), dtype="e4m3")


def block_fp8(b: GraphBuilder) -> None:
    y = normed(b)
    scale = b.max(abs(y), to=b.axis("B", D / 128)).maximum(1e-12) / 448.0
    b.output("q", (y / scale).clamp(-448, 448), dtype="e4m3")


def nvfp4(b: GraphBuilder) -> None:
    """A scale in e4m3 for each 16 features, and one for the tensor."""
    y, whole = normed(b), b.input("whole", dtype="f32")
    wanted = b.max(abs(y), to=b.axis("B", D / 16)) / 6.0 * whole
    scale = b.cast("scale", wanted.minimum(448.0), to=DType.E4M3)
    used = b.cast("used", scale, to=DType.F32) / whole
    b.output("q", (y / b.where_gt("safe", used, 0.0, used, 1.0)).clamp(-6, 6), dtype="e2m1")


@pytest.mark.parametrize("describe", [static_fp8, row_fp8, block_fp8], ids=lambda f: f.__name__)
def test_a_quantised_graph_has_a_kernel(describe: Describe) -> None:
    run_checked(best(make_spec(Definition(describe.__name__, describe), "fwd", {"d": 256, "dtype": "bf16"})), 5)


def test_a_graph_of_4_bits_has_a_text_and_types_and_no_kernel_yet() -> None:
    spec = make_spec(Definition("nvfp4", nvfp4), "fwd", {"d": 256, "dtype": "bf16"})
    graph = spec.graph()
    assert parse(print_graph(graph)) == graph
    assert graph.results[0].type.dtype not in FLOATS
    with pytest.raises(LowerError, match="has no kernel yet; kernels write"):
        problem(graph, spec.d)
