"""The figure of many graphs: the fraction of the ceiling of each and of its peers, a panel per direction and shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from lngen.bench.palette import CEILING, COLOURS, DIRECTIONS, GRID, MARKERS, NAMES, OVERLAPPING_MARK, order
from lngen.bench.records import OWN, Record, is_ceiling
from lngen.bench.report import unique
from lngen.bench.tasks import OVERLAPPED

MANY = 8  # graphs, from which on one figure has all of them
MOST_FRACTION = 1.1
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
            handles = [_series(axes, name, graphs, [r for r in here if r.provider == name]) for name in names]
            axes.set_title(f"{DIRECTIONS[direction]}, {rows} x {d}", loc="left", fontsize=9)
            _axis(axes, graphs, most)
        title = f"{len(graphs)} graphs, {self.dtype}: fraction of the ceiling"
        labels = [NAMES.get(name, name) for name in names]
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)


def overviews(records: Sequence[Record]) -> list[Overview]:
    """One for each dtype that has many graphs, and not more shapes than graphs."""
    found = []
    for dtype in unique(r.dtype for r in records):
        mine = [r for r in records if r.dtype == dtype and r.fraction is not None and not is_ceiling(r.provider)]
        graphs, shapes = ({r.graph for r in mine}, {(r.rows, r.d) for r in mine})
        found += [Overview(dtype, mine)] if len(graphs) >= max(MANY, len(shapes)) else []
    return found


def _series(axes: Any, name: str, graphs: Sequence[str], records: Sequence[Record]) -> Any:
    """A provider: bars for lngen, marks for others; what the legend shows of it."""
    places, fractions = [graphs.index(r.graph) for r in records], [r.fraction for r in records]
    colour = COLOURS.get(name, "#777777")
    if name == OWN:
        return axes.barh(places, fractions, height=0.62, color=colour, zorder=2)
    if name in (OWN + OVERLAPPED, "lngen-serial"):
        look = {"marker": OVERLAPPING_MARK, "markersize": 9, "markeredgewidth": 1.6}
    else:
        look = {"marker": MARKERS.get(name, "o"), "markersize": 5, "markeredgecolor": "white", "markeredgewidth": 0.5}
    return axes.plot(fractions, places, color=colour, linewidth=0, zorder=3, **look)[0]


def _axis(axes: Any, graphs: Sequence[str], most: float) -> None:
    """Graphs from the top down, fractions from 0, a line at the ceiling."""
    axes.grid(True, axis="x", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.axvline(1.0, color=CEILING, linewidth=1.0, linestyle=(0, (4, 2)), zorder=4)
    axes.set_xlim(0.0, max(MOST_FRACTION, most + 0.02))
    axes.set_yticks(range(len(graphs)), graphs)
    axes.set_ylim(len(graphs) - 0.4, -0.6)
