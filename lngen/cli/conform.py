"""``lngen conform``: an adversarial list for lngen's kernels and for anybody's normalisation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from lngen.check.check import has_closed_form
from lngen.check.conform import (
    Case,
    Contract,
    GraphSuite,
    LngenTarget,
    Outcome,
    conform,
    conform_graph,
    find_target,
    select,
)
from lngen.check.tolerances import NORMS, NormName
from lngen.cli.common import Decimal, progress_bar, words
from lngen.cli.output import Output, output_options
from lngen.cli.tables import table
from lngen.errors import MissingError
from lngen.ir import DType
from lngen.spec import parse_spec
from lngen.version import __version__

FUNCTION_D = 768  # the row length of cases without one, for a function


def _names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    return () if value is None else words(ctx, param, value)


@click.command(epilog="Example: lngen conform --callable torch-layernorm --dtype bf16")
@click.argument("spec", required=False)
@click.option(
    "--callable",
    "name",
    metavar="MODULE:FUNCTION",
    help="Anybody's function (x, gamma, beta, eps) -> y on NumPy arrays [M, D], also in a module of "
    "the current folder; or torch-layernorm, torch-rmsnorm, liger-layernorm, liger-rmsnorm, quack-rmsnorm.",
)
@click.option(
    "--backward",
    metavar="MODULE:FUNCTION",
    help="Its backward (dy, x, gamma, beta, eps) -> (dx, dgamma, dbeta) on NumPy arrays.",
)
@click.option("--torch", "is_torch", is_flag=True, help="The function takes torch tensors; autograd is its backward.")
@click.option("--norm", type=click.Choice(NORMS), help="What the function computes; layernorm by default.")
@click.option("--dtype", type=click.Choice([t.value for t in DType]), help="The dtype of its arrays; f32 by default.")
@click.option("--eps", type=Decimal(0, 1, above=0), help="eps of the norm; 1e-5 by default.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where it runs; for a SPEC, a GPU if there is one.")
@click.option("--cases", metavar="NAME,...", callback=_names, help="Some of the cases; by default all.")
@output_options
@click.pass_context
def command(
    ctx: click.Context,
    spec: str | None,
    name: str | None,
    backward: str | None,
    is_torch: bool,
    norm: NormName | None,
    dtype: str | None,
    eps: float | None,
    device: str | None,
    cases: tuple[str, ...],
    output: Output,
) -> None:
    """Run an adversarial list of cases on the kernels of SPEC, or on a function.

    The graph of SPEC may be any, also my.graph.fwd:d=4096 or module:function.fwd:d=4096: other graphs than the two
    norms are judged by themselves in float64, with running error bounds, and skip the cases that only a norm has.
    RMSNorm functions are called with beta None. Exits 1 if a case fails.
    """
    if (spec is None) == (name is None):
        raise click.UsageError("conform takes a SPEC or --callable, one of the two.")
    chosen = select(cases)
    if spec is not None:
        given = {"backward": backward, "torch": is_torch, "norm": norm, "dtype": dtype, "eps": eps}
        for option in (n for n, value in given.items() if value):
            raise click.UsageError(f"--{option} goes with --callable; a SPEC has its own.")
        run = _kernels(spec, device, chosen)
    else:
        assert name is not None
        run = _function(name, backward, is_torch, norm, dtype or "f32", eps or 1e-5, device, chosen)
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


def _kernels(text: str, device: str | None, cases: Sequence[Case]) -> Run:
    """lngen's own kernels."""
    from lngen.runtime.launch import device_count

    spec = parse_spec(text)
    gpus = device_count() if device != "cpu" else 0
    if device == "cuda" and not gpus:
        raise MissingError("--device cuda expects a GPU, none was found; omit it for the interpreter.")
    target = LngenTarget(spec, gpu=gpus > 0)
    if spec.builtin and spec.definition.name in NORMS and has_closed_form(spec):
        outcomes = conform(target, Contract.of_spec(spec), cases, d=spec.d)
    else:
        outcomes = conform_graph(GraphSuite(target, spec), cases)
    return Run(outcomes, target.name, spec.graph_name, spec.dtype, spec.eps)


def _function(
    name: str,
    backward: str | None,
    is_torch: bool,
    norm: NormName | None,
    dtype: str,
    eps: float,
    device: str | None,
    cases: Sequence[Case],
) -> Run:
    """A function, possibly from a module of the current folder."""
    target, norm = find_target(
        name, norm=norm, eps=eps, backward=backward, torch=is_torch, device=device, folder=Path.cwd()
    )
    contract = Contract.of(norm, DType(dtype), eps)
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
