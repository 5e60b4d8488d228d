"""If these fail, lngen or a ceiling is launched wrongly, others get other inputs, or a wrong result is timed."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from bench_fakes import CpuGpu, cases, one_case
from fake_gpu import FakeGpu
from lngen.compiler.graphs import Definition, GraphBuilder
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import D, M
from lngen.compiler.spec import make_spec, parse_spec
from lngen.compiler.toolchain import compile_ptx
from lngen.errors import LngenError, MissingError
from lngen.lab.bench import argument_sets, peers, providers
from lngen.lab.bench.argument_sets import complaint, expected, make_cases, parts, set_bytes
from lngen.lab.bench.benchmark import covering
from lngen.lab.bench.providers import THREADS, Ceiling, OverlappedCeiling, buffers, known, select, source, variants
from lngen.lab.bench.tasks import CEILINGS, LATENCY, MOVES, Task, ceiling_bytes, ceiling_of, floor_bytes, make_task
from lngen.proof.ptx import parse, run_kernel
from own_graphs import OWN, own

torch = pytest.importorskip("torch")
pytest.importorskip("cupy")


@pytest.mark.parametrize(("name", "direction"), [
    *((n, way) for n in ("add_rmsnorm", "weighted_rows", "loss") for way in ("fwd", "bwd")), ("scaled", "fwd"),
])  # fmt: skip
def test_lngen_is_launched_with_every_array_of_its_graph(
    name: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that writes down what it is asked: several [M, D] inputs, results, numbers and numbers a row."""
    (case,) = cases(name, direction, rows=5, count=2)
    gpu = FakeGpu(monkeypatch)
    monkeypatch.setattr("lngen.lab.bench.providers.device_arch", lambda device: "sm_90")
    for provider in ("lngen", "lngen-overlapped"):
        prepared = known()[provider].prepare(case)
        taken: list[set[int]] = []
        for stream, index in ((7, 1), (8, 0)):
            gpu.launched.clear()
            prepared.launch(stream, index)
            taken.append({value for one in gpu.launched for value in one.values.values()})
            pointers = {case.sets[index][n].data_ptr() for n in (*case.inputs, *case.outputs)}
            assert pointers <= taken[-1]
            assert {one.stream for one in gpu.launched} == {stream}
        assert {*prepared.results(0)} == {*case.outputs}


def test_lngen_passes_the_default_eps_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    monkeypatch.setattr("lngen.lab.bench.providers.device_arch", lambda device: "sm_90")
    (case,) = make_cases(Task((parse_spec("rmsnorm.fwd:d=24,eps=run"),), 4), 2, CpuGpu())
    assert case.inputs == ("x", "gamma")
    known()["lngen"].prepare(case).launch(7, 1)
    assert [one.values["eps"] for one in gpu.launched] == [int(np.float32(1e-5).view(np.uint32))]


def test_lngen_has_the_schedule_and_the_overlap_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    overlaps: list[bool] = []
    (case,) = cases("scaled", "fwd")
    FakeGpu(monkeypatch)
    launcher = providers.Launcher
    monkeypatch.setattr(providers, "Launcher", lambda *a: overlaps.append(a[-1]) or launcher(*a))
    monkeypatch.setattr("lngen.lab.bench.providers.device_arch", lambda device: "sm_90")
    own_schedule = "threads=4,rows_per_block=128"
    found = known([own_schedule])
    names = ("lngen", "lngen-overlapped", f"lngen:{own_schedule}")
    default, overlapped, variant = (found[name].prepare(case).schedule for name in names)
    assert overlaps == [False, True, False]
    assert default == overlapped
    assert "threads=4,rows_per_block=128" in variant not in default


@pytest.mark.parametrize(("name", "direction"), [("add_rmsnorm", "fwd"), ("gated", "fwd"), ("gated", "bwd")])
def test_the_ceiling_moves_the_bytes_of_the_graph(name: str, direction: str) -> None:
    spec = own(name, direction)
    ceiling = ceiling_of(spec)
    (case,) = cases(name, direction, rows=10, count=3)
    held = buffers(case)
    assert [len(arrays) for arrays in held] == [{"copy": 2, "add": 3}[ceiling]] * 3
    total = sum(a.numel() * a.element_size() for a in held[0])
    assert 0 <= total - ceiling_bytes(spec, 10) < 3 * 4
    assert len({a.data_ptr() for arrays in held for a in arrays}) == 3 * len(held[0])


def test_the_ceiling_of_a_latency_is_a_chain() -> None:
    (case,) = make_cases(Task((own("scaled"),), 4, LATENCY), 4, CpuGpu())
    held = buffers(case)
    assert all(after[1] is before[0] for before, after in pairwise(held))


def test_a_ceiling_writes_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy in both ways, of which the faster is the ceiling."""
    ways: list[Any] = []
    monkeypatch.setattr(providers.timing, "fastest", lambda launches, sets, gpu: ways.extend(launches))
    for name, graph, count in (("copy", "scaled", 2), ("add", "gated", 1)):
        (case,) = cases(graph, "fwd")
        held = buffers(case)
        monkeypatch.setattr(providers, "buffers", lambda case, held=held: held)
        ways.clear()
        Ceiling(name).prepare(case)
        assert len(ways) == count
        for way in ways:
            held[1][0].fill_(float("nan"))
            way(0, 1)
            assert torch.equal(held[1][0], sum(held[1][1:], torch.zeros(())))


SIZES = [16, 15, 1, 16 * THREADS * 4, 2 * 16 * THREADS * 4 + 16 * 3 + 7]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("move", MOVES)
def test_a_ceiling_moves_every_byte(move: str, size: int) -> None:
    text = source(move)
    module = parse(compile_ptx(text, "sm_90", name="ceiling.cu", lines=True))
    rng = np.random.default_rng(size)
    # Bytes below 128, so that a sum of 32-bit words is a sum of bytes.
    inputs = [rng.integers(0, 128, -(-size // 16) * 16, dtype=np.uint8) for _ in range(MOVES[move])]
    want = sum(inputs, np.zeros_like(inputs[0]))[:size]
    for v in variants(move):
        arguments = (np.zeros_like(inputs[0]), *inputs, np.int64(size))
        outcome = run_kernel(module, v.name, v.blocks(size), THREADS, arguments, source=text)
        assert outcome.findings == (), "\n".join(map(str, outcome.findings))
        np.testing.assert_array_equal(outcome.results["0"][:size], want)
        assert not outcome.results["0"][size:].any()


@pytest.mark.parametrize("move", MOVES)
def test_nothing_is_read_before_the_wait(move: str) -> None:
    kernels = compile_ptx(source(move), "sm_90").split(".entry")[1:]
    assert len(kernels) == len(variants(move))
    for kernel in kernels:
        before, _, after = kernel.partition("griddepcontrol.wait")
        assert "ld.global" not in before
        assert "ld.global" in after
        assert ("prefetch.global.L2" in before) == ("_early" in before.partition("(")[0])


def test_providers_are_chosen_by_name_and_ceilings_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda module: None)
    monkeypatch.setattr(OverlappedCeiling, "available", lambda self: True)
    ceilings, early = [*CEILINGS], ["copy-overlapped", "add-overlapped"]
    for chosen in (select(overlap=True), select(["lngen-overlapped", "lngen", "torch"])):
        assert [p.name for p in chosen] == [*ceilings, *early, "lngen", "lngen-overlapped", "torch"]
    assert [p.name for p in select()] == [*ceilings, "lngen", "torch"]
    assert [p.name for p in select(compiled=True)] == [*ceilings, "lngen", "torch", "compile"]
    assert [p.name for p in select(["torch"])] == [*ceilings, "torch"]
    assert [p.name for p in select(["compile", "lngen"])] == [*ceilings, "lngen", "compile"]
    variants = select(["torch"], schedules=["threads=64", "stages=2,cached_weights=yes"])
    assert [p.name for p in variants] == [*ceilings, "lngen:threads=64", "lngen:stages=2,cached_weights=yes", "torch"]
    with pytest.raises(MissingError, match="'liger' needs liger-kernel, which is not installed"):
        select(["liger"])


def test_providers_cover_what_they_can() -> None:
    def names(graph: str, direction: str) -> set[str]:
        return {p.name for p in covering(make_task(graph, direction, "f16", 4, 8), [*known().values()])}

    everywhere = {"lngen", "lngen-overlapped", "torch", "compile", "liger", "apex", "flash-attn"}
    assert names("layernorm", "fwd") == {"copy", "copy-overlapped", "quack", "apex-fast", *everywhere}
    assert names("layernorm", "bwd") == {"add", "add-overlapped", "apex-fast", *everywhere}
    assert names("layernorm", "both") == {"copy+add", "apex-fast", *everywhere}
    assert names("rmsnorm", "both") == {"copy+add", "quack", *everywhere}


# ---- sets of arguments ----


torch = pytest.importorskip("torch")


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


def test_gradients_do_not_add_up_over_the_rows() -> None:
    """A mean would, in f16 beyond the largest number; x keeps one, which makes statistics worth computing."""
    (case,) = make_cases(make_task("layernorm", "bwd", "f32", 4096, 8), 1, CpuGpu())
    assert abs(float(case.sets[0]["dy"].mean())) < 0.05
    assert abs(float(case.sets[0]["x"].mean()) - 0.5) < 0.05


def test_the_halves_of_both_share_their_sets() -> None:
    forward, backward = make_cases(make_task("layernorm", "both", "f32", 4, 16), 2, CpuGpu())
    assert forward.sets is backward.sets
    assert {*forward.sets[1]} == {"x", "gamma", "beta", "y", "mean", "rstd", "dy", "dx", "dgamma", "dbeta"}
    assert (forward.sets[0]["rstd"] == forward.sets[1]["rstd"]).all()  # a backward's input from the start


@pytest.mark.parametrize(("direction", "into", "out"), [("fwd", "x", "y"), ("bwd", "dy", "dx")])
def test_a_latency_is_a_chain(direction: str, into: str, out: str) -> None:
    task = make_task("layernorm", direction, "f32", 4, 16, LATENCY)
    (case,) = make_cases(task, 4, CpuGpu())
    for before, after in zip(case.sets, case.sets[1:], strict=False):
        assert after[into] is before[out]
    assert case.chain == into
    assert case.sets[0]["gamma"] is case.sets[1]["gamma"]  # and warm


def test_inputs_are_where_the_graph_is_defined() -> None:
    def logarithm(b: GraphBuilder) -> None:
        b.output("y", (b.input("x", M, D) + b.input("z", M, D)).log())

    spec = make_spec(Definition("own", logarithm), "bwd", {"d": 24, "dtype": "bf16"})
    (case,) = make_cases(Task((spec,), 33), 1, CpuGpu())
    assert all(bool(torch.isfinite(want).all()) for want in expected(case).values())


def test_a_set_holds_what_a_peer_needs() -> None:
    """lngen's backward of h = x + residual needs neither; PyTorch's records both."""
    task = Task((own("add_rmsnorm", "bwd", of="h"),), 10)
    assert "x" not in {p.name for p in task.specs[0].graph().params}
    assert set_bytes(task) > floor_bytes(task.specs[0], 10)
    assert "x" in make_cases(task, 1, CpuGpu())[0].sets[0]


def test_a_reference_in_parts_is_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over the rows add up, other results are put together; unless an equation joins the rows."""
    for name in ("scaled", "add_rmsnorm"):
        (case,) = cases(name, "bwd", rows=33)
        whole = expected(case)
        monkeypatch.setattr(argument_sets, "CHUNK", 100)
        pieces = expected(case)
        monkeypatch.undo()
        for n, want in whole.items():
            torch.testing.assert_close(pieces[n], want, rtol=1e-12, atol=1e-12)

    def joined(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        b.output("y", x - b.mean(x, M))

    spec = make_spec(Definition("joined", joined), "fwd", {"d": 24})
    assert [*parts(spec, 10**7)] == [slice(0, 10**7)]
    assert len([*parts(own("gated"), 10**7)]) > 1


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("mistake", ["mean", "gamma", "nan", "sum"])
def test_a_wrong_backward_is_noticed(dtype: str, mistake: str) -> None:
    case = one_case(f"layernorm.bwd:d=256,dtype={dtype}", 64)
    t = {name: a.double() for name, a in case.sets[0].items()}
    xhat = (t["x"] - t["mean"][:, None]) * t["rstd"][:, None]
    g = t["dy"] * (1.0 if mistake == "gamma" else t["gamma"])
    shift = 0.0 if mistake == "mean" else g.mean(1, keepdims=True)
    dx = t["rstd"][:, None] * (g - shift - xhat * (g * xhat).mean(1, keepdims=True))
    results = {"dx": dx, "dgamma": (t["dy"] * xhat).sum(0), "dbeta": t["dy"].sum(0)}
    if mistake == "nan":
        dx[63, 255] = float("nan")
    if mistake == "sum":
        results["dbeta"] = t["dy"][1:].sum(0)
    assert complaint(case, expected(case), results).startswith("dbeta" if mistake == "sum" else "dx")


def test_a_missing_result_is_an_error() -> None:
    case = one_case("layernorm.fwd:d=8", 2)
    with pytest.raises(LngenError, match="'y' is missing"):
        complaint(case, expected(case), {})
