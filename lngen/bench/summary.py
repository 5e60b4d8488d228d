"""The report of a benchmark: tables, a summary, notes."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from lngen.bench.records import OWN, HostRecord, Record, Summary, geometric_mean, graph_key, grouped, summarise
from lngen.bench.tasks import BETWEEN_GEMMS, FEW_ROWS, IN_TURN, LATENCY, THROUGHPUT

WIDTH = 160  # columns, where no terminal sets a width


def text(records: Sequence[Record], host: Sequence[HostRecord] = (), width: int | None = None) -> str:
    """Tables, notes and the summary; tables have at most ``width`` columns, None: those of the terminal."""
    console = Console(file=io.StringIO(), width=width or WIDTH, color_system=None)
    for table in [*tables(records), *([host_table(host)] if host else [])]:
        console.print(table)
    for line in [*footnotes(records), *summary_lines(summarise(records))]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def tables(records: Sequence[Record]) -> list[Table]:
    """A table per class, graph, direction and dtype: shapes down, providers across."""
    found = []
    for kind, (what, cell) in TABLES.items():
        for key, group in grouped((r for r in records if r.kind == kind), graph_key).items():
            found.append(_table(f"{' '.join(key)}, {what}", group, cell))
    return found


def _table(title: str, group: Sequence[Record], cell: Callable[[Record], str]) -> Table:
    compared = grouped((r for r in group if r.ratio is not None), lambda r: r.provider)
    table = Table(title=title, title_justify="left", show_footer=bool(compared) and group[0].kind in FEW_ROWS)
    table.add_column("rows x D", "least\ngeometric mean")
    providers = unique(r.provider for r in group)
    for name in providers:
        table.add_column(name, justify="right")
    for name, mine in compared.items():
        ratios = [r.ratio for r in mine if r.ratio is not None]
        footer = f"{min(ratios):.2f}\n{geometric_mean(ratios):.2f}"
        table.add_column(f"{name} / best peer", footer, justify="right")
    for (rows, d), point in grouped(group, lambda r: (r.rows, r.d)).items():
        here = {r.provider: r for r in point}
        cells = [cell(here[name]) if name in here else "-" for name in providers]
        cells += [_ratio(here.get(name)) for name in compared]
        drifted = " ~" if any(r.drifted for r in point) else ""
        table.add_row(f"{rows} x {d}{drifted}", *cells)
    return table


def _ratio(r: Record | None) -> str:
    return "-" if r is None or r.ratio is None else f"{r.ratio:.2f} {r.best_peer}"


def _speed(r: Record) -> str:
    if r.gb_s is None:
        return r.note.partition(":")[0] or "-"
    share = ""
    if r.is_lngen and r.fraction is not None:
        share = f" ({r.fraction:.3f} < {r.target:.3f})" if r.met is False else f" ({r.fraction:.2f})"
    return f"{r.gb_s:.0f}{share}{' *' if r.note else ''}"


def _time(r: Record) -> str:
    if r.us_median is None:
        return r.note.partition(":")[0] or "-"
    return f"{r.us_median:.2f}{' *' if r.note else ''}"


TABLES = {  # by class: what the cells are, and their text
    THROUGHPUT: ("GB/s (fraction of the ceiling < its target)", _speed),
    LATENCY: ("us per call in a chain of dependent launches", _time),
    IN_TURN: ("us behind a plain kernel, cold", _time),
    BETWEEN_GEMMS: ("us between two GEMMs", _time),
}


def host_table(records: Sequence[HostRecord]) -> Table:
    """Host time per call."""
    table = Table(title="host time per call", title_justify="left")
    for name in ("call", "arrays", "us median", "us p10", "us p90", ""):
        table.add_column(name, justify="right" if name.startswith("us") else "left")
    for r in records:
        times = ["-" if v is None else f"{v:.2f}" for v in (r.us_median, r.us_p10, r.us_p90)]
        table.add_row(r.call, r.arrays, *times, r.note)
    return table


def footnotes(records: Sequence[Record]) -> list[str]:
    """The notes that the tables mark with *, each once per provider with the number of further points."""
    lines = []
    for (provider, note), group in grouped((r for r in records if r.note), lambda r: (r.provider, r.note)).items():
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        lines.append(f"{provider}, {group[0].spec} rows={group[0].rows}{more}: {note}")
    if any(r.drifted for r in records):
        lines.append(
            "~ the ceiling itself, or of few rows what is subtracted, moved by more than 2 % in all repeated rounds; "
            "--resume measures them again."
        )
    return lines


def summary_lines(summaries: Sequence[Summary]) -> list[str]:
    """A few lines per class, graph and direction."""
    return [line for s in summaries for line in _summary_lines(s)]


def _summary_lines(s: Summary) -> list[str]:
    way = "" if s.provider == OWN else f"{s.provider}: "
    head = f"{way}{s.graph} {s.direction}{'' if s.kind == THROUGHPUT else f' {s.kind}'}, {s.points} points"
    parts = []
    if s.met + s.missed:
        parts.append(f"{s.met} of {s.met + s.missed} targets met")
    if s.ratio is not None:
        common = "" if s.ratio_common is None else f", {s.ratio_common:.2f} over D = 768 to 16384"
        wanted = "" if s.ratio_target is None else f" (target {s.ratio_target:g})"
        parts.append(
            f"{s.ratio:.2f} x the best peer on geometric mean{wanted}{common}, "
            f"at least as fast at {s.ahead} of {s.compared}"
        )
    if s.failed:
        parts.append(f"{s.failed} without a time")
    lines = [f"{head}: {'; '.join(parts) or 'nothing to compare with'}."]
    if s.worst:
        lines.append(f"  farthest below target: {', '.join(s.worst)}")
    if s.slower:
        lines.append(f"  slower: {', '.join(s.slower)}")
    return lines


def unique(values: Iterable[Any]) -> list[Any]:
    """Without repetitions, in order."""
    return list(dict.fromkeys(values))
