"""``lngen generated``: the golden set of kernels."""

from __future__ import annotations

from pathlib import Path

import click

from lngen.aot.catalog import CATALOG, differences, rewrite
from lngen.cli.common import json_option, print_json
from lngen.data import data_dir


@click.command(epilog="Example: lngen generated --check")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if a file is stale, missing or superfluous.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The folder of the set; by default the one lngen comes with.",
)
@json_option
@click.pass_context
def command(ctx: click.Context, check: bool, folder: Path | None, as_json: bool) -> None:
    """Rewrite, or verify, the kernels that lngen generated and people read in review.

    Each is one spec under one schedule, both written down: neither a GPU nor a compiler is needed.
    """
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
