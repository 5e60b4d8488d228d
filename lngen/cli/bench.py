"""``lngen bench``: lngen against its peers and the ceilings."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console

from lngen.errors import SpecError
from lngen.graphs import GRAPHS
from lngen.spec import DIRECTIONS, Spec, parse_spec

# The table in section 7 of the design.
SHAPES = "4096x1024,4096x2048,4096x4096,4096x8192,4096x16384,32768x1024,32768x4096,2048x65536,262144x256"
HOST_D = 1024


def words(text: str) -> list[str]:
    """A comma-separated list."""
    return [word.strip() for word in text.split(",") if word.strip()]


def number(text: str, what: str) -> int:
    """A whole number from 1; SpecError for anything else."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise SpecError(f"{what} is expected to be a whole number from 1, got '{text}'.")
    return int(text)


def parse_shapes(shapes: str, rows: str, d: str) -> list[tuple[int, int]]:
    """Pairs of rows and D: those of ``shapes``, or every one of ``rows`` with every one of ``d``."""
    if bool(rows) != bool(d):
        raise SpecError("--rows and --d go together; give both, or --shapes, or none of them.")
    if rows:
        if shapes:
            raise SpecError("Give either --shapes or --rows with --d, not both.")
        return [(number(m, "--rows"), number(n, "--d")) for m, n in itertools.product(words(rows), words(d))]
    pairs = []
    for word in words(shapes or SHAPES):
        m, cross, n = word.partition("x")
        if not cross:
            raise SpecError(f"--shapes is expected to hold ROWSxD, for example 4096x1024, got '{word}'.")
        pairs.append((number(m, "ROWS in --shapes"), number(n, "D in --shapes")))
    return pairs


def cases(graphs: str, directions: str, dtypes: str, shapes: list[tuple[int, int]]) -> list[tuple[Spec, int]]:
    """Every spec that is asked for, with its rows; SpecError for a wrong name."""
    return [
        (parse_spec(f"{graph}.{direction}:d={d},dtype={dtype}"), rows)
        for graph, direction, dtype in itertools.product(words(graphs), words(directions), words(dtypes))
        for rows, d in shapes
    ]


FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("bench", epilog="Example: lngen bench --graph layernorm --shapes 4096x1024,4096x4096 --json b.json")
@click.option("--graph", default="layernorm", show_default=True, help=f"Some of {', '.join(GRAPHS)}.")
@click.option("--direction", default="fwd,bwd", show_default=True, help=f"Some of {', '.join(DIRECTIONS)}.")
@click.option("--shapes", default="", metavar="ROWSxD,...", help="By default nine, 4096x1024 to 262144x256.")
@click.option("--rows", default="", metavar="N,...", help="Rows, each with every --d.")
@click.option("--d", default="", metavar="N,...", help="Features per row.")
@click.option("--dtype", default="bf16", show_default=True, help="Some of f16, bf16, f32, f64.")
@click.option("--providers", default="", metavar="NAME,...", help="By default all that are installed.")
@click.option("--schedule", default="", metavar="K=V,...", help="Changes to lngen's default schedule.")
@click.option("--compile", "compiled", is_flag=True, help="Also torch.compile, which takes its time.")
@click.option("--host", is_flag=True, help=f"Also the host time per call, at 16 x {HOST_D}.")
@click.option("--rounds", default=12, show_default=True, type=click.IntRange(10, 1000), help="Of the timing.")
@click.option("--json", "json_file", type=FILE, help="Write the records to this file.")
@click.option("--plot", "plot_file", type=FILE, help="Draw them to this .png or .svg file.")
def bench(
    graph: str,
    direction: str,
    shapes: str,
    rows: str,
    d: str,
    dtype: str,
    providers: str,
    schedule: str,
    compiled: bool,
    host: bool,
    rounds: int,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Time lngen, its peers and the ceilings side by side, cold, in GB/s of the bytes a call must move.

    The ceiling is a plain copy (forward) or the sum of two arrays (backward); lngen's share of it stands in
    brackets. Options that name several things take them separated by commas.
    """
    from lngen.bench import report
    from lngen.bench.engines import make_engine
    from lngen.bench.host import host_benchmark
    from lngen.bench.peers import select
    from lngen.bench.run import benchmark, conditions

    engine = make_engine()
    chosen = select(words(providers), compiled=compiled, schedule=schedule)
    todo = cases(graph, direction, dtype, parse_shapes(shapes, rows, d))
    specs = [parse_spec(f"{g}.fwd:d={HOST_D},dtype={t}") for g in words(graph) for t in words(dtype)]
    if plot_file is not None:
        report.check_plot(plot_file)
    with Console(stderr=True).status("preparing") as status:
        records = benchmark(todo, chosen, engine, rounds=rounds, progress=_progress(status.update))
        status.update("host time")
        timed = [r for spec in specs for r in host_benchmark(spec)] if host else []
    report.show(records, timed)
    if json_file is not None:
        report.write_json(json_file, records, conditions(engine, rounds), timed)
    if plot_file is not None:
        report.plot(records, plot_file)


def _progress(show: Callable[[str], None]) -> Callable[[int, int, str], None]:
    return lambda done, total, text: show(f"{done}/{total} {text}")


command = bench  # the name under which lngen.cli looks for it
