"""``lngen build`` and ``lngen generated``: kernels that are written to a folder."""

from __future__ import annotations

import statistics
from dataclasses import asdict, astuple
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lngen.aot.build import KINDS, build
from lngen.aot.catalog import CATALOG, differences, rewrite
from lngen.cli.output import AnyPath, Output, json_option, note, output_options, table
from lngen.cli.shared_options import (
    arch_option,
    dask_executor,
    dask_option,
    device_option,
    progress_bar,
    rows_option,
    schedule_option,
    target,
    words,
)
from lngen.compile import Compilation, KernelSet
from lngen.config import data_dir
from lngen.devices import DEFAULT_ARCH, Device, oldest_first
from lngen.problem import ANY, Schedule, complete, parse_schedule
from lngen.runtime.lock_file import Lock, read_lock
from lngen.spec import parse_spec
from lngen.toolchain import nvrtc_version
from lngen.version import __version__

if TYPE_CHECKING:
    from lngen.aot.times import Times

# ---- build: kernels of any specs, with a manifest ----


@click.command("build", epilog="Example: lngen build layernorm.fwd:d=4096,dtype=bf16 --arch sm_80,sm_90 --out build")
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
@click.option("--out", "folder", required=True, type=AnyPath(), metavar="DIR", help="The folder to write to.")
@schedule_option
@click.option("--lock", "lock_file", type=AnyPath(), metavar="FILE", help="A lock file with tuned schedules.")
@rows_option
@dask_option
@json_option
def build_command(
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


# ---- generated: the golden set ----


@click.command("generated", epilog="Example: lngen generated --check")
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
def generated_command(
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
