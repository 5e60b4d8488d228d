"""``lngen build``: kernels ahead of time."""

from __future__ import annotations

from pathlib import Path

import click

from lngen.aot.build import KINDS, build
from lngen.aot.plans import plan_for
from lngen.cli.common import arch_option, json_option, print_json, progress_bar, schedule_option, words
from lngen.spec import parse_spec
from lngen.version import __version__


@click.command(epilog="Example: lngen build layernorm.fwd:d=4096,dtype=bf16 --arch sm_80,sm_90 --out build")
@click.argument("specs", metavar="SPEC...", nargs=-1, required=True)
@arch_option("Targets of ptx and cubin; the default schedule is that of the first.")
@click.option(
    "--emit",
    "kinds",
    default=",".join(KINDS),
    show_default=True,
    metavar="KIND,...",
    callback=words,
    help="Files to write; with cu alone nothing is compiled.",
)
@click.option("--out", "folder", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Where to.")
@schedule_option
@json_option
def command(
    specs: tuple[str, ...],
    arches: tuple[str, ...],
    kinds: tuple[str, ...],
    folder: Path,
    schedule: str,
    as_json: bool,
) -> None:
    """Generate the kernels of each SPEC into a folder, with a manifest.json that says how to launch them.

    NAME.cu, NAME.ARCH.ptx, NAME.ARCH.cubin: NAME spells the spec and the schedule. The same request gives the
    same bytes. Everything is compiled before anything is written. In a folder with a manifest, kernels of the
    same NAME are replaced and all others stay.
    """
    plans = [plan_for(parse_spec(text), schedule, arches[0]) for text in specs]
    with progress_bar("compiling") as progress:
        built = build(plans, folder, arches=arches, version=__version__, kinds=kinds, progress=progress)
    if as_json:
        print_json({"folder": str(built.folder), "kernel_sets": built.entries})
        return
    for name in built.files:
        click.echo(folder / name)
