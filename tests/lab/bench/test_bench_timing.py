"""If these fail, launches are timed wrongly: too few or warm argument sets, other surroundings, an unseen drift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench_fakes import CpuGpu, FakeTimer, drawn, few_rows_records
from lngen.cli.bench import bench, filled
from lngen.errors import LngenError
from lngen.lab.bench import few_rows, figures, providers, store, summary, timing, torch_gpu
from lngen.lab.bench.argument_sets import Prepared, make_cases
from lngen.lab.bench.benchmark import benchmark
from lngen.lab.bench.peers import FLASHINFER, Member, Torch
from lngen.lab.bench.providers import Ceiling
from lngen.lab.bench.records import judge
from lngen.lab.bench.tasks import BETWEEN_GEMMS, FEW_ROWS, IN_TURN, Task, make_task
from lngen.lab.bench.timing import Launch, Stats, drift, launch_count, set_count, time_side_by_side

MB = 1_000_000


@pytest.mark.parametrize(("set_mb", "l2_mb", "free_mb", "want"), [
    (16, 60, 100_000, 19),  # 300 MB
    (16, 100, 100_000, 32),  # 5 x L2
    (1, 60, 100_000, 64),  # at most
    (1000, 60, 100_000, 2),  # at least, so that a set is not found where it was left
    (100, 60, 350, 2),  # 60 % of what is free
    (1000, 60, 2000, 1),
])  # fmt: skip
def test_set_count(set_mb: int, l2_mb: int, free_mb: int, want: int) -> None:
    assert set_count(set_mb * MB, l2_mb * MB, free_mb * MB) == want


@pytest.mark.parametrize(
    ("us", "sets", "want"), [(10.0, 19, 817), (1000.0, 2, 8), (5000.0, 5, 5), (0.1, 64, 2048), (0.0, 1, 2000)]
)
def test_launch_count(us: float, sets: int, want: int) -> None:
    assert launch_count(us, sets) == want
    assert want % sets == 0


def test_statistics() -> None:
    stats = Stats.of([5.0, 1.0, 2.0, 3.0, 4.0, 11.0, 10.0, 9.0, 8.0, 7.0, 6.0])
    assert (stats.median, stats.p10, stats.p90, stats.minimum) == (6.0, 2.0, 10.0, 1.0)
    assert drift([1.0, 1.0, 9.0, 1.1, 1.1]) == pytest.approx(0.1)
    assert drift([1.0]) == 0.0


def test_rounds_are_shuffled_over_all_sets() -> None:
    timer = FakeTimer({"copy": 4.0, "a": 8.0, "b": 100.0})
    found = time_side_by_side(
        {name: timer.launch(name) for name in timer.us}, 3, timer, reference="copy", rounds=10, warm_ms=20
    )
    first, *order = timer.replayed[-1]
    assert first == order[-1]  # one more, which finds an idle GPU
    rounds = [tuple(order[i : i + 3]) for i in range(0, 30, 3)]
    assert {frozenset(one) for one in rounds} == {frozenset(timer.us)}
    assert len({*rounds}) > 1  # nobody always follows the same other
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


@pytest.mark.parametrize("us", [{"a": 4.0, "b": 5.0}, {"a": 5.0, "b": 4.0}, {"a": 4.0, "b": 4.0}, {"a": 4.0}])
def test_the_fastest_way_is_the_ceiling(us: dict[str, float]) -> None:
    timer = FakeTimer(us)
    ways = {name: timer.launch(name) for name in us}
    chosen = timing.fastest([*ways.values()], 3, timer)
    assert chosen is ways[min(us, key=lambda name: us[name])]
    assert [i for _, i in timer.captured] == [[0, 1, 2]] * (2 if len(us) > 1 else 0)


# ---- few rows ----


torch = pytest.importorskip("torch")

US = {"copy": 1.0, "torch": 2.0, "slow": 4.0, "lngen": 1.6}


class Adding(CpuGpu):
    """Every provider adds its time to 50 us of surroundings."""

    ran = 0.0

    def capture(self, launch: Launch, indices: Sequence[int]) -> Any:
        self.ran = 0.0
        super().capture(launch, indices)
        return len(indices), 50.0 + self.ran

    def elapsed(self, graphs: Sequence[Any]) -> list[float]:
        return [count * us / 1e3 for count, us in graphs]


def adding(provider: Any) -> Any:
    """The provider, whose launches take the time of its name."""
    prepare = provider.prepare

    def prepared(case: Any) -> Prepared:
        made = prepare(case)

        def launch(stream: int, index: int) -> None:
            made.launch(stream, index)
            case.gpu.ran = US[provider.name]

        return Prepared(launch, made.results, ends=made.ends)

    provider.prepare = prepared
    return provider


def task(kind: str, graph: str = "layernorm", dtype: str = "f32") -> Task:
    return make_task(graph, "fwd", dtype, 3, 32, kind)


@pytest.mark.parametrize("kind", FEW_ROWS)
def test_a_call_costs_what_it_adds_to_its_surroundings(kind: str, few_sets: None) -> None:
    chosen = [*map(adding, [Ceiling("copy"), Torch(), Torch("slow")])]
    records = benchmark([task(kind)], chosen, Adding()).records
    assert {r.provider: r.us_median for r in records} == pytest.approx({n: US[n] for n in ("copy", "torch", "slow")})
    assert {(r.kind, r.gb_s, r.target) for r in records} == {(kind, None, None)}
    assert [r.fraction for r in records] == [1.0, 0.5, 0.25]
    (nothing,) = benchmark([task(kind)], [Torch()], CpuGpu()).records
    assert (nothing.us_median, nothing.note[:6]) == (None, "noise:")


def test_what_surrounds_a_call_is_subtracted_in_each_round() -> None:
    timer = FakeTimer({"base": 5.0, "a": 8.0})
    found = time_side_by_side({n: timer.launch(n) for n in timer.us}, 2, timer, reference="base", base="base", rounds=3)
    assert {name: s.median for name, s in found.stats.items()} == pytest.approx({"a": 3.0})
    broken = FakeTimer({"base": None, "a": 8.0})
    with pytest.raises(LngenError, match="base cannot be timed: RuntimeError: operation not permitted"):
        time_side_by_side({n: broken.launch(n) for n in broken.us}, 2, broken, base="base")


def test_the_gemms_write_what_a_call_reads_and_read_what_it_writes(few_sets: None) -> None:
    gpu, wanted = CpuGpu(), task(BETWEEN_GEMMS)
    (case,) = make_cases(wanted, 2, gpu)
    call, products = Torch().prepare(case), []
    matmul = torch.matmul

    def noting(a: Any, b: Any, *, out: Any) -> Any:
        products.append((a, out))
        return matmul(a, b, out=out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "matmul", noting)
        few_rows.between_gemms(case)(call)(0, 1)
    (_, x), (y, _) = products
    assert x is case.sets[1]["x"]
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (32,), case.sets[1]["gamma"], case.sets[1]["beta"]))
    assert few_rows.surrounding_bytes(wanted) == 2 * 1024 * 32 * 4


def test_one_that_works_in_place_gets_its_own_x(few_sets: None) -> None:
    (case,) = make_cases(task(BETWEEN_GEMMS, "add_rmsnorm", "bf16"), 2, CpuGpu())
    member = FLASHINFER.members["add_rmsnorm"]
    ready = member._in_place(None, case)  # type: ignore[arg-type]
    assert ready.ends is not None
    read, written = ready.ends(1)
    assert read is written is ready.results(1)["y"]
    assert read is not case.sets[1]["x"]
    copied = Ceiling("copy").prepare(case)
    assert copied.ends is not None
    read, written = copied.ends(1)
    assert read.shape == written.shape == (3, 32)


def test_every_set_has_converted_weights_of_its_own() -> None:
    """Weights that all sets share would be in the cache."""
    (case,), seen = make_cases(task(IN_TURN, dtype="bf16"), 2, CpuGpu()), []
    member = Member("math", lambda m, t, s: (seen.append(t["gamma"]), t["x"])[1], wide=True)
    ready = member.prepare(case)
    for index in (0, 1, 0):
        ready.launch(0, index)
    assert [t is seen[0] for t in seen] == [True, False, True]
    assert {t.dtype for t in seen} == {torch.float32}


@pytest.mark.parametrize("rows", [3, 4000])
def test_nothing_is_in_the_cache(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sets are followed by a reading of what they lack."""
    gpu, read = CpuGpu(), []
    (case,) = make_cases(make_task("layernorm", "fwd", "f32", rows, 32, IN_TURN), 2, gpu)
    monkeypatch.setattr(few_rows.timing, "COLD_BYTES", 1_000_000)
    monkeypatch.setattr(torch, "sum", lambda a, *_, out: read.append(a.nbytes))
    around, floor = few_rows.behind_a_kernel(case, rows * 32 * 8), rows * 32 * 8
    for index in range(2):
        around(None)(0, index)
    assert sum(read) + 2 * floor == pytest.approx(max(1_000_000, 2 * floor), rel=0.01)
    assert bool(read) == (rows == 3)


def test_the_command_measures_few_rows(few_sets: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu, known = Adding(), {p.name: p for p in (Ceiling("copy"), Torch(), Torch("lngen"))}
    monkeypatch.setattr(torch_gpu, "find_gpu", lambda: gpu)
    monkeypatch.setattr(store, "conditions", lambda device, method, settings: {})
    monkeypatch.setattr(providers, "known", lambda schedules=(): {n: adding(p) for n, p in known.items()})
    options = f"--few-rows --providers torch,lngen --rows 1,4 --d 32,64 --dtype f32 --plot {tmp_path}/p.svg --out"
    result = CliRunner().invoke(bench, [*options.split(), str(tmp_path / "b.json")], catch_exceptions=False)
    assert " 2.00 " in result.output
    assert "layernorm fwd f32: us that a call adds between two GEMMs" in " ".join(result.output.split())
    assert "layernorm, between GEMMs: mean" in (tmp_path / "p.svg").read_text()
    found = store.read_json(tmp_path / "b.json").records
    assert {(r.kind, r.rows, r.d) for r in found} == {(k, m, d) for k in FEW_ROWS for m in (1, 4) for d in (32, 64)}
    assert {r.graph for r in found} == {"rmsnorm", "add_rmsnorm", "layernorm"}


def test_what_few_rows_are() -> None:
    o = filled({"graphs": (), "direction": "", "shapes": "", "rows": "", "d": "", "few_rows": True})
    assert (o["direction"], o["rows"][:8], o["d"][-12:]) == ("fwd", "1, 4, 16", "10240, 16384")


def test_every_point_has_its_ratio_and_the_table_the_least_and_the_mean() -> None:
    """Also for calls that overlap, which others than lngen's default have no column for."""
    records = [replace(r, d=r.d + 1) for r in few_rows_records()]
    overlapped = [replace(r, provider="lngen-overlapped", us_median=4.0) for r in records if r.provider == "lngen"]
    group, _ = summary.table_groups(judge([*records, *overlapped]))
    shown = {str(c.header): [*c.cells] for c in summary.table(group).columns[-3:]}
    assert shown == {
        "best peer": ["liger", "liger", "", ""],
        "lngen\n/ best peer": ["1.10"] * 4,
        "lngen-\noverlapped\n/ best peer": ["0.55"] * 4,
    }
    assert [*summary.table(group).columns[0].cells][2:] == ["least ratio", "geometric mean"]


def test_one_figure_has_the_ratio_of_every_point(tmp_path: Path) -> None:
    records = few_rows_records()
    (picture,) = figures.few_rows_figures(records)
    figure = drawn(picture)
    assert [[t.get_text() for t in axes.texts] for axes in figure.axes] == [["1.10", "1.10"]] * 2
    assert figure.axes[1].get_title(loc="left") == "lngen layernorm, between GEMMs: mean 1.10, least 1.10"
    assert figure.get_supxlabel() == "the fastest peer: Liger (4 cells)"
    assert not figures.few_rows_figures(judge([r for r in records if r.provider != "liger"]))
