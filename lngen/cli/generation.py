"""``lngen build`` and ``lngen generated``: kernels that are written to a folder."""

import statistics
from pathlib import Path
from typing import Any

import click

from lngen.cli.output import AnyPath, Output, json_option, note, output_options, table
from lngen.cli.shared_options import dask_executor, dask_option, device_option, progress_bar, schedule_option
from lngen.compiler.devices import DEFAULT_ARCH, named
from lngen.compiler.toolchain import nvrtc_version
from lngen.config import data_dir
from lngen.packs.build import DEFAULT_KINDS, KINDS, LAYOUTS, build
from lngen.packs.catalog import CATALOG, differences, measure, rewrite

# ---- build: kernels of any specs, with a manifest ----


@click.command(
    "build",
    epilog="Example: lngen build layernorm.fwd:d=4096,dtype=bf16 --arch sm_80,sm_90+ptx --rows 1,4096,many --out build",
)
@click.argument("specs", metavar="SPEC...", nargs=-1)
@click.option(
    "--arch", "arches", default=DEFAULT_ARCH, show_default=True, metavar="SM,...",
    help="Targets, each with its own best schedules; with sm_90+ptx, newer GPUs run the PTX of sm_90.",
)  # fmt: skip
@click.option("--rows", default="many", show_default=True, metavar="M,...", help="Numbers of rows, 'many', or 'all'.")
@device_option
@click.option(
    "--emit", metavar="KIND,...",
    help=f"Files to write, of {', '.join(KINDS)}; by default {','.join(DEFAULT_KINDS)}, in a hub package cubin. With "
    "cu alone nothing is compiled.",
)  # fmt: skip
@click.option("--out", "folder", required=True, type=AnyPath(), metavar="DIR", help="The folder to write to.")
@schedule_option
@click.option("--lock", type=AnyPath(), metavar="FILE", help="A lock file with tuned schedules.")
@click.option("--trace", type=AnyPath(), metavar="DIR", help="Also what the trace files of FlashInfer in DIR call.")
@click.option(
    "--layout", default=LAYOUTS[0], show_default=True, metavar="NAME",
    help=f"Of {', '.join(LAYOUTS)}: a hub package, which Hugging Face kernels loads.",
)  # fmt: skip
@click.option("--embed", is_flag=True, help="The C library (--emit c) has the kernels inside and needs no other file.")
@click.option("--bundle", is_flag=True, help="Sources stand alone, without headers beside them.")
@dask_option
@json_option
def build_command(
    specs: tuple[str, ...],
    arches: str,
    device: str | None,
    folder: Path,
    dask: str | None,
    output: Output,
    **options: Any,  # of ``build``, by their names there
) -> None:
    """Generate a pack: kernels of each SPEC, for every arch and class of rows, with a manifest.json.

    NAME.cu, NAME.ARCH.ptx, NAME.ARCH.cubin: NAME spells the spec and the schedule. The same request gives the same
    bytes. Everything is compiled before anything is written. A folder with a pack is added to: what has the same spec,
    arch and rows is replaced, nothing else changes, no file is deleted.
    """
    if not specs and options["trace"] is None:
        raise click.UsageError("Missing argument 'SPEC...': name a spec.")
    if device is not None and arches == DEFAULT_ARCH:
        arches = named(device).arch
    with dask_executor(dask) as executor, progress_bar("compiling") as progress:
        built = build(specs, folder, arch=arches, device=device, progress=progress, executor=executor, **options)
    for line in (*built.notes, *built.replaced):
        note(line)
    sets = [built.manifest.kernel_sets[name] for name in sorted(built.manifest.kernel_sets)]
    output.table(
        {"folder": str(built.folder), "specs": built.manifest.specs, "kernel_sets": sets, "files": list(built.files)},
        "".join(f"{folder / n}\n" for n in built.files),
    )


# ---- generated: the golden set ----


@click.command("generated", epilog="Example: lngen generated --check")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if a file is stale, missing or superfluous.")
@click.option(
    "--dir", "folder", type=AnyPath(), metavar="DIR", help="The folder of the set; by default that of the installation."
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
@click.option(
    "--sass",
    is_flag=True,
    help="Instead of the kernels the record of their instructions, for this build of the compiler.",
)
@output_options
@click.pass_context
def generated_command(
    ctx: click.Context, check: bool, folder: Path | None, timed: bool, against: Path | None, sass: bool, output: Output
) -> None:
    """Rewrite, or verify, the golden set: generated kernels that people read in review.

    Each kernel is one spec with one schedule, both fixed: no GPU and, except for --time and --sass, no compiler is
    needed. --sass also exits 1 for a kernel without loads of 16 bytes where its rows allow them, or with local memory;
    with --check, for one with more instructions than are recorded.
    """
    if sass:
        if folder or timed or against:
            raise click.UsageError("--sass goes with --check alone.")
        ctx.exit(_sass(output, check))
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


def _sass(output: Output, check: bool) -> int:
    """Compile and lint the golden set; the exit code. Another build of the compiler than the recorded ones is noted."""
    from lngen.lab.inspect.sass_lint import above, build, golden, record, recorded

    file = data_dir("generated") / "sass-budget.json"
    faults, numbers = golden()
    most = recorded(file).get(build())
    if not check:
        record(file, numbers)
    elif most is None:
        note(f"NVRTC {build()} is not recorded, so that no number of instructions is judged; lngen generated --sass.")
    else:
        faults += above(numbers, most)
    data = {"nvrtc": build(), "recorded": most is not None, "kernels": numbers, "faults": faults}
    output.table(data, "".join(f"{line}\n" for line in (*faults, f"{len(numbers)} kernels, {len(faults)} faults")))
    return 1 if faults else 0


TIMES = {
    "emit_ms": "emit ms", "compile_ms": "compile ms", "total_ms": "both ms", "cached_ms": "cached ms",
    "against_ms": "against ms", "ratio": "ratio",
}  # fmt: skip


def _time(output: Output, against: Path | None) -> None:
    """Print the times of each kernel, compiled anew for the default arch, with their total and median."""
    kernels = dict(measure(DEFAULT_ARCH, against))
    found = {**kernels}
    for name, how in (("total", sum), ("median", statistics.median)):
        found[name] = {key: how([times[key] for times in kernels.values()]) for key in next(iter(kernels.values()))}
    for times in found.values() if against else ():
        times["ratio"] = times["compile_ms"] / times["against_ms"]
    rounded = {name: {key: round(number, 3) for key, number in times.items()} for name, times in found.items()}
    listed = [{"kernel": name, **rounded[name]} for name in kernels]
    data = {"arch": DEFAULT_ARCH, "nvrtc": list(nvrtc_version()), "kernels": listed}
    rows = [
        [name, *(f"{n:.2f}" if key == "ratio" else f"{n:.1f}" for key, n in times.items())]
        for name, times in found.items()
    ]
    columns = ["kernel", *(TIMES[key] for key in found["total"])]
    output.table({**data, "total": rounded["total"], "median": rounded["median"]}, table(columns, rows))
