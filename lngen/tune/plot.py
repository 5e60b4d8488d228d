"""A picture of a job: every trial, over the model's order and over each parameter that varies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lngen.bench.figures import COLOURS, GRID, STYLE, save, sign
from lngen.bench.figures import check as check_plot
from lngen.tune.choose import Choice
from lngen.tune.export import PARAMETERS, configuration
from lngen.tune.trial import STATUSES, Trial
from lngen.version import __version__

TIMED, BEST, FAILED, LINE = COLOURS["lngen"], COLOURS["torch"], "#999999", COLOURS["copy"]
MOST_PANELS = 6
MARKERS = dict(zip(STATUSES, "xv^sDo", strict=True))


def plot(trials: Sequence[Trial], choice: Choice | None, path: Path) -> None:
    """Draw the trials of one job: times, the reference as a line, the choice marked, failures along the top.

    The ending of ``path`` decides the format, .png or .svg. The same trials give the same bytes. MissingError
    without matplotlib, LngenError for another ending or a path that cannot be written.
    """
    matplotlib, figures = check_plot(path)
    configs = {t.schedule: configuration(t) for t in trials}
    varying = [k for k in PARAMETERS if len({str(c[k]) for c in configs.values()}) > 1][: MOST_PANELS - 1]
    with matplotlib.rc_context(STYLE):
        columns = min(len(varying) + 1, 3)
        lines = -(-(len(varying) + 1) // columns)
        figure = figures.Figure(figsize=(4.6 * columns, 3.6 * lines), layout="constrained")
        title = f"{trials[0].spec}, {trials[0].rows} rows" if trials else "no trials"
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        for position, key in enumerate(["rank", *varying]):
            axes = figure.add_subplot(lines, columns, position + 1)
            _panel(
                axes,
                trials,
                choice,
                {t.schedule: t.rank if key == "rank" else configs[t.schedule][key] for t in trials},
            )
            axes.set_xlabel("rank in the model's order" if key == "rank" else key)
            if position == 0:
                axes.legend(fontsize=7)
        sign(figure, _origin(trials))
        save(figure, path)


def _origin(trials: Sequence[Trial]) -> str:
    """The origin of the trials: device, compiler, lngen's version, and the day of the last."""
    if not trials:
        return ""
    last = max(t.date for t in trials)
    return ", ".join(filter(None, [trials[0].device, trials[0].compiler, f"lngen {__version__}", last]))


def _panel(axes: Any, trials: Sequence[Trial], choice: Choice | None, where: dict[str, Any]) -> None:
    """One cloud of trials; words, and numbers with few distinct values, become ticks side by side."""
    values = sorted(set(where.values()))
    ticks = {v: n for n, v in enumerate(values)}
    numbered = where == {t.schedule: t.rank for t in trials}
    place = {s: v if numbered else ticks[v] for s, v in where.items()}
    if not numbered:
        axes.set_xticks(range(len(values)), [str(v) for v in values])
    timed = [t for t in trials if t.us_median is not None and t.status == "correct"]
    top = max((t.us_median or 0.0 for t in timed), default=1.0) * 1.1
    for status in STATUSES[:-1]:
        failed = [t for t in trials if t.status == status]
        if failed:
            xs = [place[t.schedule] for t in failed]
            axes.plot(xs, [top] * len(xs), MARKERS[status], color=FAILED, markersize=4, label=status)
    if timed:
        axes.plot([place[t.schedule] for t in timed], [t.us_median for t in timed], "o", color=TIMED, markersize=4)
    references = [t.reference for t in timed if t.reference is not None]
    if references:
        axes.axhline(sorted(references)[len(references) // 2], color=LINE, linewidth=1, label="reference")
    if choice is not None:
        best = choice.trial
        axes.plot([place[best.schedule]], [best.us_median], "*", color=BEST, markersize=12, label="chosen")
    axes.set_ylabel("us a launch")
    axes.grid(True, color=GRID, linewidth=0.7)
