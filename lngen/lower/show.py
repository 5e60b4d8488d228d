"""A plan as text: what a person reads before the CUDA."""

from __future__ import annotations

from lngen.lower.parts import Phase
from lngen.lower.pieces import HELD_COLUMNS
from lngen.lower.plan import Kernel, Plan


def show_plan(plan: Plan) -> str:
    """Spec, schedule, tensors, then each kernel with its launch rule, constants and phases."""
    lines = [
        f"plan {plan.name}",
        f"  spec      {plan.spec}",
        f"  schedule  {plan.schedule}",
        *(f"  input     {v}: {v.type}, aligned to {plan.alignment(v)} bytes" for v in plan.inputs),
        *(f"  output    {v}: {v.type}, aligned to {plan.alignment(v)} bytes" for v in plan.outputs),
    ]
    for b in plan.workspace:
        size = f"{b.per_row} * rows" if b.per_row else str(b.fixed)
        zeroed = ", zero before the first call" if b.zeroed else ""
        lines.append(f"  workspace {b.name}: {b.element}[{size}]{zeroed}")
    for kernel in plan.kernels:
        lines += ["", *_kernel(kernel)]
    return "\n".join(lines) + "\n"


def _kernel(kernel: Kernel) -> list[str]:
    width = max(len(str(c.value)) for c in kernel.constants)
    lines = [
        f"kernel {kernel.name}",
        f"  template  {kernel.template}",
        f"  launch    {kernel.launch_rule()}",
        f"  arguments {', '.join(a.name for a in kernel.arguments)}",
        *(f"  {c.name:<13} = {c.value:<{width}}  {c.note}" for c in kernel.constants),
    ]
    if kernel.places:
        lines.append(f"  stage     {', '.join(map(str, kernel.places))}")
    if kernel.results:
        lines.append(f"  leaving   {', '.join(map(str, kernel.results))}")
    if HELD_COLUMNS in (*kernel.sections.held, *kernel.sections.begun):
        lines.append(f"  held      {', '.join(t.name for t in kernel.columns)}")
    lines.append(f"  shared    {_shared(kernel)}")
    if kernel.uniform:
        lines.append("  once      " + " ".join(_defined(s.text) for s in kernel.uniform))
    for number, phase in enumerate(kernel.phases):
        lines += _phase(str(number), phase)
    for phase in kernel.finish.phases if kernel.finish else ():
        lines += _phase("after the grid barrier", phase)
    return lines


def _shared(kernel: Kernel) -> str:
    """What a block folds in, and what the launch adds for stages."""
    folding = f"{kernel.shared} of {kernel.real} to fold in"
    exchanged = f", {kernel.exchanged} a row from the blocks of the cluster" if kernel.exchanged else ""
    return folding + exchanged + (f", {kernel.dynamic} bytes of stages" if kernel.dynamic else "")


def _phase(number: str, phase: Phase) -> list[str]:
    lines = [f"  phase {number}"]
    parts = {
        "load": [t.name for t in (*phase.tiles, *phase.columns)],
        "compute": [_defined(s.text) for s in phase.statements if s.text.startswith("const ")],
        "sum": [s.name for f in phase.folds if f.op == "Add" for s in f.named],
        "maximum": [s.name for f in phase.folds if f.op == "Max" for s in f.named],
        "segments": [f.of for f in phase.folds if not f.named],
        "then": [_defined(s.text) for s in phase.after],
        "accumulate": [a.name for a in phase.accumulators],
        "store": [o.name for o in (*phase.outputs, *phase.row_outputs)],
    }
    return lines + [f"    {what:<10} {' '.join(names)}" for what, names in parts.items() if names]


def _defined(text: str) -> str:
    """The name a statement defines."""
    return text.split(" = ")[0].split()[-1]
