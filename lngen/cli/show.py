"""``lngen show``: one stage of the way from a spec to a binary."""

from __future__ import annotations

import difflib
from typing import Any

import click

from lngen.aot.plans import plan_for
from lngen.check.inputs import random_inputs
from lngen.cli.common import arch_option, rows_option, schedule_option
from lngen.cli.output import Output, output_options
from lngen.cli.tables import table_text
from lngen.emit import emit
from lngen.errors import LngenError
from lngen.inspect import COLUMNS, measure, resources, traffic_json, traffic_rows, traffic_text
from lngen.lower import Plan, lower
from lngen.runtime.choose import compile_plan
from lngen.schedule import check_arch, parse_schedule
from lngen.spec import Spec, parse_spec
from lngen.toolchain import compile_ptx

# A stage and the Pygments lexer that colours it on a terminal; Python's suits the IR well enough.
STAGES = {"graph": "python", "plan": "text", "cuda": "cuda", "ptx": "ptx", "resources": "text", "traffic": "text"}
TABLES = ("resources", "traffic")


@click.command(epilog='Example: lngen show layernorm.bwd:d=4096,dtype=bf16 --stage cuda --diff "threads=256"')
@click.argument("spec")
@click.option("--stage", type=click.Choice([*STAGES]), default="cuda", show_default=True, help="What to print.")
@click.option("--after", metavar="PASS", help="The graph after this pass, or 'all': after each of them.")
@schedule_option
@rows_option
@click.option("--diff", metavar="K=V,...", help="A unified diff against the same schedule with these changes.")
@arch_option("Target; --stage resources takes several, and the default schedule is then one for all of them.")
@output_options
def command(
    spec: str,
    stage: str,
    after: str | None,
    schedule: str,
    rows: int | None,
    diff: str | None,
    arches: tuple[str, ...],
    output: Output,
) -> None:
    """Print one stage of SPEC: exactly its text in a pipe, highlighted on a terminal.

    graph: the IR, with every sum's order; plan: kernels, phases, launch rules; cuda: the source; ptx: what
    NVRTC makes of it; resources, a table: registers, spills, shared memory, barriers and occupancy of each kernel;
    traffic, a table: the bytes, sectors, instructions, barriers and bank conflicts of a call with --rows rows, or a
    few row groups, counted by executing the PTX on NumPy.
    """
    _check_options(stage, after, bool(schedule) or rows is not None, diff, arches)
    parsed = parse_spec(spec)
    if stage == "graph":
        text = graph_text(parsed, after)
        output.stage({"spec": str(parsed), "stage": stage, "text": text}, text, STAGES[stage])
        return
    plan = plan_for(parsed, schedule, *arches, rows=rows)
    text, data = view(plan, stage, arches, rows)
    if diff is not None:
        other = lower(parsed, parse_schedule(diff, plan.schedule))
        text = _diff(plan, text, other, view(other, stage, arches, rows)[0])
        data = {"spec": str(parsed), "schedule": str(plan.schedule), "other": str(other.schedule), "stage": stage}
        output.stage({**data, "text": text}, text, "diff")
    elif stage in TABLES:
        output.table(data, text)
    else:
        output.stage(data, text, STAGES[stage])


def _check_options(stage: str, after: str | None, scheduled: bool, diff: str | None, arches: tuple[str, ...]) -> None:
    """UsageError for an option that has nothing to say about the stage."""
    if after is not None and stage != "graph":
        raise click.UsageError("--after names a pass over the graph; add --stage graph.")
    if stage == "graph" and (scheduled or diff is not None):
        raise click.UsageError("a graph has no schedule; use --schedule, --rows and --diff with another --stage.")
    if len(arches) > 1 and stage != "resources":
        raise click.UsageError(f"--stage {stage} takes one --arch, got {', '.join(arches)}.")


def graph_text(spec: Spec, after: str | None = None) -> str:
    """The final graph, the one after a pass, or all of them under headings."""
    trace = spec.trace()
    if after is None:
        return str(spec.graph())
    if after == "all":
        return "\n".join(f"// ---- after {name} ----\n{graph}" for name, graph in trace.items())
    if after not in trace:
        raise LngenError(f"there is no pass '{after}' for {spec}, expected one of {', '.join(trace)}, or all.")
    return str(trace[after])


def view(plan: Plan, stage: str, arches: tuple[str, ...], rows: int | None = None) -> tuple[str, dict[str, Any]]:
    """A stage from the plan on, as text and as JSON has it; ``rows``: how many a traffic count has."""
    about = {"name": plan.name, "spec": str(plan.spec), "schedule": str(plan.schedule)}
    if stage == "resources":
        found = {arch: resources(plan, compile_plan(plan, arch).resources, arch) for arch in arches}
        listed = [
            (kernel, arch, *(used[key] for key in COLUMNS.values()))
            for arch, kernels in found.items()
            for kernel, used in kernels.items()
        ]
        return table_text(("kernel", "arch", *COLUMNS), listed), {**about, "resources": found}
    if stage in ("ptx", "traffic"):
        check_arch(plan.schedule, arches[0])
    if stage == "traffic":
        count = traffic_rows(plan, rows)
        measured = measure(plan, random_inputs(plan.spec, count), arches[0])
        return traffic_text(plan, measured, count), {**traffic_json(plan, measured, count), "arch": arches[0]}
    if stage == "ptx":
        text = compile_ptx(emit(plan), arches[0], name=f"{plan.name}.cu")
    else:
        text = str(plan) if stage == "plan" else emit(plan)
    return text, {**about, "stage": stage, "text": text}


def _diff(plan: Plan, text: str, other: Plan, changed: str) -> str:
    lines = text.splitlines(keepends=True), changed.splitlines(keepends=True)
    return "".join(difflib.unified_diff(*lines, plan.name, other.name))
