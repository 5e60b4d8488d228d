"""Figures: GB/s and fraction of the ceiling over D, a line per provider; one figure per direction, dtype and row class.

A row class is a size of the tensor, or a number of rows: whichever gives fewer figures. Points of classes with less
than three widths share one figure, with a column per shape. Many graphs of few shapes share one as well, with a panel
per direction and shape.
"""

from __future__ import annotations

import importlib
import io
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any

from lngen.errors import LngenError, MissingError
from lngen.files import write_all
from lngen.lab.bench.records import OWN, SERIAL, VARIANT, Record, geometric_mean, graph_key, grouped
from lngen.lab.bench.store import Saved
from lngen.lab.bench.summary import unique
from lngen.lab.bench.tasks import CEILINGS, FEW_ROWS, MB, OVERLAPPED, THROUGHPUT, is_ceiling
from lngen.version import install_hint

INK, GRID, TARGET, CEILING, OTHER = "#333333", "#e4e4e4", "#7a7a7a", "#222222", "#777777"
DIRECTIONS = {"fwd": "forward", "bwd": "backward", "both": "forward and backward"}
PEERS = {  # colour, mark, name
    "torch": ("#d55e00", "s", "torch"),
    "compile": ("#e69f00", "D", "torch.compile"),
    "liger": ("#009e73", "^", "Liger"),
    "quack": ("#cc79a7", "v", "QuACK"),
    "flash-attn": ("#8c510a", "<", "flash-attn"),
    "mamba": ("#b8860b", ">", "Mamba"),
    "flashinfer": ("#56b4a9", "h", "FlashInfer"),
    "flashinfer-pdl": ("#2f7f78", "H", "FlashInfer PDL"),
    "apex-fast": ("#7b5ea7", "P", "Apex fast"),
    "apex": ("#a08fc0", "X", "Apex"),
}
COLOURS = {
    **dict.fromkeys(CEILINGS, CEILING),
    **dict.fromkeys([name + OVERLAPPED for name in CEILINGS], "#8a8a8a"),
    "lngen": "#0b5fa5",
    **dict.fromkeys((OWN + OVERLAPPED, SERIAL), "#7fb2e0"),
    **{name: colour for name, (colour, _, _) in PEERS.items()},
}
MARKERS = {name: mark for name, (_, mark, _) in PEERS.items()}
NAMES = {
    **{name + OVERLAPPED: f"{name}, overlapped (ceiling)" for name in CEILINGS},
    OWN + OVERLAPPED: "lngen, overlapped",
    SERIAL: "lngen, in turn",
    **{name: shown for name, (_, _, shown) in PEERS.items()},
}
SCHEDULES = ("#6a51a3", "#41b6c4", "#8c6bb1", "#1d91c0", "#9ebcda")  # lngen with other schedules than the default
LEAST = 3  # widths that make a line
LEGEND = 110  # letters of a line of the legend, of which a mark takes six
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

    def draw(self, figure: Any) -> None:
        """GB/s at the left, the fraction of the ceiling at the right."""
        left, right = figure.subplots(1, 2)
        shapes = sorted({(r.d, r.rows) for r in self.records})
        places = {shape: float(shape[0] if self.line else i) for i, shape in enumerate(shapes)}
        names = sorted(unique(r.provider for r in self.records), key=order)
        colours = _colours(names)
        for axes, value in ((left, "gb_s"), (right, "fraction")):
            for name in names:
                mine = [r for r in self.records if r.provider == name and getattr(r, value) is not None]
                if not (name in CEILINGS and value == "fraction"):  # 1 everywhere, and drawn below
                    points = [(places[r.d, r.rows], getattr(r, value), r.d) for r in mine]
                    _series(axes, name, points, self.line, colours.get(name, OTHER))
            _target(axes, self, places, value)
            _axis(axes, shapes, places, self.line)
            values = [getattr(r, value) for r in self.records if getattr(r, value) is not None]
            (_speed_scale if value == "gb_s" else _fraction_scale)(axes, values)
        left.set_title("GB/s of floor bytes", loc="left", fontsize=9)
        right.set_title("fraction of the ceiling", loc="left", fontsize=9)
        right.axhline(1.0, color=CEILING, linewidth=1.0, linestyle=(0, (4, 2)), zorder=1)
        graph, direction, dtype = self.key
        _title(figure, f"{graph} {DIRECTIONS[direction]}, {dtype}, {self.rows}", *left.get_legend_handles_labels())


def check_plot(path: Path) -> tuple[Any, Any]:
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
    """Draw throughputs and few rows; the files written: ``path``, or with several figures one ``path-NAME`` for each.

    The ending of ``path`` decides the format, .png or .svg; ``origin`` is written beside the title. MissingError
    without matplotlib, LngenError for a path that cannot be written. The same records give the same bytes.
    """
    matplotlib, figures = check_plot(path)
    timed = [r for r in records if r.kind == THROUGHPUT and r.gb_s is not None]
    together = overviews(timed)
    apart = [r for r in timed if r.dtype not in {o.dtype for o in together}]
    drawn: list[Overview | Picture | FewRows] = [*together, *pictures(apart), *few_rows_figures(records)]
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
    figure.text(0.995, 1 - 0.09 / figure.get_figheight(), origin, ha="right", va="top", fontsize=7, color=TARGET)


def save(figure: Any, path: Path) -> None:
    """Write a picture whole or not at all; LngenError if that fails."""
    drawn = io.BytesIO()
    kind = path.suffix.removeprefix(".")
    figure.savefig(drawn, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else {})
    write_all({path: drawn.getvalue()})


def order(name: str) -> tuple[int, str]:
    """A sort key of providers: lngen first, peers in the order of their colours, the ceilings last."""
    places = {n: i for i, n in enumerate(COLOURS)}
    return (0 if name.startswith(OWN) else 99 if is_ceiling(name) else places.get(name, 50), name)


# ---- a figure of one graph ----


def pictures(records: Sequence[Record]) -> list[Picture]:
    """The figures for records."""
    found = []
    for key, group in grouped(records, graph_key).items():
        classes = min((grouped(group, name) for name in (_rows_class, _size_class)), key=len)
        lines = {name: rs for name, rs in classes.items() if len({r.d for r in rs}) >= LEAST}
        rest = [r for name, rs in classes.items() if name not in lines for r in rs]
        found += [Picture(key, name, rs, True) for name, rs in lines.items()]
        found += [Picture(key, "other shapes" if lines else "all shapes", rest, False)] if rest else []
    return found


def _rows_class(r: Record) -> str:
    return f"{r.rows} rows"


def _size_class(r: Record) -> str:
    """The size rounded to a twentieth of a power of two, because whole rows match a size only approximately."""
    size = 2 ** (round(20 * math.log2(r.tensor_bytes / MB)) / 20)
    return f"{size:.3g} MB per tensor"


def _title(figure: Any, title: str, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """The title above, the legend below, in as few lines as hold it."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    lines = -(-sum(len(label) + 6 for label in labels) // LEGEND)
    ncols = -(-len(labels) // lines)
    figure.legend(handles, labels, loc="outside lower center", ncols=ncols, frameon=False, fontsize=9)


def _series(axes: Any, name: str, points: Sequence[tuple[float, float, int]], line: bool, colour: str) -> None:
    """A provider: a line through the regular widths, and hollow marks at the odd ones, which would make it jagged."""
    points = sorted(points)
    regular = [p for p in points if _regular(p[2]) or not line]
    odd = [p for p in points if p not in regular]
    ours, ceiling = name.startswith(OWN), is_ceiling(name)
    marker = None if ceiling and line else "_" if ceiling else "o" if ours else MARKERS.get(name, "o")
    size = {"_": 16.0, "o": 5.0}.get(marker or "", 4.0)
    look = {"color": colour, "marker": marker, "markersize": size, "zorder": 4 if ours else 3}
    axes.plot(
        *_across(regular),
        label=NAMES.get(name, f"{name} (ceiling)" if ceiling else name),
        linewidth=(2.2 if ours else 1.2) if line else 0.0,
        linestyle=(0, (4, 2)) if ceiling else "-",
        **look,
    )
    if not ceiling:
        axes.plot(*_across(odd), markerfacecolor="white", linewidth=0.0, **look)


def _across(points: Sequence[tuple[float, float, int]]) -> tuple[list[float], list[float]]:
    """Their places and values."""
    return [p[0] for p in points], [p[1] for p in points]


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
    axes.plot(*_across(regular), linewidth=1.4, linestyle=(0, (1, 1)), **style)
    axes.plot(*_across(odd), linewidth=0, marker="_", markersize=12, mew=1.6, **style)
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


def _colours(names: Sequence[str]) -> dict[str, str]:
    """The colours of all providers, and of these ways to call lngen."""
    return COLOURS | dict(zip([n for n in names if n.startswith(VARIANT)], cycle(SCHEDULES), strict=False))


def _regular(d: int) -> bool:
    return d % 256 == 0 or d & (d - 1) == 0


# ---- a figure of few rows ----

SHADES = ("#e98a4b", "#ffffff", "#6aa5dc")  # from half the best peer's speed over the same to one and a half


@dataclass(frozen=True)
class FewRows:
    """The figure of few rows of a direction and dtype: the best peer's time over lngen's by rows and D.

    A panel per graph and way to call lngen, down, and per class, across. ``records`` are lngen's.
    """

    key: tuple[str, str]
    records: Sequence[Record]

    @property
    def slug(self) -> str:
        """For a file's name."""
        return f"few-rows-{'-'.join(self.key)}"

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches."""
        panels, rows = ({(r.graph, r.provider) for r in self.records}, {r.rows for r in self.records})
        return WIDTH, MARGIN + len(panels) * (0.6 + 0.22 * len(rows))

    def draw(self, figure: Any) -> None:
        """A field of cells in each panel."""
        lines, kinds = unique((r.graph, r.provider) for r in self.records), unique(r.kind for r in self.records)
        panels = figure.subplots(len(lines), len(kinds), squeeze=False)
        for axes, ((graph, name), kind) in zip(panels.flat, product(lines, kinds), strict=True):
            here = [r for r in self.records if (r.graph, r.provider, r.kind) == (graph, name, kind)]
            _ratio_cells(axes, here)
            ratios = [r.ratio for r in here if r.ratio is not None]
            found = f"mean {geometric_mean(ratios):.2f}, least {min(ratios):.2f}" if ratios else "no times"
            axes.set_title(f"{NAMES.get(name, name)} {graph}, {kind}: {found}", loc="left", fontsize=9)
        for axes in panels[-1]:
            axes.set_xlabel("D")
        for axes in panels[:, 0]:
            axes.set_ylabel("rows")
        direction, dtype = self.key
        title = f"few rows {DIRECTIONS[direction]}, {dtype}: lngen's speed over the fastest peer's (blue: ahead)"
        figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
        best = Counter(NAMES.get(r.best_peer, r.best_peer) for r in self.records).most_common()
        names = ", ".join(f"{name} ({count} cells)" for name, count in best)
        figure.supxlabel(f"the fastest peer: {names}", x=0.01, ha="left", fontsize=8)


def _ratio_cells(axes: Any, records: Sequence[Record]) -> None:
    """Rows down, D across; in each cell the ratio and its shade."""
    widths, rows = (sorted({getattr(r, name) for r in records}) for name in ("d", "rows"))
    ratios = {(r.rows, r.d): r.ratio for r in records}
    shades = importlib.import_module("matplotlib.colors").LinearSegmentedColormap.from_list("ratio", SHADES)
    field = [[ratios.get((m, d), math.nan) for d in widths] for m in rows]
    axes.pcolormesh(field, cmap=shades, vmin=0.5, vmax=1.5, edgecolors="white", linewidth=1)
    for r in records:
        place = widths.index(r.d) + 0.5, rows.index(r.rows) + 0.5
        axes.text(*place, f"{r.ratio:.2f}", ha="center", va="center")
    axes.set_xticks([n + 0.5 for n in range(len(widths))], widths)
    axes.set_yticks([n + 0.5 for n in range(len(rows))], rows)
    axes.invert_yaxis()
    axes.tick_params(length=0)


def few_rows_figures(records: Sequence[Record]) -> list[FewRows]:
    """One for each direction and dtype of which lngen has been compared with a peer."""
    few = [r for r in records if r.kind in FEW_ROWS and r.ratio is not None]
    return [FewRows(key, rs) for key, rs in grouped(few, lambda r: (r.direction, r.dtype)).items()]


# ---- a figure of many graphs ----

MANY = 8  # graphs, from which on one figure has all of them
WIDTH, ROW, MARGIN = 11.0, 0.2, 1.0  # inches: of the figure, of a graph in a panel, of a panel's title and axis


@dataclass(frozen=True)
class Overview:
    """The figure of all records of a dtype, each with a fraction of the ceiling."""

    dtype: str
    records: Sequence[Record]

    @property
    def slug(self) -> str:
        """For a file's name."""
        return f"graphs-{self.dtype}"

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches."""
        graphs, directions = ({r.graph for r in self.records}, {r.direction for r in self.records})
        return WIDTH, MARGIN + len(directions) * (MARGIN + ROW * len(graphs))

    def draw(self, figure: Any) -> None:
        """Graphs down, a bar for lngen and a mark for every other provider."""
        graphs, directions = unique(r.graph for r in self.records), unique(r.direction for r in self.records)
        shapes = unique((r.rows, r.d) for r in self.records)
        names = sorted(unique(r.provider for r in self.records), key=order)
        most = max(r.fraction or 0.0 for r in self.records)
        panels = figure.subplots(len(directions), len(shapes), sharex=True, sharey=True, squeeze=False)
        for axes, (direction, (rows, d)) in zip(panels.flat, product(directions, shapes), strict=True):
            here = [r for r in self.records if (r.direction, r.rows, r.d) == (direction, rows, d)]
            handles = [_graph_series(axes, name, graphs, [r for r in here if r.provider == name]) for name in names]
            axes.set_title(f"{DIRECTIONS[direction]}, {rows} x {d}", loc="left", fontsize=9)
            _graph_axis(axes, graphs, most)
        title = f"{len(graphs)} graphs, {self.dtype}: fraction of the ceiling"
        labels = [NAMES.get(name, name) for name in names]
        _title(figure, title, handles, labels)


def overviews(records: Sequence[Record]) -> list[Overview]:
    """One for each dtype that has many graphs, and not more shapes than graphs."""
    found = []
    for dtype in unique(r.dtype for r in records):
        mine = [r for r in records if r.dtype == dtype and r.fraction is not None and not is_ceiling(r.provider)]
        graphs, shapes = ({r.graph for r in mine}, {(r.rows, r.d) for r in mine})
        found += [Overview(dtype, mine)] if len(graphs) >= max(MANY, len(shapes)) else []
    return found


def _graph_series(axes: Any, name: str, graphs: Sequence[str], records: Sequence[Record]) -> Any:
    """A provider: bars for lngen, marks for others; what the legend shows of it."""
    places, fractions = [graphs.index(r.graph) for r in records], [r.fraction for r in records]
    colour = COLOURS.get(name, OTHER)
    if name == OWN:
        return axes.barh(places, fractions, height=0.62, color=colour, zorder=2)
    if name in (OWN + OVERLAPPED, SERIAL):
        look = {"marker": "|", "markersize": 9, "markeredgewidth": 1.6}
    else:
        look = {"marker": MARKERS.get(name, "o"), "markersize": 5, "markeredgecolor": "white", "markeredgewidth": 0.5}
    return axes.plot(fractions, places, color=colour, linewidth=0, zorder=3, **look)[0]


def _graph_axis(axes: Any, graphs: Sequence[str], most: float) -> None:
    """Graphs from the top down, fractions from 0, a line at the ceiling."""
    axes.grid(True, axis="x", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.axvline(1.0, color=CEILING, linewidth=1.0, linestyle=(0, (4, 2)), zorder=4)
    axes.set_xlim(0.0, max(MOST_FRACTION, most + 0.02))
    axes.set_yticks(range(len(graphs)), graphs)
    axes.set_ylim(len(graphs) - 0.4, -0.6)
