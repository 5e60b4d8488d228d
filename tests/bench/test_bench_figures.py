"""If these fail, a picture cannot be drawn, differs between runs, or shows other records than it should."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from bench_fakes import RECORDS, bench_record
from commands import call
from lngen.bench import figures
from lngen.bench.figures import overviews
from lngen.bench.records import Record, judge
from lngen.bench.store import Saved, write_json
from lngen.bench.tasks import DESIGN, GRIDS
from lngen.errors import LngenError, MissingError
from lngen.ir import DType


def test_figures_are_classes_of_rows_or_of_sizes() -> None:
    def named(shapes: Sequence[tuple[int, int]]) -> list[tuple[str, int, bool]]:
        found = figures.pictures(judge([bench_record("copy", m, d, gb_s=1.0) for m, d in shapes]))
        return [(p.rows, len(p.records), p.line) for p in found]

    assert named(DESIGN) == [("4096 rows", 5, True), ("other shapes", 4, False)]
    targets = named(GRIDS["targets"].shapes(DType.BF16))
    assert targets == [(f"{size} MB per tensor", 21, True) for size in (8, 16, 32, 64, 256)]
    assert named(GRIDS["classic"].shapes(DType.F16)) == [("4096 rows", 30, True)]
    assert named([(1, 8), (2, 8)]) == [("all shapes", 2, False)]


def test_a_plot_without_matplotlib_says_what_installs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(figures.importlib, "import_module", missing)
    with pytest.raises(MissingError, match=r'pip install "\.\[plot\]"'):
        figures.plot(RECORDS, tmp_path / "x.svg")


def test_plots_are_the_same_twice(tmp_path: Path) -> None:
    for name in ("x.svg", "x.png"):
        assert figures.plot(RECORDS, tmp_path / name) == [tmp_path / name]
        first = (tmp_path / name).read_bytes()
        figures.plot(RECORDS, tmp_path / name)
        assert (tmp_path / name).read_bytes() == first
    assert figures.plot([], tmp_path / "empty.svg") == []


def test_a_figure_per_direction_shows_peers_ceiling_and_target(tmp_path: Path) -> None:
    forward = [bench_record(n, d=d, gb_s=g, fraction=g / 4000) for d in (512, 1000, 2048, 4096) for n, g in
               (("copy", 4000.0), ("lngen", 3900.0), ("compile", 3000.0))]  # fmt: skip
    backward = [replace(r, direction="bwd", spec=r.spec.replace("fwd", "bwd")) for r in forward]
    files = figures.plot(judge([*forward, *backward]), tmp_path / "x.svg")
    assert [f.name for f in files] == ["x-layernorm-fwd-bf16-4096rows.svg", "x-layernorm-bwd-bf16-4096rows.svg"]

    (picture,) = figures.pictures(judge(forward))
    figure = Figure()
    picture.draw(figure)
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
    assert len(figures.plot(few, tmp_path / "y.svg")) == 7 * 2
    assert not overviews([replace(r, d=d) for r in records for d in range(1, 10)])  # more shapes than graphs


def test_a_picture_says_where_it_comes_from() -> None:
    run = {"date": "2026-01-02 03:04:05 UTC", "commit": "0123456789abcdef"}
    saved = Saved(RECORDS, {"device": "NVIDIA H200", "lngen": "0.1.0"}, runs=[{"date": "2025-01-01"}, run])
    assert figures.origin(saved) == "NVIDIA H200, lngen 0.1.0, 2026-01-02, commit 0123456789ab"
    assert figures.origin(Saved(RECORDS)) == ""

    figure = Figure()
    figures.sign(figure, figures.origin(saved))
    assert [text.get_text() for text in figure.texts] == [figures.origin(saved)]


def test_fractions_have_one_linear_scale(tmp_path: Path) -> None:

    for most, top in ((0.98, 1.1), (1.2, 1.22)):
        figure = Figure()
        records = [bench_record("lngen", d=d, gb_s=9.0, fraction=f) for d, f in ((256, 0.3), (512, most), (1024, 0.9))]
        figures.pictures(judge(records))[0].draw(figure)
        axes = figure.axes[1]
        assert axes.get_yscale() == "linear"
        assert axes.get_ylim() == pytest.approx((0.5, top))


def test_a_picture_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(LngenError, match="cannot write"):
        figures.plot(RECORDS, tmp_path / "x.png" / "y" / ("z" * 300 + ".png"))
    assert [*tmp_path.rglob("*.png")] in ([], [tmp_path / "x.png"])


def test_each_way_to_run_lngen_has_a_colour_of_its_own() -> None:

    names = ("lngen", "lngen-overlapped", "lngen:stages=2", "lngen:stages=3", "torch")
    (picture,) = figures.pictures(
        judge([bench_record(n, d=d, gb_s=1.0, fraction=0.5) for d in (256, 512, 1024) for n in names])
    )
    figure = Figure()
    picture.draw(figure)
    colours = {line.get_label(): line.get_color() for line in figure.axes[0].get_lines()}
    assert len({colours[figures.NAMES.get(n, n)] for n in names}) == len(names)


def test_records_without_a_fraction_are_drawn(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    write_json(file, Saved([replace(r, fraction=None, met=None) for r in RECORDS]))
    done = call("bench", "--from", str(file), "--plot", str(tmp_path / "x.svg"))
    assert (done.exit_code, [p.name for p in tmp_path.glob("*.svg")]) == (0, ["x.svg"]), done.stderr
