"""Figures: GB/s and fraction of the ceiling over D, a line per provider; one figure per direction, dtype and row class.

A row class is a size of the tensor, or a number of rows: whichever gives fewer figures. Points of classes with less
than three widths share one figure, with a column per shape. Many graphs of few shapes share one as well
(``lngen.bench.plot_graphs``).
"""

from __future__ import annotations

import importlib
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from lngen.bench.palette import CEILING, COLOURS, DIRECTIONS, GRID, INK, MARKERS, NAMES, TARGET, order
from lngen.bench.plot_graphs import Overview, overviews
from lngen.bench.records import OWN, VARIANT, Record, is_ceiling, throughputs
from lngen.bench.report import grouped, unique
from lngen.bench.store import Saved
from lngen.bench.targets import MB
from lngen.bench.tasks import CEILINGS
from lngen.errors import LngenError, MissingError
from lngen.files import write_all
from lngen.version import install_hint

SCHEDULES = ("#6a51a3", "#41b6c4", "#8c6bb1", "#1d91c0", "#9ebcda")  # lngen with other schedules than the default
LEAST = 3  # widths that make a line
LEAST_FRACTION, MOST_FRACTION = 0.5, 1.1
STYLE = {
    "svg.hashsalt": "lngen",
    "svg.fonttype": "none",  # letters stay text, which is a third of the size of their outlines
    "font.family": "monospace",  # a sans-serif "lngen" reads "Ingen"
    "font.monospace": ["DejaVu Sans Mono"],
    "font.size": 8.5,
    "axes.edgecolor": "#999999",
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass(frozen=True)
class Picture:
    """The records of one figure. Where ``line`` is False, shapes have no order, and each has its own column."""

    key: tuple[str, str, str]
    rows: str
    records: Sequence[Record]
    line: bool
    size = (11.0, 4.6)  # inches

    @property
    def slug(self) -> str:
        """For a file's name."""
        return re.sub(r"[^\w.-]+", "-", "-".join([*self.key, self.rows.replace(" ", "")]))

    @property
    def title(self) -> str:
        """For a reader."""
        graph, direction, dtype = self.key
        return f"{graph} {DIRECTIONS[direction]}, {dtype}, {self.rows}"

    def draw(self, figure: Any) -> None:
        """GB/s at the left, the fraction of the ceiling at the right."""
        _draw(figure, self)


def check(path: Path) -> tuple[Any, Any]:
    """The modules of matplotlib that draw; LngenError for another format, MissingError without matplotlib."""
    if path.suffix not in (".png", ".svg"):
        raise LngenError(f"'{path}' is expected to end in .png or .svg.")
    try:
        return importlib.import_module("matplotlib"), importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingError(f"A plot needs matplotlib; install it with: {install_hint('plot')}.") from error


def origin(saved: Saved) -> str:
    """The origin of records, for a picture: device, lngen's version, date and commit of the last run."""
    run = saved.runs[-1] if saved.runs else {}
    version = saved.conditions.get("lngen", "")
    parts = [saved.conditions.get("device", ""), f"lngen {version}" if version else "", run.get("date", "")[:10]]
    return ", ".join(filter(None, [*parts, f"commit {run['commit'][:12]}" if "commit" in run else ""]))


def plot(records: Sequence[Record], path: Path, origin: str = "") -> list[Path]:
    """Draw the throughputs; the files written: ``path``, or with several figures one ``path-NAME`` for each.

    The ending of ``path`` decides the format, .png or .svg; ``origin`` is written beside the title. MissingError
    without matplotlib, LngenError for a path that cannot be written. The same records give the same bytes.
    """
    matplotlib, figures = check(path)
    timed = [r for r in throughputs(records) if r.gb_s is not None]
    together = overviews(timed)
    apart = [r for r in timed if r.dtype not in {o.dtype for o in together}]
    drawn: list[Overview | Picture] = [*together, *pictures(apart)]
    written = []
    with matplotlib.rc_context(STYLE):
        for picture in drawn:
            file = path if len(drawn) == 1 else path.with_name(f"{path.stem}-{picture.slug}{path.suffix}")
            figure = figures.Figure(figsize=picture.size, layout="constrained")
            picture.draw(figure)
            sign(figure, origin)
            save(figure, file)
            written.append(file)
    return written


def sign(figure: Any, origin: str) -> None:
    """Write the origin of a picture's records at the right of its title."""
    figure.text(0.995, 0.985, origin, ha="right", va="top", fontsize=7, color=TARGET)


def save(figure: Any, path: Path) -> None:
    """Write a picture whole or not at all; LngenError if that fails."""
    drawn = io.BytesIO()
    kind = path.suffix.removeprefix(".")
    figure.savefig(drawn, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else {})
    write_all({path: drawn.getvalue()})


def pictures(records: Sequence[Record]) -> list[Picture]:
    """The figures for records."""
    found = []
    for key, group in grouped(records).items():
        by_rows, by_size = (_classes(group, name) for name in (_rows_class, _size_class))
        classes = by_size if len(by_size) < len(by_rows) else by_rows
        lines = {name: rs for name, rs in classes.items() if len({r.d for r in rs}) >= LEAST}
        rest = [r for name, rs in classes.items() if name not in lines for r in rs]
        found += [Picture(key, name, rs, True) for name, rs in lines.items()]
        found += [Picture(key, "other shapes" if lines else "all shapes", rest, False)] if rest else []
    return found


def _classes(group: Sequence[Record], name: Any) -> dict[str, list[Record]]:
    classes: dict[str, list[Record]] = {}
    for r in group:
        classes.setdefault(name(r), []).append(r)
    return classes


def _rows_class(r: Record) -> str:
    return f"{r.rows} rows"


def _size_class(r: Record) -> str:
    """The size rounded to a twentieth of a power of two, because whole rows match a size only approximately."""
    size = 2 ** (round(20 * math.log2(r.tensor_bytes / MB)) / 20)
    return f"{size:.3g} MB per tensor"


def _draw(figure: Any, picture: Picture) -> None:
    left, right = figure.subplots(1, 2)
    shapes = sorted({(r.d, r.rows) for r in picture.records})
    places = {shape: float(shape[0] if picture.line else i) for i, shape in enumerate(shapes)}
    names = sorted(unique(r.provider for r in picture.records), key=order)
    colours = COLOURS | dict(zip([n for n in names if n.startswith(VARIANT)], cycle(SCHEDULES), strict=False))
    for axes, value in ((left, "gb_s"), (right, "fraction")):
        for name in names:
            mine = [r for r in picture.records if r.provider == name and getattr(r, value) is not None]
            if not (name in CEILINGS and value == "fraction"):  # 1 everywhere, and drawn below
                points = [(places[r.d, r.rows], getattr(r, value), r.d) for r in mine]
                _series(axes, name, points, picture.line, colours.get(name, "#777777"))
        _target(axes, picture, places, value)
        _axis(axes, shapes, places, picture.line)
        values = [getattr(r, value) for r in picture.records if getattr(r, value) is not None]
        (_speed_scale if value == "gb_s" else _fraction_scale)(axes, values)
    left.set_title("GB/s of floor bytes", loc="left", fontsize=9)
    right.set_title("fraction of the ceiling", loc="left", fontsize=9)
    right.axhline(1.0, color=CEILING, linewidth=1.0, linestyle=(0, (4, 2)), zorder=1)
    handles, labels = left.get_legend_handles_labels()
    figure.suptitle(picture.title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)


def _series(axes: Any, name: str, points: Sequence[tuple[float, float, int]], line: bool, colour: str) -> None:
    """A provider: a line through the regular widths, and hollow marks at the odd ones, which would make it jagged."""
    points = sorted(points)
    regular = [p for p in points if _regular(p[2])] if line else points
    odd = [p for p in points if not _regular(p[2])] if line else []
    ours = name.startswith(OWN)
    ceiling = is_ceiling(name)
    marker = None if ceiling and line else "_" if ceiling else "o" if ours else MARKERS.get(name, "o")
    size = {"_": 16.0, "o": 5.0}.get(marker or "", 4.0)
    axes.plot(
        [p[0] for p in regular],
        [p[1] for p in regular],
        label=NAMES.get(name, f"{name} (ceiling)" if ceiling else name),
        color=colour,
        marker=marker,
        markersize=size,
        linewidth=(2.2 if ours else 1.2) if line else 0.0,
        linestyle=(0, (4, 2)) if ceiling else "-",
        zorder=4 if ours else 3,
    )
    if not ceiling:
        axes.plot(
            [p[0] for p in odd],
            [p[1] for p in odd],
            color=colour,
            marker=marker,
            markersize=size,
            markerfacecolor="white",
            linewidth=0.0,
            zorder=4 if ours else 3,
        )


def _target(axes: Any, picture: Picture, places: dict[tuple[int, int], float], value: str) -> None:
    """The target: a grey line through the regular widths, a bar at each other width."""
    ceilings = {(r.d, r.rows): r.gb_s or 0.0 for r in picture.records if r.provider in CEILINGS}
    wanted = {(r.d, r.rows): r.target for r in picture.records if r.target is not None}
    points = sorted(
        (places[shape], target * (ceilings.get(shape, 0.0) if value == "gb_s" else 1.0), shape[0])
        for shape, target in wanted.items()
        if value == "fraction" or shape in ceilings
    )
    regular = [p for p in points if _regular(p[2])] if picture.line else []
    odd = [p for p in points if p not in regular]
    style = {"color": TARGET, "zorder": 2}
    axes.plot([p[0] for p in regular], [p[1] for p in regular], linewidth=1.4, linestyle=(0, (1, 1)), **style)
    axes.plot([p[0] for p in odd], [p[1] for p in odd], linewidth=0, marker="_", markersize=12, mew=1.6, **style)
    if points:
        look = {"linewidth": 1.4, "linestyle": (0, (1, 1))} if regular else {"linewidth": 0, "marker": "_", "mew": 1.6}
        axes.plot([], [], label="target", markersize=12, **look, **style)


def _axis(axes: Any, shapes: Sequence[tuple[int, int]], places: dict[tuple[int, int], float], line: bool) -> None:
    axes.grid(True, which="major", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    if not line:
        axes.set_xticks([places[s] for s in shapes], [f"{rows} x\n{d}" for d, rows in shapes])
        axes.set_xlim(-0.6, len(shapes) - 0.4)
        axes.set_xlabel("rows x D")
        return
    axes.set_xscale("log", base=2)
    widths = sorted({d for d, _ in shapes})
    powers = [1 << n for n in range(31) if widths[0] <= 1 << n <= widths[-1]]
    axes.set_xticks(powers, [f"{p >> 10}K" if p >= 1024 else str(p) for p in powers])
    axes.set_xticks(widths, minor=True, labels=[""] * len(widths))
    axes.set_xlabel("D")


def _speed_scale(axes: Any, values: Sequence[float]) -> None:
    """A logarithmic scale, with round numbers where they fit."""
    low, high = min(values) / 1.08, max(values) * 1.08
    ticks = [t for n in range(6) for step in (1, 1.5, 2, 3, 4, 5, 7) if low <= (t := step * 10.0**n) <= high]
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.set_yticks([], minor=True)


def _fraction_scale(axes: Any, values: Sequence[float]) -> None:
    """A linear scale, equal in all pictures whose values fit; values below 0.5 are not shown."""
    axes.set_ylim(LEAST_FRACTION, max([MOST_FRACTION, *(v + 0.02 for v in values)]))
    axes.yaxis.set_major_locator(importlib.import_module("matplotlib.ticker").MultipleLocator(0.1))


def _regular(d: int) -> bool:
    return d % 256 == 0 or d & (d - 1) == 0
