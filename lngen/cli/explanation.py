"""``lngen explain``: why a kernel is what it is; ``lngen repro``: the kernel as one file that can be sent to anyone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lngen.cli.output import AnyPath, Output, output_options, stage_options, unwritable
from lngen.cli.shared_options import (
    Whole,
    arch_option,
    device_option,
    one_arch,
    progress_bar,
    rows_option,
    schedule_option,
    split,
    target,
)
from lngen.compiler.compile import Compilation
from lngen.compiler.devices import DEFAULT_ARCH, device_for
from lngen.compiler.problem import check_arch
from lngen.compiler.spec import parse_spec
from lngen.files import write_all

if TYPE_CHECKING:
    from lngen.lab.explain import Subject

# ---- explain ----

SECTIONS = ("derivation", "stability", "cost", "fusion", "schedule")


@click.command("explain", epilog="Example: lngen explain layernorm.bwd:d=4096,dtype=bf16 --rows 8192")
@click.argument("spec", required=False)
@click.option("--only", metavar="SECTION,...", help=f"Some of the sections: {', '.join(SECTIONS)}.")
@click.option("--why-not", metavar="K=V,...", help="Only why this change of the schedule was not chosen.")
@schedule_option
@rows_option
@arch_option("Target, one.")
@device_option
@click.option("--html", type=AnyPath(), metavar="FILE", help="Write a page to this file instead; with --all, a folder.")
@click.option("--all", "every", is_flag=True, help="With --html: a page of each golden kernel, and an index.")
@click.option(
    "--compare", "compared", multiple=True, metavar="TEXT",
    help="With --html: also show the kernels of other K=V,..., of another arch, or of a pack in a folder; repeatable.",
)  # fmt: skip
@output_options
def explain_command(
    spec: str | None,
    only: str | None,
    why_not: str | None,
    schedule: str,
    rows: int | None,
    arches: tuple[str, ...],
    device: str | None,
    html: Path | None,
    every: bool,
    compared: tuple[str, ...],
    output: Output,
) -> None:
    """Explain SPEC: how its equations were derived, where digits can be lost, what it costs, why it is one kernel, and
    why its schedule was chosen.
    """
    from lngen.lab.explain import explain
    from lngen.lab.explain.reasons import why_not as answer

    names = _sections(only, why_not)
    changed = arches != (DEFAULT_ARCH,) or any((spec, compared, only, why_not, schedule, rows, device))
    _check_pages(spec, html, every, changed, compared)
    if html is not None and every:
        from lngen.lab.explain.page import golden_pages

        with progress_bar("explaining") as progress:
            return _write({html / name: text for name, text in golden_pages(progress)}, output)
    subject, arch = _subject(spec or "", schedule, rows, arches, device)
    sections = explain(subject, names) if why_not is None else (answer(subject, why_not),)
    if html is not None:
        from lngen.lab.explain.page import built, page, version

        others = [version(subject, arch, other) for other in compared]
        return _write({html: page(subject, sections, built(subject.kernels, arch), others)}, output)
    about = {"spec": str(subject.plan.spec), "schedule": str(subject.schedule), "rows": subject.rows}
    about["device"] = subject.device.name
    text = "\n".join([f"{about['spec']}\n{about['schedule']}\n", *map(str, sections)])
    output.table(about | {s.name: dict(s.data) for s in sections}, text)


def _subject(
    spec: str, schedule: str, rows: int | None, arches: tuple[str, ...], device: str | None
) -> tuple[Subject, str]:
    """What is explained, and the arch of its machine code."""
    from lngen.lab.explain import Subject

    arches, gpu = target(arches, device)
    arch, compilation = one_arch("explain", arches), Compilation(parse_spec(spec))
    kernels = compilation.changed(schedule, arch, rows=rows, device=gpu, compiled=False)
    check_arch(kernels.plan.schedule, arch)
    return Subject(compilation, kernels, gpu or device_for(arch), rows, schedule), arch


def _sections(only: str | None, why_not: str | None) -> tuple[str, ...]:
    """The sections that are asked for; UsageError for one that does not exist, or beside --why-not."""
    if only is not None and why_not is not None:
        raise click.UsageError("--why-not answers alone; leave --only out.")
    names = split(only) if only is not None else SECTIONS
    unknown = next((n for n in names if n not in SECTIONS), None)
    if unknown is not None or not names:
        raise click.UsageError(f"--only expects some of {', '.join(SECTIONS)}, got '{unknown or only}'.")
    return names


def _check_pages(spec: str | None, html: Path | None, every: bool, changed: bool, compared: tuple[str, ...]) -> None:
    """UsageError for options that do not go together, or a page that cannot be written."""
    if every and (changed or html is None):
        raise click.UsageError("--all takes --html DIR alone: the specs and schedules of the golden set are fixed.")
    if not every and not spec:
        raise click.UsageError("Missing argument 'SPEC': name a spec, or add --all --html DIR.")
    if compared and html is None:
        raise click.UsageError("--compare is shown on a page; add --html FILE.")
    why = unwritable(html / "index.html" if every else html) if html else None
    if why is not None:
        more = "; a folder takes --all" if html and html.is_dir() else ""
        raise click.UsageError(f"--html '{html}' cannot be written: {why}; name a place that can be written to{more}.")


def _write(pages: Mapping[Path, str], output: Output) -> None:
    write_all({path: text.encode() for path, text in pages.items()})
    sizes = {str(path): len(text.encode()) for path, text in pages.items()}
    output.table({"files": sizes}, "".join(f"{path}, {bytes_ // 1000} kB\n" for path, bytes_ in sizes.items()))


# ---- repro ----

ROWS, ELEMENTS = 1024, 2**22


@click.command("repro", epilog="Example: lngen repro layernorm.bwd:d=4096,dtype=bf16 --rows 512 --out repro.py")
@click.argument("spec")
@click.option("--rows", type=Whole(1), metavar="M", help=f"Of the call; by default {ROWS}, fewer if they are long.")
@click.option("--seed", type=Whole(), metavar="N", default=0, show_default=True, help="Of the inputs.")
@schedule_option
@arch_option("Target, one.")
@device_option
@stage_options
def repro_command(
    spec: str, rows: int | None, seed: int, schedule: str, arches: tuple[str, ...], device: str | None, output: Output
) -> None:
    """Print a Python file that launches the kernels of SPEC on a GPU, compares all bits, and times them.

    It has their CUDA text and machine code, a generator of inputs, and the sha256 of each result; it needs NumPy alone.
    """
    from lngen.packs.repro import repro

    arches, gpu = target(arches, device)
    arch, compilation = one_arch("repro", arches), Compilation(parse_spec(spec))
    rows = rows or max(1, min(ROWS, ELEMENTS // compilation.spec.d))
    kernels = compilation.changed(schedule, arch, rows=rows, device=gpu)
    text = repro(kernels, arch, gpu or device_for(arch), rows, seed)
    about = {"spec": str(compilation.spec), "schedule": str(kernels.plan.schedule), "arch": arch, "rows": rows}
    output.stage({**about, "text": text}, text, "python")
