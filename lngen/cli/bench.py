"""``lngen bench``: lngen against its peers and the ceilings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lngen.cli.output import AnyPath, OutFile, Output, note, output_options, table, terminal_width
from lngen.cli.shared_options import Decimal, Whole, overlap_option, split
from lngen.compiler.graphs import GRAPHS
from lngen.compiler.ir import DType
from lngen.errors import SpecError, short
from lngen.lab.bench.tasks import (
    DIRECTIONS,
    FEW_ROWS,
    FEW_ROWS_GRAPHS,
    FEW_ROWS_ROWS,
    FEW_ROWS_WIDTHS,
    GRIDS,
    LATENCY,
    LATENCY_ROWS,
    LATENCY_WIDTHS,
    THROUGHPUT,
    Task,
    declared_dtype,
    make_task,
    split_graphs,
)
from lngen.user_input import LARGEST, whole

if TYPE_CHECKING:
    from lngen.lab.bench.records import HostRecord, Record
    from lngen.lab.bench.store import Saved

HOST_D = 1024
STARTUP_ROWS, STARTUP_D = 4096, 4096


def number(text: str, what: str) -> int:
    """A whole number from 1; SpecError for anything else."""
    found = whole(text, 1)
    if found is None:
        raise SpecError(f"{what} is expected to be a whole number from 1 to {LARGEST}, got '{short(text)}'.")
    return found


def parse_shapes(shapes: str, rows: str, d: str) -> list[tuple[int, int]]:
    """Pairs of rows and D: those of ``shapes``, or all combinations of ``rows`` and ``d``; none if all are empty."""
    if bool(rows) != bool(d):
        raise SpecError("--rows and --d go together; give both, or --shapes, or --grid.")
    if rows:
        if shapes:
            raise SpecError("Give either --shapes or --rows with --d, not both.")
        return [(number(m, "--rows"), number(n, "--d")) for m, n in itertools.product(split(rows), split(d))]
    pairs = []
    for word in split(shapes):
        m, cross, n = word.partition("x")
        if not cross:
            raise SpecError(f"--shapes is expected to hold ROWSxD, for example 4096x1024, got '{short(word)}'.")
        pairs.append((number(m, "ROWS in --shapes"), number(n, "D in --shapes")))
    return pairs


def tasks(
    graphs: Sequence[str],
    directions: str,
    dtypes: str,
    grid: str,
    shapes: list[tuple[int, int]],
    latency: bool = False,
    few_rows: bool = False,
) -> list[Task]:
    """All requested tasks, shapes before the grid's; SpecError for a wrong word."""
    chosen = GRIDS[grid]
    kinds = FEW_ROWS if few_rows else (THROUGHPUT,)
    if few_rows and "both" in split(directions):
        raise SpecError("--few-rows measures one call at a time: give --direction fwd, bwd or fwd,bwd.")
    found = []
    for graph, direction in itertools.product(split_graphs(graphs), split(directions)):
        for dtype in dtype_names(dtypes, grid, graph):
            make_task(graph, direction, dtype, 1, 1)  # refuses a wrong word even where no shape follows
            pairs = shapes or chosen.shapes(DType(dtype))
            found += [make_task(graph, direction, dtype, m, d, kind) for m, d in pairs for kind in kinds]
            if latency and direction != "both":
                links = itertools.product(LATENCY_ROWS, LATENCY_WIDTHS)
                found += [make_task(graph, direction, dtype, m, d, LATENCY) for m, d in links]
    return found


def dtype_names(dtypes: str, grid: str, graph: str) -> list[str]:
    """The named dtypes; or else the one that the graph declares, or those of the grid."""
    declared = [*filter(None, [declared_dtype(graph)])]
    return [*(split(dtypes) or declared or GRIDS[grid].dtypes)]


def filled(o: dict[str, Any]) -> dict[str, Any]:
    """The options with graphs and directions, and for few rows the shapes, that were left out."""
    few = o["few_rows"]
    graphs = o["graphs"] or (FEW_ROWS_GRAPHS if few else ("layernorm",))
    o = {**o, "graphs": graphs, "direction": o["direction"] or ("fwd" if few else "fwd,bwd")}
    if few and not o["shapes"]:
        o |= {"rows": o["rows"] or comma(FEW_ROWS_ROWS), "d": o["d"] or comma(FEW_ROWS_WIDTHS)}
    return o


def comma(numbers: Sequence[int]) -> str:
    """As an option takes them and a text shows them."""
    return ", ".join(map(str, numbers))


def _grids() -> str:
    return "; ".join(f"{name}: {grid.about}" for name, grid in GRIDS.items())


INPUT = AnyPath(dir_okay=False, exists=True)
LATENCIES = f"{comma(LATENCY_ROWS)} rows of {comma(LATENCY_WIDTHS)}"


@click.command(
    "bench",
    epilog="Example: lngen bench --graph rmsnorm:weight=f32 --graph norms:add_rmsnorm --direction fwd,bwd --compile "
    "--grid quick --out b.json --resume --seconds 500",
)
@click.option(
    "--graph",
    "graphs",
    multiple=True,
    metavar="GRAPH",
    show_default="layernorm",
    help=f"One of {', '.join(GRAPHS)}, a file my.graph or MODULE:FUNCTION, with :KEY=VALUE,... as in a spec, without d "
    "and dtype; repeatable. Names alone may be separated by commas.",
)
@click.option(
    "--direction", default="", metavar="T,...", show_default="fwd,bwd", help=f"Some of {', '.join(DIRECTIONS)}."
)
@click.option("--grid", default="design", show_default=True, type=click.Choice([*GRIDS]), help=f"Shapes. {_grids()}.")
@click.option("--shapes", default="", metavar="ROWSxD,...", help="These shapes instead of a grid.")
@click.option("--rows", default="", metavar="N,...", help="Rows, each with every --d, instead of a grid.")
@click.option("--d", default="", metavar="N,...", help="Features per row.")
@click.option("--dtype", default="", metavar="T,...", help="Some of f16, bf16, f32, f64; by default the grid's.")
@click.option(
    "--providers",
    default="",
    metavar="NAME,...",
    help="By default all installed.",
)
@click.option(
    "--schedule", "schedules", multiple=True, metavar="K=V,...", help="Also lngen with this schedule; repeatable."
)
@click.option("--compile", "compiled", is_flag=True, help="Also torch.compile, which compiles slowly.")
@overlap_option("Also lngen with calls that overlap, lngen-overlapped, and the ceilings with such calls.")
@click.option("--latency", is_flag=True, help=f"Also the latency in a chain of launches, {LATENCIES}.")
@click.option(
    "--few-rows",
    is_flag=True,
    help="Instead, what a call adds behind a kernel that triggers no programmatic launch, and between two GEMMs, in "
    f"us; by default of {', '.join(FEW_ROWS_GRAPHS)}, fwd, {comma(FEW_ROWS_ROWS)} rows of {comma(FEW_ROWS_WIDTHS)}.",
)
@click.option("--host", is_flag=True, help=f"Also the host time per call, at 16 x {HOST_D}.")
@click.option(
    "--startup",
    is_flag=True,
    help="Instead, ms from the start of a process to its first results, cold, warm and from a pack, of each --graph "
    f"with --dtype and one --rows and --d; by default {STARTUP_ROWS} x {STARTUP_D}.",
)
@click.option("--rounds", default=12, show_default=True, type=Whole(10, 1000), help="Rounds of timing.")
@output_options
@click.option("--resume", is_flag=True, help="Continue the --out file: what it holds is not measured again.")
@click.option("--seconds", type=Decimal(), help="Start no point that would end later; see --resume.")
@click.option("--commit", default="", metavar="HASH", help="The commit that is measured, where git is not available.")
@click.option("--plot", "plot_file", type=OutFile(), help="Draw to this .png or .svg; several figures have names.")
@click.option("--from", "sources", type=INPUT, multiple=True, help="Measure nothing, show these --out files.")
def bench(output: Output, plot_file: Path | None, sources: tuple[Path, ...], **options: Any) -> None:
    """Time lngen, its peers and the ceilings side by side, cold, in GB/s of the bytes a call must move.

    The ceiling is a plain copy or the sum of two arrays, whichever has the more similar share of writes, of as many
    bytes as the graph's [M, D] tensors: for a norm the copy (forward) and the sum (backward), and both for forward and
    backward as one unit. The peers of a graph are PyTorch with the same expression, and the libraries that have a
    kernel for it. The table has lngen's fraction of the ceiling in brackets; a † marks a missed target. Options
    that name several things separate them by commas. The --out file is written after every point.
    """
    from lngen.lab.bench import figures, store, summary

    if options.pop("startup"):
        return _startup(output, options)
    if plot_file is not None:
        figures.check_plot(plot_file)
    if sources:
        files = [store.read_json(path) for path in sources]
        found = store.merged(files)
    else:
        found = _measure(output.file, **options)
    document = store.render(found)
    output.table(document, summary.text(found.records, found.host, width=terminal_width()))
    if plot_file is not None:
        drawn = figures.plot(found.records, plot_file, figures.origin(found))
        for text in [*map(str, drawn)] or [f"'{plot_file}' is not drawn: no point has times of lngen and of another."]:
            note(text)


def _startup(output: Output, o: dict[str, Any]) -> None:
    """Print, or write, what the first results of a process take."""
    from rich.console import Console

    from lngen.lab.bench.startup import measure
    from lngen.lab.bench.torch_gpu import find_gpu

    rows, d = number(o["rows"] or str(STARTUP_ROWS), "--rows"), number(o["d"] or str(STARTUP_D), "--d")
    graphs = split_graphs(o["graphs"] or ("layernorm",))
    pairs = [(graph, dtype) for graph in graphs for dtype in dtype_names(o["dtype"], o["grid"], graph)]
    specs = [make_task(graph, "fwd", dtype, rows, d).specs[0] for graph, dtype in pairs]
    gpu = find_gpu().name
    with Console(stderr=True).status("preparing") as status:
        found = [measure(spec, rows, status.update) for spec in specs]
    columns = "spec", "state", "step", "ms", "times import torch", "times NVRTC"
    lines = [(one.spec, *line) for one in found for line in one.lines()]
    data = {"gpu": gpu, "rows": rows, "startup": [dict(zip(columns, line, strict=True)) for line in lines]}
    output.table(data, f"{gpu}, {rows} rows\n" + table(columns, lines))


def _measure(out_file: Path | None, **o: Any) -> Saved:
    """Run the requested tasks; every result is written to the file at once."""
    from rich.console import Console

    from lngen.lab.bench.benchmark import Hooks, Method, benchmark
    from lngen.lab.bench.providers import known, select
    from lngen.lab.bench.store import Saved, circumstances, conditions, resumed
    from lngen.lab.bench.torch_gpu import find_gpu

    if o["resume"] and out_file is None:
        raise SpecError("--resume needs the file to continue: --out FILE.")
    o = filled(o)
    shapes = parse_shapes(o["shapes"], o["rows"], o["d"])
    todo = tasks(o["graphs"], o["direction"], o["dtype"], o["grid"], shapes, o["latency"], o["few_rows"])
    gpu, method = find_gpu(), Method(rounds=o["rounds"])
    chosen = select(split(o["providers"]), compiled=o["compiled"], overlap=o["overlap"], schedules=o["schedules"])
    under = conditions(gpu.name, str(method), {n: p.settings for n, p in known().items() if p.available()})
    before = resumed(out_file, under) if out_file is not None and o["resume"] else Saved()
    keep = partial(_keep, out_file, before, under, lambda: circumstances(gpu.number, o["commit"]))
    console = Console(stderr=True)

    with console.status("preparing") as status:
        hooks = Hooks(
            progress=lambda done, total, text: status.update(f"{done}/{total} {text}"),
            say=lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True),
            keep=lambda records: keep(records, before.host),
        )
        outcome = benchmark(todo, chosen, gpu, method, hooks=hooks, saved=before.records, seconds=o["seconds"])
        status.update("host time")
        host = before.host or (_host(o["graphs"], o["dtype"], o["grid"]) if o["host"] else [])
    found = keep(outcome.records, host)
    if outcome.left:
        hooks.say(f"{outcome.left} of {len(todo)} points are left; the same command with --resume measures them.")
    return found


def _keep(
    out_file: Path | None,
    before: Saved,
    under: dict[str, str],
    now: Callable[[], dict[str, str]],
    records: list[Record],
    host: list[HostRecord],
) -> Saved:
    """All that is measured so far, also written to the file; the circumstances of this run if it added anything."""
    from lngen.lab.bench.store import Saved, write_json

    added = (records, host) != (before.records, before.host)
    found = Saved(records, under, host, [*before.runs, *([now()] if added else [])])
    if out_file is not None:
        write_json(out_file, found)
    return found


def _host(graphs: Sequence[str], dtypes: str, grid: str) -> list[HostRecord]:
    from lngen.lab.bench.host_time import host_benchmark

    pairs = [(graph, dtype) for graph in split_graphs(graphs) for dtype in dtype_names(dtypes, grid, graph)]
    specs = [make_task(graph, "fwd", dtype, 1, HOST_D).specs[0] for graph, dtype in pairs]
    return [r for spec in specs for r in host_benchmark(spec)]
