"""``lngen check``: checks kernels."""

from __future__ import annotations

from dataclasses import asdict

import click

from lngen.check.check import check_spec
from lngen.check.result import Result
from lngen.cli.common import Decimal, Whole, arch_option, on_option, progress_bar
from lngen.cli.output import Output, note, output_options
from lngen.cli.tables import table
from lngen.spec import parse_spec


@click.command(epilog="Example: lngen check layernorm.bwd:d=4096,dtype=bf16 --rows 0,1,133 --schedules 4")
@click.argument("specs", metavar="SPEC...", nargs=-1)
@on_option("Run the kernels on a GPU, or their PTX on NumPy; auto is a GPU if there is one.")
@click.option(
    "--rows", default="0,1,3,133", show_default=True, metavar="M,...", type=Whole(listed=True), help="Counts."
)
@click.option("--schedules", type=Whole(1, 1000), default=1, show_default=True, help="Number of schedules to check.")
@arch_option("The one arch to compile for where there is no GPU.")
@click.option("--matrix", is_flag=True, help="Instead of SPECs: the whole grid of specs and rows, on a GPU.")
@click.option("--budget", type=Decimal(), default=480.0, show_default=True, help="With --matrix: seconds.")
@click.option("--processes", type=Whole(1, 1024), default=8, show_default=True, help="With --matrix.")
@output_options
@click.pass_context
def command(
    ctx: click.Context,
    specs: tuple[str, ...],
    on: str,
    rows: tuple[int, ...],
    schedules: int,
    arches: tuple[str, ...],
    matrix: bool,
    budget: float,
    processes: int,
    output: Output,
) -> None:
    """Check each SPEC: errors against the oracles, compilation, every bit against the interpreter.

    Kernels run on a GPU if there is one; else their PTX is executed on NumPy, which also finds wrong accesses,
    races and missing barriers. Exits 1 if anything fails.
    """
    if matrix == bool(specs):
        raise click.UsageError("check takes SPECs or --matrix, one of the two.")
    if matrix:
        ctx.exit(_matrix(output, schedules, processes, budget))
    if len(arches) > 1:
        raise click.UsageError(f"check takes one --arch, got {', '.join(arches)}.")
    parsed = [parse_spec(text) for text in specs]
    results: list[Result] = []
    with progress_bar("checking") as progress:
        for done, spec in enumerate(parsed):
            if progress:
                progress(done, len(parsed))
            results += check_spec(spec, on=on, rows=rows, schedules=schedules, arch=arches[0])
    failed = sum(not r.ok for r in results)
    rows_shown = [
        ("ok" if r.ok else "FAIL", r.what, "-" if r.rows is None else r.rows, r.spec, r.schedule, r.detail)
        for r in results
    ]
    output.table(
        {"passed": len(results) - failed, "failed": failed, "results": [asdict(r) for r in results]},
        table(("", "what", "rows", "spec", "schedule", "detail"), rows_shown)
        + f"{len(results) - failed} checks passed, {failed} failed\n",
    )
    if failed:
        ctx.exit(1)


def _matrix(output: Output, schedules: int, processes: int, budget: float) -> int:
    """The bit matrix: a table of its totals; the JSON also has its entries."""
    from lngen.check import matrix

    entries: list[matrix.Entry] = []
    conditions = matrix.conditions()
    listed = list(matrix.specs())
    with progress_bar("specs") as progress:
        for entry in matrix.run_matrix(listed, schedules=max(5, schedules), processes=processes, budget=budget):
            entries.append(entry)
            if progress:
                progress(len(entries), len(listed))
            for text in entry.notes:
                note(f"{entry.spec}: {text}")
    totals = {k: v for k, v in matrix.summary(entries).items() if k != "entries"}
    not_reached = totals["not_reached"]
    shown = {**totals, "not_reached": len(not_reached)}
    output.table(matrix.to_json(entries, conditions), table(("what", "number"), shown.items()))
    return 1 if totals["numbers_that_differ"] or not_reached else 0
