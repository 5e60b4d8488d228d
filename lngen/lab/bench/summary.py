"""The report of a benchmark: tables, a summary, notes."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from lngen.lab.bench.records import SERIAL, HostRecord, Record, Summary, geometric_mean, graph_key, grouped, summarise
from lngen.lab.bench.tasks import BETWEEN_GEMMS, IN_TURN, LATENCY, OVERLAPPED, THROUGHPUT

WIDTH = 160  # columns, where no terminal sets a width
NL = "\n"
MISSED, NOTED = "†", "*"  # behind a cell
WAYS = f"{SERIAL} is an earlier name: in such a file lngen overlaps its calls, and {SERIAL} makes them in turn."
RATIO = "last columns: time of the best peer over that of lngen; above 1, lngen is faster"


def text(records: Sequence[Record], host: Sequence[HostRecord] = (), width: int | None = None) -> str:
    """Tables, notes and the summary; tables have at most ``width`` columns, None: those of the terminal."""
    console = Console(file=io.StringIO(), width=width or WIDTH, color_system=None)

    def say(lines: Iterable[str]) -> None:
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    said: list[Record] = []  # whose notes stand below their table
    for group in table_groups(records):
        say(titles(group))
        console.print(table(group))
        left = left_out(group)
        said += [r for r in group if r.provider in left]
        say(f"{name} is left out, since it has no time here: {why}" for name, why in left.items())
    if host:
        say(["host time per call, us"])
        console.print(host_table(host))
    say([*footnotes(records, said), *summary_lines(summarise(records))])
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def table_groups(records: Sequence[Record]) -> list[list[Record]]:
    """The records of each table: of a class, a graph, a direction and a dtype."""
    kinds = (grouped((r for r in records if r.kind == kind), graph_key) for kind in TABLES)
    return [group for found in kinds for group in found.values()]


def left_out(group: Sequence[Record]) -> dict[str, str]:
    """The providers of a table that have no time in it, and why."""
    without = {name: mine for name, mine in _by_provider(group).items() if all(r.us_median is None for r in mine)}
    return {name: "; ".join(unique(r.note or "not measured" for r in mine)) for name, mine in without.items()}


def titles(group: Sequence[Record]) -> list[str]:
    """What a table is of, and in words what its numbers are."""
    head = f"{' '.join(graph_key(group[0]))}: {TABLES[group[0].kind][0]}"
    if any(r.gb_s and r.is_lngen and r.fraction is not None for r in group):
        names = (f", {r.provider}" for r in group if r.is_ceiling and not r.provider.endswith(OVERLAPPED))
        head += f"; in brackets, the fraction of the ceiling{next(names, '')}"
    return [head, *[RATIO] * any(r.ratio is not None for r in group)]


def table(group: Sequence[Record]) -> Table:
    """Shapes down, providers across, then the best peer and the ratios to it, with their least and mean."""
    left, (_, cell) = left_out(group), TABLES[group[0].kind]
    ratios = {n: [r.ratio for r in mine if r.ratio is not None] for n, mine in _by_provider(group).items()}
    ratios = {name: found for name, found in ratios.items() if found}
    providers = {name: mine for name, mine in _by_provider(group).items() if name not in left}
    made = Table()
    made.add_column("rows x D", overflow="fold")
    for head in (*providers, *["best peer"] * bool(ratios), *(f"{name}{NL}/ best peer" for name in ratios)):
        made.add_column(_broken(head), justify="right", overflow="fold")
    marks = {name: max(len(_marks(r)) for r in mine) for name, mine in providers.items()}
    points = grouped(group, lambda r: (r.rows, r.d))
    for (rows, d), point in points.items():
        here = {r.provider: r for r in point}
        cells = [_cell(here.get(name), cell, marks[name]) for name in providers]
        cells += [next((r.best_peer for r in point if r.best_peer), "-")] * bool(ratios)
        cells += [_ratio(here.get(name)) for name in ratios]
        drifted = " ~" if any(r.drifted for r in point) else ""
        made.add_row(f"{rows} x {d}{drifted}", *cells)
    if max(map(len, ratios.values()), default=0) > 1:
        made.add_section()
        empty = [""] * (len(providers) + 1)
        made.add_row("least ratio", *empty, *(f"{min(found):.2f}" for found in ratios.values()))
        made.add_row("geometric mean", *empty, *(f"{geometric_mean(found):.2f}" for found in ratios.values()))
    return made


def _by_provider(group: Sequence[Record]) -> dict[str, list[Record]]:
    return grouped(group, lambda r: r.provider)


def _broken(head: str) -> str:
    """The head of a column, in lines that end where a name or a schedule can be broken."""
    return re.sub(r"(?<=[-,:])(?=\w)", NL, head)


def _cell(r: Record | None, text_of: Callable[[Record], str], width: int) -> str:
    """Its number, or why it has none, and its marks in a column of their own."""
    return "-" if r is None else f"{text_of(r)}{_marks(r):<{width}}"


def _marks(r: Record) -> str:
    marks = [MISSED] * (r.met is False) + [NOTED] * bool(r.note and r.us_median is not None)
    return "".join(f" {mark}" for mark in marks)


def _ratio(r: Record | None) -> str:
    return "-" if r is None or r.ratio is None else f"{r.ratio:.2f}"


def _speed(r: Record) -> str:
    if r.gb_s is None:
        return r.note.partition(":")[0] or "-"
    return f"{r.gb_s:.0f}{f' ({r.fraction:.2f})' if r.is_lngen and r.fraction is not None else ''}"


def _time(r: Record) -> str:
    return r.note.partition(":")[0] or "-" if r.us_median is None else f"{r.us_median:.2f}"


TABLES = {  # by class: what the cells are, and their text
    THROUGHPUT: ("GB/s of floor bytes", _speed),
    LATENCY: ("us per call in a chain of launches, each of which waits for the last one's result", _time),
    IN_TURN: ("us that a call adds behind a kernel without programmatic launch, cold", _time),
    BETWEEN_GEMMS: ("us that a call adds between two GEMMs", _time),
}


def host_table(records: Sequence[HostRecord]) -> Table:
    """Host time per call."""
    table, noted = Table(), any(r.note for r in records)
    for name in ("call", "arrays", "median", "p10", "p90", *["note"] * noted):
        table.add_column(name, justify="right" if name in ("median", "p10", "p90") else "left")
    for r in records:
        times = ["-" if v is None else f"{v:.2f}" for v in (r.us_median, r.us_p10, r.us_p90)]
        table.add_row(r.call, r.arrays, *times, *[r.note] * noted)
    return table


def footnotes(records: Sequence[Record], said: Sequence[Record] = ()) -> list[str]:
    """What the marks of tables mean, and the notes that are not ``said`` yet, each once per provider."""
    lines = [WAYS] * any(r.provider == SERIAL for r in records)
    if any(r.met is False for r in records):
        lines.append(f"{MISSED} below its target, which is a fraction of the ceiling; the lines below name both.")
    noted = (r for r in records if r.note and r not in said)
    for (provider, note), group in grouped(noted, lambda r: (r.provider, r.note)).items():
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        mark = f"{NOTED} " if any(r.us_median is not None for r in group) else ""
        lines.append(f"{mark}{provider}, {group[0].spec} rows={group[0].rows}{more}: {note}")
    if any(r.drifted for r in records):
        lines.append(
            "~ the ceiling itself, or of few rows what is subtracted, moved by more than 2 % in all repeated rounds; "
            "--resume measures them again."
        )
    return lines


def summary_lines(summaries: Sequence[Summary]) -> list[str]:
    """A few lines per class, graph, direction and way to call lngen."""
    return [line for s in summaries for line in _summary_lines(s)]


def _summary_lines(s: Summary) -> list[str]:
    kind = "" if s.kind == THROUGHPUT else f" {s.kind}"
    parts = []
    if s.met + s.missed:
        parts.append(f"{s.met} of {s.met + s.missed} targets met")
    if s.ratio is not None:
        common = "" if s.ratio_common in (None, s.ratio) else f", {s.ratio_common:.2f} over D = 768 to 16384"
        wanted = "" if s.ratio_target is None else f", target {s.ratio_target:g}"
        parts.append(f"{s.ratio:.2f} times the best peer's speed (geometric mean{wanted}){common}")
        parts.append(f"at least as fast at {s.ahead} of {s.compared}")
    if s.failed:
        parts.append(f"{s.failed} without a time")
    found = "; ".join(parts) or "nothing to compare with"
    lines = [f"{s.provider}, {s.graph} {s.direction}{kind}, {s.points} point{'s' * (s.points != 1)}: {found}."]
    if s.worst:
        lines.append(f"  below target, as a fraction of the ceiling: {_named(s.worst, s.missed)}")
    if s.slower:
        lines.append(
            f"  slower than the best peer, as a fraction of its speed: {_named(s.slower, s.compared - s.ahead)}"
        )
    return lines


def _named(points: Sequence[str], count: int) -> str:
    more = count - len(points)
    return ", ".join(points) + f" and {more} more" * (more > 0)


def unique(values: Iterable[Any]) -> list[Any]:
    """Without repetitions, in order."""
    return list(dict.fromkeys(values))
