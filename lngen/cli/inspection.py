"""``lngen list`` and ``lngen show``: the graphs, and each stage between a spec and a binary."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click

from lngen.cli.output import AnyPath, Output, note, output_options, stage_options, table_text
from lngen.cli.shared_options import arch_option, device_option, one_arch, rows_option, schedule_option, target
from lngen.compiler.compile import Compilation, KernelSet, spill_text
from lngen.compiler.graphs import GRAPHS, Chosen, Definition, Option, Options
from lngen.compiler.ir import FUNCTIONS, ORDERS, DType, Value, is_of_set
from lngen.compiler.lower import Plan
from lngen.compiler.problem import check_arch, parse_schedule
from lngen.compiler.spec import SAVES, parse_spec
from lngen.compiler.spec.parse import wrong
from lngen.dtypes import FLOATS
from lngen.errors import LngenError, MissingError, SpecError, VerifyError

# ---- list: the graphs and the keys of a spec ----

# Stand-ins, one dtype per role, so that a type is shown by the key that sets it.
_ROLES = {DType.F16: "dtype", DType.BF16: "weight"}
_OPTIONS = Options(DType.F16, DType.BF16, DType.F32)
_EPS = "added to the mean square, from 0 to 1; run: every call gives it"


@click.command("list", epilog="Example: lngen list add_rmsnorm")
@click.argument("names", nargs=-1, metavar="[GRAPH]...")
@output_options
def list_command(output: Output, names: tuple[str, ...]) -> None:
    """List the graphs, a line each. Of each GRAPH print the inputs, outputs, statistics, and keys with defaults."""
    for name in names:
        if name not in GRAPHS:
            wrong(name, "graph", name, list(GRAPHS))
    graphs = [_described(GRAPHS[name]) for name in names or GRAPHS]
    data = {"graphs": graphs, "orders": [*ORDERS], "functions": [*FUNCTIONS]}
    output.table(data, "\n".join(map(_text, graphs)) if names else _overview(graphs))


def _overview(graphs: list[dict[str, Any]]) -> str:
    """The graphs by group, a line each."""
    width = max(len(g["name"]) for g in graphs)
    lines = []
    for group in dict.fromkeys(g["group"] for g in graphs):
        lines += [group, *(f"  {g['name']:<{width}}  {g['summary']}" for g in graphs if g["group"] == group), ""]
    lines += [
        "lngen list GRAPH prints its inputs, results and keys; a spec is GRAPH.fwd|bwd:key=value,...",
        f"Sums have the order {ORDERS[0]} (key order: {' '.join(ORDERS)}), functions the equations {FUNCTIONS[0]} (key "
        f"functions: {' '.join(FUNCTIONS)}); another version gives other bits.\n",
    ]
    return "\n".join(lines)


def _described(definition: Definition) -> dict[str, Any]:
    declared = definition.builder(_OPTIONS).declared
    flags = (n for n, option in declared.items() if isinstance(option.default, bool) and not option.of_forward)
    everything = tuple((n, True) for n in flags if definition.fits(replace(_OPTIONS, chosen=((n, True),))))
    built = definition.builder(replace(_OPTIONS, chosen=everything))
    dtypes = _dtypes(definition, declared)
    compute = "compute" if DType.F64.value in dtypes else DType.F32.value
    results = [v.name for v in built.results]
    moved = definition.builder(replace(_OPTIONS, chosen=everything, out=DType.BF16)).results
    by_out = [v.name for v, other in zip(built.results, moved, strict=True) if v.type.dtype is not other.type.dtype]
    near = "2" if any(map(is_of_set, built.params)) else "1"  # rows of a set are inner rows
    keys = {
        "d": ("required", "features per row"),
        "dtype": ("f32", f"of inputs and gradients with rows: {dtypes}"),
        "weight": ("dtype", "dtype of inputs without rows"),
        **({"out": ("dtype", f"dtype of {', '.join(by_out)}")} if by_out else {}),
        **{n: (_text_of(o.default), f"{o.about}: {o.values}") for n, o in declared.items()},
        **({"eps": ("1e-05", _EPS)} if built.takes_eps else {}),
        "save": ("stats", f"what forward saves for backward: {' '.join(SAVES)}, or names of results"),
        "wrt": ("all inputs", f"bwd only, what to differentiate: {'+'.join(definition.differentiable(built.options))}"),
        "of": ("all outputs", f"bwd only, which results have a cotangent: {'+'.join(results)}"),
        "grad": ("the input's", "bwd only, dtype of the gradients of inputs without rows"),
        "dx_quant": ("no", "bwd only, dtype of 8 bits of dx: e4m3 or e5m2"),
        "dx_scales": ("tensor", "bwd only, whether dx_scale is an input f32[], or a result, of each block of 128"),
        "accumulate": ("none", "bwd only, the inputs whose gradient is added to an array, in the compute dtype"),
        "order": (ORDERS[0], f"version of the rule that orders the sums; part of the result: {' '.join(ORDERS)}"),
        "functions": (FUNCTIONS[0], f"version of the functions' equations; part of the result: {' '.join(FUNCTIONS)}"),
        "strides": (
            near,
            "distances between rows: 2 for the heads of a packed projection, in place; changes no bit",
        ),
        "blocks": ("the same on every GPU", "bwd only, blocks that share the rows of column sums; part of the result"),
        "stretch": ("by the rows of a set", "bwd only, rows of a set that a partial sum has; part of the result"),
    }
    return {
        "name": definition.name,
        "group": definition.group,
        "summary": definition.summary,
        "inputs": [
            {
                "name": p.name,
                "type": _type(p),
                "optional": (optional := p.name in declared and isinstance(declared[p.name].default, bool)),
                "default": not optional or bool(declared[p.name].default),
            }
            for p in built.params
        ],
        "outputs": [
            {"name": v.name, "type": _type(v, "out" if v.name in by_out else _ROLES.get(v.type.dtype, compute))}
            for v in built.results
        ],
        "statistics": [{"name": v.name, "type": _type(v, compute)} for v in built.statistics],
        "keys": [{"key": k, "default": default, "meaning": text} for k, (default, text) in keys.items()],
    }


def _dtypes(definition: Definition, declared: Mapping[str, Option]) -> str:
    """The dtypes that the graph takes, with the options that one of them needs: functions are in f32 alone."""

    def takes(dtype: DType, *chosen: tuple[str, Chosen]) -> bool:
        try:
            definition.builder(Options(dtype, dtype, dtype, chosen=chosen))
        except (SpecError, VerifyError):
            return False
        return True

    words = " ".join(t.value for t in FLOATS if takes(t))
    for t in FLOATS:
        needed = [f"{n}={word}" for n, o in declared.items() for word in o.choices if takes(t, (n, word))]
        words += f", {t.value} with {' or '.join(needed)}" if needed and not takes(t) else ""
    return words


def _text_of(value: Chosen) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _type(value: Value, role: str = "") -> str:
    return re.sub(r"^\w+", role or _ROLES.get(value.type.dtype, value.type.dtype), str(value.type))


def _text(graph: dict[str, Any]) -> str:
    lines = [f"{graph['name']}.fwd, {graph['name']}.bwd: {graph['summary']}"]
    for i in graph["inputs"]:
        note = f"  optional, {'in' if i['default'] else 'not in'} by default" if i["optional"] else ""
        lines.append(f"  input      {i['name']}: {i['type']}{note}")
    lines += [f"  output     {o['name']}: {o['type']}" for o in graph["outputs"]]
    lines += [f"  statistic  {s['name']}: {s['type']}" for s in graph["statistics"]]
    name, width = (max(len(k[part]) for k in graph["keys"]) for part in ("key", "default"))
    lines += [f"  key        {k['key']:<{name}} = {k['default']:<{width}}  {k['meaning']}" for k in graph["keys"]]
    return "\n".join(lines) + "\n"


# ---- show: one stage of a spec ----

# A stage and the Pygments lexer that colours it on a terminal; Python's lexer suits the IR.
STAGES = {
    "graph": "python", "plan": "text", "cuda": "cuda", "ptx": "ptx", "sass": "nasm", "resources": "text",
    "traffic": "text",
}  # fmt: skip
KINDS = {"cuda": "cu", "ptx": "ptx", "sass": "cubin"}  # the stages that a pack has, as files of that kind
TABLES = ("resources", "traffic")


@click.command("show", epilog='Example: lngen show layernorm.bwd:d=4096,dtype=bf16 --stage cuda --diff "threads=256"')
@click.argument("spec")
@click.option("--stage", type=click.Choice([*STAGES]), default="cuda", show_default=True, help="What to print.")
@click.option("--after", metavar="PASS", help="The graph after this pass, or 'all': after each of them.")
@schedule_option
@rows_option
@click.option("--diff", metavar="K=V,...", help="A unified diff against the same schedule with these changes.")
@click.option("--diff-arch", metavar="SM", help="A unified diff against the same schedule on this arch: ptx or sass.")
@click.option(
    "--against",
    type=AnyPath(exists=True, file_okay=False),
    metavar="DIR",
    help="A unified diff against the same spec in the pack in DIR, of any version of lngen: cuda, ptx or sass.",
)
@click.option("--bundle", is_flag=True, help="The source with the device headers in it: a file that stands alone.")
@arch_option("Target; --stage resources takes several, and one default schedule then fits all of them.")
@device_option
@stage_options
def show_command(
    spec: str,
    stage: str,
    after: str | None,
    schedule: str,
    rows: int | None,
    diff: str | None,
    diff_arch: str | None,
    against: Path | None,
    bundle: bool,
    arches: tuple[str, ...],
    device: str | None,
    output: Output,
) -> None:
    """Print one stage of SPEC: exactly its text in a pipe, highlighted on a terminal.

    graph: the IR, with every sum's order; plan: kernels, phases, launch rules; cuda: the source; ptx: the
    output of NVRTC; sass: the machine code of each kernel, its resources, and its instructions by kind in each loop and
    per element of a row; resources, a table: registers, spills, shared memory, barriers and occupancy of each kernel;
    traffic, a table: the bytes, sectors, instructions, barriers and bank conflicts of a call with --rows rows, or a
    few row groups, counted by executing the PTX on NumPy.
    """
    arches, gpu = target(arches, device)
    _check_options(stage, after, bool(schedule) or rows is not None or diff is not None, bundle, arches)
    _check_diffs(stage, {"--diff": diff, "--diff-arch": diff_arch, "--against": against})
    compilation = Compilation(parse_spec(spec))
    if stage == "graph":
        return _show_graph(compilation, after, output)
    fit = (*arches, diff_arch) if diff_arch else arches
    kernels = compilation.changed(schedule, *fit, rows=rows, device=gpu, compiled=stage not in ("plan", "cuda"))
    if not schedule and (spilled := spilled_bytes(kernels, arches[0])):
        note(spill_text(kernels.plan.schedule, spilled))
    text, data = view(kernels, stage, arches, rows, bundle)
    if diff is not None:
        other = compilation.kernels(parse_schedule(diff, kernels.plan.schedule))
        compared = Compared(other.plan.name, view(other, stage, arches, rows, bundle)[0], str(other.plan.schedule))
    elif diff_arch is not None:
        there = view(kernels, stage, (diff_arch,))[0]
        compared = Compared(f"{kernels.plan.name}.{diff_arch}", there, str(kernels.plan.schedule))
    elif against is not None:
        compared = _packed(against, kernels.plan, stage, arches[0])
    else:
        return output.table(data, text) if stage in TABLES else output.stage(data, text, STAGES[stage])
    output.stage(*_diff(kernels.plan, stage, text, compared), "diff")


class Compared(NamedTuple):
    """A stage to compare with: its name and text, and the schedule that it is of."""

    name: str
    text: str
    schedule: str


def _check_diffs(stage: str, diffs: Mapping[str, object]) -> None:
    """UsageError for more than one kind of diff, or one of a stage that has none."""
    given = [option for option, value in diffs.items() if value is not None]
    if len(given) > 1:
        raise click.UsageError(f"one diff at a time, got {' and '.join(given)}; leave one of them away.")
    stages = {"--diff-arch": ("ptx", "sass"), "--against": (*KINDS,)}
    for option in given:
        if stage not in stages.get(option, STAGES):
            raise click.UsageError(f"{option} compares the stages {', '.join(stages[option])}, got --stage {stage}.")


def _check_options(stage: str, after: str | None, scheduled: bool, bundle: bool, arches: tuple[str, ...]) -> None:
    """UsageError for an option that does not apply to the stage."""
    if after is not None and stage != "graph":
        raise click.UsageError("--after names a pass over the graph; add --stage graph.")
    if stage == "graph" and scheduled:
        raise click.UsageError("a graph has no schedule; use --schedule, --rows and --diff with another --stage.")
    if bundle and stage != "cuda":
        raise click.UsageError("--bundle puts headers into the source; add --stage cuda.")
    if stage != "resources":
        one_arch(f"--stage {stage}", arches)


def spilled_bytes(kernels: KernelSet, arch: str) -> int:
    """Bytes per thread that the kernels spill on ``arch``; 0 if they are known not to, and without a compiler."""
    try:
        return 0 if kernels.known_clean(arch) else kernels.spilled(arch)
    except MissingError:
        return 0


def _show_graph(compilation: Compilation, after: str | None, output: Output) -> None:
    """The final graph, the one after a pass, or all of them under headings."""
    trace = compilation.passes
    if after not in (None, "all", *trace):
        raise LngenError(
            f"there is no pass '{after}' for {compilation.spec}, expected one of {', '.join(trace)}, or all."
        )
    text = str(compilation.graph if after is None else trace.get(after, ""))
    if after == "all":
        text = "\n".join(f"// ---- after {name} ----\n{graph}" for name, graph in trace.items())
    output.stage({"spec": str(compilation.spec), "stage": "graph", "text": text}, text, STAGES["graph"])


def view(
    kernels: KernelSet, stage: str, arches: tuple[str, ...], rows: int | None = None, bundle: bool = False
) -> tuple[str, dict[str, Any]]:
    """A stage from the plan on, as text and for JSON; ``rows``: the number of rows of a traffic count."""
    plan = kernels.plan
    about = {"name": plan.name, "spec": str(plan.spec), "schedule": str(plan.schedule)}
    if stage == "resources":
        from lngen.lab.inspect.traffic import COLUMNS, resources

        found = {arch: resources(plan, kernels.cubin(arch).resources, arch) for arch in arches}
        listed = [
            (kernel, arch, *(used[key] for key in COLUMNS.values()))
            for arch, kernels in found.items()
            for kernel, used in kernels.items()
        ]
        return table_text(("kernel", "arch", *COLUMNS), listed), {**about, "resources": found}
    if stage == "traffic":
        from lngen.lab.inspect.traffic import measure, traffic_json, traffic_rows, traffic_text
        from lngen.proof.check.inputs import random_inputs

        check_arch(plan.schedule, arches[0])  # before inputs are drawn
        count = traffic_rows(plan, rows)
        measured = measure(kernels, random_inputs(plan.spec, count), arches[0])
        return traffic_text(plan, measured, count), {**traffic_json(plan, measured, count), "arch": arches[0]}
    if stage == "sass":
        from lngen.lab.inspect.machine_code import machine_code

        codes = machine_code(kernels, arches[0])
        text = "\n".join(code.text() for code in codes)
        return text, {**about, "stage": stage, "arch": arches[0], "kernels": [code.data() for code in codes]}
    if stage == "cuda":
        text = kernels.file(arches[0], bundle=bundle)
    else:
        text = str(plan) if stage == "plan" else kernels.ptx(arches[0])
    return text, {**about, "stage": stage, "text": text}


def _packed(folder: Path, plan: Plan, stage: str, arch: str) -> Compared:
    """A stage from a file of a pack, with a note if it is of another schedule than the plan's."""
    from lngen.lab.inspect.machine_code import packed

    found = packed(folder, plan, arch, KINDS[stage])
    if (schedule := found.entry["schedule"]["text"]) != str(plan.schedule):
        note(f"the pack has another schedule, which --schedule compares with: {schedule}")
    codes = found.machine_code(arch) if stage == "sass" else ()
    text = "\n".join(code.text() for code in codes) if codes else found.data.decode()
    return Compared(f"{folder}/{found.file} of lngen {found.entry['lngen_version']}", text, schedule)


def _diff(plan: Plan, stage: str, text: str, other: Compared) -> tuple[dict[str, str], str]:
    """A unified diff for JSON, and its text."""
    lines = text.splitlines(keepends=True), other.text.splitlines(keepends=True)
    diff = "".join(difflib.unified_diff(*lines, plan.name, other.name))
    about = {"spec": str(plan.spec), "schedule": str(plan.schedule), "other": other.schedule}
    return {**about, "stage": stage, "text": diff}, diff
