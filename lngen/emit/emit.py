"""Plan -> CUDA text. Python has decided everything; the templates lay it out."""

from __future__ import annotations

import hashlib
import textwrap
import traceback
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from lngen.data import data_dir
from lngen.errors import EmitError
from lngen.ir import DType, Graph, print_graph
from lngen.ir.numerics import SEGMENT_STRANDS
from lngen.lower import Kernel, Plan


@dataclass(frozen=True)
class Module:
    """The context of ``module.cu.jinja``."""

    name: str
    command: str
    spec: str
    schedule: str
    ir_hash: str
    ir: tuple[str, ...]
    real: str
    absent: str
    segment_strands: int
    partials: tuple[str, ...]
    kernels: tuple[Kernel, ...]


def emit(plan: Plan) -> str:
    """The CUDA source of a plan's kernels: one translation unit that includes nothing."""
    context = module(plan)
    try:
        text = environment().get_template("module.cu.jinja").render({k: getattr(context, k) for k in asdict(context)})
    except TemplateError as e:
        raise EmitError(f"'{plan.name}' could not be laid out: {_where(e)}: {e}.") from e
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines()) + "\n"


def _where(error: TemplateError) -> str:
    """The template and line of the innermost frame: Jinja writes them into the traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith(".jinja")]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "module.cu.jinja"


def module(plan: Plan) -> Module:
    """What the templates get to see."""
    ir = print_graph(plan.graph)
    return Module(
        name=plan.name,
        command=_command(plan),
        spec=str(plan.spec),
        schedule=str(plan.schedule),
        ir_hash=hashlib.sha256(ir.encode()).hexdigest()[:12],
        ir=tuple(ir.splitlines()),
        real=plan.kernels[0].real,
        absent=plan.kernels[0].absent,
        segment_strands=SEGMENT_STRANDS,
        partials=partials(plan),
        kernels=plan.kernels,
    )


def _command(plan: Plan) -> str:
    """What emits the text again: a command line, or, with ``g`` for a Definition none knows, Python."""
    if plan.spec.builtin:
        return f"lngen show {plan.spec} --stage cuda --schedule {plan.schedule}"
    direction = plan.spec.direction
    keys = (key.split("=") for key in str(plan.spec).partition(":")[2].split(","))
    options = ", ".join(f"{name}={value if name == 'd' else repr(value)}" for name, value in keys)
    return f"lngen.compile(g, {options}, schedule={{'{direction}': '{plan.schedule}'}}).source('{direction}')"


def partials(plan: Plan) -> tuple[str, ...]:
    """The helper files the kernels call, in the order in which they build on each other."""
    used, ops = _dtypes(plan.graph), {e.op for e in plan.graph.eqns}
    templates = {k.template.removesuffix(".cu.jinja") for k in plan.kernels}
    rows = [k for k in plan.kernels if k.template.startswith("row")]
    sections = {part.removesuffix(".cuh.jinja") for k in rows for part in k.sections}
    folds = {f.part.removesuffix(".cuh.jinja") for k in plan.kernels for phase in k.phases for f in phase.folds}
    accumulate = any(k.accumulators for k in rows)
    first, meets = "_first_numbers" in sections, any(k.exchanged for k in rows)
    sums = "finish" in templates or "_one_launch" in sections
    wanted = {
        "_launch": True,
        "_prefetch": bool(templates & {"row", "row_staged", "row_claimed", "row_columns"}),
        "_bf16": DType.BF16 in used,
        "_f16": DType.F16 in used,
        "_f16_again": DType.F16 in used and "row_columns" in templates,
        "_f16_once": DType.F16 in used and "row_columns" not in templates,
        "_f64": DType.F64 in used,
        "_f64_bf16": {DType.F64, DType.BF16} <= used,
        "_f64_f16": {DType.F64, DType.F16} <= used,
        "_early": "_held_columns" in sections or (first and not meets),
        "_number_early": first and not meets,
        "_number_plain": first and meets,
        "_bits": "_seen" in sections,
        "_stay": accumulate or "columns" in templates,
        "_memory": bool(templates - {"finish", "narrow"}),
        "_packed": "_copy_packed_columns" in sections,
        "_wide": "_widened_columns" in sections,
        "_mbarrier": "_setup_bulk" in sections or any(k.cluster > 1 for k in rows),
        "_bulk": "_setup_bulk" in sections,
        "_counter": "_claim" in sections,
        "_ragged": "_copy_ragged" in sections,
        "_async": "_copy_async" in sections,
        "_cluster": any(k.cluster > 1 for k in rows),
        "_column": bool(rows),
        "_fold": bool(rows) or sums,
        "_maximum": bool(ops & {"maximum", "reduce_max"}),
        "_row_barrier": bool(folds) or "_refill_at_once" in sections or "_end_row" in sections,
        "_row_fold": bool(folds),
        "_spread": "_segment_sums" in folds,
        "_wait_all": meets and accumulate and not plan.schedule.restrict,
        "_wait_shared": meets and (not accumulate or plan.schedule.restrict),
        "_exchange": meets,
        "_exchange_spread": "_cluster_spread" in folds,
        "_expect_more": "_bring_told" in sections,
        "_partial": accumulate,
        "_strand": sums,
        "_grid_barrier": "_one_launch" in sections,
    }
    return tuple(f"{name}.cuh.jinja" for name, needed in wanted.items() if needed)


def _dtypes(graph: Graph) -> set[DType]:
    return {v.type.dtype for v in graph.values().values()}


@cache
def environment() -> Environment:
    """The one Jinja environment."""
    return make_environment(data_dir("templates"))


def make_environment(folder: Path) -> Environment:
    """Undefined names are errors; control lines leave no trace; ``indented`` moves lines to the right."""
    made = Environment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    made.filters["indented"] = _indented
    return made


def _indented(text: str, levels: int = 1) -> str:
    """Every line but empty ones moved to the right; nothing stays nothing."""
    return textwrap.indent(text, "    " * levels)
