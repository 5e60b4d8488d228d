"""A plan as text: what a person reads before the CUDA."""

from __future__ import annotations

from lngen.lower.parts import Phase
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
        lines.append(f"  workspace {b.name}: {b.dtype}[{size}]")
    for kernel in plan.kernels:
        lines += ["", *_kernel(kernel)]
    return "\n".join(lines) + "\n"


def _kernel(kernel: Kernel) -> list[str]:
    lines = [
        f"kernel {kernel.name}",
        f"  template  {kernel.template}",
        f"  launch    {kernel.launch_rule()}",
        f"  arguments {', '.join(a.name for a in kernel.arguments)}",
        *(f"  {c.name:<13} = {c.value:<6} {c.note}" for c in kernel.constants),
    ]
    if kernel.uniform:
        lines.append("  once      " + " ".join(_defined(s.text) for s in kernel.uniform))
    for number, phase in enumerate(kernel.phases):
        lines += _phase(number, phase)
    return lines


def _phase(number: int, phase: Phase) -> list[str]:
    lines = [f"  phase {number}"]
    parts = {
        "load": [t.name for t in (*phase.tiles, *phase.columns)],
        "compute": [_defined(s.text) for s in phase.statements if s.text.startswith("const ")],
        "sum": [s.name for f in phase.folds if f.op == "Add" for s in f.sums],
        "maximum": [s.name for f in phase.folds if f.op == "Max" for s in f.sums],
        "then": [_defined(s.text) for s in phase.after],
        "accumulate": [a.name for a in phase.accumulators],
        "store": [o.name for o in (*phase.outputs, *phase.row_outputs)],
    }
    return lines + [f"    {what:<10} {' '.join(names)}" for what, names in parts.items() if names]


def _defined(text: str) -> str:
    """The name a statement defines."""
    return text.split(" = ")[0].split()[-1]
