"""``lngen build``: generates kernels ahead of time."""

from __future__ import annotations

from pathlib import Path

import click

from lngen.aot.build import KINDS, build
from lngen.cli.cluster import dask_executor, dask_option
from lngen.cli.common import arch_option, device_option, progress_bar, rows_option, schedule_option, target, words
from lngen.cli.output import AnyPath, Output, json_option, note
from lngen.compile import Compilation, KernelSet
from lngen.devices import Device, oldest_first
from lngen.runtime.lock_file import Lock, read_lock
from lngen.schedule import ANY, Schedule, complete, parse_schedule
from lngen.spec import parse_spec
from lngen.version import __version__


@click.command(epilog="Example: lngen build layernorm.fwd:d=4096,dtype=bf16 --arch sm_80,sm_90 --out build")
@click.argument("specs", metavar="SPEC...", nargs=-1, required=True)
@arch_option("Targets of ptx and cubin; one default schedule fits all of them.")
@device_option
@click.option(
    "--emit",
    "kinds",
    default=",".join(KINDS),
    show_default=True,
    metavar="KIND,...",
    callback=words,
    help="Files to write; with cu alone nothing is compiled.",
)
@click.option("--out", "folder", required=True, type=AnyPath(), metavar="DIR", help="Where to.")
@schedule_option
@click.option("--lock", "lock_file", type=AnyPath(), metavar="FILE", help="A lock file with tuned schedules.")
@rows_option
@dask_option
@json_option
def command(
    specs: tuple[str, ...],
    arches: tuple[str, ...],
    device: str | None,
    kinds: tuple[str, ...],
    folder: Path,
    schedule: str,
    lock_file: Path | None,
    rows: int | None,
    dask: str | None,
    output: Output,
) -> None:
    """Generate the kernels of each SPEC into a folder, with a manifest.json that says how to launch them.

    NAME.cu, NAME.ARCH.ptx, NAME.ARCH.cubin: NAME encodes the spec and the schedule. The same request gives the
    same bytes. Everything is compiled before anything is written. In a folder with a manifest, kernels of the
    same NAME are replaced and all others are kept; a build that would take an arch or a kind from one is refused.
    """
    lock = read_lock(lock_file) if lock_file else Lock()
    arches, gpu = target(oldest_first(arches), device)
    sets = [_kernels(text, schedule, arches, lock, rows, gpu) for text in specs]
    with dask_executor(dask) as executor, progress_bar("compiling") as progress:
        built = build(
            sets, folder, arches=arches, version=__version__, kinds=kinds, progress=progress, executor=executor
        )
    output.table(
        {"folder": str(built.folder), "kernel_sets": built.entries}, "".join(f"{folder / n}\n" for n in built.files)
    )


def _kernels(
    text: str, schedule: str, arches: tuple[str, ...], lock: Lock, rows: int | None, gpu: Device | None
) -> KernelSet:
    """The kernels of a spec: its locked schedule on the oldest arch, or its default, changed by ``schedule``."""
    compilation = Compilation(parse_spec(text))
    made = _schedule(compilation, schedule, arches, lock, rows, gpu)
    if lock.entries and lock.schedule(compilation, rows, arch=arches[0]) is None:
        note(f"{compilation.spec} is not in '{lock.path}' for {arches[0]}; its default schedule is built.")
    others = [a for a in arches if len(arches) > 1 and _schedule(compilation, schedule, (a,), lock, rows, gpu) != made]
    if others:
        note(
            f"{compilation.spec}: the one schedule for {', '.join(arches)} is not the best for {', '.join(others)}; "
            "build each arch alone, into a folder of its own, to give each its best."
        )
    return compilation.kernels(made)


def _schedule(
    compilation: Compilation, text: str, arches: tuple[str, ...], lock: Lock, rows: int | None, gpu: Device | None
) -> Schedule:
    """The locked schedule on the first arch, or the default on all of them, changed by ``text``."""
    base = lock.schedule(compilation, rows, arch=arches[0])
    if base is None:
        base = ANY if complete(text) else compilation.schedule(*arches, rows=rows, device=gpu)
    return parse_schedule(text, base)
