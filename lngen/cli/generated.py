"""``lngen generated``: the golden set of kernels."""

from __future__ import annotations

import statistics
from dataclasses import asdict, astuple
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lngen.aot.catalog import CATALOG, differences, rewrite
from lngen.cli.output import AnyPath, Output, output_options
from lngen.cli.tables import table
from lngen.data import data_dir
from lngen.devices import DEFAULT_ARCH
from lngen.toolchain import nvrtc_version

if TYPE_CHECKING:
    from lngen.aot.times import Times


@click.command(epilog="Example: lngen generated --check")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if a file is stale, missing or superfluous.")
@click.option(
    "--dir",
    "folder",
    type=AnyPath(),
    metavar="DIR",
    help="The folder of the set; by default that of the installation.",
)
@click.option(
    "--time", "timed", is_flag=True, help="Write nothing; print the times to emit and to compile each kernel."
)
@click.option(
    "--against",
    type=AnyPath(exists=True, file_okay=False),
    metavar="DIR",
    help="With --time: compile the golden set in DIR in turn with this one and print the ratio of the times.",
)
@output_options
@click.pass_context
def command(
    ctx: click.Context, check: bool, folder: Path | None, timed: bool, against: Path | None, output: Output
) -> None:
    """Rewrite, or verify, the golden set: generated kernels that people read in review.

    Each kernel is one spec with one schedule, both fixed: no GPU and, except for --time, no compiler is needed.
    """
    if timed:
        if check or folder:
            raise click.UsageError("--time goes with neither --check nor --dir.")
        _time(output, against)
        return
    if against:
        raise click.UsageError("--against goes with --time alone.")
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


def _time(output: Output, against: Path | None) -> None:
    """Print the times of each kernel, compiled anew for the default arch, with their total and median."""
    from lngen.aot.times import combined, measure

    found = dict(measure(DEFAULT_ARCH, against))
    total, middle = (combined([*found.values()], how) for how in (sum, statistics.median))
    named = {**found, "total": total, "median": middle}
    columns = ["kernel", "emit ms", "compile ms", "both ms", "cached ms"]
    columns += ["against ms", "ratio"] if against else []
    output.table(
        {
            "arch": DEFAULT_ARCH,
            "nvrtc": list(nvrtc_version()),
            "kernels": [{"kernel": name, **_fields(times)} for name, times in found.items()],
            "total": _fields(total),
            "median": _fields(middle),
        },
        table(columns, [_row(name, times) for name, times in named.items()]),
    )


def _fields(times: Times) -> dict[str, float]:
    """The times of a row of the JSON, to the microsecond, and the ratio if there is one."""
    found = {name: round(ms, 3) for name, ms in asdict(times).items() if ms is not None}
    return found | ({"ratio": round(times.compile_ms / times.against_ms, 3)} if times.against_ms else {})


def _row(name: str, times: Times) -> list[str]:
    cells = [f"{ms:.1f}" for ms in astuple(times) if ms is not None]
    return [name, *cells, *([f"{times.compile_ms / times.against_ms:.2f}"] if times.against_ms else [])]
