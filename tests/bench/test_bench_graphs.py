"""The benchmark of any graph: how it is named, its inputs, its ceiling, PyTorch as a peer, other libraries' members."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from test_bench import CpuEngine

import own_graphs
from fake_gpu import FakeGpu
from lngen.bench import ceilings, conditions, engines, host, libraries, plot, providers, report, timing
from lngen.bench.cases import Case
from lngen.bench.ceilings import Ceiling, buffers
from lngen.bench.floor import ceiling_bytes, floor_bytes, write_share
from lngen.bench.formulas import complaint, errors, expected
from lngen.bench.libraries import LIBRARIES
from lngen.bench.measure import covering
from lngen.bench.overlapped import OverlappedCeiling
from lngen.bench.peers import known
from lngen.bench.providers import Torch, own_function
from lngen.bench.records import is_ceiling
from lngen.bench.run import benchmark
from lngen.bench.sets import make_cases, set_bytes
from lngen.bench.store import read_json
from lngen.bench.tasks import CEILINGS, LATENCY, Task, ceiling_of, make_task, split_graphs
from lngen.cli.bench import bench, tasks
from lngen.errors import MissingError, SpecError
from lngen.graphs import GRAPHS, Definition, GraphBuilder
from lngen.interpret import interpret
from lngen.ir import D, DType, M
from lngen.spec import make_spec
from own_graphs import OWN, own

torch = pytest.importorskip("torch")

MODULE = """
from lngen import D, M


def add_rmsnorm(b):
    h = b.input("x", M, D) + b.input("residual", M, D, dtype="f32")
    rstd = (b.mean(h * h) + b.eps()).rsqrt()
    gamma = b.optional_input("gamma", D)
    y = h * rstd
    b.output("y", y if gamma is None else y * gamma)
    b.output("h", h, dtype="f32")
    b.statistic(rstd, "rstd")
"""


class HostEngine(CpuEngine):
    """Arrays that are not PyTorch's, as far as the benchmark knows."""

    name = "numpy"


@pytest.fixture
def few_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "COLD_BYTES", 10_000)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a file of f32 and a module."""
    (tmp_path / "my.graph").write_text(str(own("add_rmsnorm", dtype="f32").forward()))
    (tmp_path / "bench_norms.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("bench_norms", None)


def cases(name: str, direction: str, rows: int = 5, count: int = 2, engine: Any = None, **keys: object) -> list[Case]:
    halves = ("fwd", "bwd") if direction == "both" else (direction,)
    task = Task(tuple(own(name, half, **keys) for half in halves), rows)
    return make_cases(task, count, engine or CpuEngine())


# ---- names ----


@pytest.mark.parametrize(
    ("graph", "label"),
    [
        ("rmsnorm", "rmsnorm"),
        ("rmsnorm:weight=f32", "rmsnorm:weight=f32"),
        ("rmsnorm:weight=bf16,eps=1e-05", "rmsnorm"),  # the defaults
        ("layernorm:gamma=no,wrt=x", "layernorm:gamma=no,wrt=x"),
        ("bench_norms:add_rmsnorm", "add_rmsnorm@"),
        ("bench_norms:add_rmsnorm:gamma=no,out=f32", "add_rmsnorm@"),
        ("my.graph", "add_rmsnorm@"),
        ("./my.graph:wrt=x", "add_rmsnorm@"),
    ],
)
def test_a_graph_is_named_as_in_a_spec(graph: str, label: str, folder: Path) -> None:
    """The record has the name with its digest and the keys that are not defaults."""
    (task,) = tasks([graph], "bwd", "" if "my.graph" in graph else "bf16", "design", [(4, 16)])
    keys = ",".join(k for k in graph.rpartition(":")[2].split(",") if "=" in k)
    assert (task.graph == label) if "@" not in label else task.graph.startswith(label)
    if "@" in label:
        assert task.graph.partition(":")[2] == ",".join(
            k for k in ("out=f32", "gamma=no", "wrt=x") if k in keys.split(",")
        )
    assert task.spec.startswith(f"{task.graph.partition(':')[0]}.bwd:d=16,dtype=")
    assert task.dtype is (DType.F32 if "my.graph" in graph else DType.BF16)  # a file declares its own
    assert task.spec == str(task.specs[0])


def test_keys_of_a_backward_are_of_a_backward(folder: Path) -> None:
    forward, backward, both = tasks(["rmsnorm:wrt=x,eps=0.1"], "fwd,bwd,both", "f32", "design", [(4, 16)])
    assert (forward.graph, backward.graph) == ("rmsnorm:eps=0.1", "rmsnorm:eps=0.1,wrt=x")
    assert (both.spec, both.graph) == ("rmsnorm.both:d=16,dtype=f32,eps=0.1,wrt=x", backward.graph)


def test_several_graphs() -> None:
    given = ["layernorm, rmsnorm", "rmsnorm:weight=f32,out=f32", "a.graph:wrt=x", "m:f"]
    assert split_graphs(given) == ["layernorm", "rmsnorm", *given[1:]]


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ("rmsnrm", r"there is no graph 'rmsnrm', expected one of layernorm, rmsnorm.*did you mean"),
        ("rmsnorm:d=64", r"--graph 'rmsnorm:d=64': the key 'd' is not part of a graph here; give --shapes, --d or --g"),
        ("my.graph:dtype=f32", r"the key 'dtype' is not part of a graph here; give --dtype\."),
        ("rmsnorm.fwd", r"--graph 'rmsnorm\.fwd': a graph is expected without its direction; give that with --direct"),
        ("none.graph", r"'none\.graph' is expected to be a file with a graph, but No such file or directory\."),
        ("bench_norms:nothing", r"'bench_norms:nothing' cannot be imported: 'bench_norms' has no 'nothing'\."),
        ("rmsnorm:weight", r"expected 'key=value', got 'weight'\."),
        ("rmsnorm:wieght=f32", r"there is no key 'wieght', expected one of .*; did you mean 'weight'"),
    ],
)
def test_a_wrong_graph_gets_one_sentence(graph: str, message: str, folder: Path) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        tasks([graph], "fwd", "f32", "design", [(4, 16)])
    assert "\n" not in str(caught.value)


# ---- inputs, cotangents, saved values ----


@pytest.mark.parametrize("name", OWN)
def test_sets_come_from_the_graph(name: str) -> None:
    """Inputs, cotangents of mean 0 for every output, and values saved by the forward; not a list of names."""
    (case,) = cases(name, "bwd", rows=400)
    first = case.sets[0]
    assert {*case.inputs, *case.outputs, *(p.name for p in case.forward.params)} == {*first}
    for v in (*case.graph.params, *case.graph.results):
        assert tuple(first[v.name].shape) == v.type.shape(400, 24)
    for output in case.differentiable:
        assert abs(float(first[f"d{output}"].mean())) < 0.25
    arrays = {v.name: first[v.name].numpy() for v in case.forward.params}
    known_values = interpret(own(name).graph(), arrays)
    saved = [v.name for v in case.graph.params if v.name in known_values]
    assert saved == [n for n in case.inputs if n in {r.name for r in case.forward.results}]
    for n in saved:
        np.testing.assert_allclose(first[n].numpy(), known_values[n], rtol=1e-5)


@pytest.mark.parametrize("direction", ["fwd", "bwd", "both"])
@pytest.mark.parametrize("name", OWN)
def test_the_whole_way_with_pytorch_as_a_peer(name: str, direction: str, few_sets: None) -> None:
    halves = ("fwd", "bwd") if direction == "both" else (direction,)
    task = Task(tuple(own(name, half) for half in halves), 40)
    chosen = covering(task, [*map(Ceiling, CEILINGS), Torch(), *LIBRARIES])
    ceiling, eager = benchmark([task], chosen, CpuEngine()).records
    assert (ceiling.provider, ceiling.note, ceiling.fraction) == (task.ceiling, "", 1.0)
    assert (eager.provider, eager.note, eager.us_median) == ("torch", "", 10.0)
    assert eager.gb_s == round(sum(floor_bytes(s, 40) for s in task.specs) / 10.0 / 1e3, 1)
    assert (eager.graph, eager.target) == (task.graph, None)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("engine", [CpuEngine, HostEngine])
def test_lngen_is_right_by_the_reference(name: str, direction: str, engine: type[CpuEngine]) -> None:
    """The interpreter's results, of bf16 and f32, with PyTorch's reference and without PyTorch."""
    for dtype in ("f32", "bf16"):
        (case,) = cases(name, direction, rows=33, engine=engine(), dtype=dtype)
        found = interpreted(case)
        assert not complaint(case, expected(case), found), (dtype, errors(case, expected(case), found))
        main = case.outputs[0]
        assert complaint(case, expected(case), {**found, main: found[main] * 1.1}).startswith(f"{main} is off by")


def interpreted(case: Case) -> dict[str, Any]:
    """What the interpreter makes of the first set, in float64."""
    from lngen.ir.numerics import NUMPY_DTYPE

    inputs = {v.name: case.engine.host(case.engine.wide(case.sets[0][v.name])) for v in case.graph.params}
    stored = {v.name: inputs[v.name].astype(NUMPY_DTYPE[v.type.dtype]) for v in case.graph.params}
    return {n: torch.from_numpy(a.astype(np.float64)) for n, a in interpret(case.graph, stored).items()}


def test_a_reference_in_parts_is_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over the rows add up, other results are put together; unless an equation joins the rows."""
    from lngen.bench import formulas

    for name in ("scaled", "add_rmsnorm"):
        (case,) = cases(name, "bwd", rows=33)
        whole = expected(case)
        monkeypatch.setattr(formulas, "CHUNK", 100)
        pieces = expected(case)
        monkeypatch.undo()
        for n, want in whole.items():
            torch.testing.assert_close(pieces[n], want, rtol=1e-12, atol=1e-12)

    def joined(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        b.output("y", x - b.mean(x, M))

    spec = make_spec(Definition("joined", joined), "fwd", {"d": 24})
    assert [*formulas.parts(spec, 10**7)] == [slice(0, 10**7)]
    assert len([*formulas.parts(own("gated"), 10**7)]) > 1


def test_inputs_are_where_the_graph_is_defined() -> None:
    def logarithm(b: GraphBuilder) -> None:
        b.output("y", (b.input("x", M, D) + b.input("z", M, D)).log())

    spec = make_spec(Definition("own", logarithm), "bwd", {"d": 24, "dtype": "bf16"})
    for engine in (CpuEngine(), HostEngine()):
        (case,) = make_cases(Task((spec,), 33), 1, engine)
        assert all(bool(torch.isfinite(want).all()) for want in expected(case).values())


def test_gradients_asked_for_and_cotangents_given() -> None:
    """wrt and of: the peers take as many, in the right order."""
    (case,) = cases("add_rmsnorm", "bwd", wrt="gamma+residual", of="h")
    assert (case.outputs, case.spec.differentiated) == (("dresidual", "dgamma"), ("h",))
    prepared = Torch().prepare(case)
    prepared.launch(0, 1)
    assert not complaint(case, expected(case), {n: a for n, a in prepared.results(1).items() if n in case.outputs})
    assert bool((expected(case)["dgamma"] == 0).all())


@pytest.mark.parametrize("engine", [CpuEngine, HostEngine])
@pytest.mark.parametrize("name", ["add_rmsnorm", "scaled"])
def test_gradients_that_are_added_to_arrays_or_stored_once(name: str, engine: type[CpuEngine]) -> None:
    """accumulate=gamma; dresidual is dx and not a result."""
    (case,) = cases(name, "bwd", rows=9, engine=engine(), accumulate="gamma")
    assert "dgamma_in" in case.inputs
    assert "dresidual" not in case.outputs
    plain = {p.name: case.sets[1][p.name].numpy() for p in case.graph.params}
    results = interpret(case.graph, plain)
    want = expected(case, 1)
    for n, found in results.items():
        np.testing.assert_allclose(found.reshape(want[n].shape), want[n].numpy(), rtol=2e-3, atol=1e-4)
    if engine is CpuEngine:
        prepared = Torch().prepare(case)
        prepared.launch(0, 1)
        assert not complaint(case, want, prepared.results(1))


def test_a_statistic_with_a_cotangent() -> None:
    (case,) = cases("add_rmsnorm", "bwd", of="y+rstd")
    prepared = Torch().prepare(case)
    prepared.launch(0, 0)
    assert "drstd" in case.inputs
    assert not complaint(case, expected(case), prepared.results(0))


def test_a_set_holds_what_a_peer_needs() -> None:
    """lngen's backward of h = x + residual needs neither; PyTorch's records both."""
    task = Task((own("add_rmsnorm", "bwd", of="h"),), 10)
    assert "x" not in {p.name for p in task.specs[0].graph().params}
    assert set_bytes(task) > floor_bytes(task.specs[0], 10)
    assert "x" in make_cases(task, 1, CpuEngine())[0].sets[0]


def test_a_latency_is_that_of_a_chain(few_sets: None) -> None:
    task = Task((own("gated", "bwd"),), 4, LATENCY)
    (case,) = make_cases(task, 4, CpuEngine())
    assert case.chain == "dy"
    chosen = [*map(Ceiling, CEILINGS), Torch()]
    assert [r.note for r in benchmark([task], chosen, CpuEngine()).records] == ["", ""]
    impossible = Task((own("loss"),), 4, LATENCY)
    for record in benchmark([impossible], chosen, CpuEngine()).records:
        assert "no input of the type of 'loss', f32[M]: leave --latency out." in record.note


@pytest.mark.parametrize(
    ("name", "direction"),
    [*((n, way) for n in ("add_rmsnorm", "weighted_rows", "loss") for way in ("fwd", "bwd")), ("scaled", "fwd")],
)
def test_lngen_is_launched_with_every_array_of_its_graph(
    name: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that writes down what it is asked: several [M, D] inputs, results, numbers and numbers a row."""
    (case,) = cases(name, direction, rows=5, count=2)
    gpu = FakeGpu(monkeypatch)
    monkeypatch.setattr("lngen.bench.providers.device_arch", lambda device: "sm_90")
    for provider in ("lngen", "lngen-overlapped"):
        gpu.launched.clear()
        prepared = known()[provider].prepare(case)
        prepared.launch(7, 1)
        taken = {value for one in gpu.launched for value in one.values.values()}
        assert {case.sets[1][n].data_ptr() for n in (*case.inputs, *case.outputs)} <= taken
        assert {one.stream for one in gpu.launched} == {7}
        assert {*prepared.results(0)} == {*case.outputs}


# ---- ceilings ----

# Read and written [M, D] tensors, and the ceiling whose share of writes is the nearer.
RATIOS = {
    ("add_rmsnorm", "fwd"): (2, 2, "copy"),
    ("gated", "fwd"): (2, 1, "add"),
    ("gated", "bwd"): (3, 2, "add"),
    ("scaled", "fwd"): (1, 1, "copy"),
    ("scaled", "bwd"): (2, 1, "add"),
    ("loss", "fwd"): (2, 0, "add"),
    ("loss", "bwd"): (2, 2, "copy"),
}


@pytest.mark.parametrize(("name", "direction"), RATIOS)
def test_the_ceiling_moves_the_bytes_of_the_graph(name: str, direction: str) -> None:
    reads, writes, ceiling = RATIOS[name, direction]
    spec = own(name, direction)
    assert write_share(spec.graph()) == writes / (reads + writes)
    assert ceiling_bytes(spec, 10) == (reads + writes) * 10 * 24 * 4
    assert ceiling_of(spec) == ceiling
    (case,) = cases(name, direction, rows=10, count=3)
    held = buffers(case)
    assert [len(arrays) for arrays in held] == [{"copy": 2, "add": 3}[ceiling]] * 3
    total = sum(a.numel() * a.element_size() for a in held[0])
    assert 0 <= total - ceiling_bytes(spec, 10) < 3 * 4
    assert len({a.data_ptr() for arrays in held for a in arrays}) == 3 * len(held[0])


def test_a_ceiling_writes_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    (copied,) = cases("scaled", "fwd")
    (added,) = cases("gated", "fwd")
    for case, name in ((copied, "copy"), (added, "add")):
        assert (Ceiling(name).covers(case.spec), OverlappedCeiling(name).covers(case.spec)) == (True, True)
        held = buffers(case)
        monkeypatch.setattr(ceilings, "buffers", lambda case, held=held: held)
        Ceiling(name).prepare(case).launch(0, 1)
        assert torch.equal(held[1][0], sum(held[1][1:], torch.zeros(())))


def test_the_ceiling_of_a_latency_is_a_chain() -> None:
    (case,) = make_cases(Task((own("scaled"),), 4, LATENCY), 4, CpuEngine())
    held = buffers(case)
    assert all(after[1] is before[0] for before, after in pairwise(held))


def test_forward_and_backward_have_a_ceiling_each() -> None:
    task = Task((own("gated", "fwd"), own("gated", "bwd")), 10)
    assert (task.ceiling, Task((own("loss"), own("loss", "bwd")), 10).ceiling) == ("add+add", "add+copy")
    assert {p.name for p in covering(task, [*known().values()]) if not p.checked} == {"add+add"}
    assert all(is_ceiling(name) for name in ("add+copy", "copy+copy", "add-overlapped"))


# ---- other libraries ----


def dyt(b: GraphBuilder) -> None:
    """A stand-in for the member's inputs, with another function of x."""
    x, alpha = b.input("x", M, D), b.input("alpha")
    gamma, beta = b.input("gamma", D), b.input("beta", D)
    b.output("y", (alpha * x).relu() * gamma + beta)


def add_layernorm(b: GraphBuilder) -> None:
    h = b.input("x", M, D) + b.input("residual", M, D)
    gamma, beta = b.input("gamma", D), b.input("beta", D)
    centred = h - b.mean(h)
    b.output("y", centred * (b.mean(centred * centred) + b.eps()).rsqrt() * gamma + beta)
    b.output("h", h)


def softmax(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    e = x * x
    b.output("y", e / b.sum(e))


MEMBERS = {
    "add_rmsnorm": own_graphs.add_rmsnorm,
    "gated_rmsnorm": own_graphs.gated,
    **{f.__name__: f for f in (dyt, add_layernorm, softmax)},
}


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of lngen's with these names; their functions of x stand for those that have ops of their own."""
    more = {name: Definition(name, f) for name, f in MEMBERS.items()}
    for module in ("lngen.spec.spec", "lngen.spec.parse", "lngen.bench.tasks"):
        monkeypatch.setattr(f"{module}.GRAPHS", MappingProxyType({**GRAPHS, **more}))


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


def _fused_add(x: Any, residual: Any, weight: Any, eps: float) -> None:
    residual += x
    x[...] = _norm(residual, weight, None, eps, False)


# By module: what stands for it, with the signatures of the libraries' public sources.
STANDS = {
    "liger_kernel.ops.layer_norm": {
        "LigerLayerNormFunction": _Function(lambda x, w, b, eps: _norm(x, w, b, eps, True)),
    },
    "liger_kernel.ops.rms_norm": {
        "LigerRMSNormFunction": _Function(lambda x, w, eps, offset, mode, inplace: _norm(x, w, None, eps, False)),
    },
    "liger_kernel.ops.fused_add_rms_norm": {
        "LigerFusedAddRMSNormFunction": _Function(
            lambda x, r, w, eps, offset, mode, inplace: _flash(False)(x, w, None, r, eps, True)
        ),
    },
    "liger_kernel.ops.dyt": {"LigerDyTFunction": _Function(lambda x, a, g, b: torch.relu(a[0] * x) * g + b)},
    "liger_kernel.ops.softmax": {"LigerSoftmaxFunction": _Function(lambda x: x * x / (x * x).sum(-1, keepdim=True))},
    "quack.rmsnorm": {
        "rmsnorm": _quack_rmsnorm,
        "layernorm_fwd": lambda x, weight, bias, eps: _norm(x, weight, bias, eps, True).to(x.dtype),
    },
    "quack.softmax": {"softmax": lambda x: x * x / (x * x).sum(-1, keepdim=True)},
    "flash_attn.ops.triton.layer_norm": {"layer_norm_fn": _flash(True), "rms_norm_fn": _flash(False)},
    "mamba_ssm.ops.triton.layernorm_gated": {
        "rmsnorm_fn": lambda x, w, b, z, eps: _norm(x, w, b, eps, False) * torch.relu(z)
    },
    "flashinfer.norm": {
        "rmsnorm": lambda x, w, eps: _norm(x, w, None, eps, False),
        "layernorm": lambda x, w, b, eps: _norm(x, w, b, eps, True).to(x.dtype),
        "fused_add_rmsnorm": _fused_add,
    },
}
HELD = [(peer, name, way) for peer in LIBRARIES if not peer.extension for name, m in peer.members.items() for way in
        m.directions]  # fmt: skip


@pytest.mark.parametrize(("peer", "name", "direction"), HELD, ids=[f"{p.name}-{n}-{w}" for p, n, w in HELD])
def test_a_member_is_called_as_its_library_wants(
    peer: libraries.Library, name: str, direction: str, members: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins take the libraries' arguments; results are those of lngen's graph."""
    task = make_task(name, direction, "bf16", 16, 8)
    assert peer.covers(task.specs[0])
    (case,) = make_cases(task, 2, CpuEngine())
    monkeypatch.setattr(libraries.importlib, "import_module", lambda module: SimpleNamespace(**STANDS[module]))
    for t in case.sets if "target" in case.sets[0] else []:
        t["target"].fill_(3)
    before = {n: case.sets[1][n].clone() for n in case.inputs}
    prepared = peer.prepare(case)
    prepared.launch(0, 1)
    results = prepared.results(1)
    assert not complaint(case, expected(case), results)
    assert {*results} == {*case.outputs, *case.graph.shared} - {"mean", "rstd", "dtarget"}
    assert all(torch.equal(case.sets[1][n], a) for n, a in before.items())  # shared with every other provider


def test_in_place_has_arrays_of_its_own_in_a_chain_one(members: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = make_cases(make_task("add_rmsnorm", "fwd", "bf16", 4, 8, LATENCY), 4, CpuEngine())
    monkeypatch.setattr(libraries.importlib, "import_module", lambda module: SimpleNamespace(**STANDS[module]))
    prepared = libraries.FLASHINFER.prepare(case)
    assert prepared.results(0)["y"] is prepared.results(3)["y"]


def test_libraries_cover_what_they_have(members: None) -> None:
    def names(graph: str, direction: str = "fwd", dtype: str = "bf16") -> set[str]:
        spec = make_task(graph, direction, dtype, 4, 8).specs[0]
        return {p.name for p in LIBRARIES if p.covers(spec)}

    assert names("add_rmsnorm") == {"liger", "quack", "flash-attn", "flashinfer"}
    assert names("add_rmsnorm", "bwd") == names("add_rmsnorm", dtype="f32") == {"liger", "quack", "flash-attn"}
    assert names("add_layernorm", "bwd") == {"flash-attn"}
    assert names("gated_rmsnorm", "bwd") == {"mamba"}
    assert (names("softmax", "bwd"), names("dyt", "bwd")) == ({"liger", "quack"}, {"liger"})
    assert names("cross_entropy") == set()  # theirs takes an index, lngen's a distribution
    assert names("rmsnorm:weight=f32") == names("rmsnorm:beta=yes") == names("layernorm:out=f32") == set()
    assert names("rmsnorm:eps=0.1,wrt=x", "bwd") == {"liger", "quack", "flash-attn", "apex"}


def test_a_graph_of_the_same_name_is_not_lngen_s() -> None:
    spec = make_spec(Definition("rmsnorm", own_graphs.gated), "fwd", {"d": 8, "dtype": "bf16"})
    assert not any(p.covers(spec) for p in LIBRARIES)
    (case,) = make_cases(Task((spec,), 4), 1, CpuEngine())
    prepared = Torch().prepare(case)
    prepared.launch(0, 0)
    assert not complaint(case, expected(case), prepared.results(0))


@pytest.mark.parametrize("graph", ["rmsnorm:beta=yes", "layernorm:gamma=no", "rmsnorm:save=none", "rmsnorm:weight=f32"])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_norm_with_options_has_pytorch_s_expression(graph: str, direction: str) -> None:
    (case,) = make_cases(make_task(graph, direction, "bf16", 16, 8), 2, CpuEngine())
    prepared = Torch().prepare(case)
    prepared.launch(0, 1)
    assert not complaint(case, expected(case), prepared.results(1))
    assert {*prepared.results(1)} == {*case.outputs} - {"mean", "rstd"}


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "cross_entropy"])
def test_softmax_s_family_has_pytorch_s_own_functions(
    name: str, direction: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call, of distributions for cross_entropy; it agrees with the graph, whose expression is not evaluated."""
    called: list[str] = []
    own = getattr(torch.nn.functional, name)
    monkeypatch.setattr(torch.nn.functional, name, lambda *a, **o: called.append(name) or own(*a, **o))
    monkeypatch.setattr(providers, "torch_function", lambda graph: pytest.fail("the expression"))
    (case,) = make_cases(make_task(name, direction, dtype, 9, 250), 2, CpuEngine())
    prepared = Torch().prepare(case)
    prepared.launch(0, 1)
    assert {*called} == {name}
    assert {*prepared.results(1)} == {*case.differentiable} if direction == "fwd" else {"dx"}
    assert not complaint(case, expected(case), prepared.results(1))
    assert not complaint(case, expected(case), interpreted(case))


@pytest.mark.parametrize("graph", ["softmax:scale=0.5", "log_softmax:out=f32"])
def test_softmax_with_options_has_the_expression(graph: str) -> None:
    spec = make_task(graph, "bwd", "bf16", 2, 8).specs[0]
    assert own_function(spec) is None
    (case,) = make_cases(Task((spec,), 2), 1, CpuEngine())
    prepared = Torch().prepare(case)
    prepared.launch(0, 0)
    assert not complaint(case, expected(case), prepared.results(0))


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


# ---- records, tables, plots, command line ----


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, few_sets: None) -> None:
    engine = CpuEngine()
    monkeypatch.setattr(engines, "make_engine", lambda: engine)
    monkeypatch.setattr(conditions, "conditions", lambda engine, method: {"rounds": str(method.rounds)})


def test_the_command_takes_own_graphs(on_the_cpu: None, folder: Path) -> None:
    options = "--graph layernorm,rmsnorm --graph rmsnorm:beta=yes --graph my.graph "
    options += "--graph bench_norms:add_rmsnorm:gamma=no"
    rest = "--providers torch --shapes 64x32 --direction fwd,bwd,both --dtype f32 --rounds 10 --out b.json --resume"
    first, second = (
        CliRunner().invoke(bench, [*options.split(), *rest.split(), "--plot", "p.svg"], catch_exceptions=False)
        for _ in range(2)
    )
    assert (first.exit_code, second.exit_code) == (0, 0)
    saved = read_json(Path("b.json"))
    assert len(saved.records) == 5 * 3 * 2
    assert not [r.note for r in saved.records if r.note and r.graph != "rmsnorm"]  # which has no operator on a CPU
    graphs = list(dict.fromkeys(r.graph.split("@")[0] for r in saved.records))
    assert graphs == ["layernorm", "rmsnorm", "rmsnorm:beta=yes", "add_rmsnorm"]
    assert len({r.graph for r in saved.records}) == 5
    assert {r.target for r in saved.records} == {None}  # too small
    digest = next(r.graph for r in saved.records if r.graph.startswith("add_rmsnorm@"))
    assert digest in first.output
    assert len([*folder.glob("p-*.svg")]) == 15
    assert [*folder.glob(f"p-{digest.replace('@', '-')}-*")]
    assert len(json.loads(Path("b.json").read_text())["runs"]) == 1  # nothing was measured twice


def test_a_wrong_graph_is_told_before_a_gpu_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "device_count", lambda: 0)
    assert isinstance(CliRunner().invoke(bench, ["--graph", "none.graph"]).exception, SpecError)
    assert isinstance(CliRunner().invoke(bench, ["--graph", "rmsnorm:eps=0.1"]).exception, MissingError)


def test_targets_are_of_the_two_norms() -> None:
    from bench_records import bench_record
    from lngen.bench.verdict import judge, summarise

    times = {"gb_s": 1.0, "us_median": 1.0, "fraction": 0.5}
    for graph, target in (("rmsnorm", 0.94), ("rmsnorm:weight=f32", None), ("gated@12345678", None)):
        record = judge([_replaced(bench_record("lngen", **times), graph)])[0]
        assert (record.target, record.met) == (target, None if target is None else False)
        assert (summarise([record])[0].ratio_target is None) == (target is None)
        assert report.tables([record])
        assert plot.pictures([record])[0].slug.startswith(graph.split("@")[0].replace(":", "-").replace("=", "-"))


def _replaced(record: Any, graph: str) -> Any:
    from dataclasses import replace

    return replace(record, graph=graph)


def test_host_times_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = host._expression_calls(own("gated"), {n: torch.zeros(2, 24) for n in "xz"} | {"gamma": torch.zeros(24)})
    assert [*calls] == ["torch, the expression"]
    (y, _) = calls["torch, the expression"]()  # type: ignore[misc]
    assert y.shape == (2, 24)
    spec = make_task("rmsnorm", "fwd", "f32", 2, 24).specs[0]
    softmax = make_task("softmax", "fwd", "f32", 2, 24).specs[0]
    assert [*host._expression_calls(softmax, {"x": torch.zeros(2, 24)})] == ["F.softmax"]
    native = host._native_calls(spec, {"x": torch.zeros(2, 24), "gamma": torch.zeros(24)})
    assert native["F.rms_norm"]().shape == (2, 24)  # type: ignore[attr-defined]


def test_help_has_an_example_of_a_graph() -> None:
    text = " ".join(CliRunner().invoke(bench, ["--help"]).output.split())
    assert "--graph norms:add_rmsnorm" in text
