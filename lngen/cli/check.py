"""``lngen check``: is a kernel right?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from lngen.check.check import check_spec
from lngen.check.result import Result
from lngen.cli.common import arch_option, json_option, on_option, print_json, print_table, progress_bar, words
from lngen.spec import parse_spec


def _counts(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    found = words(ctx, param, value)
    if not all(word.isdigit() for word in found):
        raise click.BadParameter(f"expected numbers of rows such as 0,1,133, got {value!r}.", ctx, param)
    return tuple(map(int, found))


@click.command(epilog="Example: lngen check layernorm.bwd:d=4096,dtype=bf16 --rows 0,1,133 --schedules 4")
@click.argument("specs", metavar="SPEC...", nargs=-1)
@on_option("What runs the kernels: a GPU, or the PTX on NumPy; auto is a GPU if there is one.")
@click.option("--rows", default="0,1,3,133", show_default=True, metavar="M,...", callback=_counts, help="Row counts.")
@click.option("--schedules", type=click.IntRange(1), default=1, show_default=True, help="How many schedules to try.")
@arch_option("The arch to compile for where there is no GPU; one.")
@click.option("--matrix", is_flag=True, help="Instead of SPECs: the whole grid of specs and rows, on a GPU.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="With --matrix: the JSON file to write.")
@click.option("--budget", type=float, default=480.0, show_default=True, help="With --matrix: seconds.")
@click.option("--processes", type=click.IntRange(1), default=8, show_default=True, help="With --matrix.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    specs: tuple[str, ...],
    on: str,
    rows: tuple[int, ...],
    schedules: int,
    arches: tuple[str, ...],
    matrix: bool,
    out: Path | None,
    budget: float,
    processes: int,
    as_json: bool,
) -> None:
    """Check each SPEC: errors against the oracles, compilation, every bit against the interpreter.

    Kernels run on a GPU if there is one; else their PTX is executed on NumPy, which also finds wrong accesses,
    races and missing barriers. Exits 1 if anything fails.
    """
    if matrix == bool(specs):
        raise click.UsageError("check takes SPECs or --matrix, one of the two.")
    if matrix:
        ctx.exit(_matrix(out, schedules, processes, budget))
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
    if as_json:
        print_json({"passed": len(results) - failed, "failed": failed, "results": [asdict(r) for r in results]})
    else:
        columns = ("", "what", "rows", "spec", "schedule", "detail")
        print_table(
            columns,
            [("ok" if r.ok else "FAIL", r.what, r.rows, r.spec, r.schedule, r.detail) for r in results],
        )
        click.echo(f"{len(results) - failed} checks passed, {failed} failed")
    if failed:
        ctx.exit(1)


def _matrix(out: Path | None, schedules: int, processes: int, budget: float) -> int:
    """The bit matrix: progress on stderr, the totals on stdout, the entries in ``out``."""
    from lngen.check import matrix
    from lngen.files import write_all

    entries: list[matrix.Entry] = []
    conditions = matrix.conditions()
    listed = list(matrix.specs())
    with progress_bar("specs") as progress:
        for entry in matrix.run_matrix(listed, schedules=max(5, schedules), processes=processes, budget=budget):
            entries.append(entry)
            if progress:
                progress(len(entries), len(listed))
            for note in entry.notes:
                click.echo(f"{entry.spec}: {note}", err=True)
    if out is not None:
        write_all({out: matrix.to_json(entries, conditions).encode()})
    totals = {k: v for k, v in matrix.summary(entries).items() if k != "entries"}
    print_json(totals)
    return 1 if totals["numbers_that_differ"] or totals["not_reached"] else 0
