"""The benchmark without a GPU: bytes, counts, statistics, rounds, checked results, reports, command line."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from bench_records import RECORDS, bench_record
from lngen.bench import (
    circumstances,
    conditions,
    engines,
    formulas,
    host,
    libraries,
    plot,
    providers,
    report,
    timing,
)
from lngen.bench.cases import Case
from lngen.bench.ceilings import Ceiling
from lngen.bench.engines import TorchEngine, make_engine
from lngen.bench.floor import ceiling_bytes, floor_bytes, gb_s, memory_peak
from lngen.bench.formulas import BOUNDS, complaint, errors, expected
from lngen.bench.grids import DESIGN, GRIDS, WIDTHS, rows_for
from lngen.bench.host import HostRecord, host_times
from lngen.bench.libraries import APEX, APEX_FAST, QUACK_LIBRARY
from lngen.bench.measure import LINKS, covering, doubted
from lngen.bench.overlapped import OverlappedCeiling
from lngen.bench.peers import known, select
from lngen.bench.plot_graphs import overviews
from lngen.bench.providers import Prepared, Torch, autograd, keeping
from lngen.bench.records import Record
from lngen.bench.run import Hooks, benchmark
from lngen.bench.sets import make_cases
from lngen.bench.store import Saved, merged, read_json, resumed, write_json
from lngen.bench.targets import target_fraction
from lngen.bench.tasks import CEILINGS, LATENCY, make_task
from lngen.bench.timing import Stats, drift, launch_count, set_count, time_side_by_side
from lngen.bench.verdict import judge, summarise
from lngen.cli import cli
from lngen.cli.bench import bench, parse_shapes, tasks
from lngen.compile import KernelSet
from lngen.errors import LngenError, MissingError, ScheduleError, SpecError
from lngen.ir import DType
from lngen.spec import Spec, parse_spec

MB = 1_000_000


class FakeTimer:
    """Replays take what is said; remembers what was captured and replayed."""

    def __init__(self, us: dict[str, Any]) -> None:
        self.us, self.captured, self.replayed = us, [], []
        self.name = ""

    def launch(self, name: str) -> timing.Launch:
        def run(stream: int, index: int) -> None:
            self.name = name
            if self.us[name] is None:
                raise RuntimeError("operation not permitted\nwhen stream is capturing")

        return run

    def capture(self, launch: timing.Launch, indices: Sequence[int]) -> Any:
        for index in indices:
            launch(7, index)
        self.captured.append((self.name, list(indices)))
        return self.name, len(indices)

    def elapsed(self, graphs: Sequence[Any]) -> list[float]:
        self.replayed.append([name for name, _ in graphs])
        return [self.us[name] * count / 1e3 for name, count in graphs]


class CpuEngine(TorchEngine):
    """PyTorch on the CPU with a clock of its own: everything of a benchmark but the GPU."""

    def __init__(self) -> None:
        torch = pytest.importorskip("torch")
        self._torch, self._device = torch, torch.device("cpu")
        self.us = 10.0

    @contextmanager
    def active(self) -> Iterator[None]:
        yield

    def stream(self) -> int:
        return 0

    def synchronize(self) -> None:
        pass

    def memory(self) -> tuple[int, int]:
        return 10**9, 1000

    def peak(self) -> float:
        return 10**6

    def release(self) -> None:
        pass

    def device(self) -> tuple[int, str]:
        return 0, "a CPU"

    def capture(self, launch: timing.Launch, indices: Sequence[int]) -> Any:
        for index in indices[:2]:  # two, so that a chain has a link
            launch(0, index)
        return len(indices)

    def elapsed(self, graphs: Sequence[Any]) -> list[float]:
        return [count * self.us / 1e3 for count in graphs]


def one_case(text: str, rows: int, count: int = 1) -> Case:
    """The case of one spec."""
    head, _, keys = text.partition(":")
    task = make_task(*head.split("."), "f32", rows, 8)
    (case,) = make_cases(replace(task, specs=(parse_spec(f"{head}:{keys}"),)), count, CpuEngine())
    return case


@pytest.fixture
def few_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "COLD_BYTES", 10_000)


# ---- bytes ----


@pytest.mark.parametrize(
    ("text", "rows", "want"),
    [
        ("layernorm.fwd:d=4096,dtype=bf16", 4096, 2 * 4096 * 4096 * 2 + 2 * 4096 * 2 + 8 * 4096),
        ("layernorm.bwd:d=1024,dtype=f32", 32768, 3 * 32768 * 1024 * 4 + 3 * 1024 * 4 + 8 * 32768),
        ("rmsnorm.fwd:d=64,dtype=bf16", 1048576, 2 * 64 * 1048576 * 2 + 64 * 2 + 4 * 1048576),
        ("rmsnorm.bwd:d=256,dtype=f16,weight=f32", 7, 3 * 7 * 256 * 2 + 2 * 256 * 4 + 4 * 7),
    ],
)
def test_floor_bytes_by_hand(text: str, rows: int, want: int) -> None:
    assert floor_bytes(parse_spec(text), rows) == want


def test_a_ceiling_moves_the_large_arrays() -> None:
    assert ceiling_bytes(parse_spec("layernorm.fwd:d=8,dtype=bf16,out=f32"), 10) == 80 * 6
    assert ceiling_bytes(parse_spec("rmsnorm.bwd:d=8,dtype=f32"), 10) == 80 * 12
    assert gb_s(67_108_864, 15.6) == pytest.approx(4301.9, abs=0.1)


# ---- counts and statistics ----


@pytest.mark.parametrize(
    ("set_mb", "l2_mb", "free_mb", "want"),
    [
        (16, 60, 100_000, 19),  # 300 MB
        (16, 100, 100_000, 32),  # 5 x L2
        (1, 60, 100_000, 64),  # at most
        (1000, 60, 100_000, 2),  # at least, so that a set is not found where it was left
        (100, 60, 350, 2),  # 60 % of what is free
        (1000, 60, 2000, 1),
    ],
)
def test_set_count(set_mb: int, l2_mb: int, free_mb: int, want: int) -> None:
    assert set_count(set_mb * MB, l2_mb * MB, free_mb * MB) == want


def test_a_set_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(LngenError, match=r"2\.0 GB and at most 60% of the 3\.0 GB"):
        set_count(2000 * MB, 60 * MB, 3000 * MB)


@pytest.mark.parametrize(
    ("us", "sets", "want"),
    [(10.0, 19, 817), (1000.0, 2, 8), (5000.0, 5, 5), (0.1, 64, 2048), (0.0, 1, 2000)],
)
def test_launch_count(us: float, sets: int, want: int) -> None:
    assert launch_count(us, sets) == want
    assert want % sets == 0


def test_statistics() -> None:
    stats = Stats.of([5.0, 1.0, 2.0, 3.0, 4.0, 11.0, 10.0, 9.0, 8.0, 7.0, 6.0])
    assert (stats.median, stats.p10, stats.p90, stats.minimum) == (6.0, 2.0, 10.0, 1.0)
    assert drift([1.0, 1.0, 9.0, 1.1, 1.1]) == pytest.approx(0.1)
    assert drift([1.0]) == 0.0


# ---- rounds ----


def test_rounds_are_interleaved_over_all_sets() -> None:
    timer = FakeTimer({"copy": 4.0, "a": 8.0, "b": 100.0})
    found = time_side_by_side(
        {name: timer.launch(name) for name in timer.us}, 3, timer, reference="copy", rounds=10, warm_ms=20
    )
    assert timer.replayed[-1] == ["b", *["copy", "a", "b"] * 10]
    assert sum(names == ["copy", "a", "b"] for names in timer.replayed) == 1  # 24 ms of warm-up
    assert {name: s.median for name, s in found.stats.items()} == pytest.approx(timer.us)
    assert found.launches == {"copy": 2001, "a": 1002, "b": 81}
    for _, indices in timer.captured:
        assert indices == [i % 3 for i in range(len(indices))]
    assert not found.drifted
    assert not found.failures


def test_one_that_cannot_be_captured_stops_no_other() -> None:
    timer = FakeTimer({"copy": 4.0, "bad": None})
    found = time_side_by_side({name: timer.launch(name) for name in timer.us}, 2, timer, reference="bad", rounds=3)
    assert found.failures == {"bad": "RuntimeError: operation not permitted"}
    assert [*found.stats] == ["copy"]
    alone = time_side_by_side({"bad": timer.launch("bad")}, 2, timer)
    assert not alone.stats
    assert alone.failures


def test_a_drifting_reference_is_flagged() -> None:
    class Drifting(FakeTimer):
        def elapsed(self, graphs: Sequence[Any]) -> list[float]:
            return [ms * (1 + 0.05 * (i > 10)) for i, ms in enumerate(super().elapsed(graphs))]

    timer = Drifting({"copy": 4.0, "a": 8.0})
    launches = {name: timer.launch(name) for name in timer.us}
    found = time_side_by_side(launches, 2, timer, reference="copy", rounds=10)
    assert found.drift == pytest.approx(0.05)
    assert found.drifted


@pytest.mark.parametrize("us", [{"a": 4.0, "b": 5.0}, {"a": 5.0, "b": 4.0}, {"a": 4.0, "b": 4.0}, {"a": 4.0}])
def test_the_fastest_way_is_the_ceiling(us: dict[str, float]) -> None:
    timer = FakeTimer(us)
    ways = {name: timer.launch(name) for name in us}
    chosen = timing.fastest([*ways.values()], 3, timer)
    assert chosen is ways[min(us, key=lambda name: us[name])]
    assert [i for _, i in timer.captured] == [[0, 1, 2]] * (2 if len(us) > 1 else 0)


def test_both_ways_to_copy_copy() -> None:
    engine = CpuEngine()
    x, out = engine.normal((3, 8), DType.BF16, 0.0, 1), engine.empty((3, 8), DType.BF16)
    for way in (engine.copy, engine.scale):
        engine.poison(out)
        way(out, x)
        assert bool((out == x).all())


@pytest.mark.parametrize("shape", [(4, 8), (3, 7)])
def test_cupy_moves_all_bytes_whatever_they_mean(shape: tuple[int, int]) -> None:
    """NumPy stands for CuPy; numbers of 8 bytes are still added as what they are."""
    engine = engines.CupyEngine.__new__(engines.CupyEngine)
    engine._cupy = np
    rng = np.random.default_rng(0)
    for dtype in ("uint16", "float64"):
        x, y = (rng.integers(0, 2**14, shape).astype(dtype) for _ in range(2))
        out = np.full(shape, 0x7FFF, dtype)
        engine.scale(out, x)
        assert (out == x).all()
        engine.add(out, x, y)
        assert (out != x).any()
        assert dtype == "uint16" or (out == x + y).all()


# ---- results are checked ----

SPECS = ["layernorm.fwd", "layernorm.bwd", "rmsnorm.fwd", "rmsnorm.bwd"]


@pytest.mark.parametrize("head", SPECS)
@pytest.mark.parametrize("chunk", [1 << 24, 100])
def test_torch_agrees_with_the_formulas(head: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formulas, "CHUNK", chunk)
    case = one_case(f"{head}:d=48,dtype=f32,eps=1e-3", 37, 3)
    first, last = ({n: case.sets[i][n] for n in case.inputs} for i in (0, 2))
    assert all((first[n] == last[n]).all() and first[n].data_ptr() != last[n].data_ptr() for n in first)
    prepared = Torch().prepare(case) if head != "rmsnorm.bwd" else _rms_by_autograd(case)
    for index in range(3):
        prepared.launch(0, index)
    want = expected(case)
    found = errors(case, want, prepared.results(1))
    assert max(found.values()) < 1e-5
    assert case.outputs[0] in found
    assert not complaint(case, want, prepared.results(2))


def _rms_by_autograd(case: Any) -> Prepared:
    import torch

    shape = (case.spec.d,)
    return autograd(case, lambda t: (torch.nn.functional.rms_norm(t["x"], shape, t["gamma"], case.spec.eps),))


def test_layernorm_by_autograd() -> None:
    torch = pytest.importorskip("torch")
    layer_norm = torch.nn.functional.layer_norm
    for direction in ("fwd", "bwd"):
        case = one_case(f"layernorm.{direction}:d=40,dtype=f32", 9, 2)
        prepared = autograd(case, lambda t: (layer_norm(t["x"], (40,), t["gamma"], t["beta"], 1e-5),))
        prepared.launch(0, 1)
        results = prepared.results(1)
        assert not complaint(case, expected(case, 1), results)
        assert {*results} == ({"y"} if direction == "fwd" else {"dx", "dgamma", "dbeta"})


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("mistake", ["mean", "gamma", "nan", "sum"])
def test_a_wrong_backward_is_noticed(dtype: str, mistake: str) -> None:
    case = one_case(f"layernorm.bwd:d=256,dtype={dtype}", 64)
    t = {name: case.engine.wide(a) for name, a in case.sets[0].items()}
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
    assert set(BOUNDS) == {v.type.dtype for n in ("f16", "bf16", "f32", "f64") for v in _params(n)}


def _params(dtype: str) -> Any:
    return parse_spec(f"layernorm.fwd:d=8,dtype={dtype}").graph().params[:1]


def test_results_are_kept_until_their_set_comes_round() -> None:
    made: list[list[int]] = []

    def call(t: dict[str, Any]) -> Sequence[Any]:
        made.append([len(made)])
        return (made[-1], None)

    prepared = keeping(call, ("y", "mean"), [{}, {}])
    for index in (0, 1, 0):
        prepared.launch(0, index)
    assert (prepared.results(0), prepared.results(1)) == ({"y": [2]}, {"y": [1]})


# ---- the whole way ----


class Wrong(Torch):
    """PyTorch with a mistake."""

    def __init__(self, name: str, mistake: str) -> None:
        super().__init__(name)
        self.mistake = mistake

    def prepare(self, case: Any) -> Prepared:
        if self.mistake == "raises":
            raise ValueError("no such kernel")
        right = super().prepare(case)
        return replace(right, results=lambda i: {n: a + 1 for n, a in right.results(i).items()})


def todo(direction: str, *shapes: tuple[int, int], graph: str = "layernorm", dtype: str = "f32") -> list[Any]:
    return tasks([graph], direction, dtype, "design", list(shapes))


def test_a_benchmark_reports_what_fails_and_goes_on(few_sets: None) -> None:
    chosen = [*(Ceiling(d) for d in CEILINGS), Torch(), Wrong("wrong", "values"), Wrong("raising", "raises")]
    seen: list[tuple[int, int, str]] = []
    hooks = Hooks(progress=lambda *a: seen.append(a))
    records = benchmark(todo("fwd,bwd", (64, 32), (3, 32)), chosen, CpuEngine(), hooks=hooks).records
    assert [s[:2] for s in seen] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert [r.provider for r in records] == ["copy", "torch", "wrong", "raising"] * 2 + [
        "add", "torch", "wrong", "raising"
    ] * 2  # fmt: skip
    ceiling, torch, wrong, raising = records[:4]
    assert (ceiling.us_median, ceiling.gb_s, ceiling.fraction) == (10.0, 1.6, 1.0)
    assert torch.gb_s == 1.7  # the same time for a few more bytes
    assert (torch.sets, torch.launches, torch.tensor_bytes) == (2, 400, 64 * 32 * 4)
    assert wrong.gb_s is None
    assert wrong.note.startswith("wrong: y is off by")
    assert raising.note == "failed: ValueError: no such kernel"


def test_a_case_that_fails_is_reported_in_its_rows(few_sets: None) -> None:
    class Broken(CpuEngine):
        def elapsed(self, graphs: Sequence[Any]) -> list[float]:
            if self.us == 10.0:
                self.us = 20.0
                raise RuntimeError("CUDA error: out of memory")
            return super().elapsed(graphs)

    class TooSmall(CpuEngine):
        def memory(self) -> tuple[int, int]:
            return 14000, 1000  # enough for one set, but not beside the expected results in float64

    cases, chosen = todo("fwd", (8, 32), graph="rmsnorm"), [Ceiling("copy"), Torch()]
    found = {r.provider: r for r in benchmark(cases, chosen, Broken()).records}
    assert found["copy"].note == "failed: RuntimeError: CUDA error: out of memory"
    assert found["torch"].us_median == 20.0
    assert found["torch"].fraction is None
    assert all("choose fewer rows" in r.note for r in benchmark(cases, chosen, TooSmall()).records)


def test_a_small_case_is_said_to_be_warm(few_sets: None) -> None:
    class LargeCache(CpuEngine):
        def memory(self) -> tuple[int, int]:
            return 10**9, 60 * MB

    record = benchmark(todo("fwd", (8, 32), graph="rmsnorm"), [Torch()], LargeCache()).records[0]
    assert record.sets == timing.MAX_SETS
    assert record.note.startswith("warm: 64 sets are only 0 MB")
    assert record.gb_s is not None


def test_a_lost_gpu_ends_the_run_and_keeps_what_there_is(few_sets: None) -> None:
    class Lost(CpuEngine):
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access")

    said: list[str] = []
    kept: list[int] = []
    hooks = Hooks(say=said.append, keep=lambda records: kept.append(len(records)))
    outcome = benchmark(todo("fwd", (8, 32), (9, 32)), [Torch()], Lost(), hooks=hooks)
    assert (outcome.left, kept, len(said)) == (1, [1], 1)
    assert "the GPU no longer answers" in said[0]
    assert "illegal memory access" in outcome.records[0].note


@pytest.mark.parametrize(("held", "releases"), [(0.4, 0), (0.6, 2)])
def test_cached_memory_is_given_back_only_when_much_is_held(held: float, releases: int, few_sets: None) -> None:
    class Caching(CpuEngine):
        asked, released = 0, 0

        def memory(self) -> tuple[int, int]:
            self.asked += 1
            return int(10**9 * (1 - held * (self.asked > 1))), 1000

        def release(self) -> None:
            self.released += 1

    engine = Caching()
    benchmark(todo("fwd", (8, 32), (9, 32)), [Torch()], engine)
    assert engine.released == releases


# ---- forward and backward as one unit ----


def test_both_is_a_unit_of_forward_and_backward(few_sets: None) -> None:
    (task,) = todo("both", (64, 32))
    assert (task.spec, task.direction) == ("layernorm.both:d=32,dtype=f32", "both")
    chosen = [*(Ceiling(d) for d in CEILINGS), Torch(), Wrong("wrong", "values")]
    ceiling, torch, wrong = benchmark([task], chosen, CpuEngine()).records
    assert (ceiling.provider, ceiling.fraction) == ("copy+add", 1.0)
    assert ceiling.gb_s == round(5 * 64 * 32 * 4 / 10.0 / 1e3, 1)
    floors = sum(floor_bytes(spec, 64) for spec in task.specs)
    assert torch.gb_s == round(floors / 10.0 / 1e3, 1)
    assert torch.target is None
    assert wrong.note.startswith("wrong: y")


def test_the_backward_of_both_takes_the_set_of_half_a_turn_ago(few_sets: None) -> None:
    order: list[tuple[str, int]] = []

    class Noting(Torch):
        def prepare(self, case: Any) -> Prepared:
            right = super().prepare(case)

            def launch(stream: int, index: int) -> None:
                order.append((case.spec.direction, index))
                right.launch(stream, index)

            return replace(right, launch=launch)

    (record,) = benchmark(todo("both", (8, 16)), [Noting()], CpuEngine()).records
    assert (record.note, record.sets) == ("", 4)
    assert order[:4] == [("fwd", 0), ("bwd", 2), ("fwd", 1), ("bwd", 3)]
    assert len(order) == 2 * (4 + 2 * 2)  # one turn before the check, and two captures


def test_gradients_do_not_add_up_over_the_rows() -> None:
    """A mean would, in f16 beyond the largest number; x keeps one, which makes statistics worth computing."""
    (case,) = make_cases(make_task("layernorm", "bwd", "f32", 4096, 8), 1, CpuEngine())
    assert abs(float(case.sets[0]["dy"].mean())) < 0.05
    assert abs(float(case.sets[0]["x"].mean()) - 0.5) < 0.05


def test_the_halves_of_both_share_their_sets() -> None:
    forward, backward = make_cases(todo("both", (4, 16))[0], 2, CpuEngine())
    assert forward.sets is backward.sets
    assert {*forward.sets[1]} == {"x", "gamma", "beta", "y", "mean", "rstd", "dy", "dx", "dgamma", "dbeta"}
    assert (forward.sets[0]["rstd"] == forward.sets[1]["rstd"]).all()  # a backward's input from the start


def test_a_wrong_forward_spoils_no_other_backward(few_sets: None) -> None:
    class Spoiling(Torch):
        def prepare(self, case: Any) -> Prepared:
            case.sets[0]["rstd"].fill_(7.0)
            raise ValueError("after writing nonsense")

    chosen = [Spoiling("spoiling"), Torch()]
    spoiling, torch = benchmark(todo("both", (8, 32)), chosen, CpuEngine()).records
    assert (spoiling.us_median, torch.note, torch.us_median) == (None, "", 10.0)


def test_a_mistake_in_either_half_of_both_is_noticed(few_sets: None) -> None:
    class HalfWrong(Wrong):
        def prepare(self, case: Any) -> Prepared:
            right = Torch.prepare(self, case)
            return right if case.spec.direction == "fwd" else super().prepare(case)

    (record,) = benchmark(todo("both", (8, 32)), [HalfWrong("wrong", "values")], CpuEngine()).records
    assert record.note.startswith("wrong: dx is off by")
    assert record.us_median is None


# ---- latency ----


@pytest.mark.parametrize(("direction", "into", "out"), [("fwd", "x", "y"), ("bwd", "dy", "dx")])
def test_a_latency_is_a_chain(direction: str, into: str, out: str) -> None:
    task = make_task("layernorm", direction, "f32", 4, 16, LATENCY)
    (case,) = make_cases(task, 4, CpuEngine())
    for before, after in zip(case.sets, case.sets[1:], strict=False):
        assert after[into] is before[out]
    assert case.chain == into
    assert case.sets[0]["gamma"] is case.sets[1]["gamma"]  # and warm


def test_calls_that_allocate_are_chained_by_their_results() -> None:
    took: list[Any] = []

    def call(t: dict[str, Any]) -> Sequence[Any]:
        took.append(t["x"])
        return (f"y{len(took)}",)

    prepared = keeping(call, ("y",), [{"x": "own"}, {"x": "other"}, {"x": "other"}], "x")
    for index in (0, 1, 2, 0):
        prepared.launch(0, index)
    assert took == ["own", "y1", "y2", "own"]
    unchained = keeping(call, ("y",), [{"x": "own"}, {"x": "other"}])
    unchained.launch(0, 0)
    unchained.launch(0, 1)
    assert took[-2:] == ["own", "other"]


def test_a_latency_is_a_class_of_its_own() -> None:
    chosen = [*(Ceiling(d) for d in CEILINGS), Torch(), Wrong("wrong", "values")]
    found = [make_task("layernorm", d, "f32", 4, 16, LATENCY) for d in ("fwd", "bwd")]
    forward, backward = (benchmark([t], chosen, CpuEngine()).records for t in found)
    for records, ceiling in ((forward, "copy"), (backward, "add")):
        assert [r.provider for r in records] == [ceiling, "torch", "wrong"]
        assert [r.us_median for r in records] == [10.0, 10.0, None]
        assert {(r.kind, r.gb_s, r.fraction, r.target) for r in records} == {(LATENCY, None, None, None)}
        assert records[1].sets == LINKS
        assert records[2].note.startswith("wrong")
    (table,) = report.tables(forward)
    assert "us per call in a chain of dependent launches" in str(table.title)
    assert [list(c.cells) for c in table.columns] == [["4 x 16"], ["10.00"], ["10.00"], ["wrong"]]


def test_each_provider_of_a_latency_begins_with_the_same_input() -> None:
    begins: list[float] = []

    class Spoiling(Torch):
        def prepare(self, case: Any) -> Prepared:
            right = super().prepare(case)

            def launch(stream: int, index: int) -> None:
                begins.append(float(case.sets[0]["x"].sum()))
                right.launch(stream, index)
                case.sets[0]["x"].fill_(7.0)  # as a chain does when it comes round

            return replace(right, launch=launch)

    task = make_task("layernorm", "fwd", "f32", 4, 16, LATENCY)
    records = benchmark([task], [Spoiling("a"), Spoiling("b")], CpuEngine()).records
    assert [r.note for r in records] == ["", ""]
    assert begins[0] == begins[1] != 7.0 * 64


def test_autograd_records_a_chain_once_per_link() -> None:
    torch = pytest.importorskip("torch")
    task = make_task("layernorm", "bwd", "f32", 4, 16, LATENCY)
    (case,) = make_cases(task, 64, CpuEngine())
    calls: list[int] = []

    def forward(t: dict[str, Any]) -> Any:
        calls.append(1)
        return (torch.nn.functional.layer_norm(t["x"], (16,), t["gamma"], t["beta"], 1e-5),)

    prepared = autograd(case, forward)
    assert len(calls) == 2
    prepared.launch(0, 0)
    assert not complaint(case, expected(case), prepared.results(0))


# ---- a GPU that is not calm ----


class Restless(CpuEngine):
    """The ceiling, replayed first in each round, moves by 5 % in the first ``times`` sets of rounds."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.rounds = times, 0

    def elapsed(self, graphs: Sequence[Any]) -> list[float]:
        ms = super().elapsed(graphs)
        if len(graphs) < 10:
            return ms
        self.rounds += 1
        moves = self.rounds <= self.times
        return [one * (1 + 0.05 * (moves and i > len(ms) // 2)) for i, one in enumerate(ms)]


def test_rounds_are_repeated_while_the_ceiling_moves(few_sets: None) -> None:
    chosen = [Ceiling("copy"), Torch()]
    for times, repeats, drifted, sentences in ((0, 0, False, 0), (2, 2, False, 2), (9, 3, True, 3)):
        said: list[str] = []
        engine = Restless(times)
        found = benchmark(todo("fwd", (8, 32)), chosen, engine, hooks=Hooks(say=said.append)).records
        assert {(r.repeats, r.drifted) for r in found} == {(repeats, drifted)}
        assert engine.rounds == repeats + 1
        assert len(said) == sentences
    assert said[0].endswith("copy moved by 5.0%, the GPU is busy or throttling; the rounds are repeated.")


def test_the_calmest_rounds_count() -> None:
    moves = [0.3, 0.1, 0.2]

    class Calming(FakeTimer):
        def elapsed(self, graphs: Sequence[Any]) -> list[float]:
            ms = super().elapsed(graphs)
            if len(graphs) < 10:
                return ms
            move = moves.pop(0)
            return [one * (1 + move * (i > 10)) for i, one in enumerate(ms)]

    timer = Calming({"copy": 4.0})
    found = time_side_by_side({"copy": timer.launch("copy")}, 2, timer, reference="copy", rounds=20, repeats=2)
    assert (found.drift, found.repeats) == (pytest.approx(0.1), 2)
    assert found.stats["copy"].p90 == pytest.approx(4.4)


# ---- runs in slices ----


def test_what_is_there_is_not_measured_again(few_sets: None) -> None:
    cases, chosen = todo("fwd", (8, 32), (9, 32), (10, 32)), [Ceiling("copy"), Torch()]
    first = benchmark(cases[:2], chosen, CpuEngine()).records
    first = [replace(r, drifted=r.rows == 9, us_median=1.0) for r in first]
    seen: list[tuple[int, int, str]] = []
    hooks = Hooks(progress=lambda *a: seen.append(a))
    records = benchmark(cases, chosen, CpuEngine(), hooks=hooks, saved=first).records
    assert [(s[0], s[1], s[2][-8:]) for s in seen] == [(1, 3, "2 rows=9"), (2, 3, " rows=10")]  # 9 had drifted
    assert [(r.rows, r.us_median) for r in records] == [
        (8, 1.0), (8, 1.0), (9, 10.0), (9, 10.0), (10, 10.0), (10, 10.0)
    ]  # fmt: skip
    again = benchmark(cases, [*chosen, Wrong("raising", "raises")], CpuEngine(), saved=records).records
    assert [r.provider for r in again] == ["copy", "torch", "raising"] * 3  # one more provider: side by side again


def test_no_task_begins_that_would_end_too_late(few_sets: None) -> None:
    now, ticks = [0.0], CpuEngine()

    class Slow(Torch):
        def prepare(self, case: Any) -> Prepared:
            now[0] += 10.0
            return super().prepare(case)

    def run(seconds: float) -> Any:
        now[0] = 0.0
        cases = todo("fwd", (8, 32), (9, 32), (10, 32))
        return benchmark(cases, [Slow()], ticks, seconds=seconds, clock=lambda: now[0])

    assert [run(seconds).left for seconds in (15.0, 25.0, 30.0)] == [2, 1, 0]


def test_a_file_of_other_conditions_is_not_continued(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    assert resumed(file, {"device": "H200"}) == Saved()
    write_json(file, Saved(RECORDS, {"device": "H200", "torch": "2.11"}))
    assert len(resumed(file, {"device": "H200", "torch": "2.11"}).records) == len(RECORDS)
    with pytest.raises(LngenError, match=r"other conditions \(device 'H200' -> 'A100', torch '2.11' -> ''\)"):
        resumed(file, {"device": "A100"})


def test_a_file_that_is_no_benchmark_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    for text in ("", "[]", '{"records": [{"spec": 1}], "conditions": {}}'):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(LngenError, match="expected to be a file that 'lngen bench --out' wrote"):
            read_json(file)
    with pytest.raises(LngenError, match="cannot be read"):
        read_json(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"d": 0}, "d is 0, expected from 1 to 2147483647"),
        ({"rows": 0}, "rows is 0, expected from 1 to 2147483647"),
        ({"fraction": 1e308}, "fraction is 1e+308, expected from 0 to 100"),
        ({"gb_s": 1e308}, "gb_s is 1e+308, expected from 0 to 1e+18"),
        ({"direction": "up"}, "direction is 'up', expected one of fwd, bwd, both"),
    ],
)
def test_a_record_that_no_benchmark_has_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    file = tmp_path / "b.json"
    write_json(file, Saved(RECORDS[:1]))
    content = json.loads(file.read_text(encoding="utf-8"))
    content["records"][0] |= changed
    file.write_text(json.dumps(content), encoding="utf-8")
    done = CliRunner().invoke(cli, ["bench", "--from", str(file), "--plot", str(tmp_path / "x.svg")])
    assert (done.exit_code, message in done.stderr) == (2, True), done.stderr


def test_records_without_a_fraction_are_drawn(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    write_json(file, Saved([replace(r, fraction=None, met=None) for r in RECORDS]))
    done = CliRunner().invoke(cli, ["bench", "--from", str(file), "--plot", str(tmp_path / "x.svg")])
    assert (done.exit_code, [p.name for p in tmp_path.glob("*.svg")]) == (0, ["x.svg"]), done.stderr


def test_files_of_earlier_versions_are_judged_now() -> None:
    saved = read_json(Path(__file__).parents[1] / "data" / "bench-first-version.json")
    assert saved.conditions["device"] == "NVIDIA H200"
    lngen = next(r for r in saved.records if r.is_lngen)
    assert (lngen.target, lngen.met, lngen.best_peer, lngen.ratio) == (0.68, False, "torch", 1.9049)


def test_the_conditions_name_the_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = conditions.source_digest()
    assert before == conditions.source_digest()
    (tmp_path / "kernel.cu.j2").write_text("another template", encoding="utf-8")
    monkeypatch.setattr(conditions, "data_dir", lambda name: tmp_path)
    assert len(before) == len(conditions.source_digest()) == 12
    assert before != conditions.source_digest()


# ---- grids, targets, verdicts ----


def test_grids() -> None:
    assert GRIDS["design"].shapes(DType.BF16) == DESIGN
    classic = GRIDS["classic"].shapes(DType.F16)
    assert (classic[0], classic[1], classic[-1], len(classic)) == ((4096, 1024), (4096, 1536), (4096, 15872), 30)
    for dtype in (DType.BF16, DType.F32):
        grid = GRIDS["targets"].shapes(dtype)
        assert len(grid) == len({*grid}) == 5 * 21
        assert {d for _, d in grid} == {*WIDTHS} >= {64, 128, 1000, 4093, 256, 768, 7168, 12288, 131072}
        sizes = [rows * d * dtype.size / 2**20 for rows, d in grid]
        assert sizes == pytest.approx([8, 16, 32, 64, 256] * 21, rel=0.02)
        assert {*GRIDS["quick"].shapes(dtype)} < {*grid}
    assert rows_for(8 << 20, 12288, DType.BF16) == 341
    assert rows_for(8, 12288, DType.BF16) == 1
    assert GRIDS["targets"].dtypes == ("f16", "bf16", "f32")


@pytest.mark.parametrize(
    ("direction", "dtype", "mb", "d", "want"),
    [
        ("fwd", "bf16", 8, 1024, 0.94),
        ("bwd", "f16", 8, 1024, 0.68),
        ("bwd", "f32", 256, 1024, 0.95),
        ("bwd", "f32", 4096, 1024, 0.95),
        ("bwd", "bf16", 128, 1024, 0.925),  # half way between 64 and 256 in logarithms
        ("fwd", "bf16", 32, 4093, 0.8075),
        ("bwd", "bf16", 64, 64, 0.765),
        ("fwd", "bf16", 64, 128, 0.8245),
        ("fwd", "bf16", 64, 1000, 0.8245),
        ("fwd", "bf16", 64, 768, 0.97),
        ("fwd", "bf16", 7.9, 12288, 0.94),  # whole rows
        ("fwd", "bf16", 4, 1024, None),
        ("fwd", "f64", 64, 1024, None),
        ("both", "bf16", 64, 1024, None),
    ],
)
def test_targets(direction: str, dtype: str, mb: float, d: int, want: float | None) -> None:
    assert target_fraction(direction, dtype, int(mb * 2**20), d) == want


def test_the_verdict_on_a_point() -> None:
    times = {"copy": 5.0, "lngen": 5.2, "torch": 10.0, "liger": 7.8, "quack": 1.0, "compile": None}
    notes = {"quack": "implausible: faster than the ceiling", "compile": "wrong: y is off"}
    point = [bench_record(n, us_median=us, fraction=us and 5.0 / us, note=notes.get(n, "")) for n, us in times.items()]
    judged = {r.provider: r for r in judge(point)}
    lngen = judged["lngen"]
    assert (lngen.tensor_bytes, lngen.target, lngen.met) == (8 << 20, 0.94, True)
    assert (lngen.best_peer, lngen.ratio) == ("liger", 1.5)
    others = [r for r in judged.values() if r is not lngen]
    assert {(r.target, r.met, r.best_peer, r.ratio) for r in others} == {(0.94, None, "", None)}
    slow = judge([replace(point[1], fraction=0.9399)])[0]
    assert (slow.met, slow.best_peer, slow.ratio) == (False, "", None)  # alone: no peer


def test_the_summary_counts_and_names_the_worst() -> None:
    points = [(4096, 20480, 0.99, 2.0), (4096, 4096, 0.90, 0.5), (32768, 1024, 0.90, 0.8), (4096, 2048, None, None)]
    records = []
    for rows, d, fraction, ratio in points:
        us = None if ratio is None else 10.0
        records.append(bench_record("lngen", rows, d, us_median=us, fraction=fraction, note="" if us else "failed: x"))
        records.append(bench_record("torch", rows, d, us_median=ratio and 10.0 * ratio))
    (summary,) = summarise(judge(records))
    assert (summary.points, summary.met, summary.missed, summary.failed) == (4, 1, 2, 1)
    assert summary.ratio_common == round(0.4**0.5, 4)
    assert (summary.ratio, summary.compared, summary.ahead) == (round(0.8 ** (1 / 3), 4), 3, 1)
    assert summary.worst == ("32768 x 1024 bf16 0.900 of 0.970", "4096 x 4096 bf16 0.900 of 0.950")
    assert summary.slower == ("4096 x 4096 bf16 0.50 x torch", "32768 x 1024 bf16 0.80 x torch")
    assert report.summary_lines([summary]) == [
        "layernorm fwd, 4 points: 1 of 3 targets met; 0.93 x the best peer on geometric mean (target 1.15), "
        "0.63 over D = 768 to 16384, at least as fast at 1 of 3; 1 without a time.",
        "  farthest below target: 32768 x 1024 bf16 0.900 of 0.970, 4096 x 4096 bf16 0.900 of 0.950",
        "  slower: 4096 x 4096 bf16 0.50 x torch, 32768 x 1024 bf16 0.80 x torch",
    ]


def test_lngen_is_launched_with_the_pointers_of_a_set(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[int], int, int]] = []
    prepared_for: list[int] = []
    overlaps: list[bool] = []

    class Launcher:
        def __init__(self, plan: Any, image: bytes, device: int, overlap: bool) -> None:
            overlaps.append(overlap)
            self.tensors = tuple(v.name for v in (*plan.inputs, *plan.outputs))

        def bind(self, rows: int, strides: dict[str, int]) -> Any:
            assert (rows, set(strides.values())) == (5, {64})

            class Bound:
                workspace_bytes = 10

                def prepare(self, workspace: int, stream: int) -> None:
                    prepared_for.append(workspace)

                def __call__(self, pointers: list[int], workspace: int, stream: int) -> None:
                    calls.append((pointers, workspace, stream))

            return Bound()

    monkeypatch.setattr(providers, "device_arch", lambda device: "sm_90")
    monkeypatch.setattr(KernelSet, "cubin", lambda kernels, arch: SimpleNamespace(image=b"", resources={}))
    monkeypatch.setattr(providers, "Launcher", Launcher)
    case = one_case("layernorm.bwd:d=64,dtype=bf16", 5, 2)
    prepared = known()["lngen"].prepare(case)
    prepared.launch(11, 1)
    prepared.launch(12, 0)
    names = ("dy", "x", "gamma", "mean", "rstd", "dx", "dgamma", "dbeta")
    assert calls[0][0] == [case.sets[1][n].data_ptr() for n in names]
    assert [c[2] for c in calls] == [11, 12]
    assert calls[0][1] == calls[1][1] != 0
    assert prepared_for == [calls[0][1]]
    assert {*prepared.results(0)} == {"dx", "dgamma", "dbeta"}
    assert "threads=" in prepared.schedule
    known()["lngen-overlapped"].prepare(case)
    assert overlaps == [False, True]
    assert (
        "threads=4,"
        in known(["threads=4,rows_per_block=128"])["lngen:threads=4,rows_per_block=128"].prepare(case).schedule
    )


# ---- the choice of providers ----


def test_providers_are_chosen_by_name_and_ceilings_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "installed", lambda module: module == "torch")
    monkeypatch.setattr(libraries, "installed", lambda module: False)
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
    with pytest.raises(ScheduleError, match=r"there is no key 'thread', expected one of .*; did you mean 'threads'"):
        select(schedules=["thread=64"])
    with pytest.raises(LngenError, match=r"no provider 'tirch', expected some of .*lngen.*; did you mean 'torch'"):
        select(["tirch"])
    with pytest.raises(MissingError, match="'liger' needs liger-kernel, which is not installed"):
        select(["liger"])


@pytest.mark.parametrize(
    ("provider", "gb_s", "fraction", "note"),
    [
        ("torch", 3000.0, 1.1, ""),
        ("torch", 3000.0, 1.11, "implausible: faster than the ceiling"),
        ("lngen", 3000.0, 1.2, ""),  # its calls begin while the ceiling's wait
        ("lngen", 4917.0, 1.2, ""),
        ("lngen", 4918.0, 1.0, "implausible: faster than memory, 4917 GB/s"),
    ],
)
def test_what_is_too_good_to_be_true(provider: str, gb_s: float, fraction: float, note: str) -> None:
    record = doubted(bench_record(provider, gb_s=gb_s, fraction=fraction), 4917.0)
    assert record.note == note
    assert doubted(replace(record, note="warm"), 1.0).note == "warm"


@pytest.mark.parametrize(("khz", "bits", "gb_s"), [(3_201_000, 6144, 4916.736), (0, 6144, math.inf)])
def test_what_memory_can_move_at_most(monkeypatch: pytest.MonkeyPatch, khz: int, bits: int, gb_s: float) -> None:
    """An H200: 3201 MHz, twice a clock, over 6144 bits. Some drivers do not tell the clock."""
    runtime = pytest.importorskip("cupy").cuda.runtime
    told = {runtime.cudaDevAttrMemoryClockRate: khz, runtime.cudaDevAttrGlobalMemoryBusWidth: bits}
    monkeypatch.setattr(runtime, "deviceGetAttribute", lambda attribute, device: told[attribute])
    assert memory_peak(0) == pytest.approx(gb_s)


def test_calls_that_wait_have_a_summary_of_their_own() -> None:
    both = [
        bench_record(name, fraction=f, target=0.9, met=f > 0.9)
        for name, f in (("lngen", 1.0), ("lngen-overlapped", 0.8))
    ]
    in_turn, overlapping = summarise(both)
    assert (in_turn.provider, in_turn.met) == ("lngen", 1)
    assert (overlapping.provider, overlapping.met) == ("lngen-overlapped", 0)
    lines = report.summary_lines([in_turn, overlapping])
    assert lines[0].startswith("layernorm fwd, 1 points: 1 of 1 targets met")
    assert lines[1].startswith("lngen-overlapped: layernorm fwd, 1 points: 0 of 1 targets met")


def test_providers_cover_what_they_can() -> None:
    def names(graph: str, direction: str) -> set[str]:
        return {p.name for p in covering(make_task(graph, direction, "f16", 4, 8), [*known().values()])}

    everywhere = {"lngen", "lngen-overlapped", "torch", "compile", "liger", "apex", "flash-attn"}
    assert names("layernorm", "fwd") == {"copy", "copy-overlapped", "quack", "apex-fast", *everywhere}
    assert names("layernorm", "bwd") == {"add", "add-overlapped", "apex-fast", *everywhere}
    assert names("layernorm", "both") == {"copy+add", "apex-fast", *everywhere}
    assert names("rmsnorm", "both") == {"copy+add", "quack", *everywhere}


def _norm(x: Any, gamma: Any, beta: Any, eps: float, mean: bool) -> Any:
    centred = x - x.mean(-1, keepdim=True) if mean else x
    y = centred * (centred * centred).mean(-1, keepdim=True).add(eps).rsqrt() * gamma
    return y if beta is None else y + beta


class _LayerNormFunction:
    """Stands for Apex' autograd functions: fast (x, gamma, beta, eps), affine (x, gamma, beta, shape, eps)."""

    @staticmethod
    def apply(x: Any, gamma: Any, beta: Any, *rest: Any) -> Any:
        assert rest[:-1] in ((), ((8,),))
        return _norm(x, gamma, beta, rest[-1], mean=True)


class _RMSNormFunction:
    @staticmethod
    def apply(x: Any, gamma: Any, shape: Any, eps: float) -> Any:
        assert shape == (8,)
        return _norm(x, gamma, None, eps, mean=False)


class _Module:
    FastLayerNormFN = FusedLayerNormAffineFunction = _LayerNormFunction
    FusedRMSNormAffineFunction = _RMSNormFunction

    @staticmethod
    def rmsnorm(x: Any, weight: Any, eps: float) -> Any:
        return _norm(x, weight, None, eps, mean=False)

    @staticmethod
    def layernorm_fwd(x: Any, weight: Any, bias: Any, eps: float) -> Any:
        assert {str(weight.dtype), str(bias.dtype)} == {"torch.float32"}
        return _norm(x, weight, bias, eps, mean=True).to(x.dtype)


@pytest.mark.parametrize("head", SPECS)
@pytest.mark.parametrize("peer", [QUACK_LIBRARY, APEX_FAST, APEX], ids=lambda peer: peer.name)
def test_peers_are_called_as_they_want_to_be(peer: Any, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = one_case(f"{head}:d=8,dtype=f16", 16, 2)
    if not peer.covers(case.spec):
        pytest.skip("not covered")
    monkeypatch.setattr(libraries.importlib, "import_module", lambda name: _Module)
    prepared = peer.prepare(case)
    prepared.launch(0, 1)
    assert not complaint(case, expected(case), prepared.results(1))


def test_apex_without_its_extensions_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "installed", lambda module: module == "apex")
    assert not APEX_FAST.available()
    monkeypatch.setattr(libraries.importlib, "import_module", lambda name: _Module)
    assert APEX_FAST.available()


# ---- reports ----


def test_the_table_has_shapes_down_and_providers_across() -> None:
    (table,) = report.tables(RECORDS)
    assert [c.header for c in table.columns] == ["rows x D", "copy", "lngen", "torch", "lngen / best peer"]
    rows = list(zip(*(c.cells for c in table.columns), strict=True))
    assert rows == [
        ("4096 x 1024 ~", "2995", "2750 (0.918 < 0.940)", "wrong", "-"),
        ("4096 x 4096", "3650", "3490 (0.96)", "2800", "1.25 torch"),
        ("32768 x 1024", "3908", "3765 (0.960 < 0.970) *", "wrong", "-"),
    ]
    notes = report.footnotes(RECORDS)
    wrong = "torch, layernorm.fwd:d=1024,dtype=bf16 rows=4096 and 1 more: wrong: y is off by 2.0e+00 of its size"
    assert notes[0] == wrong
    assert notes[-1].startswith("~ the ceiling")


def test_without_peers_nothing_is_compared() -> None:
    (table,) = report.tables([r for r in RECORDS if r.provider == "copy"])
    assert [c.header for c in table.columns] == ["rows x D", "copy"]


def test_json_comes_back_and_is_the_same_twice(tmp_path: Path) -> None:
    conditions = {"torch": "2.11", "device": "H200"}
    host = [HostRecord("layernorm.fwd:d=8", 16, "lngen", "cupy", 3.0, 2.9, 3.1)]
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    write_json(one, Saved(RECORDS, conditions, host))
    write_json(two, Saved(RECORDS, dict(reversed(conditions.items())), host))
    assert one.read_bytes() == two.read_bytes()
    assert read_json(one) == Saved(RECORDS, conditions, host)
    (summary,) = json.loads(one.read_text(encoding="utf-8"))["summary"]
    assert (summary["points"], summary["met"], summary["ratio"]) == (3, 1, 1.25)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.json", "two.json"]
    with pytest.raises(LngenError, match="cannot write"):
        write_json(one / "x.json", Saved(RECORDS, conditions))


def test_figures_are_classes_of_rows_or_of_sizes() -> None:
    def named(shapes: Sequence[tuple[int, int]]) -> list[tuple[str, int, bool]]:
        found = plot.pictures(judge([bench_record("copy", m, d, gb_s=1.0) for m, d in shapes]))
        return [(p.rows, len(p.records), p.line) for p in found]

    assert named(DESIGN) == [("4096 rows", 5, True), ("other shapes", 4, False)]
    targets = named(GRIDS["targets"].shapes(DType.BF16))
    assert targets == [(f"{size} MB per tensor", 21, True) for size in (8, 16, 32, 64, 256)]
    assert named(GRIDS["classic"].shapes(DType.F16)) == [("4096 rows", 30, True)]
    assert named([(1, 8), (2, 8)]) == [("all shapes", 2, False)]


def test_a_plot_is_of_png_or_svg(tmp_path: Path) -> None:
    with pytest.raises(LngenError, match=r"to end in \.png or \.svg"):
        plot.plot(RECORDS, tmp_path / "x.gif")


def test_a_plot_without_matplotlib_says_what_installs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(plot.importlib, "import_module", missing)
    with pytest.raises(MissingError, match=r'pip install "\.\[plot\]"'):
        plot.plot(RECORDS, tmp_path / "x.svg")


def test_plots_are_the_same_twice(tmp_path: Path) -> None:
    for name in ("x.svg", "x.png"):
        assert plot.plot(RECORDS, tmp_path / name) == [tmp_path / name]
        first = (tmp_path / name).read_bytes()
        plot.plot(RECORDS, tmp_path / name)
        assert (tmp_path / name).read_bytes() == first
    assert plot.plot([], tmp_path / "empty.svg") == []


def test_a_figure_per_direction_shows_peers_ceiling_and_target(tmp_path: Path) -> None:
    forward = [bench_record(n, d=d, gb_s=g, fraction=g / 4000) for d in (512, 1000, 2048, 4096) for n, g in
               (("copy", 4000.0), ("lngen", 3900.0), ("compile", 3000.0))]  # fmt: skip
    backward = [replace(r, direction="bwd", spec=r.spec.replace("fwd", "bwd")) for r in forward]
    files = plot.plot(judge([*forward, *backward]), tmp_path / "x.svg")
    assert [f.name for f in files] == ["x-layernorm-fwd-bf16-4096rows.svg", "x-layernorm-bwd-bf16-4096rows.svg"]
    from matplotlib.figure import Figure

    (picture,) = plot.pictures(judge(forward))
    figure = Figure()
    plot._draw(figure, picture)
    (legend,) = figure.legends
    assert [t.get_text() for t in legend.get_texts()] == ["lngen", "torch.compile", "copy (ceiling)", "target"]
    left, right = figure.axes
    assert [axes.get_xscale() + axes.get_yscale() for axes in figure.axes] == ["loglog", "loglinear"]
    lines = [[*line.get_xdata()] for line in left.get_lines() if line.get_label() == "lngen"]
    assert lines == [[512, 2048, 4096]]  # 1000 has a mark of its own
    targets = [[*line.get_ydata()] for line in right.get_lines() if line.get_color() == plot.TARGET]
    assert targets[:2] == [[0.94, 0.95], [0.799]]


def test_many_graphs_share_a_figure(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    names = [f"graph{n}" for n in range(8)]
    shares = {"copy": 1.0, "lngen": 0.9, "lngen-overlapped": 0.8, "liger": 0.5}
    records = judge([
        Record(f"{g}.{way}:d={d},dtype=bf16", g, way, 4096, d, "bf16", p, gb_s=f, fraction=f - 0.01 * n)
        for way in ("fwd", "bwd") for d in (512, 1024) for n, g in enumerate(names) for p, f in shares.items()
    ])  # fmt: skip
    assert plot.plot(records, tmp_path / "x.svg") == [tmp_path / "x.svg"]
    (overview,) = overviews(records)
    figure = Figure()
    overview.draw(figure)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        f"{way}, 4096 x {d}" for way in ("forward", "backward") for d in (512, 1024)
    ]
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == names
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([0.9 - 0.01 * n for n in range(8)])
    serial, liger = (line for line in axes.get_lines() if len(line.get_xdata()) == 8)
    assert [*serial.get_xdata()] == pytest.approx([0.8 - 0.01 * n for n in range(8)])
    assert [*liger.get_ydata()] == [*range(8)]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["lngen", "lngen, overlapped", "Liger"]
    few = [r for r in records if r.graph != names[0]]
    assert not overviews(few)
    assert len(plot.plot(few, tmp_path / "y.svg")) == 7 * 2
    assert not overviews([replace(r, d=d) for r in records for d in range(1, 10)])  # more shapes than graphs


def test_a_picture_says_where_it_comes_from() -> None:
    run = {"date": "2026-01-02 03:04:05 UTC", "commit": "0123456789abcdef"}
    saved = Saved(RECORDS, {"device": "NVIDIA H200", "lngen": "0.1.0"}, runs=[{"date": "2025-01-01"}, run])
    assert plot.origin(saved) == "NVIDIA H200, lngen 0.1.0, 2026-01-02, commit 0123456789ab"
    assert plot.origin(Saved(RECORDS)) == ""
    from matplotlib.figure import Figure

    figure = Figure()
    plot.sign(figure, plot.origin(saved))
    assert [text.get_text() for text in figure.texts] == [plot.origin(saved)]


def test_fractions_have_one_linear_scale(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    for most, top in ((0.98, 1.1), (1.2, 1.22)):
        figure = Figure()
        records = [bench_record("lngen", d=d, gb_s=9.0, fraction=f) for d, f in ((256, 0.3), (512, most), (1024, 0.9))]
        plot._draw(figure, plot.pictures(judge(records))[0])
        axes = figure.axes[1]
        assert axes.get_yscale() == "linear"
        assert axes.get_ylim() == pytest.approx((0.5, top))


def test_a_picture_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(LngenError, match="cannot write"):
        plot.plot(RECORDS, tmp_path / "x.png" / "y" / ("z" * 300 + ".png"))
    assert [*tmp_path.rglob("*.png")] in ([], [tmp_path / "x.png"])


def test_each_way_to_run_lngen_has_a_colour_of_its_own() -> None:
    from matplotlib.figure import Figure

    names = ("lngen", "lngen-overlapped", "lngen:stages=2", "lngen:stages=3", "torch")
    (picture,) = plot.pictures(
        judge([bench_record(n, d=d, gb_s=1.0, fraction=0.5) for d in (256, 512, 1024) for n in names])
    )
    figure = Figure()
    plot._draw(figure, picture)
    colours = {line.get_label(): line.get_color() for line in figure.axes[0].get_lines()}
    assert len({colours[plot.NAMES.get(n, n)] for n in names}) == len(names)


# ---- circumstances ----


def test_circumstances_are_what_the_machine_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def output(command: list[str]) -> str:
        asked.append(command)
        return "580.1, 1980, 1980, 3201, 3201, 650.5, 700.00, 61" if command[0] == "nvidia-smi" else ""

    monkeypatch.setattr(circumstances, "_output", output)
    monkeypatch.setattr(circumstances, "_uuid", lambda device: f"GPU-{device}")
    found = circumstances.circumstances(1, "abc")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", found.pop("date"))
    assert found == {
        "commit": "abc", "device id": "GPU-1", "driver": "580.1", "SM clock, MHz": "1980",
        "SM clock at most, MHz": "1980", "memory clock, MHz": "3201", "memory clock at most, MHz": "3201",
        "power, W": "650.5", "power at most, W": "700.00", "temperature, C": "61",
    }  # fmt: skip
    assert [c[0] for c in asked] == ["nvidia-smi"]
    assert "--id=GPU-1" in asked[0]


def test_what_nobody_tells_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circumstances.subprocess, "run", lambda *a, **k: (_ for _ in ()).throw(OSError()))
    monkeypatch.setattr(circumstances, "_uuid", lambda device: "")
    assert [*circumstances.circumstances(0)] == ["date"]


def test_git_tells_the_commit_and_whether_files_differ(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        options = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(tmp_path), *options, *words], check=True, capture_output=True)

    assert circumstances._commit(tmp_path) == ""
    git("init")
    (tmp_path / "f").write_text("1")
    git("add", "f")
    git("commit", "-m", "m")
    head = circumstances._commit(tmp_path)
    assert re.fullmatch("[0-9a-f]{40}", head)
    (tmp_path / "f").write_text("2")
    assert circumstances._commit(tmp_path) == f"{head} with changes"


def test_a_run_that_adds_records_is_added(on_the_cpu: None, tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    run_bench("--shapes", "8x32", "--out", str(file), "--commit", "one")
    run_bench("--shapes", "8x32", "--out", str(file), "--commit", "none", "--resume")
    run_bench("--shapes", "9x32", "--out", str(file), "--commit", "two", "--resume")
    assert [run["commit"] for run in read_json(file).runs] == ["one", "two"]


def test_merged_files_keep_the_conditions_they_share() -> None:
    one = Saved(RECORDS[:1], {"device": "H200", "torch": "2.11"}, runs=[{"date": "1"}])
    two = Saved(RECORDS[1:], {"device": "H200", "torch": "2.12"}, runs=[{"date": "2"}])
    assert merged([one, two]) == Saved(RECORDS, {"device": "H200"}, [], [{"date": "1"}, {"date": "2"}])


# ---- host time ----


def test_host_times_are_of_both_kinds_of_arrays_and_a_broken_one_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(spec: Spec, rows: int) -> Any:
        raise RuntimeError("no GPU part")

    monkeypatch.setattr(host, "_cupy_calls", lambda spec, rows: ({"lngen": lambda: None}, lambda: None))
    monkeypatch.setattr(host, "_torch_calls", lambda spec, rows: ({"F.layer_norm": lambda: None}, lambda: None))
    spec = parse_spec("layernorm.bwd:d=8")
    found = host.host_benchmark(spec, 16)
    assert [(r.call, r.arrays, r.rows, r.note) for r in found] == [
        ("lngen", "cupy", 16, ""),
        ("F.layer_norm", "torch", 16, ""),
    ]
    assert {r.spec for r in found} == {"layernorm.fwd:d=8,dtype=f32"}
    monkeypatch.setattr(host, "_cupy_calls", broken)
    first, *_ = host.host_benchmark(spec, 16)
    assert (first.call, first.arrays, first.us_median) == ("-", "cupy", None)
    assert "no GPU part" in first.note


def test_host_times_leave_the_waiting_out() -> None:
    now, order = [0.0], []

    def spend(name: str, us: float) -> None:
        now[0] += us * 1e-6
        order.append(name)

    def fail() -> None:
        raise MissingError("no GPU")

    calls = {"a": lambda: spend("a", 3.0), "bad": fail, "b": lambda: spend("b", 8.0)}
    found = host_times(calls, lambda: spend("wait", 1e4), count=4, batches=3, clock=lambda: now[0])
    assert [*found] == ["a", "bad", "b"]
    assert found["bad"] == "MissingError: no GPU"
    a, b = found["a"], found["b"]
    assert isinstance(a, Stats)
    assert isinstance(b, Stats)
    assert (a.median, b.median) == pytest.approx((3.0, 8.0))
    assert order == ["a", "wait", "b", "wait", *(["a"] * 4 + ["wait"] + ["b"] * 4 + ["wait"]) * 4]
    table = report.host_table([HostRecord("s", 16, "lngen", "cupy", 3.0, 2.9, 3.1), HostRecord("s", 16, "-", "torch")])
    assert [list(c.cells) for c in table.columns][2] == ["3.00", "-"]


# ---- command line ----


def test_shapes() -> None:
    assert parse_shapes("", "", "") == []
    assert parse_shapes("", "1,2", "8, 16") == [(1, 8), (1, 16), (2, 8), (2, 16)]
    assert parse_shapes("7x9", "", "") == [(7, 9)]
    for wrong in [("7", "", ""), ("7xa", "", ""), ("0x8", "", ""), ("", "1", ""), ("1x1", "1", "1")]:
        with pytest.raises(SpecError):
            parse_shapes(*wrong)


def test_tasks() -> None:
    assert [str(t) for t in tasks(["rmsnorm"], "fwd,both", "f32,bf16", "design", [(3, 8)])] == [
        "rmsnorm.fwd:d=8,dtype=f32 rows=3", "rmsnorm.fwd:d=8,dtype=bf16 rows=3",
        "rmsnorm.both:d=8,dtype=f32 rows=3", "rmsnorm.both:d=8,dtype=bf16 rows=3",
    ]  # fmt: skip
    assert [(t.rows, t.d, str(t.dtype)) for t in tasks(["layernorm"], "fwd", "", "design", [])] == [
        (m, d, "bf16") for m, d in DESIGN
    ]
    assert {str(t.dtype) for t in tasks(["layernorm"], "fwd", "", "targets", [])} == {"f16", "bf16", "f32"}
    found = tasks(["layernorm"], "bwd,both", "f32", "design", [(3, 8)], latency=True)
    assert [t.direction for t in found] == ["bwd"] * 10 + ["both"]
    assert {(t.rows, t.kind) for t in found[1:10]} == {(m, LATENCY) for m in (1, 16, 128)}
    assert str(found[1]).endswith("rows=1 latency")
    assert {t.kind for t in tasks(["layernorm"], "fwd", "", "none", [], latency=True)} == {LATENCY}


def test_a_wrong_direction_lists_the_known_ones() -> None:
    with pytest.raises(SpecError, match="no direction 'bkw', expected some of fwd, bwd, both"):
        tasks(["layernorm"], "bkw", "f32", "design", [])


def test_without_a_gpu_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "device_count", lambda: 0)
    with pytest.raises(MissingError, match=r"needs an NVIDIA GPU and CuPy.*'lngen tune SPEC --ranking'") as caught:
        make_engine()
    assert caught.value.exit_code == 3
    result = CliRunner().invoke(bench, ["--providers", "nonsense"])
    assert isinstance(result.exception, MissingError)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, few_sets: None) -> None:
    engine = CpuEngine()
    monkeypatch.setattr(engines, "make_engine", lambda: engine)
    monkeypatch.setattr(conditions, "conditions", lambda engine, method: {"rounds": str(method.rounds)})


def run_bench(*options: str) -> str:
    text = "--providers torch --direction fwd --dtype f32 --rounds 10"
    result = CliRunner().invoke(bench, [*text.split(), *options], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_the_command_prints_and_writes(on_the_cpu: None, tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    assert "layernorm fwd f32, GB/s" in run_bench("--shapes", "8x32", "--out", str(file))
    saved = read_json(file)
    assert [r.provider for r in saved.records] == ["copy", "torch"]
    assert saved.conditions == {"rounds": "10"}
    result = CliRunner().invoke(bench, ["--providers", "tirch"])
    assert isinstance(result.exception, LngenError)
    assert "Example: lngen bench" in CliRunner().invoke(bench, ["--help"]).output


def test_a_plot_that_cannot_be_is_refused_before_anything_is_measured(on_the_cpu: None, tmp_path: Path) -> None:
    options = ["--providers", "torch", "--shapes", "8x32", "--out", str(tmp_path / "b.json"), "--plot", "x.gif"]
    result = CliRunner().invoke(bench, options)
    assert isinstance(result.exception, LngenError)
    assert not [*tmp_path.iterdir()]


def test_the_command_continues_a_file(on_the_cpu: None, tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    options = ["--shapes", "8x32,9x32", "--out", str(file), "--resume"]
    output = run_bench(*options, "--seconds", "0")
    assert "2 of 2 points are left; the same command with --resume measures them." in output.replace("\n", " ")
    assert read_json(file).records == []
    assert "are left" not in run_bench(*options)
    first = file.read_bytes()
    run_bench(*options)
    assert file.read_bytes() == first
    run_bench("--shapes", "10x32", "--out", str(file), "--resume")
    assert [r.rows for r in read_json(file).records] == [8, 8, 9, 9, 10, 10]


def test_to_continue_needs_a_file(on_the_cpu: None) -> None:
    result = CliRunner().invoke(bench, ["--resume"])
    assert isinstance(result.exception, SpecError)
    assert "--out FILE" in str(result.exception)


def test_each_point_is_in_the_file_at_once(on_the_cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, sizes = tmp_path / "b.json", []
    prepare = Torch.prepare

    def looking(self: Torch, case: Any) -> Prepared:
        sizes.append(len(read_json(file).records) if file.exists() else 0)
        return prepare(self, case)

    monkeypatch.setattr(Torch, "prepare", looking)
    run_bench("--shapes", "8x32,9x32,10x32", "--out", str(file))
    assert sizes == [0, 2, 4]


def test_files_are_shown_again_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engines, "device_count", lambda: 0)
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    write_json(one, Saved(RECORDS, {}, [HostRecord("s", 16, "lngen", "cupy", 3.0, 2.9, 3.1)]))
    write_json(two, Saved([replace(r, direction="bwd", spec=r.spec.replace("fwd", "bwd")) for r in RECORDS]))
    options = ["--from", str(one), "--from", str(two), "--plot", str(tmp_path / "x.svg")]
    result = CliRunner().invoke(bench, options, catch_exceptions=False)
    assert "layernorm fwd bf16" in result.output
    assert "layernorm bwd, 3 points" in result.output
    assert "host time per call" in result.output
    assert len([*tmp_path.glob("x-layernorm-*.svg")]) == 2
