"""``lngen check`` and ``lngen conform``: lngen's kernels, and anybody's function, are checked."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from lngen.cli.output import Output, note, output_options, table
from lngen.cli.shared_options import Decimal, Whole, arch_option, on_option, one_arch, progress_bar, words
from lngen.compiler.ir import DType
from lngen.compiler.spec import Spec, parse_spec
from lngen.dtypes import FLOATS
from lngen.errors import MissingError
from lngen.proof.check.conform import Case, Outcome, cases_of, conform, conform_graph, select
from lngen.proof.check.conform.implementations import LngenTarget, Target, find_function, find_target
from lngen.proof.check.conform.suites import Contract, GraphSuite
from lngen.proof.check.oracles import NORMS, NormName
from lngen.proof.check.spec_checks import Result, check_spec, has_closed_form
from lngen.version import __version__

# ---- check: bits and errors of kernels ----


@click.command("check", epilog="Example: lngen check layernorm.bwd:d=4096,dtype=bf16 --rows 0,1,133 --schedules 4")
@click.argument("specs", metavar="SPEC...", nargs=-1)
@on_option("Run the kernels on a GPU, or their PTX on NumPy; auto is a GPU if there is one.")
@click.option(
    "--rows", default="0,1,3,133", show_default=True, metavar="M,...", type=Whole(listed=True), help="Numbers of rows."
)
@click.option("--schedules", type=Whole(1, 1000), default=1, show_default=True, help="Number of schedules to check.")
@arch_option("The one arch to compile for where there is no GPU.")
@click.option("--matrix", is_flag=True, help="Instead of SPECs: the whole grid of specs and rows, on a GPU.")
@click.option("--budget", type=Decimal(), default=480.0, show_default=True, help="With --matrix: seconds it may take.")
@click.option("--processes", type=Whole(1, 1024), default=8, show_default=True, help="With --matrix: they share a GPU.")
@output_options
@click.pass_context
def check_command(
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
    arch = one_arch("check", arches)
    parsed = [parse_spec(text) for text in specs]
    results: list[Result] = []
    with progress_bar("checking") as progress:
        for done, spec in enumerate(parsed):
            if progress:
                progress(done, len(parsed))
            results += check_spec(spec, on=on, rows=rows, schedules=schedules, arch=arch)
    ctx.exit(_print_results(output, results))


def _print_results(output: Output, results: Sequence[Result]) -> int:
    """The results as a table and JSON; the exit code."""
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
    return int(failed > 0)


def _matrix(output: Output, schedules: int, processes: int, budget: float) -> int:
    """The bit matrix: a table of its totals; the JSON also has its entries."""
    from lngen.proof.check import matrix

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


# ---- conform: an adversarial list of cases ----

FUNCTION_D = 768  # the row length of cases without one, for a function


@click.command("conform", epilog="Example: lngen conform --callable torch-layernorm --dtype bf16")
@click.argument("spec", required=False)
@click.option(
    "--callable",
    "name",
    metavar="MODULE:FUNCTION",
    help="Anybody's function (x, gamma, beta, eps) -> y on NumPy arrays [M, D], also in a module of "
    "the current folder; or torch-layernorm, torch-rmsnorm, liger-layernorm, liger-rmsnorm, quack-rmsnorm. "
    "With a SPEC: a function of the SPEC's inputs and eps, that returns its results.",
)
@click.option(
    "--backward",
    metavar="MODULE:FUNCTION",
    help="Its backward (dy, x, gamma, beta, eps) -> (dx, dgamma, dbeta) on NumPy arrays.",
)
@click.option("--torch", is_flag=True, help="The function takes torch tensors; autograd is its backward.")
@click.option("--norm", type=click.Choice(NORMS), help="What the function computes; layernorm by default.")
@click.option("--dtype", type=click.Choice([t.value for t in FLOATS]), help="The dtype of its arrays; f32 by default.")
@click.option("--eps", type=Decimal(0, 1, above=0), help="eps of the norm; 1e-5 by default.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where it runs; for a SPEC, a GPU if there is one.")
@click.option("--cases", metavar="NAME,...", callback=words, help="Some of the cases; by default all.")
@output_options
@click.pass_context
def conform_command(
    ctx: click.Context,
    /,
    spec: str | None,
    name: str | None,
    device: str | None,
    cases: tuple[str, ...],
    output: Output,
    **given: Any,  # what belongs to a function
) -> None:
    """Run an adversarial list of cases on the kernels of SPEC, on a function, or on one that should compute SPEC.

    The graph of SPEC may be any, also my.graph.fwd:d=4096 or module:function.fwd:d=4096: other graphs than the two
    norms are judged by themselves in float64, with running error bounds, and skip the cases that only a norm has.
    A SPEC with results of 8 bits has cases of its own: the keys of SPEC are the rule. RMSNorm functions are called
    with beta None. Exits 1 if a case fails.
    """
    if spec is not None:
        own = {"torch"} if name else set()
        for option in (n for n, value in given.items() if value and n not in own):
            raise click.UsageError(f"--{option} goes with --callable alone; a SPEC has its own.")
        parsed = parse_spec(spec)
        chosen = select(cases, cases_of(parsed))
        target = find_function(name, parsed, device=device, folder=Path.cwd(), torch=given["torch"]) if name else None
        run = _of_spec(parsed, target or _kernels(parsed, device), chosen)
    elif name is not None:
        chosen = select(cases)
        run = _function(name, device, chosen, **given)
    else:
        raise click.UsageError("conform takes a SPEC, --callable, or both.")
    outcomes = []
    with progress_bar("cases") as progress:
        for outcome in run.outcomes:
            outcomes.append(outcome)
            if progress:
                progress(len(outcomes), len(chosen))
    output.table(*_report(run, outcomes))
    if any(o.status == "fail" for o in outcomes):
        ctx.exit(1)


@dataclass(frozen=True)
class Run:
    """The cases of a target, not yet run, and what it is: its name, its graph, dtype and eps."""

    outcomes: Iterator[Outcome]
    target: str
    norm: str
    dtype: DType
    eps: float


def _kernels(spec: Spec, device: str | None) -> Target:
    """lngen's own kernels."""
    from lngen.launch.runtime.launcher import device_count

    gpus = device_count() if device != "cpu" else 0
    if device == "cuda" and not gpus:
        raise MissingError("--device cuda expects a GPU, none was found; omit it for the interpreter.")
    return LngenTarget(spec, gpu=gpus > 0)


def _of_spec(spec: Spec, target: Target, cases: Sequence[Case]) -> Run:
    """A target that should compute the spec."""
    if spec.builtin and spec.definition.name in NORMS and has_closed_form(spec):
        outcomes = conform(target, Contract.of_spec(spec), cases, d=spec.d)
    else:
        outcomes = conform_graph(GraphSuite(target, spec), cases)
    return Run(outcomes, target.name, spec.graph_name, spec.dtype, spec.eps_or_default)


def _function(
    name: str, device: str | None, cases: Sequence[Case], norm: NormName | None, dtype: str | None, eps: float | None,
    **options: Any,
) -> Run:  # fmt: skip
    """A function, possibly from a module of the current folder."""
    eps = eps or 1e-5
    target, norm = find_target(name, norm=norm, eps=eps, device=device, folder=Path.cwd(), **options)
    contract = Contract.of(norm, DType(dtype or "f32"), eps)
    return Run(conform(target, contract, cases, d=FUNCTION_D), target.name, norm, contract.dtype, eps)


def _report(run: Run, outcomes: list[Outcome]) -> tuple[dict[str, Any], str]:
    """The outcomes for JSON, and as a table."""
    counts = {s: sum(o.status == s for o in outcomes) for s in ("pass", "fail", "skipped")}
    marks = {"pass": "ok", "fail": "FAIL", "skipped": "skipped"}
    text = table(("", "case", "why", "found"), [(marks[o.status], o.name, o.why, o.detail) for o in outcomes])
    data = {
        "lngen": __version__,
        "target": run.target,
        "norm": run.norm,
        "dtype": str(run.dtype),
        "eps": run.eps,
        "passed": counts["pass"],
        "failed": counts["fail"],
        "skipped": counts["skipped"],
        "cases": [_plain(o) for o in outcomes],
    }
    return data, f"{text}{counts['pass']} passed, {counts['fail']} failed, {counts['skipped']} skipped\n"


def _plain(outcome: Outcome) -> dict[str, Any]:
    """An outcome for JSON, where infinity is null."""
    measured = {n: v if math.isfinite(v) else None for n, v in outcome.measured.items()}
    return {**vars(outcome), "measured": measured}
