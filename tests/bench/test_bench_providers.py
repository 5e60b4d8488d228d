"""If these fail, lngen or a ceiling is launched wrongly, or other providers are timed than those asked for."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from bench_fakes import CpuGpu, cases
from fake_gpu import FakeGpu
from lngen.bench import peers, providers
from lngen.bench.argument_sets import make_cases
from lngen.bench.benchmark import covering
from lngen.bench.providers import THREADS, Ceiling, OverlappedCeiling, buffers, known, select, source, variants
from lngen.bench.tasks import CEILINGS, LATENCY, MOVES, Task, ceiling_bytes, ceiling_of, make_task
from lngen.errors import MissingError
from lngen.ptx import parse, run_kernel
from lngen.spec import parse_spec
from lngen.toolchain import compile_ptx
from own_graphs import own

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
    monkeypatch.setattr("lngen.bench.providers.device_arch", lambda device: "sm_90")
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
    monkeypatch.setattr("lngen.bench.providers.device_arch", lambda device: "sm_90")
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
    monkeypatch.setattr("lngen.bench.providers.device_arch", lambda device: "sm_90")
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
