"""``lngen show``: one stage of the way from a spec to a binary."""

from __future__ import annotations

import difflib
from dataclasses import asdict
from typing import Any

import click

from lngen.aot.plans import plan_for
from lngen.check.inputs import random_inputs
from lngen.cli.common import arch_option, print_json, print_text, rows_option, schedule_option, table_text
from lngen.emit import emit
from lngen.errors import LngenError
from lngen.inspect import measure, traffic_text
from lngen.lower import Plan, lower
from lngen.runtime.choose import compile_plan
from lngen.schedule import check_arch, parse_schedule
from lngen.spec import Spec, parse_spec
from lngen.toolchain import compile_ptx

# A stage and the Pygments lexer that colours it on a terminal; Python's suits the IR well enough.
STAGES = {"graph": "python", "plan": "text", "cuda": "cuda", "ptx": "ptx", "resources": "text", "traffic": "text"}

# Rows a traffic count runs, in row groups: enough for a block to have some, few enough for a second.
TRAFFIC_ROWS = 8
COLUMNS = ("kernel", "arch", "registers", "spill stores", "spill loads", "stack", "shared", "barriers")


@click.command(epilog='Example: lngen show layernorm.bwd:d=4096,dtype=bf16 --stage cuda --diff "threads=256"')
@click.argument("spec")
@click.option("--stage", type=click.Choice([*STAGES]), default="cuda", show_default=True, help="What to print.")
@click.option("--after", metavar="PASS", help="The graph after this pass, or 'all': after each of them.")
@schedule_option
@rows_option
@click.option("--diff", metavar="K=V,...", help="A unified diff against the same schedule with these changes.")
@arch_option("Target; --stage resources takes several, and the default schedule is then one for all of them.")
@click.option("--json", "as_json", is_flag=True, help="Print the resources as JSON.")
def command(
    spec: str,
    stage: str,
    after: str | None,
    schedule: str,
    rows: int | None,
    diff: str | None,
    arches: tuple[str, ...],
    as_json: bool,
) -> None:
    """Print one stage of SPEC: exactly its text in a pipe, highlighted on a terminal.

    graph: the IR, with every sum's order; plan: kernels, phases, launch rules; cuda: the source; ptx: what
    NVRTC makes of it; resources: registers, spills, shared memory and barriers of each kernel; traffic: the
    bytes, sectors, instructions, barriers and bank conflicts of a call, counted by executing the PTX on NumPy.
    """
    _check_options(stage, after, bool(schedule) or rows is not None, diff, arches, as_json)
    parsed = parse_spec(spec)
    if stage == "graph":
        print_text(graph_text(parsed, after), STAGES[stage])
        return
    plan = plan_for(parsed, schedule, *arches, rows=rows)
    if as_json:
        print_json(resources_json(plan, arches))
    elif diff is None:
        print_text(stage_text(plan, stage, arches), STAGES[stage])
    else:
        other = lower(parsed, parse_schedule(diff, plan.schedule))
        print_text(_diff(plan, other, stage, arches), "diff")


def _check_options(
    stage: str, after: str | None, scheduled: bool, diff: str | None, arches: tuple[str, ...], as_json: bool
) -> None:
    """UsageError for an option that has nothing to say about the stage."""
    if after is not None and stage != "graph":
        raise click.UsageError("--after names a pass over the graph; add --stage graph.")
    if stage == "graph" and (scheduled or diff is not None):
        raise click.UsageError("a graph has no schedule; use --schedule, --rows and --diff with another --stage.")
    if as_json and (stage != "resources" or diff is not None):
        raise click.UsageError("--json prints resources; add --stage resources, without --diff.")
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


def stage_text(plan: Plan, stage: str, arches: tuple[str, ...]) -> str:
    """A stage from the plan on, as text."""
    if stage == "plan":
        return str(plan)
    if stage == "cuda":
        return emit(plan)
    if stage in ("ptx", "traffic"):
        check_arch(plan.schedule, arches[0])
    if stage == "ptx":
        return compile_ptx(emit(plan), arches[0], name=f"{plan.name}.cu")
    if stage == "traffic":
        rows = TRAFFIC_ROWS * (plan.kernels[0].grid[0].per or 1)
        return traffic_text(plan, measure(plan, random_inputs(plan.spec, rows), arches[0]), rows)
    listed = [
        (
            kernel,
            arch,
            r["registers"],
            r["spill_stores"],
            r["spill_loads"],
            r["stack"],
            r["shared"],
            r["barriers"],
        )
        for arch, kernels in resources_json(plan, arches)["resources"].items()
        for kernel, r in kernels.items()
    ]
    return table_text(COLUMNS, listed)


def resources_json(plan: Plan, arches: tuple[str, ...]) -> dict[str, Any]:
    """What each kernel takes on each arch, by arch and kernel."""
    found = {arch: compile_plan(plan, arch).resources for arch in arches}
    return {
        "name": plan.name,
        "spec": str(plan.spec),
        "schedule": str(plan.schedule),
        "resources": {arch: {k: asdict(r) for k, r in kernels.items()} for arch, kernels in found.items()},
    }


def _diff(plan: Plan, other: Plan, stage: str, arches: tuple[str, ...]) -> str:
    old, new = (stage_text(p, stage, arches).splitlines(keepends=True) for p in (plan, other))
    return "".join(difflib.unified_diff(old, new, plan.name, other.name))
