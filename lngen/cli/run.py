"""``lngen run``: applies a kernel to files."""

from __future__ import annotations

from pathlib import Path

import click

from lngen.cli.common import on_option, overlap_option, schedule_option
from lngen.cli.npy import as_file, load_inputs, parse_files
from lngen.cli.output import unwritable
from lngen.compile import Compilation
from lngen.devices import DEFAULT_ARCH
from lngen.errors import ArrayError, CheckError
from lngen.files import write_all
from lngen.interpret import interpret
from lngen.ptx import run_plan
from lngen.runtime.launch import device_arch, device_count
from lngen.runtime.numpy_arrays import run_numpy
from lngen.spec import parse_spec


@click.command(epilog="Example: lngen run rmsnorm.fwd:d=768 --in x=x.npy,gamma=gamma.npy --out y=y.npy,rstd=rstd.npy")
@click.argument("spec")
@click.option("--in", "inputs", multiple=True, required=True, metavar="NAME=FILE,...", help="Every input, by name.")
@click.option("--out", "outputs", multiple=True, required=True, metavar="NAME=FILE,...", help="The results to write.")
@on_option(
    "Compute on a GPU, with the kernels' PTX on NumPy, or with the interpreter; auto: a GPU if there is one, else the "
    "interpreter. The bits are the same."
)
@schedule_option
@overlap_option("On a GPU, let the kernel start while the kernel before it on the stream ends.")
def command(
    spec: str, inputs: tuple[str, ...], outputs: tuple[str, ...], on: str, schedule: str, overlap: bool
) -> None:
    """Compute SPEC from .npy files to .npy files.

    Names are the graph's (lngen list; lngen show SPEC --stage graph). bfloat16 is stored as uint16, the upper
    half of a float32: in NumPy a.view(ml_dtypes.bfloat16). x may have any leading dimensions, (..., D), and
    results have the same. Only the results named by --out are written, each file whole or not at all.
    """
    parsed = parse_spec(spec)
    compilation = Compilation(parsed)
    graph = compilation.graph
    targets = parse_files(outputs, "--out", [r.name for r in graph.results])
    _check_targets(targets)
    arrays, leading = load_inputs(parsed, parse_files(inputs, "--in", [p.name for p in graph.params]))
    if on == "gpu" or (on == "auto" and device_count() > 0):
        results = run_numpy(compilation.changed(schedule, device_arch(0)), arrays, overlap=overlap)
    elif on == "ptx":
        kernels = compilation.changed(schedule, DEFAULT_ARCH)
        text, ptx = kernels.text, kernels.ptx(DEFAULT_ARCH, lines=True)
        outcome = run_plan(kernels.plan, arrays, source=text, ptx=ptx, arch=DEFAULT_ARCH)
        if outcome.findings:
            raise CheckError(str(outcome.findings[0]))
        results = outcome.results
    else:
        if schedule:
            compilation.changed(schedule, DEFAULT_ARCH)  # an illegal schedule is refused here as well
        results = interpret(graph, arrays)
    write_all({targets[r.name]: as_file(r, results[r.name], leading) for r in graph.results if r.name in targets})


def _check_targets(targets: dict[str, Path]) -> None:
    """Before any work: ArrayError if two results go to one file, or the folder of a file does not exist."""
    for name, path in targets.items():
        if not path.parent.is_dir():
            raise ArrayError(f"--out: '{name}' cannot be written to '{path}': there is no folder '{path.parent}'.")
        if (why := unwritable(path)) is not None:
            raise ArrayError(f"--out: cannot write '{name}' to '{path}': {why}.")
    if len({p.resolve() for p in targets.values()}) < len(targets):
        raise ArrayError("--out: two results are given the same file.")
