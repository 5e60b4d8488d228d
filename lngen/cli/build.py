"""``lngen build``: kernels ahead of time."""

from __future__ import annotations

from pathlib import Path

import click

from lngen.aot.build import KINDS, build
from lngen.aot.plans import plan_for
from lngen.cli.cluster import dask_executor, dask_option
from lngen.cli.common import arch_option, progress_bar, rows_option, schedule_option, words
from lngen.cli.output import Output, json_option, note
from lngen.lower import Plan, lower
from lngen.runtime.lock import Lock, read_lock
from lngen.schedule import parse_schedule
from lngen.spec import parse_spec
from lngen.version import __version__


@click.command(epilog="Example: lngen build layernorm.fwd:d=4096,dtype=bf16 --arch sm_80,sm_90 --out build")
@click.argument("specs", metavar="SPEC...", nargs=-1, required=True)
@arch_option("Targets of ptx and cubin; the default schedule is one for all of them.")
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
@click.option(
    "--lock", "lock_file", type=click.Path(path_type=Path), metavar="FILE", help="Take tuned schedules from it."
)
@rows_option
@dask_option
@json_option
def command(
    specs: tuple[str, ...],
    arches: tuple[str, ...],
    kinds: tuple[str, ...],
    folder: Path,
    schedule: str,
    lock_file: Path | None,
    rows: int | None,
    dask: str | None,
    output: Output,
) -> None:
    """Generate the kernels of each SPEC into a folder, with a manifest.json that says how to launch them.

    NAME.cu, NAME.ARCH.ptx, NAME.ARCH.cubin: NAME spells the spec and the schedule. The same request gives the
    same bytes. Everything is compiled before anything is written. In a folder with a manifest, kernels of the
    same NAME are replaced and all others stay.
    """
    lock = read_lock(lock_file) if lock_file else Lock()
    plans = [_plan(text, schedule, arches, lock, rows) for text in specs]
    with dask_executor(dask) as executor, progress_bar("compiling") as progress:
        built = build(
            plans, folder, arches=arches, version=__version__, kinds=kinds, progress=progress, executor=executor
        )
    for text in built.notes:
        note(text)
    output.table(
        {"folder": str(built.folder), "kernel_sets": built.entries}, "".join(f"{folder / n}\n" for n in built.files)
    )


def _plan(text: str, schedule: str, arches: tuple[str, ...], lock: Lock, rows: int | None) -> Plan:
    """The plan of a spec: its locked schedule on the first arch, or its default, changed as ``schedule`` says."""
    spec = parse_spec(text)
    locked = lock.schedule(spec, rows, arch=arches[0])
    if locked is not None:
        return lower(spec, parse_schedule(schedule, locked))
    if lock.entries:
        note(f"{spec} is not in '{lock.path}' for {arches[0]}; its default schedule is built.")
    return plan_for(spec, schedule, *arches, rows=rows)
