"""What a benchmark leaves: a table, a JSON file, a plot. The same records give the same bytes."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lngen.bench.host import HostRecord
from lngen.bench.providers import CEILINGS
from lngen.bench.run import Record
from lngen.errors import LngenError, MissingError

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")


def write_json(
    path: Path, records: Sequence[Record], conditions: Mapping[str, str], host: Sequence[HostRecord] = ()
) -> None:
    """Records and conditions, keys sorted, in one step: the file is the old one or the new one."""
    content: dict[str, Any] = {"conditions": dict(conditions), "records": [asdict(r) for r in records]}
    if host:
        content["host"] = [asdict(r) for r in host]
    text = json.dumps(content, indent=1, sort_keys=True) + "\n"
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise LngenError(f"'{path}' cannot be written: {error.strerror}.") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def read_json(path: Path) -> tuple[list[Record], dict[str, str]]:
    """What ``write_json`` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return [Record(**r) for r in content["records"]], dict(content["conditions"])


def tables(records: Sequence[Record]) -> list[Table]:
    """A table per graph, direction and dtype, in GB/s of floor bytes: shapes down, providers across."""
    result = []
    for key, group in grouped(records).items():
        graph, direction, dtype = key
        table = Table(title=f"{graph} {direction} {dtype}, GB/s", title_justify="left")
        table.add_column("rows x D")
        providers = _unique(r.provider for r in group)
        for name in providers:
            table.add_column(name, justify="right")
        for rows, d in _unique((r.rows, r.d) for r in group):
            here = {r.provider: r for r in group if (r.rows, r.d) == (rows, d)}
            drifted = any(r.drifted for r in here.values())
            cells = [_cell(here[name]) if name in here else "-" for name in providers]
            table.add_row(f"{rows} x {d}{' ~' if drifted else ''}", *cells)
        result.append(table)
    return result


def footnotes(records: Sequence[Record]) -> list[str]:
    """What the tables mark but do not say."""
    lines = [f"{r.provider}, {r.spec} rows={r.rows}: {r.note}" for r in records if r.note]
    if any(r.drifted for r in records):
        lines.append("~ the ceiling itself moved by more than 2 % during these rounds; run them again.")
    return lines


def show(records: Sequence[Record], host: Sequence[HostRecord] = ()) -> None:
    """Print tables and notes; where no terminal sets a width, wide enough for all columns."""
    console = Console()
    console = console if console.is_terminal else Console(width=140)
    for table in [*tables(records), *([host_table(host)] if host else [])]:
        console.print(table)
    for line in footnotes(records):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def host_table(records: Sequence[HostRecord]) -> Table:
    """Host time per call."""
    table = Table(title="host time per call", title_justify="left")
    for name in ("call", "arrays", "us median", "us p10", "us p90", ""):
        table.add_column(name, justify="right" if name.startswith("us") else "left")
    for r in records:
        times = ["-" if v is None else f"{v:.2f}" for v in (r.us_median, r.us_p10, r.us_p90)]
        table.add_row(r.call, r.arrays, *times, r.note)
    return table


def grouped(records: Sequence[Record]) -> dict[tuple[str, str, str], list[Record]]:
    """Records by graph, direction and dtype, in the order they first come."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for r in records:
        groups.setdefault((r.graph, r.direction, r.dtype), []).append(r)
    return groups


def check_plot(path: Path) -> tuple[Any, Any]:
    """The modules of matplotlib that draw; LngenError for another format, MissingError without matplotlib."""
    if path.suffix not in (".png", ".svg"):
        raise LngenError(f"'{path}' is expected to end in .png or .svg.")
    try:
        return importlib.import_module("matplotlib"), importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingError('A plot needs matplotlib; install it with: pip install "lngen[plot]".') from error


def plot(records: Sequence[Record], path: Path) -> None:
    """GB/s over D, a panel per graph, direction and dtype; a line per provider and number of rows.

    The ending of ``path`` decides the format, .png or .svg. MissingError without matplotlib.
    """
    matplotlib, figures = check_plot(path)
    groups = grouped([r for r in records if r.gb_s is not None])
    with matplotlib.rc_context({"svg.hashsalt": "lngen", "font.size": 9}):
        figure = figures.Figure(figsize=(6.4 * max(len(groups), 1), 4.4), layout="constrained")
        names = _unique(r.provider for r in records if r.provider not in CEILINGS.values())
        for position, (key, group) in enumerate(groups.items()):
            axes = figure.add_subplot(1, len(groups), position + 1)
            axes.set_title(" ".join(key))
            _panel(axes, group, dict(zip(names, COLOURS * (1 + len(names) // len(COLOURS)), strict=False)))
        date = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=150, metadata=date)


def _panel(axes: Any, group: Sequence[Record], colours: Mapping[str, str]) -> None:
    markers = dict(zip(sorted({r.rows for r in group}), "osD^v<>PX*" * 10, strict=False))
    for name in _unique(r.provider for r in group):
        style = {"color": colours.get(name, "black"), "linestyle": "-" if name in colours else "--"}
        for rows, marker in markers.items():
            points = sorted((r.d, r.gb_s) for r in group if (r.provider, r.rows) == (name, rows))
            if points:
                axes.plot(*zip(*points, strict=True), marker=marker, markersize=4, linewidth=1.2, **style)
        axes.plot([], [], label=name, **style)
    for rows, marker in markers.items():
        axes.plot([], [], color="gray", linestyle="", marker=marker, markersize=4, label=f"{rows} rows")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    widths = sorted({r.d for r in group})
    axes.set_xticks(widths, [str(d) for d in widths])
    for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        ticks("{x:.0f}")
    axes.set_xlabel("D")
    axes.set_ylabel("GB/s of floor bytes")
    axes.grid(True, which="both", linewidth=0.3)
    axes.legend(fontsize=7, ncols=2)


def _cell(r: Record) -> str:
    if r.gb_s is None:
        return r.note.partition(":")[0] or "-"
    share = f" ({r.fraction:.2f})" if r.provider.startswith("lngen") and r.fraction is not None else ""
    return f"{r.gb_s:.0f}{share}{' *' if r.note else ''}"


def _unique(values: Any) -> list[Any]:
    return list(dict.fromkeys(values))
