"""``lngen verify`` and ``lngen pack``: packs that a build has made."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from lngen.cli.output import AnyPath, Output, note, output_options, table
from lngen.cli.shared_options import progress_bar
from lngen.compiler.devices import Device, device_for, device_names, named
from lngen.errors import short
from lngen.launch.kernels import Described
from lngen.launch.pack import Pack, image_for, lacking

# ---- verify ----


@click.command("verify", epilog="Example: lngen verify build")
@click.argument("folder", type=AnyPath(), metavar="DIR")
@output_options
@click.pass_context
def verify_command(ctx: click.Context, folder: Path, output: Output) -> None:
    """Check the hashes of a pack, and make again what this lngen and NVRTC made; exit 1 if anything differs."""
    from lngen.packs.verify import verify

    with progress_bar("compiling") as progress:
        found = verify(folder, progress=progress)
    for line in (*found.skipped, *(f"'{name}' is not in the manifest." for name in found.unlisted)):
        note(line)
    end = f"{len(found.faults) or 'no'} fault{'s' * (len(found.faults) > 1)}"
    rebuilt = f"{found.rebuilt} kernel set{'s' * (found.rebuilt != 1)} of the same launch data"
    lines = [f"{fault}\n" for fault in found.faults]
    lines.append(
        f"{found.files} files as listed, {found.recompiled} compiled again with the same bytes, {rebuilt}, {end}\n"
    )
    output.table({"ok": found.ok, **asdict(found)}, "".join(lines))
    if not found.ok:
        ctx.exit(1)


# ---- pack list ----


@click.group("pack", epilog="Example: lngen pack list build")
def pack_command() -> None:
    """What a pack has."""


@pack_command.command("list", epilog="Example: lngen pack list build --device h200")
@click.argument("folder", type=AnyPath(), metavar="DIR")
@click.option(
    "--device", metavar="NAME", help=f"Only what one GPU takes: {', '.join(device_names())}; by default all archs."
)
@click.option("--spec", metavar="SPEC", help="Only this spec.")
@output_options
def list_command(folder: Path, device: str | None, spec: str | None, output: Output) -> None:
    """Print which kernels a launcher takes: by spec, by GPU, by number of rows.

    Numbers of rows are for the GPU that represents an arch: they follow from bytes for each of its multiprocessors.
    Above each table is what the names of its kernel sets begin with.
    """
    from lngen.packs.hub import pack_folder

    pack = Pack(pack_folder(folder)).check()
    if spec is not None and spec not in pack.specs:
        raise click.UsageError(f"the pack '{folder}' does not have '{short(spec)}', but {', '.join(pack.specs)}.")
    wanted = [spec] if spec is not None else [*pack.specs]
    found = [row for text in wanted for row in _rows(pack, text, device)]
    output.table({"pack": found}, "\n".join(_text([r for r in found if r["spec"] == text]) for text in wanted))


def _text(rows: list[dict[str, Any]]) -> str:
    """The table of a spec; kernel sets are named without what all names of the spec begin with. Empty without rows."""
    if not rows:
        return ""
    columns = {"image": "image", "for": "gpu", "rows": "rows", "kernel set": "kernel_set"}
    columns |= {"otherwise": "otherwise"} if any(r["otherwise"] for r in rows) else {}
    start = "".join(rows[0]["kernel_set"].rpartition("__")[:2])
    cells = [
        [*((r[key] or "").removeprefix(start) for key in columns.values()), f"{r['bytes'] / 1e3:.0f} kB"] for r in rows
    ]
    heading = rows[0]["spec"] + (f": {start}..." if start else "")
    return f"{heading}\n{table([*columns, 'size'], cells)}"


def _rows(pack: Pack, spec: str, device: str | None) -> Iterator[dict[str, Any]]:
    """The lines of a spec: each image, each kernel set, the rows that it is for."""
    facts = pack.dispatch(spec)
    images = facts["images"]
    if device is not None:
        found = image_for(images, divmod(named(device).capability, 10))
        if found is None:
            note(f"{spec} has no image for {named(device).name}, which is {named(device).arch}.")
        images = [found] if found else []
    for image in images:
        gpu, classes = device_for(image["arch"]), image["classes"]
        if device is not None:
            gpu = named(device)
            lacks: dict[str, None] = {}
            classes = [_taken(pack, image["arch"], entry, gpu, lacks) for entry in classes]
            for line in lacks:
                note(line)
        for rows, entry in _by_rows(classes, gpu.multiprocessors, facts["row_bytes"]):
            yield {
                "spec": spec,
                "image": f"{image['arch']} {image['kind']}",
                "gpu": gpu.name,
                "rows": rows,
                "kernel_set": entry["kernel_set"],
                "file": entry["file"],
                "otherwise": entry["otherwise"] and entry["otherwise"]["kernel_set"],
                "bytes": pack.kernel_set(entry["kernel_set"])["files"][entry["file"]]["bytes"],
            }


def _taken(pack: Pack, arch: str, entry: Described, device: Device, lacks: dict[str, None]) -> Described:
    """A class with what a GPU takes of it: the kernel set, or the other one; else ``lacks`` gets a sentence."""
    other = entry["otherwise"]
    capability = divmod(device.capability, 10)
    needs = lacking(pack.kernel_set(entry["kernel_set"]), arch, capability, device.shared_block_kib * 1024)
    if not needs:
        return entry
    if other is None:
        lacks[f"'{entry['kernel_set']}' needs {needs}, which {device.name} does not have."] = None
        return entry
    return {**entry, **other, "otherwise": None}


def _by_rows(classes: list[Described], multiprocessors: int, row_bytes: int) -> Iterator[tuple[str, Described]]:
    """Classes in order, with their numbers of rows in words; neighbours with the same kernels are merged."""
    least = 0
    for entry, after in zip(classes, [*classes[1:], None], strict=True):
        most = entry["most_bytes"] * multiprocessors // row_bytes
        if after is None:
            yield (f"{least} and more" if least else "any"), entry
        elif most >= max(least, 1) and any(entry[key] != after[key] for key in ("file", "otherwise")):
            yield (f"{least} to {most}" if most > least else f"{least}"), entry
            least = most + 1
