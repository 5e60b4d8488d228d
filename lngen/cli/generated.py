"""``lngen generated``: the golden set of kernels."""

from __future__ import annotations

from dataclasses import asdict, astuple
from pathlib import Path

import click

from lngen.aot.catalog import CATALOG, differences, rewrite
from lngen.cli.output import Output, output_options
from lngen.cli.tables import table
from lngen.data import data_dir
from lngen.runtime.choose import DEFAULT_ARCH
from lngen.toolchain import nvrtc_version


@click.command(epilog="Example: lngen generated --check")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if a file is stale, missing or superfluous.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The folder of the set; by default the one lngen comes with.",
)
@click.option("--time", "timed", is_flag=True, help="Write nothing; how long each takes to emit and to compile.")
@output_options
@click.pass_context
def command(ctx: click.Context, check: bool, folder: Path | None, timed: bool, output: Output) -> None:
    """Rewrite, or verify, the kernels that lngen generated and people read in review.

    Each is one spec under one schedule, both written down: neither a GPU nor, but for --time, a compiler is needed.
    """
    if timed:
        if check or folder:
            raise click.UsageError("--time goes with neither --check nor --dir.")
        _time(output)
        return
    folder = folder or data_dir("generated") / "kernels"
    found = differences(folder)
    if not check:
        rewrite(folder)
    verb = "differ" if check else "rewritten or removed"
    lines = [f"{what:<11} {name}\n" for name, what in found.items()]
    output.table(
        {"kernels": len(CATALOG), "differences": [{"file": n, "what": w} for n, w in found.items()]},
        "".join([*lines, f"{len(CATALOG)} kernels, {len(found)} {verb}\n"]),
    )
    if check and found:
        ctx.exit(1)


def _time(output: Output) -> None:
    """The table of times, compiled anew for the default arch, and the medians."""
    from lngen.aot.times import measure, median

    found = dict(measure(DEFAULT_ARCH))
    middle = median([*found.values()])
    kernels = [{"kernel": name, **asdict(times)} for name, times in found.items()]
    rows = [(name, *(f"{ms:.1f}" for ms in astuple(times))) for name, times in {**found, "median": middle}.items()]
    output.table(
        {"arch": DEFAULT_ARCH, "nvrtc": list(nvrtc_version()), "kernels": kernels, "median": asdict(middle)},
        table(("kernel", "emit ms", "compile ms", "both ms", "cached ms"), rows),
    )
