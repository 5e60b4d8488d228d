"""If these fail, fusing sums with their norms changes what a compiled model computes, or leaves a pair that fits."""

import copy
import operator
import random
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lngen.torch as L
from lngen.compiler.ir import Graph, Value
from lngen.compiler.spec import parse_spec
from lngen.examples.patch_transformers import FAMILIES, SMALL
from lngen.torch import compile_backend
from sampling import rotating
from torch_calls import same_bits

pytestmark = pytest.mark.filterwarnings(  # Dynamo reads it itself
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)
COMPILER = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="inductor needs a C++ compiler")
D = 8
Function = Callable[[Any, Any, Any], Any]


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compile_backend.WithoutNorms, "settled", False)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def norm(h: Any, w: Any) -> Any:
    return L.rms_norm(h, (D,), w, 1e-6)


# ---- bits: a norm of a sum is the sum as it is stored, and then the norm ----

LENGTHS = (8, 1000, 10000, 70016)  # one segment, no whole chunks, several segments, a mean that is corrected
KEYS = (
    *(f"d={d},dtype={dtype}" for d in LENGTHS for dtype in ("f32", "bf16")),
    *(f"d=64,{dtypes}" for dtypes in ("dtype=f16", "dtype=f64", "dtype=bf16,weight=f32", "dtype=f32,out=f64")),
    *(f"d=128,dtype=bf16,{key}" for key in ("zero_centred=yes", "gamma=no,beta=no", "quant=e4m3,scales=block")),
)
SPECS = {
    "layernorm": KEYS,
    "rmsnorm": (*KEYS, *(f"d=64,dtype=bf16,weight=f32,casts={casts}" for casts in ("llama", "t5", "gemma"))),
}


def numbered(graph: Graph, known: dict[Any, int], given: dict[str, int]) -> dict[str, int]:
    """Each value's number by name: equal ones are computed alike; those of ``given`` are so by definition."""
    found: dict[Value, int] = {}
    for value in graph.tensors:
        found[value] = given.get(value.name, known.setdefault((value.name, value.type), len(known)))
    for eqn in graph.eqns:
        key = eqn.op, str(eqn.attrs), eqn.out.type, *(found[arg] for arg in eqn.args)
        found[eqn.out] = given.get(eqn.out.name, known.setdefault(key, len(known)))
    return {value.name: number for value, number in found.items()}


@rotating(("graph", "keys"), [(graph, keys) for graph in SPECS for keys in SPECS[graph]])
def test_a_norm_of_a_sum_has_the_equations_of_the_norm_for_the_rounded_sum(graph: str, keys: str) -> None:
    alone, summed = (parse_spec(f"{name}.fwd:{keys}").graph() for name in (graph, f"add_{graph}"))
    known: dict[Any, int] = {}
    of_x, of_h = numbered(alone, known, {"x": -1}), numbered(summed, known, {"h": -1})
    names = [result.name for result in alone.results]
    assert [of_h[name] for name in names] == [of_x[name] for name in names]
    made = {eqn.out.name: eqn for eqn in summed.eqns}
    total = made[made["h"].args[0].name]
    assert (made["h"].op, total.op, *(arg.name for arg in total.args)) == ("cast", "add", "x32", "residual32")
    assert made["h"].out.type == made["x32"].args[0].type


# ---- pairs, and what is left ----

LIBRARY = torch.library.Library("lngen_test", "DEF")
LIBRARY.define("bump(Tensor(a!) x) -> ()")
LIBRARY.impl("bump", lambda x: None if x.add_(1) is x else x, "CPU")
torch.library.register_fake("lngen_test::bump", lambda x: None, lib=LIBRARY)


def between(change: Function) -> Function:
    """A pair between whose nodes something happens to the sum, its second term or the weight."""

    def function(x: Any, r: Any, w: Any) -> Any:
        h = x + r
        change(h, r, w)
        return norm(h, w), h * 2

    return function


def in_place(read: Callable[[Any], Any]) -> Function:
    """A sum in place of a value that was read."""

    def function(x: Any, r: Any, w: Any) -> Any:
        h = x * 2
        other = read(h)
        h += r
        return norm(h, w), other

    return function


def under(context: Callable[[], Any], both: bool) -> Function:
    """A sum in a context, and the norm there or behind it."""

    def function(x: Any, r: Any, w: Any) -> Any:
        with context():
            h = x + r
            y = norm(h, w) if both else None
        return norm(h, w) if y is None else y, h * 2

    return function


def checkpointed(x: Any, r: Any, w: Any) -> Any:
    return checkpoint(lambda x, r: (norm(h := x + r, w), h * 2), x, r, use_reentrant=False)


def bf16() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


FUSED: dict[str, Function] = {
    "operator": lambda x, r, w: norm(x + r, w),
    "function": lambda x, r, w: norm(torch.add(x, r), w),
    "method": lambda x, r, w: norm(x.add(r), w),
    "layernorm": lambda x, r, w: L.layer_norm(x + r, (D,), w, w * 2),
    "options": lambda x, r, w: L.rms_norm(x + r, (D,), w, 1e-5, casts="llama", zero_centred=True),
    "without weights": lambda x, r, w: L.layer_norm(x + r, (D,)),
    "one tensor twice": lambda x, r, w: norm(x + x, w),
    "others read the sum": lambda x, r, w: (norm(h := x + r, w), h.view(-1), h * 2),
    "two norms": lambda x, r, w: (norm(h := x + r, w), norm(h, w * 2)),
    "another reads before": lambda x, r, w: ((h := x + r) * 2, norm(h, w)),
    "a weight is made between": lambda x, r, w: (norm(h := x + r, w * 2), h * 2),
    "in place": in_place(torch.sum),
    "dropout of a term": lambda x, r, w: (norm(h := F.dropout(x, 0.5) + r, w), F.dropout(h, 0.5)),
    "under autocast": under(bf16, True),
    "under checkpointing": checkpointed,
    "another changes": lambda x, r, w: (norm(x + r, w), (x * 2).mul_(2)),
}
LEFT: dict[str, Function] = {
    "an option that a sum has not": lambda x, r, w: L.layer_norm(x + r, (D,), w, w, casts="nemotron"),
    "alpha": lambda x, r, w: norm(torch.add(x, r, alpha=2), w),
    "a number": lambda x, r, w: norm(x + 1.0, w),
    "broadcast": lambda x, r, w: norm(x + r[:1], w),
    "two dtypes": lambda x, r, w: norm(x + r.float(), w),
    "dropout between": lambda x, r, w: norm(F.dropout(x + r, 0.5), w),
    "a view is read": lambda x, r, w: norm((x + r).view(-1, D), w),
    "other strides": lambda x, r, w: (norm(h := x.mT.contiguous().mT + r.mT.contiguous().mT, w), h.mT.view(-1)),
    "another reads before a weight is made": lambda x, r, w: ((h := x + r) * 2, norm(h, w * 2)),
    "no gradient of the sum": lambda x, r, w: (norm(h := x.detach() + r.detach(), w), h * 2),
    "the sum returned": lambda x, r, w: (norm(h := x + r, w), h),
    "detached": between(lambda h, r, w: h.detach_()),
    "the sum under no_grad": under(torch.no_grad, False),
    "the sum under autocast": under(bf16, False),
    "changed after": lambda x, r, w: (norm(h := x + r, w), h.mul_(2)),
    "changed between": between(lambda h, r, w: h.mul_(2)),
    "a view changed": between(lambda h, r, w: h[0].mul_(2)),
    "an item set": between(lambda h, r, w: h.__setitem__(0, 1.0)),
    "its data changed": between(lambda h, r, w: h.data.mul_(2)),
    "a term changed": between(lambda h, r, w: r.copy_(h)),
    "a weight changed": between(lambda h, r, w: w.add_(1)),
    "changed by an operator": between(lambda h, r, w: torch.ops.lngen_test.bump(h.detach())),
    "in place of an input": lambda x, r, w: (norm(x.add_(r), w), x.__iadd__(r), norm(x, w)),
    "in place of what has a view": in_place(lambda former: former.view(-1)),
    "in place of what is read": in_place(lambda former: former),
}


def leaves(dtype: torch.dtype, trained: bool) -> list[Any]:
    """Two tensors of rows and a weight; every call gives the same numbers."""
    torch.manual_seed(0)
    return [torch.randn(*shape).to(dtype).requires_grad_(trained) for shape in ((2, 3, D), (2, 3, D), (D,))]


def called(function: Callable[..., Any], dtype: torch.dtype, trained: bool) -> tuple[list[Any], list[Any]]:
    """What a function returns and makes of its inputs, and the gradients; none if PyTorch refuses those."""
    given = leaves(dtype, trained)
    inputs = [t.clone() for t in given]  # those that are no leaves may be changed in place
    torch.manual_seed(1)  # of dropout
    found = function(*inputs)
    found = [*found] if isinstance(found, tuple) else [found]
    with_gradients = [y for y in found if y.requires_grad]
    cotangents = [torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape) for y in with_gradients]
    try:
        gradients = torch.autograd.grad(with_gradients, given, cotangents, allow_unused=True)
    except RuntimeError:
        gradients = ()
    return [*found, *inputs], [*gradients]


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(function, backend=lambda module, inputs: L.fuse(module).forward, fullgraph=True, **options)


def check(function: Callable[..., Any], dtype: torch.dtype, trained: bool) -> int:
    """Fusing moves no bit of forward, and gradients by roundings of float64 alone; the number of pairs fused."""
    wanted, expected = called(function, dtype, trained)
    found, gradients = called(compiled(function), dtype, trained)
    assert same_bits(found, wanted)
    assert [t.requires_grad for t in found] == [t.requires_grad for t in wanted]
    if dtype == torch.float64 and expected:
        assert [g is None for g in gradients] == [g is None for g in expected]
        for gradient, other in zip(gradients, expected, strict=True):
            assert gradient is None or torch.allclose(gradient, other, rtol=1e-12, atol=1e-12)
    return int(counters["lngen"]["fused"])


@pytest.mark.parametrize("trained", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", FUSED)
def test_a_pair_becomes_one_operator(name: str, trained: bool) -> None:
    assert check(FUSED[name], torch.float64, trained) == 1


@pytest.mark.parametrize("name", LEFT)
def test_a_pair_that_is_no_sum_or_changes_stays(name: str) -> None:
    assert check(LEFT[name], torch.float64, True) == 0


@torch._dynamo.config.patch(trace_autograd_ops=True)
def test_a_sum_by_which_the_graph_differentiates_stays() -> None:
    def function(x: Any, r: Any, w: Any) -> Any:
        h = x + r
        return torch.autograd.grad(norm(h, w).square().sum(), h)[0]

    inputs = leaves(torch.float64, True)
    assert torch.equal(compiled(function)(*inputs), function(*inputs))


def test_a_stream_may_grow_in_place() -> None:
    """In inference; PyTorch's own norms do not train so."""

    def function(x: Any, r: Any, w: Any) -> Any:
        h = x * 2
        h += r
        h += norm(h, w)
        return norm(h, w)

    assert check(function, torch.float64, False) == 2


@pytest.mark.parametrize("name", ["operator", "others read the sum"])
def test_nothing_writes_h_where_nothing_needs_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In inference. The pair is printed, if asked for."""
    keys: list[str] = []

    def backend(module: Any, inputs: Any) -> Any:
        keys.extend(node.kwargs["keys"] for node in L.fuse(module).graph.nodes if "keys" in node.kwargs)
        return module.forward

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LNGEN_DEBUG", "1")
        called(torch.compile(FUSED[name], backend=backend), torch.float32, False)
    assert keys == ["h=no" if name == "operator" else ""]
    assert capsys.readouterr().err.endswith(" = l_x_ + l_r_ and rmsnorm_fwd_default\n")


def test_a_kernel_of_another_compiler_may_change_the_sum() -> None:
    """Dynamo runs none on tensors without content."""
    found: list[bool] = []

    def backend(module: Any, inputs: Any) -> Any:
        (total,) = [node for node in module.graph.nodes if node.target is operator.add]
        with module.graph.inserting_after(total):
            module.graph.call_function(triton_kernel_wrapper_mutation, (), {"kernel_idx": 0, "kwargs": {"x": total}})
        found.extend(node.target is operator.add for node in L.fuse(module).graph.nodes)
        return lambda *inputs: inputs[:1]

    torch.compile(FUSED["operator"], backend=backend)(*leaves(torch.float32, False))
    assert any(found)


def test_the_number_of_rows_may_be_any() -> None:
    """And its length may be read between: one graph, compiled once, for an addition of as many rows."""
    counter = CompileCounterWithBackend("eager")

    def function(x: Any, r: Any, w: Any) -> Any:
        h = x + r
        return norm(h, w), h.view(h.shape[0] * h.shape[1], D)

    run = torch.compile(function, backend=lambda m, inputs: counter(L.fuse(m), inputs), dynamic=True, fullgraph=True)
    for rows in (2, 5, 40):
        inputs = [torch.randn(rows, 3, D), torch.randn(rows, 3, D), torch.randn(D)]
        assert same_bits(run(*inputs), function(*inputs))
    assert (counter.frame_count, counters["lngen"]["fused"]) == (1, 1)


# ---- programs by chance: sums, norms, views, dropout, changes in place, several readers ----

STEPS: dict[str, Callable[[list[Any], int, int, Any], Any]] = {
    "sum": lambda v, i, j, w: v.append(v[i] + v[j]),
    "norm": lambda v, i, j, w: v.append(norm(v[i], w)),
    "pair": lambda v, i, j, w: v.extend((h := v[i] + v[j], norm(h, w))),
    "pair in place": lambda v, i, j, w: v.append(norm(operator.iadd(v[i] * 2, v[j]), w)),
    "product": lambda v, i, j, w: v.append(v[i] * v[j]),
    "view": lambda v, i, j, w: v.append(v[i].view(-1, D).view(2, 3, D)),
    "dropout": lambda v, i, j, w: v.append(F.dropout(v[i], 0.5)),
    "detach": lambda v, i, j, w: v.append(v[i].detach()),
}
CHANGES: dict[str, Callable[[list[Any], int, int, Any], Any]] = {
    "sum in place": lambda v, i, j, w: v.append(operator.iadd(v[i], v[j])),
    "sum in place of": lambda v, i, j, w: v.__setitem__(i, operator.iadd(v[i], v[j])),
    "scaled": lambda v, i, j, w: v[i].mul_(0.5),
    "rows copied": lambda v, i, j, w: v[i][0].copy_(v[j][1]),
}


def program(seed: int, changes: int) -> Function:
    """Ten steps, of which so many change a value in place."""
    chance = random.Random(seed)
    steps = [*chance.choices([*STEPS.values()], k=10 - changes), *chance.choices([*CHANGES.values()], k=changes)]
    chance.shuffle(steps)
    chosen = [(step, chance.random(), chance.random()) for step in steps]

    def function(x: Any, r: Any, w: Any) -> Any:
        values = [x, r, x * r]
        for step, i, j in chosen:
            step(values, int(i * len(values)), int(j * len(values)), w)
        return tuple(values)

    return function


@rotating(("first", "changes"), list(product((0, 5, 10, 15, 20), range(4))))
def test_programs_by_chance_keep_their_bits(first: int, changes: int) -> None:
    for seed in range(first, first + 5):
        torch._dynamo.reset()
        check(program(seed, changes), torch.float64, True)
    assert counters["lngen"]["fused"]


# ---- models ----


def errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The distance from float64, over all tensors."""
    return float(sum((a.double() - b).square().sum() for a, b in zip(found, exact, strict=True)) ** 0.5)


def test_gradients_of_a_sum_are_rounded_once() -> None:
    """Eager rounds that of the norm, and then its sum with the other, which is as large: sqrt(2 / 3) of its error.

    The sum h has no rounding, so that all errors are backward's. Chance moves a mean of 8192 by 1 %.
    """

    def function(x: Any, r: Any, w: Any) -> Any:
        h = x + r
        return L.rms_norm(h, (64,), w, 1e-6), h * 1

    def dx(run: Callable[..., Any], dtype: torch.dtype) -> Tensor:
        torch.manual_seed(0)
        x, r = (torch.randint(-8, 9, (128, 64)).to(dtype).requires_grad_() for _ in range(2))
        w, *cotangents = (torch.randn(shape).bfloat16().to(dtype) for shape in ((64,), (128, 64), (128, 64)))
        found: Tensor = torch.autograd.grad(run(x, r, 8 * w), x, cotangents)[0]
        return found

    exact = dx(function, torch.float64)
    eager, once = (errors([dx(run, torch.bfloat16)], [exact]) for run in (function, compiled(function)))
    assert once <= 0.9 * eager


WIDTH, LAYERS = 32, 2
SHAPES = {"llama": 2, "qwen3": 3, "gemma2": 4, "gpt2": 2, "bert": 2}  # the norms of a layer


class Layer(nn.Module):  # type: ignore[misc]
    """Two residual branches, with norms where a family has them."""

    def __init__(self, family: str, norm: Callable[[int], Any]) -> None:
        super().__init__()
        self.family, self.norms = family, nn.ModuleList(norm(WIDTH) for _ in range(SHAPES[family]))
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        for n, branch in enumerate(self.branches):
            if self.family == "bert":
                h = self.norms[n](branch(h).tanh() + h)
                continue
            x = branch(self.norms[n](h))
            x = self.norms[2](x).tanh() if self.family == "qwen3" else x.tanh()
            h = h + (self.norms[n + 2](x) if self.family == "gemma2" else x)
        return h


def model(family: str) -> nn.Module:
    norm = L.LayerNorm if family in ("gpt2", "bert") else L.RMSNorm
    layers = [Layer(family, norm) for _ in range(LAYERS)]
    return nn.Sequential(nn.Embedding(64, WIDTH), *layers, *([] if family == "bert" else [norm(WIDTH)]))


def trained(run: Callable[..., Any], parameters: Sequence[Any], words: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    y = run(words)
    return y, torch.autograd.grad(y, parameters, torch.linspace(-1, 2, y.numel()).reshape(y.shape).sin().to(y.dtype))


@pytest.mark.parametrize("family", SHAPES)
def test_two_norms_of_each_layer_are_fused(family: str) -> None:
    """Gradients are as far from float64 as in eager: there are no more roundings. 5 % is chance, of 30 seeds 1.8."""
    torch.manual_seed(0)
    net, words = model(family).bfloat16(), torch.randint(64, (4, 64))
    exact = copy.deepcopy(net).double()
    run = torch.compile(net, backend="lngen", fullgraph=True)
    wanted, expected = trained(net, [*net.parameters()], words)
    found, gradients = trained(run, [*net.parameters()], words)
    assert counters["lngen"]["fused"] == 2 * LAYERS
    assert torch.equal(found, wanted)
    _, reference = trained(exact, [*exact.parameters()], words)
    assert errors(gradients, reference) <= 1.05 * errors(expected, reference)
    with torch.inference_mode():
        assert torch.equal(run(words), wanted)
    assert counters["lngen"]["fused"] == 4 * LAYERS


@pytest.mark.filterwarnings("ignore")  # those of transformers
@pytest.mark.parametrize("family", SHAPES)
def test_two_norms_of_each_layer_of_transformers_are_fused(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    name, configuration, sizes = FAMILIES[family]
    small = {key: value for key, value in SMALL.items() if key in sizes}
    torch.manual_seed(0)
    config = getattr(transformers, configuration)(**{**sizes, **small, "vocab_size": 64})
    net = getattr(transformers, name)(config).bfloat16()
    L.patch(net)
    run = torch.compile(net, backend="lngen")
    words = torch.randint(64, (2, 16))
    for training, count in ((True, 4), (False, 8)):
        net.train(training)
        torch.manual_seed(1)
        wanted = net(input_ids=words, labels=words)
        torch.manual_seed(1)
        found = run(input_ids=words, labels=words)
        assert torch.equal(found.logits, wanted.logits)
        assert torch.equal(found.loss, wanted.loss)
        assert counters["lngen"]["fused"] == count
    exact = copy.deepcopy(net).double()
    losses = [module(input_ids=words, labels=words).loss for module in (net, run, exact)]
    of = [[*module.parameters()] for module in (net, net, exact)]
    eager, compiled, reference = (torch.autograd.grad(loss, each) for loss, each in zip(losses, of, strict=True))
    assert errors(compiled, reference) <= 1.05 * errors(eager, reference)


# ---- torch.compile ----


def test_the_backend_is_found_by_its_name() -> None:
    """Also before ``import lngen.torch``, by the entry point of an installed lngen."""
    assert torch._dynamo.lookup_backend("lngen") is compile_backend.backend
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    point = EntryPoint("lngen", project["entry-points"]["torch_dynamo_backends"]["lngen"], "torch_dynamo_backends")
    assert point.load() is compile_backend.backend


def broken(x: Any, r: Any, w: Any) -> Any:
    """Two graphs, the second of which has the norm."""
    h = x + r
    torch._dynamo.graph_break()
    return norm(h, w)


@pytest.mark.parametrize(
    ("function", "warned"),
    [(lambda x, r, w: x + r, 1), (FUSED["operator"], 0), (lambda x, r, w: norm(x, w), 0), (broken, 0)],
    ids=["no norm", "a pair", "no pair", "a norm behind a break"],
)
def test_a_model_without_norms_is_told_once(function: Function, warned: int) -> None:
    run = torch.compile(function, backend="lngen")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(4):
            assert torch.equal(run(*leaves(torch.float32, False)), function(*leaves(torch.float32, False)))
    said = [str(warning.message) for warning in found if "lngen" in str(warning.message)]
    assert said == warned * [
        "torch.compile with backend='lngen' has met no norm of lngen's, so it fuses nothing; call "
        "lngen.torch.patch(model) before."
    ]


@COMPILER
@pytest.mark.full(sample=False)
@pytest.mark.filterwarnings("ignore:`torch.jit.script.*` is deprecated:DeprecationWarning")
def test_inductor_takes_the_pass_and_keeps_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second compilation finds the first in the cache, and runs no pass; one without the pass does not find it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    wanted, expected = called(FUSED["others read the sum"], torch.float64, True)
    options: dict[str, Any] = {"pre_grad_custom_pass": L.FusePass()}
    for given, hit in ((options, False), (options, True), ({}, False)):
        torch._dynamo.reset()
        counters["inductor"].clear()
        run = torch.compile(FUSED["others read the sum"], fullgraph=True, options=given)
        found, gradients = called(run, torch.float64, True)
        assert same_bits(found, wanted)
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(gradients, expected, strict=True))
        assert bool(counters["inductor"]["fxgraph_cache_hit"]) is hit
        assert counters["lngen"]["fused"] == 1


def test_dynamo_is_not_imported_before_it_is_needed() -> None:
    """It takes a second. An installed lngen has an entry point for the backend."""
    code = (
        "import importlib.metadata, sys, torch; importlib.metadata.distribution = lambda name: None; "
        "import lngen.torch as L; assert 'torch._dynamo' not in sys.modules; L.FusePass, L.fuse"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
