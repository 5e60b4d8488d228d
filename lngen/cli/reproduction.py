"""``lngen repro``: a kernel as one file that can be sent to anyone."""

from __future__ import annotations

import click

from lngen.cli.output import Output, stage_options
from lngen.cli.shared_options import Whole, arch_option, device_option, schedule_option, target
from lngen.compile import Compilation
from lngen.devices import device_for
from lngen.spec import parse_spec

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
    from lngen.aot.repro import repro

    arches, gpu = target(arches, device)
    if len(arches) > 1:
        raise click.UsageError(f"repro takes one --arch, got {', '.join(arches)}.")
    compilation = Compilation(parse_spec(spec))
    rows = rows or max(1, min(ROWS, ELEMENTS // compilation.spec.d))
    kernels = compilation.changed(schedule, *arches, rows=rows, device=gpu)
    text = repro(kernels, arches[0], gpu or device_for(arches[0]), rows, seed)
    about = {"spec": str(compilation.spec), "schedule": str(kernels.plan.schedule), "arch": arches[0], "rows": rows}
    output.stage({**about, "text": text}, text, "python")
