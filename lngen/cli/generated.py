"""``lngen generated``: the golden set of kernels."""

from __future__ import annotations

from dataclasses import asdict, astuple
from pathlib import Path

import click

from lngen.aot.catalog import CATALOG, differences, rewrite
from lngen.cli.common import json_option, print_json, print_table
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
@json_option
@click.pass_context
def command(ctx: click.Context, check: bool, folder: Path | None, timed: bool, as_json: bool) -> None:
    """Rewrite, or verify, the kernels that lngen generated and people read in review.

    Each is one spec under one schedule, both written down: neither a GPU nor, but for --time, a compiler is needed.
    """
    if timed:
        if check or folder:
            raise click.UsageError("--time goes with neither --check nor --dir.")
        _time(as_json)
        return
    folder = folder or data_dir("generated") / "kernels"
    found = differences(folder)
    if not check:
        rewrite(folder)
    if as_json:
        print_json({"kernels": len(CATALOG), "differences": [{"file": n, "what": w} for n, w in found.items()]})
    else:
        for name, what in found.items():
            click.echo(f"{what:<11} {name}")
        verb = "differ" if check else "rewritten or removed"
        click.echo(f"{len(CATALOG)} kernels, {len(found)} {verb}")
    if check and found:
        ctx.exit(1)


def _time(as_json: bool) -> None:
    """The table of times, compiled anew for the default arch, and the medians."""
    from lngen.aot.times import measure, median

    found = dict(measure(DEFAULT_ARCH))
    middle = median([*found.values()])
    if as_json:
        kernels = [{"kernel": name, **asdict(times)} for name, times in found.items()]
        print_json({"arch": DEFAULT_ARCH, "nvrtc": list(nvrtc_version()), "kernels": kernels, "median": asdict(middle)})
        return
    columns = ("kernel", "emit ms", "compile ms", "both ms", "cached ms")
    rows = {**found, "median": middle}
    print_table(columns, [(name, *(f"{ms:.1f}" for ms in astuple(times))) for name, times in rows.items()])
