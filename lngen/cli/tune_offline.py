"""The parts of ``lngen tune`` that need no GPU: merge databases, print an order, write a table of recorded times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from lngen.cli.output import Output, note, table
from lngen.devices import default_device, named
from lngen.spec import Spec

ABOUT = """Schedules that were measured on this GPU, by direction, bytes of an element, D and workload class: KiB of
inputs for each multiprocessor, at most; 1024 is also what is taken where the number of rows is not known.
Written by: lngen tune --table, from {}
Accesses and grids are left out: they follow from D and from the GPU."""


def merge_databases(shards: Sequence[Path], path: Path, output: Output) -> None:
    """Add the trials of other databases to the one at ``path``."""
    from lngen.tune.database import merge

    count, complaints = merge(shards, path)
    for text in complaints:
        note(text)
    output.table({"database": str(path), "trials": count}, f"{count} trials in {path}\n")


def print_ranking(specs: Sequence[Spec], rows: Sequence[int], device: str | None, output: Output) -> None:
    """The order of the candidates: measured schedules, then the model's order."""
    from lngen.tune.candidates import ranking

    gpu = named(device) if device else default_device()
    listed = [
        (str(spec), m, rank, str(s))
        for spec in specs
        for m in rows
        for rank, s in enumerate(ranking(spec, m, gpu.arch, gpu))
    ]
    columns = "spec", "rows", "rank", "schedule"
    output.table({"ranking": [dict(zip(columns, line, strict=True)) for line in listed]}, table(columns, listed))


def write_table(path: Path, sources: Sequence[Path], device: str | None, output: Output) -> None:
    """Write the table of a GPU from recorded times."""
    from lngen.files import write_all
    from lngen.schedule.recorded import latest, points
    from lngen.tune.table import build, text

    if not sources:
        raise click.UsageError("--table takes times from --database FILE, --recorded FILE, or both; got neither.")
    gpu = named(device) if device else default_device()
    found = points(sources)
    made = build(gpu, latest(found), [p for p in found if len(p.times) == 1])
    names = ", ".join(source.name for source in sources)
    write_all({path: text(made, ABOUT.format(names)).encode()})
    count = sum(map(len, made.entries.values()))
    summary = f"{count} entries for {gpu.name} in {path}\n"
    output.table({"table": str(path), "device": gpu.name, "entries": count}, summary)
