"""If these fail, a verdict or a count of differences is wrong, or a picture shows other records than it should."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lngen
from bench_fakes import RECORDS, bench_record, drawn
from lngen.compiler.ir import DType
from lngen.errors import LngenError, MissingError
from lngen.lab.bench import agreement, figures, summary
from lngen.lab.bench.agreement import Arrays, Implementation, Line, compare, draw, peers
from lngen.lab.bench.figures import overviews
from lngen.lab.bench.records import Record, judge, summarise, unlike
from lngen.lab.bench.store import Saved
from lngen.lab.bench.tasks import DESIGN, GRIDS
from lngen.proof.check.inputs import forward_inputs


def test_figures_are_classes_of_rows_or_of_sizes() -> None:
    def named(shapes: Sequence[tuple[int, int]]) -> list[tuple[str, int, bool]]:
        found = figures.pictures(judge([bench_record("copy", m, d, gb_s=1.0) for m, d in shapes]))
        return [(p.rows, len(p.records), p.line) for p in found]

    assert named(DESIGN) == [("4096 rows", 5, True), ("other shapes", 4, False)]
    targets = named(GRIDS["targets"].shapes(DType.BF16))
    assert targets == [(f"{size} MB per tensor", 21, True) for size in (8, 16, 32, 64, 256)]
    assert named(GRIDS["classic"].shapes(DType.F16)) == [("4096 rows", 30, True)]
    assert named([(1, 8), (2, 8)]) == [("all shapes", 2, False)]


def test_a_figure_per_direction_shows_peers_ceiling_and_target(tmp_path: Path) -> None:
    forward = [bench_record(n, d=d, gb_s=g, fraction=g / 4000) for d in (512, 1000, 2048, 4096) for n, g in
               (("copy", 4000.0), ("lngen", 3900.0), ("compile", 3000.0))]  # fmt: skip
    backward = [replace(r, direction="bwd", spec=r.spec.replace("fwd", "bwd")) for r in forward]
    files = figures.plot(judge([*forward, *backward]), tmp_path / "x.svg")
    assert [f.name for f in files] == ["x-layernorm-fwd-bf16-4096rows.svg", "x-layernorm-bwd-bf16-4096rows.svg"]

    (picture,) = figures.pictures(judge(forward))
    figure = drawn(picture)
    (legend,) = figure.legends
    assert [t.get_text() for t in legend.get_texts()] == ["lngen", "torch.compile", "copy (ceiling)", "target"]
    left, right = figure.axes
    assert [axes.get_xscale() + axes.get_yscale() for axes in figure.axes] == ["loglog", "loglinear"]
    lines = [[*line.get_xdata()] for line in left.get_lines() if line.get_label() == "lngen"]
    assert lines == [[512, 2048, 4096]]  # 1000 has a mark of its own
    targets = [[*line.get_ydata()] for line in right.get_lines() if line.get_color() == figures.TARGET]
    assert targets[:2] == [[0.94, 0.95], [0.799]]


def test_many_graphs_share_a_figure(tmp_path: Path) -> None:

    names = [f"graph{n}" for n in range(8)]
    shares = {"copy": 1.0, "lngen": 0.9, "lngen-overlapped": 0.8, "liger": 0.5}
    records = judge([
        Record(f"{g}.{way}:d={d},dtype=bf16", g, way, 4096, d, "bf16", p, gb_s=f, fraction=f - 0.01 * n)
        for way in ("fwd", "bwd") for d in (512, 1024) for n, g in enumerate(names) for p, f in shares.items()
    ])  # fmt: skip
    assert figures.plot(records, tmp_path / "x.svg") == [tmp_path / "x.svg"]
    (overview,) = overviews(records)
    figure = drawn(overview)
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
    assert len(figures.pictures(few)) == 7 * 2
    assert not overviews([replace(r, d=d) for r in records for d in range(1, 10)])  # more shapes than graphs


def test_a_picture_says_where_it_comes_from() -> None:
    run = {"date": "2026-01-02 03:04:05 UTC", "commit": "0123456789abcdef"}
    saved = Saved(RECORDS, {"device": "NVIDIA H200", "lngen": "0.1.0"}, runs=[{"date": "2025-01-01"}, run])
    assert figures.origin(saved) == "NVIDIA H200, lngen 0.1.0, 2026-01-02, commit 0123456789ab"
    assert figures.origin(Saved(RECORDS)) == ""

    class Signed:
        draw = staticmethod(lambda figure: figures.sign(figure, figures.origin(saved)))

    assert [text.get_text() for text in drawn(Signed).texts] == [figures.origin(saved)]


def test_fractions_have_one_linear_scale(tmp_path: Path) -> None:

    for most, top in ((0.98, 1.1), (1.2, 1.22)):
        records = [bench_record("lngen", d=d, gb_s=9.0, fraction=f) for d, f in ((256, 0.3), (512, most), (1024, 0.9))]
        axes = drawn(figures.pictures(judge(records))[0]).axes[1]
        assert axes.get_yscale() == "linear"
        assert axes.get_ylim() == pytest.approx((0.5, top))


def test_a_picture_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes twice."""
    for name in ("x.svg", "x.png"):
        assert figures.plot(RECORDS, tmp_path / name) == [tmp_path / name]
    first = (tmp_path / "x.svg").read_bytes()
    figures.plot(RECORDS, tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_bytes() == first
    with pytest.raises(LngenError, match="cannot write"):
        figures.plot(RECORDS, tmp_path / "x.png" / "y" / ("z" * 300 + ".png"))
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["x.png", "x.svg"]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingError, match=r'pip install "\.\[plot\]"'):
        figures.plot(RECORDS, tmp_path / "x.svg")


def test_each_way_to_run_lngen_has_a_colour_of_its_own() -> None:

    names = ("lngen", "lngen-overlapped", "lngen:stages=2", "lngen:stages=3", "torch")
    (picture,) = figures.pictures(
        judge([bench_record(n, d=d, gb_s=1.0, fraction=0.5) for d in (256, 512, 1024) for n in names])
    )
    figure = drawn(picture)
    colours = {line.get_label(): line.get_color() for line in figure.axes[0].get_lines()}
    assert len({colours[figures.NAMES.get(n, n)] for n in names}) == len(names)


# ---- verdicts and sentences ----


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


def test_targets_are_of_the_two_norms() -> None:
    times = {"gb_s": 1.0, "us_median": 1.0, "fraction": 0.5}
    for graph, target in (("rmsnorm", 0.94), ("rmsnorm:weight=f32", None), ("gated@12345678", None)):
        record = judge([bench_record("lngen", graph=graph, **times)])[0]
        assert (record.target, record.met) == (target, None if target is None else False)
        assert (summarise([record])[0].ratio_target is None) == (target is None)
        assert summary.table_groups([record]) == [[record]]
        assert figures.pictures([record])[0].slug.startswith(graph.split("@")[0].replace(":", "-").replace("=", "-"))


def test_the_summary_counts_and_names_the_worst() -> None:
    points = [(4096, 20480, 0.99, 2.0), (4096, 4096, 0.90, 0.5), (32768, 1024, 0.90, 0.8), (4096, 2048, None, None)]
    records = []
    for rows, d, fraction, ratio in points:
        us = None if ratio is None else 10.0
        records.append(bench_record("lngen", rows, d, us_median=us, fraction=fraction, note="" if us else "failed: x"))
        records.append(bench_record("torch", rows, d, us_median=ratio and 10.0 * ratio))
    (found,) = summarise(judge(records))
    assert (found.points, found.met, found.missed, found.failed) == (4, 1, 2, 1)
    assert found.ratio_common == round(0.4**0.5, 4)
    assert (found.ratio, found.compared, found.ahead) == (round(0.8 ** (1 / 3), 4), 3, 1)
    assert found.worst == ("32768 x 1024 bf16 0.900 < 0.970", "4096 x 4096 bf16 0.900 < 0.950")
    assert found.slower == ("4096 x 4096 bf16 0.50 x torch", "32768 x 1024 bf16 0.80 x torch")
    assert summary.summary_lines([found]) == [
        "lngen, layernorm fwd, 4 points: 1 of 3 targets met; 0.93 times the best peer's speed (geometric mean, target "
        "1.15), 0.63 over D = 768 to 16384; at least as fast at 1 of 3; 1 without a time.",
        "  below target, as a fraction of the ceiling: 32768 x 1024 bf16 0.900 < 0.970, 4096 x 4096 bf16 0.900 < 0.950",
        "  slower than the best peer, as a fraction of its speed: 4096 x 4096 bf16 0.50 x torch, "
        "32768 x 1024 bf16 0.80 x torch",
    ]


@pytest.mark.parametrize(("less", "more", "digits", "shown"), [
    (0.9, 0.95, 3, ("0.900", "0.950")),
    (0.94984, 0.95, 3, ("0.9498", "0.9500")),
    (0.99612, 1.0, 2, ("0.996", "1.000")),
    (0.95, 0.95 + 1e-12, 3, ("0.950000000", "0.950000000")),
])  # fmt: skip
def test_two_numbers_that_differ_are_shown_to_differ(
    less: float, more: float, digits: int, shown: tuple[str, str]
) -> None:
    assert unlike(less, more, digits) == shown


# ---- batches and runs that differ ----


D, ROWS = 8, 20
INPUTS = {"x": np.arange(ROWS * D, dtype="f4").reshape(ROWS, D), "gamma": np.ones(D, "f4")}


def same(inputs: Arrays) -> Arrays:
    return {"y": inputs["x"] * 2, "dx": inputs["x"] * 3, "dgamma": inputs["x"].sum(0)}


def by_batch(inputs: Arrays) -> Arrays:
    """A single row has other bits, and so have the sums of five rows."""
    results = dict(same(inputs))
    if len(inputs["x"]) == 1:
        results["y"] = results["y"] + 0.5
    if len(inputs["x"]) == 5:
        results["dgamma"] = results["dgamma"] + np.eye(1, D, dtype="f4")[0]
    return results


def counts(side: Implementation) -> dict[tuple[str, int], tuple[int, int]]:
    return {(x.what, x.batch): (x.elements, x.differ) for x in compare(side, "g", INPUTS, [1, 5])}


def test_what_differs_is_counted() -> None:
    assert counts(Implementation("a", "a", same, [same, by_batch], calls=3)) == {
        ("y, dx", 1): (2 * 3 * 2 * D, 3 * D), ("y, dx", 5): (2 * 3 * 2 * 5 * D, 0), ("dgamma", 5): (2 * D, 1),
        ("y, dx", ROWS): (2 * 2 * ROWS * D, 0), ("dgamma", ROWS): (2 * D, 0),
    }  # fmt: skip


def test_a_run_is_compared_with_itself_in_other_batches() -> None:
    found = counts(Implementation("a", "a", by_batch, [by_batch], calls=1, whole=False))
    assert found == {("y, dx", 1): (2 * D, D), ("y, dx", 5): (2 * 5 * D, 0), ("dgamma", 5): (D, 0)}


def test_pytorch_on_a_cpu_is_compared_between_numbers_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(agreement, "device_count", lambda: 0)
    used: list[int] = []
    layer_norm = torch.nn.functional.layer_norm

    def counted(*args: Any) -> Any:
        used.append(torch.get_num_threads())
        return layer_norm(*args)

    monkeypatch.setattr(torch.nn.functional, "layer_norm", counted)
    spec, before = lngen.parse_spec("layernorm.bwd:d=8,dtype=bf16"), torch.get_num_threads()
    (side,) = peers(spec)
    inputs = forward_inputs(spec, 3)
    results = [run({**inputs, "dy": inputs["x"]}) for run in (side.want, *side.runs)]
    assert used == [1, 2]
    assert torch.get_num_threads() == before
    assert [a.shape for a in results[0].values()] == [(3, 8), (3, 8), (8,), (8,)]
    assert [*results[1]] == ["y", "dx", "dgamma", "dbeta"]
    assert results[0]["y"].dtype == inputs["x"].dtype


def test_without_pytorch_there_are_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "find_spec", lambda name: None)
    assert peers(lngen.parse_spec("rmsnorm.bwd:d=8,dtype=bf16")) == []
    assert "torch" not in agreement.origin()


def test_the_figure_says_what_differs_and_is_the_same_twice(tmp_path: Path) -> None:
    lines = [
        Line("layernorm", "y, dx", 1, "lngen", "lngen, 5 schedules", 100, 0),
        Line("layernorm", "dgamma, dbeta", 1000, "torch", "torch, 1 and 2 threads", 100, 98),
        Line("rmsnorm", "y, dx", 1, "compile", "torch, then torch.compile", 100000, 12),
    ]
    drawn = []
    for _ in range(2):
        draw(lines, "A title", "a CPU", tmp_path / "x.svg")
        drawn.append((tmp_path / "x.svg").read_text(encoding="utf-8"))
    assert drawn[0] == drawn[1]
    texts = ("98 %", "0.012 %", "y, dx, batch of 1", "dgamma, dbeta, batch of 1,000", "A title", "a CPU")
    assert [text for text in (*texts, *(x.shown for x in lines)) if text not in drawn[0]] == []
