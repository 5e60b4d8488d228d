"""If these fail, a peer computes something else than lngen, or is called as nobody calls it."""

import importlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import own_graphs
from bench_fakes import CpuGpu, cases, interpreted
from graph_names import HEADS
from lngen.compiler.graphs import GRAPHS, Definition
from lngen.compiler.spec import make_spec
from lngen.lab.bench import peers
from lngen.lab.bench.argument_sets import complaint, expected, make_cases
from lngen.lab.bench.peers import APEX_FAST, LIBRARIES, Torch, autograd, keeping, own_form
from lngen.lab.bench.tasks import LATENCY, Task, make_task
from set_cases import OF_SETS

torch = pytest.importorskip("torch")


# The function of PyTorch's that each graph is made of.
FUNCTIONS = {
    name: "rms_norm" if "rmsnorm" in name else "layer_norm" if "layernorm" in name else name
    for name in GRAPHS
    if name not in ("l2norm", "dyt", *OF_SETS, *HEADS)
} | {"cross_entropy:target=index": "cross_entropy"}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_graph_of_pytorch_s_functions_is_called_as_such(
    name: str, direction: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as an operator for each equation: that is slower than anybody's program. It agrees with the graph."""
    functional, function = torch.nn.functional, FUNCTIONS[name]
    called: list[str] = []
    original = getattr(functional, function)
    monkeypatch.setattr(functional, function, lambda *a, **o: called.append(function) or original(*a, **o))
    (case,) = make_cases(make_task(name, direction, dtype, 9, 250), 2, CpuGpu())
    expression = peers.torch_function
    monkeypatch.setattr(peers, "torch_function", lambda graph: lambda *inputs: pytest.fail("the expression"))
    prepared = Torch().prepare(case)
    prepared.launch(0, 1)
    monkeypatch.setattr(peers, "torch_function", expression)
    assert {*called} == {function}
    results = prepared.results(1)
    assert {*results} == ({*case.differentiable} if direction == "fwd" else {*case.outputs, *case.graph.shared})
    assert not complaint(case, expected(case, 1), results)
    assert not complaint(case, expected(case), interpreted(case))


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("graph", [
    "rmsnorm:beta=yes", "layernorm:gamma=no", "rmsnorm:weight=f32", "add_layernorm:round_sum=no",
    "softmax:scale=0.5", "log_softmax:out=f32", "l2norm", "dyt",
])  # fmt: skip
def test_any_other_graph_has_the_expression(graph: str, direction: str) -> None:
    (case,) = make_cases(make_task(graph, direction, "bf16", 16, 8), 2, CpuGpu())
    assert own_form(case.spec) is None
    prepared = Torch().prepare(case)
    prepared.launch(0, 1)
    assert not complaint(case, expected(case), prepared.results(1))


@pytest.mark.parametrize(("name", "keys", "outputs"), [
    ("add_rmsnorm", {"wrt": "gamma+residual", "of": "h"}, {"dresidual", "dgamma"}),
    ("add_rmsnorm", {"of": "y+rstd"}, {"dx", "dgamma"}),  # dresidual is dx and no result
    ("add_rmsnorm", {"accumulate": "gamma"}, {"dx", "dgamma"}),  # added to an array
    ("scaled", {"accumulate": "gamma"}, None),
])  # fmt: skip
def test_gradients_are_those_asked_for(name: str, keys: dict[str, str], outputs: set[str] | None) -> None:
    """Of the cotangents given; the interpreter has the same."""
    (case,) = cases(name, "bwd", rows=9, **keys)
    assert outputs in (None, {*case.outputs})
    assert {f"d{n}" for n in case.spec.differentiated} <= {*case.inputs}
    prepared = Torch().prepare(case)
    prepared.launch(0, 1)
    results, want = prepared.results(1), expected(case, 1)
    assert not complaint(case, want, {n: a for n, a in results.items() if n in case.outputs})
    assert not complaint(case, expected(case), interpreted(case))


def test_compiled_peers_compile_the_expression(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[dict[str, Any]] = []
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **o: compiled.append(o) or compile_(f, backend="eager", **o))
    for direction in ("fwd", "bwd"):
        (case,) = cases("add_rmsnorm", direction)
        prepared = Torch("compile", compiled=True).prepare(case)
        prepared.launch(0, 1)
        assert not complaint(case, expected(case), prepared.results(1))
    assert compiled == [{"dynamic": False}] * 2


@pytest.mark.parametrize(("chain", "read"), [("x", ["own", "y1", "y2", "own"]), ("", ["own", "other", "third", "own"])])
def test_calls_that_allocate_are_chained_by_their_results(chain: str, read: list[str]) -> None:
    """If they are to be; results are kept until their set comes round."""
    took: list[Any] = []

    def call(t: dict[str, Any]) -> Sequence[Any]:
        took.append(t["x"])
        return (f"y{len(took)}", None)

    prepared = keeping(call, ("y", "mean"), [{"x": "own"}, {"x": "other"}, {"x": "third"}], *[chain] * bool(chain))
    for index in (0, 1, 2, 0):
        prepared.launch(0, index)
    assert took == read
    assert [prepared.results(n) for n in range(3)] == [{"y": "y4"}, {"y": "y2"}, {"y": "y3"}]


def test_autograd_records_a_chain_once_per_link() -> None:
    task = make_task("layernorm", "bwd", "f32", 4, 16, LATENCY)
    (case,) = make_cases(task, 64, CpuGpu())
    calls: list[int] = []

    def forward(t: dict[str, Any]) -> Any:
        calls.append(1)
        return (torch.nn.functional.layer_norm(t["x"], (16,), t["gamma"], t["beta"], 1e-5),)

    prepared = autograd(case, forward)
    assert len(calls) == 2
    prepared.launch(0, 0)
    assert not complaint(case, expected(case), prepared.results(0))


def _norm(x: Any, gamma: Any, beta: Any, eps: float, mean: bool) -> Any:
    centred = x - x.mean(-1, keepdim=True) if mean else x
    y = centred * (centred * centred).mean(-1, keepdim=True).add(eps).rsqrt() * gamma
    return y if beta is None else y + beta


class _Function:
    """An autograd function: its ``apply``."""

    def __init__(self, apply: Any) -> None:
        self.apply = apply


def _flash(mean: bool) -> Any:
    def call(x: Any, weight: Any, bias: Any, residual: Any = None, eps: float = 1e-6, prenorm: bool = False) -> Any:
        h = x if residual is None else x + residual
        y = _norm(h, weight, bias, eps, mean)
        return (y, h) if prenorm else y

    return call


def _quack_rmsnorm(x: Any, weight: Any, residual: Any = None, eps: float = 1e-6, prenorm: bool = False) -> Any:
    return _flash(False)(x, weight, None, residual, eps, prenorm)


def _fused_add(x: Any, residual: Any, weight: Any, eps: float, *, enable_pdl: bool) -> None:
    residual += x
    x[...] = _norm(residual, weight, None, eps, False)


def _rmsnorm_quant(out: Any, x: Any, weight: Any, scale: Any, eps: float, *, enable_pdl: bool) -> None:
    """The reciprocal and the clamp of FlashInfer's CUDA kernel."""
    y = _norm(x.float(), weight.float(), None, eps, False) * (1 / scale)
    most = torch.finfo(out.dtype).max
    out.copy_(y.clamp(-most, most))


def _fused_add_quant(out: Any, x: Any, residual: Any, weight: Any, scale: Any, eps: float, *, enable_pdl: bool) -> None:
    residual += x
    _rmsnorm_quant(out, residual, weight, scale, eps, enable_pdl=enable_pdl)


def _loss(x: Any, target: Any, *rest: Any) -> tuple[Any, None]:
    """Liger's: the gradient lies over logits that require one, and the loss has their dtype."""
    assert rest == (None, -100, 0.0, 0.0, "none")
    loss = torch.nn.functional.cross_entropy(x, target, reduction="none")
    if x.requires_grad:
        with torch.no_grad():
            x.copy_(_gradient(x, target))
    return loss, None


def _gradient(x: Any, target: Any) -> Any:
    return (x.float().softmax(-1) - torch.nn.functional.one_hot(target, x.shape[-1])).to(x.dtype)


def _quack_loss(x: Any, target: Any, *, reduction: str) -> Any:
    return torch.nn.functional.cross_entropy(x.float(), target, reduction=reduction)


def _dyt(x: Any, alpha: Any, gamma: Any, beta: Any) -> Any:
    return (torch.tanh(alpha.float() * x.float()) * gamma + beta).to(x.dtype)


# By module: what stands for it, with the signatures of the libraries' public sources.
STANDS = {
    "liger_kernel.ops.layer_norm": {
        "LigerLayerNormFunction": _Function(lambda x, w, b, eps: _norm(x, w, b, eps, True))
    },
    "liger_kernel.ops.rms_norm": {
        "LigerRMSNormFunction": _Function(lambda x, w, eps, offset, mode, inplace: _norm(x, w, None, eps, False))
    },
    "liger_kernel.ops.fused_add_rms_norm": {
        "LigerFusedAddRMSNormFunction": _Function(
            lambda x, r, w, eps, offset, mode, inplace: _flash(False)(x, w, None, r, eps, True)
        )
    },
    "liger_kernel.ops.dyt": {"LigerDyTFunction": _Function(_dyt)},
    "liger_kernel.ops.softmax": {"LigerSoftmaxFunction": _Function(lambda x: x.softmax(-1))},
    "quack.rmsnorm": {
        "rmsnorm": _quack_rmsnorm,
        "layernorm_fwd": lambda x, weight, bias, eps: _norm(x, weight, bias, eps, True).to(x.dtype),
    },
    "liger_kernel.ops.cross_entropy": {"LigerCrossEntropyFunction": SimpleNamespace(apply=_loss)},
    "quack.softmax": {"softmax": lambda x: x.softmax(-1)},
    "quack.cross_entropy": {
        "cross_entropy": _quack_loss,
        "cross_entropy_fwd": lambda x, t, return_dx: (_quack_loss(x, t, reduction="none"), _gradient(x, t)),
    },
    "flash_attn.ops.triton.layer_norm": {"layer_norm_fn": _flash(True), "rms_norm_fn": _flash(False)},
    "mamba_ssm.ops.triton.layernorm_gated": {
        "rmsnorm_fn": lambda x, w, b, z, eps: _norm(x, w, b, eps, False) * torch.nn.functional.silu(z)
    },
    "flashinfer.norm": {
        "rmsnorm": lambda x, w, eps, *, enable_pdl: _norm(x, w, None, eps, False),
        "layernorm": lambda x, w, b, eps: _norm(x, w, b, eps, True).to(x.dtype),
        "layernorm_cute": lambda y, x, w, b, eps, *, enable_pdl: y.copy_(_norm(x, w, b, eps, True)),
        "fused_add_rmsnorm": _fused_add,
        "rmsnorm_quant": _rmsnorm_quant,
        "fused_add_rmsnorm_quant": _fused_add_quant,
    },
    "apex.contrib.layer_norm.layer_norm": {
        "FastLayerNormFN": _Function(lambda x, w, b, eps: _norm(x, w, b, eps, True))
    },
    "apex.normalization.fused_layer_norm": {
        "FusedLayerNormAffineFunction": _Function(lambda x, w, b, shape, eps: _norm(x, w.view(shape), b, eps, True)),
        "FusedRMSNormAffineFunction": _Function(lambda x, w, shape, eps: _norm(x, w.view(shape), None, eps, False)),
    },
}

HELD = [(peer, name, way) for peer in LIBRARIES for name, m in peer.members.items() for way in m.directions]


@pytest.mark.parametrize(("peer", "name", "direction"), HELD, ids=[f"{p.name}-{n}-{w}" for p, n, w in HELD])
def test_a_member_is_called_as_its_library_wants(
    peer: peers.Library, name: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins take the libraries' arguments; results are those of lngen's graph."""
    task = make_task(name, direction, "bf16", 16, 8)
    assert peer.covers(task.specs[0])
    (case,) = make_cases(task, 2, CpuGpu())
    monkeypatch.setattr(importlib, "import_module", lambda module: SimpleNamespace(**STANDS[module]))
    before = {n: case.sets[1][n].clone() for n in case.inputs}
    prepared = peer.prepare(case)
    prepared.launch(0, 1)
    results = prepared.results(1)
    assert not complaint(case, expected(case), results)
    assert {*results} == ({*case.differentiable} if direction == "fwd" else {*case.outputs, *case.graph.shared})
    assert all(torch.equal(case.sets[1][n], a) for n, a in before.items())  # shared with every other provider


def test_flashinfer_is_called_with_and_without_programmatic_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,), seen = make_cases(make_task("rmsnorm", "fwd", "bf16", 4, 8), 1, CpuGpu()), []
    monkeypatch.setattr(importlib, "import_module", lambda module: SimpleNamespace(rmsnorm=rmsnorm))

    def rmsnorm(x: Any, weight: Any, eps: float, *, enable_pdl: bool) -> Any:
        seen.append(enable_pdl)
        return x

    for peer in (peers.FLASHINFER, peers.FLASHINFER_PDL):
        peer.prepare(case).launch(0, 0)
    assert seen == [False, True]


def test_in_place_has_arrays_of_its_own_in_a_chain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = make_cases(make_task("add_rmsnorm", "fwd", "bf16", 4, 8, LATENCY), 4, CpuGpu())
    monkeypatch.setattr(importlib, "import_module", lambda module: SimpleNamespace(**STANDS[module]))
    prepared = peers.FLASHINFER.prepare(case)
    assert prepared.results(0)["y"] is prepared.results(3)["y"]


def test_a_peer_that_multiplies_by_a_scale_is_outside_of_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = make_cases(make_task("rmsnorm:quant=e4m3,scales=tensor", "fwd", "bf16", 16, 8), 1, CpuGpu())

    def multiplies(out: Any, x: Any, weight: Any, scale: Any, eps: float, *, enable_pdl: bool) -> None:
        _rmsnorm_quant(out, x, weight, 1 / scale, eps, enable_pdl=enable_pdl)

    monkeypatch.setattr(importlib, "import_module", lambda module: SimpleNamespace(rmsnorm_quant=multiplies))
    prepared = peers.FLASHINFER.prepare(case)
    prepared.launch(0, 0)
    assert complaint(case, expected(case), prepared.results(0)).startswith("q is off by ")


def test_libraries_cover_what_they_have() -> None:
    def names(graph: str, direction: str = "fwd", dtype: str = "bf16") -> set[str]:
        spec = make_task(graph, direction, dtype, 4, 8).specs[0]
        return {p.name for p in LIBRARIES if p.covers(spec)}

    assert names("add_rmsnorm") == {"liger", "quack", "flash-attn", "flashinfer", "flashinfer-pdl"}
    assert names("add_rmsnorm", "bwd") == names("add_rmsnorm", dtype="f32") == {"liger", "quack", "flash-attn"}
    assert names("add_layernorm", "bwd") == {"flash-attn"}
    assert names("gated_rmsnorm", "bwd") == {"mamba"}
    assert (names("softmax", "bwd"), names("dyt", "bwd")) == ({"liger", "quack"}, {"liger"})
    assert names("cross_entropy") == set()  # of a distribution they have none
    assert names("cross_entropy:target=index") == names("cross_entropy:target=index,x_grad=yes") == {"liger", "quack"}
    assert names("cross_entropy:target=index", "bwd") == {"quack"}
    assert names("rmsnorm:weight=f32") == names("rmsnorm:beta=yes") == names("layernorm:out=f32") == set()
    quant = "quant=e4m3,scales=tensor"
    assert names(f"rmsnorm:{quant}") == names(f"add_rmsnorm:{quant},apply=mul") == {"flashinfer", "flashinfer-pdl"}
    assert names(f"rmsnorm:{quant},y=yes") == names("rmsnorm:quant=e4m3") == names(f"rmsnorm:{quant}", dtype="f32")
    assert (
        names("rmsnorm:quant=e4m3") == names(f"layernorm:{quant}") == names("rmsnorm:quant=int8,scales=tensor") == set()
    )
    assert names("rmsnorm:eps=0.1,wrt=x", "bwd") == {"liger", "quack", "flash-attn", "apex"}


def test_a_graph_of_the_same_name_is_not_lngen_s() -> None:
    spec = make_spec(Definition("rmsnorm", own_graphs.gated), "fwd", {"d": 8, "dtype": "bf16"})
    assert not any(p.covers(spec) for p in LIBRARIES)
    (case,) = make_cases(Task((spec,), 4), 1, CpuGpu())
    prepared = Torch().prepare(case)
    prepared.launch(0, 0)
    assert not complaint(case, expected(case), prepared.results(0))


def test_apex_without_its_extensions_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda module: module == "apex" or None)
    assert not APEX_FAST.available()
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace())
    assert APEX_FAST.available()
