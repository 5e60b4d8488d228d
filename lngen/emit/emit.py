"""Plan -> CUDA text. Python makes every decision; the templates lay it out."""

from __future__ import annotations

import hashlib
import traceback
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from lngen.config import data_dir
from lngen.emit.layout import laid_out
from lngen.errors import EmitError
from lngen.headers import includes
from lngen.ir import ctype, print_graph
from lngen.lower import Plan

# Without these options the bits differ: contraction, and approximate division and square root.
COMPILE = "-std=c++17 -fmad=false -prec-div=true -prec-sqrt=true -ftz=false"


def emit(plan: Plan) -> str:
    """The CUDA source of a plan's kernels, which includes the device headers it uses."""
    real = ctype(plan.accumulator)
    try:
        rendered = [environment().get_template(k.template).render(kernel=k, real=real) for k in plan.kernels]
        kernels = "\n\n".join(laid_out(text).strip() for text in rendered)
        text = environment().get_template("module.cu.jinja").render(
            **_head(plan), includes=includes(kernels), kernels=kernels
        )  # fmt: skip
    except TemplateError as e:
        raise EmitError(f"'{plan.name}' could not be laid out: {_where(e)}: {e}.") from e
    return text.rstrip() + "\n"


def _head(plan: Plan) -> dict[str, str]:
    """The comment at the start of a file, and the name of its namespace."""
    ir = print_graph(plan.graph)
    lines = {
        "spec": str(plan.spec),
        "schedule": str(plan.schedule),
        "regenerate": _command(plan),
        "compile": f"nvcc or NVRTC with {COMPILE}",
        **{f"launch {n}": f"{k.role}, {k.launch_rule()}" for n, k in enumerate(plan.kernels, 1)},
        **({"workspace": "; ".join(map(str, plan.workspace))} if plan.workspace else {}),
        "names": "in kernels, variables that end in _ are lngen's, all others are values of the graph",
        "ir-sha256": hashlib.sha256(ir.encode()).hexdigest()[:12],
    }
    facts = "\n".join(f"//   {name:<10} : {text}" for name, text in lines.items())
    comment = {"facts": laid_out(facts).rstrip(), "ir": laid_out(_commented(ir)).rstrip()}
    return {"name": plan.name, "stem": plan.stem, **comment}


def _commented(text: str) -> str:
    return "\n".join(f"// {line}".rstrip() for line in text.splitlines())


def _where(error: TemplateError) -> str:
    """The template and line of the innermost frame, which Jinja writes into the traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith(".jinja")]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "module.cu.jinja"


def _command(plan: Plan) -> str:
    """The command that emits the text again, with the spec and the schedule that the header has in lines of their own.

    It is a command line or, for a Definition ``g``, Python.
    """
    if plan.spec.builtin:
        return "lngen show SPEC --stage cuda --schedule SCHEDULE"
    direction = plan.spec.direction
    keys = (key.split("=") for key in str(plan.spec).partition(":")[2].split(","))
    options = ", ".join(f"{name}={value if name == 'd' else repr(value)}" for name, value in keys)
    return f"lngen.compile(g, {options}, schedule={{'{direction}': SCHEDULE}}).source('{direction}')"


@cache
def environment() -> Environment:
    """The one Jinja environment: undefined names are errors, control lines and ends of macros produce no output."""
    return Environment(
        loader=FileSystemLoader(data_dir("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: value.rstrip() if isinstance(value, str) else value,
        autoescape=False,
    )
