"""The benchmark without a GPU: bytes, counts, statistics, rounds, checked results, reports, command line."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lngen.bench import engines, peers, providers, report, timing
from lngen.bench.cases import BOUNDS, complaint, errors, make_case
from lngen.bench.engines import TorchEngine, make_engine
from lngen.bench.floor import ceiling_bytes, floor_bytes, gb_s
from lngen.bench.host import HostRecord, host_times
from lngen.bench.peers import known, select
from lngen.bench.providers import Ceiling, Prepared, Torch, autograd, keeping
from lngen.bench.run import Record, benchmark
from lngen.bench.timing import Stats, drift, launch_count, set_count, time_side_by_side
from lngen.cli.bench import SHAPES, bench, cases, command, parse_shapes
from lngen.errors import LngenError, MissingError, SpecError
from lngen.spec import parse_spec

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

    def release(self) -> None:
        pass

    def device(self) -> tuple[int, str]:
        return 0, "a CPU"

    def capture(self, launch: timing.Launch, indices: Sequence[int]) -> Any:
        launch(0, indices[0])
        return len(indices)

    def elapsed(self, graphs: Sequence[Any]) -> list[float]:
        return [count * self.us / 1e3 for count in graphs]


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


# ---- results are checked ----

SPECS = ["layernorm.fwd", "layernorm.bwd", "rmsnorm.fwd", "rmsnorm.bwd"]


@pytest.mark.parametrize("head", SPECS)
@pytest.mark.parametrize("chunk", [1 << 24, 100])
def test_torch_agrees_with_the_formulas(head: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lngen.bench.cases.CHUNK", chunk)
    case = make_case(parse_spec(f"{head}:d=48,dtype=f32,eps=1e-3"), 37, 3, CpuEngine())
    first, last = ({n: case.sets[i][n] for n in case.inputs} for i in (0, 2))
    assert all((first[n] == last[n]).all() and first[n].data_ptr() != last[n].data_ptr() for n in first)
    prepared = Torch().prepare(case) if head != "rmsnorm.bwd" else _rms_by_autograd(case)
    for index in range(3):
        prepared.launch(0, index)
    found = errors(case, 1, prepared.results(1))
    assert max(found.values()) < 1e-5
    assert case.outputs[0] in found
    assert not complaint(case, 2, prepared.results(2))


def _rms_by_autograd(case: Any) -> Prepared:
    import torch

    shape = (case.spec.d,)
    return autograd(case, lambda x, gamma, beta: torch.nn.functional.rms_norm(x, shape, gamma, case.spec.eps))


def test_layernorm_by_autograd() -> None:
    torch = pytest.importorskip("torch")
    for direction in ("fwd", "bwd"):
        case = make_case(parse_spec(f"layernorm.{direction}:d=40,dtype=f32"), 9, 2, CpuEngine())
        prepared = autograd(case, lambda x, g, b: torch.nn.functional.layer_norm(x, (40,), g, b, 1e-5))
        prepared.launch(0, 1)
        results = prepared.results(1)
        assert not complaint(case, 1, results)
        assert {*results} == ({"y"} if direction == "fwd" else {"dx", "dgamma", "dbeta"})


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("mistake", ["mean", "gamma", "nan", "sum"])
def test_a_wrong_backward_is_noticed(dtype: str, mistake: str) -> None:
    case = make_case(parse_spec(f"layernorm.bwd:d=256,dtype={dtype}"), 64, 1, CpuEngine())
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
    assert complaint(case, 0, results).startswith("dbeta" if mistake == "sum" else "dx")


def test_a_missing_result_is_an_error() -> None:
    case = make_case(parse_spec("layernorm.fwd:d=8"), 2, 1, CpuEngine())
    with pytest.raises(LngenError, match="'y' is missing"):
        complaint(case, 0, {})
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


def test_a_benchmark_reports_what_fails_and_goes_on(few_sets: None) -> None:
    todo = cases("layernorm", "fwd,bwd", "f32", [(64, 32), (3, 32)])
    chosen = [*(Ceiling(n, d) for d, n in providers.CEILINGS.items()), Torch(), Wrong("wrong", "values")]
    chosen += [Wrong("raising", "raises")]
    seen: list[tuple[int, int, str]] = []
    records = benchmark(todo, chosen, CpuEngine(), progress=lambda *a: seen.append(a))
    assert [s[:2] for s in seen] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert [r.provider for r in records] == ["copy", "torch", "wrong", "raising"] * 2 + [
        "add", "torch", "wrong", "raising"
    ] * 2  # fmt: skip
    ceiling, torch, wrong, raising = records[:4]
    assert (ceiling.us_median, ceiling.gb_s, ceiling.fraction) == (10.0, 1.6, 1.0)
    assert torch.gb_s == 1.7  # the same time for a few more bytes
    assert (torch.sets, torch.launches) == (2, 800)
    assert wrong.gb_s is None
    assert wrong.note.startswith("wrong: y is off by")
    assert raising.note == "failed: ValueError: no such kernel"


def test_a_case_that_fails_is_reported_in_its_rows(few_sets: None) -> None:
    class Broken(CpuEngine):
        def elapsed(self, graphs: Sequence[Any]) -> list[float]:
            if self.us == 10.0:
                self.us = 20.0
                raise RuntimeError("CUDA error: an illegal memory access")
            return super().elapsed(graphs)

    class TooSmall(CpuEngine):
        def memory(self) -> tuple[int, int]:
            return 100, 1000

    todo = cases("rmsnorm", "fwd", "f32", [(8, 32)])
    chosen = [Ceiling("copy", "fwd"), Torch()]
    found = {r.provider: r for r in benchmark(todo, chosen, Broken())}
    assert found["copy"].note == "failed: RuntimeError: CUDA error: an illegal memory access"
    assert found["torch"].us_median == 20.0
    assert found["torch"].fraction is None
    assert all("choose fewer rows" in r.note for r in benchmark(todo, chosen, TooSmall()))


def test_a_small_case_is_said_to_be_warm(few_sets: None) -> None:
    class LargeCache(CpuEngine):
        def memory(self) -> tuple[int, int]:
            return 10**9, 60 * MB

    record = benchmark(cases("rmsnorm", "fwd", "f32", [(8, 32)]), [Torch()], LargeCache())[0]
    assert record.sets == timing.MAX_SETS
    assert record.note.startswith("warm: 64 sets are only 0 MB")
    assert record.gb_s is not None


def test_lngen_is_launched_with_the_pointers_of_a_set(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[int], int, int]] = []

    class Launcher:
        def __init__(self, plan: Any, binary: Any, device: int) -> None:
            self.tensors = tuple(v.name for v in (*plan.inputs, *plan.outputs))

        def bind(self, rows: int, strides: dict[str, int]) -> Any:
            assert (rows, set(strides.values())) == (5, {64})

            class Bound:
                workspace_bytes = 10

                def __call__(self, pointers: list[int], workspace: int, stream: int) -> None:
                    calls.append((pointers, workspace, stream))

            return Bound()

    monkeypatch.setattr(providers, "device_arch", lambda device: "sm_90")
    monkeypatch.setattr(providers, "compile_plan", lambda plan, arch: None)
    monkeypatch.setattr(providers, "Launcher", Launcher)
    case = make_case(parse_spec("layernorm.bwd:d=64,dtype=bf16"), 5, 2, CpuEngine())
    prepared = known()["lngen"].prepare(case)
    prepared.launch(11, 1)
    prepared.launch(12, 0)
    names = ("dy", "x", "gamma", "mean", "rstd", "dx", "dgamma", "dbeta")
    assert calls[0][0] == [case.sets[1][n].data_ptr() for n in names]
    assert [c[2] for c in calls] == [11, 12]
    assert calls[0][1] == calls[1][1] != 0
    assert {*prepared.results(0)} == {"dx", "dgamma", "dbeta"}
    assert "threads=" in prepared.schedule


# ---- the choice of providers ----


def test_providers_are_chosen_by_name_and_ceilings_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "installed", lambda module: module == "torch")
    monkeypatch.setattr(peers, "installed", lambda module: False)
    assert [p.name for p in select()] == ["copy", "add", "lngen", "torch"]
    assert [p.name for p in select(compiled=True)] == ["copy", "add", "lngen", "torch", "compile"]
    assert [p.name for p in select(["torch"])] == ["copy", "add", "torch"]
    assert [p.name for p in select(["compile", "lngen"])] == ["copy", "add", "lngen", "compile"]
    with pytest.raises(LngenError, match=r"no provider 'tirch', expected some of .*lngen.*; did you mean 'torch'"):
        select(["tirch"])
    with pytest.raises(MissingError, match="'liger' needs liger-kernel, which is not installed"):
        select(["liger"])


def test_providers_cover_what_they_can() -> None:
    layernorm, backward = parse_spec("layernorm.fwd:d=8"), parse_spec("rmsnorm.bwd:d=8")
    covering = {n for n, p in known().items() if p.covers(layernorm)}
    assert covering == {"copy", "lngen", "torch", "compile", "liger"}
    assert {n for n, p in known().items() if p.covers(backward)} == {
        "add", "lngen", "torch", "compile", "liger", "quack"
    }  # fmt: skip


# ---- reports ----


def _record(provider: str, rows: int = 4096, d: int = 1024, **values: Any) -> Record:
    spec = f"layernorm.fwd:d={d},dtype=bf16"
    return Record(spec, "layernorm", "fwd", rows, d, "bf16", provider, **values)


RECORDS = [
    _record("copy", us_median=5.6, gb_s=2995.0, fraction=1.0, launches=1400, sets=18, drifted=True),
    _record("lngen", us_median=6.1, gb_s=2750.4, fraction=0.918, schedule="threads=32", drifted=True),
    _record("torch", note="wrong: y is off by 2.0e+00 of its size", drifted=True),
    _record("copy", d=4096, us_median=18.4, gb_s=3650.0, fraction=1.0),
    _record("lngen", d=4096, us_median=19.7, gb_s=3400.0, fraction=0.93),
    _record("copy", rows=32768, us_median=34.3, gb_s=3908.0, fraction=1.0),
    _record("lngen", rows=32768, us_median=35.6, gb_s=3765.0, fraction=0.96, note="implausible: x"),
]


def test_the_table_has_shapes_down_and_providers_across() -> None:
    (table,) = report.tables(RECORDS)
    assert [c.header for c in table.columns] == ["rows x D", "copy", "lngen", "torch"]
    rows = list(zip(*(c.cells for c in table.columns), strict=True))
    assert rows == [
        ("4096 x 1024 ~", "2995", "2750 (0.92)", "wrong"),
        ("4096 x 4096", "3650", "3400 (0.93)", "-"),
        ("32768 x 1024", "3908", "3765 (0.96) *", "-"),
    ]
    notes = report.footnotes(RECORDS)
    assert notes[0] == "torch, layernorm.fwd:d=1024,dtype=bf16 rows=4096: wrong: y is off by 2.0e+00 of its size"
    assert notes[-1].startswith("~ the ceiling")


def test_json_comes_back_and_is_the_same_twice(tmp_path: Path) -> None:
    conditions = {"torch": "2.11", "device": "H200"}
    host = [HostRecord("layernorm.fwd:d=8", 16, "lngen", "cupy", 3.0, 2.9, 3.1)]
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    report.write_json(one, RECORDS, conditions, host)
    report.write_json(two, RECORDS, dict(reversed(conditions.items())), host)
    assert one.read_bytes() == two.read_bytes()
    assert report.read_json(one) == (RECORDS, conditions)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.json", "two.json"]
    with pytest.raises(LngenError, match="cannot be written"):
        report.write_json(tmp_path / "none" / "x.json", RECORDS, conditions)


def test_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LngenError, match=r"to end in \.png or \.svg"):
        report.plot(RECORDS, tmp_path / "x.gif")
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(MissingError, match=r'pip install "lngen\[plot\]"'):
            report.plot(RECORDS, tmp_path / "x.svg")
        pytest.skip("matplotlib is not installed")
    for name in ("x.svg", "x.png"):
        report.plot(RECORDS, tmp_path / name)
        first = (tmp_path / name).read_bytes()
        report.plot(RECORDS, tmp_path / name)
        assert (tmp_path / name).read_bytes() == first
    report.plot([], tmp_path / "empty.svg")


# ---- host time ----


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
    assert parse_shapes("", "", "") == [tuple(map(int, s.split("x"))) for s in SHAPES.split(",")]
    assert parse_shapes("", "1,2", "8, 16") == [(1, 8), (1, 16), (2, 8), (2, 16)]
    assert parse_shapes("7x9", "", "") == [(7, 9)]
    for wrong in [("7", "", ""), ("7xa", "", ""), ("0x8", "", ""), ("", "1", ""), ("1x1", "1", "1")]:
        with pytest.raises(SpecError):
            parse_shapes(*wrong)
    assert [str(s) for s, _ in cases("rmsnorm", "fwd,bwd", "f32,bf16", [(3, 8)])] == [
        "rmsnorm.fwd:d=8,dtype=f32", "rmsnorm.fwd:d=8,dtype=bf16",
        "rmsnorm.bwd:d=8,dtype=f32", "rmsnorm.bwd:d=8,dtype=bf16",
    ]  # fmt: skip


def test_without_a_gpu_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "device_count", lambda: 0)
    with pytest.raises(MissingError, match="needs an NVIDIA GPU and CuPy") as caught:
        make_engine()
    assert caught.value.exit_code == 3
    result = CliRunner().invoke(bench, ["--providers", "nonsense"])
    assert isinstance(result.exception, MissingError)
    assert command is bench


def test_the_command_prints_and_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, few_sets: None) -> None:
    engine = CpuEngine()
    monkeypatch.setattr(engines, "make_engine", lambda: engine)
    monkeypatch.setattr("lngen.bench.run.conditions", lambda engine, rounds: {"rounds": str(rounds)})
    text = "--providers torch --direction fwd --dtype f32 --shapes 8x32 --rounds 10"
    options = text.split()
    file = tmp_path / "b.json"
    result = CliRunner().invoke(bench, [*options, "--json", str(file)], catch_exceptions=False)
    assert result.exit_code == 0
    assert "layernorm fwd f32, GB/s" in result.output
    records, conditions = report.read_json(file)
    assert [r.provider for r in records] == ["copy", "torch"]
    assert conditions == {"rounds": "10"}
    result = CliRunner().invoke(bench, ["--providers", "tirch"])
    assert isinstance(result.exception, LngenError)
    assert "Example: lngen bench" in CliRunner().invoke(bench, ["--help"]).output
