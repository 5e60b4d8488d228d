"""A kernel of a plan as text, which a person reads before the CUDA."""

from __future__ import annotations

from lngen.lower.kernel import Kernel
from lngen.lower.parts import Join, Phase, Statement


def kernel_lines(kernel: Kernel) -> list[str]:
    """The launch rule of a kernel, its policies and its phases, line by line."""
    lines = [
        f"kernel {kernel.name}",
        f"  template  {kernel.template}",
        f"  launch    {kernel.launch_rule()}",
        f"  arguments {', '.join(a.name for a in kernel.arguments)}",
        *(f"  policy    {policy.removeprefix('using ').removesuffix(';')}" for policy in kernel.policies),
    ]
    if kernel.row and kernel.row.places:
        lines.append(f"  stage     {', '.join(map(str, kernel.row.places))}")
    if kernel.row and kernel.row.results:
        lines.append(f"  leaving   {', '.join(map(str, kernel.row.results))}")
    if kernel.row and kernel.row.cached:
        lines.append(f"  cached    {', '.join(t.name for t in kernel.columns)}")
    if kernel.dynamic:
        lines.append(f"  shared    {kernel.dynamic} bytes of stages")
    if kernel.uniform:
        lines.append("  once      " + " ".join(_defined(s) for s in kernel.uniform))
    for phase in kernel.phases:
        lines += _phase(phase)
    for phase_of_numbers in kernel.numbers.phases if kernel.numbers else ():
        names = (name for reduce in phase_of_numbers.reduces for name in reduce.names)
        lines.append(f"  reduce    {' '.join(names)}")
        lines += [f"  then      {_defined(s)}" for s in phase_of_numbers.after]
    statements = (*kernel.statements, *(kernel.finish.statements if kernel.finish else ()))
    if statements:
        lines.append("  columns   " + " ".join(_defined(s) for s in statements if _defines(s)))
    return lines


def _phase(phase: Phase) -> list[str]:
    parts = {
        "load": dict.fromkeys(name for loop in phase.loops for name in loop.inputs),
        "compute": dict.fromkeys(
            _defined(s) for loop in phase.loops for s in (*loop.vector, *loop.element) if s.note and _defines(s)
        ),
        "sum": [s.name for r in phase.reduces if r.op == "Add" for s in r.sums],
        "maximum": [s.name for r in phase.reduces if r.op == "Max" for s in r.sums],
        "exchange": phase.exchanged,
        "then": dict.fromkeys(_defined(s) for after in phase.after for s in _statements(after)),
        "accumulate": [a.name for a in phase.accumulators if a.op == "Add"],
        "column max": [a.name for a in phase.accumulators if a.op == "Max"],
        "store": [o.name for o in (*phase.outputs, *phase.row_outputs)],
    }
    lines = [f"    {what:<10} {' '.join(names)}" for what, names in parts.items() if names]
    return [f"  phase {phase.number}", *lines]


def _statements(after: Statement | Join) -> tuple[Statement, ...]:
    return (*after.statements, after.result) if isinstance(after, Join) else (after,)


def _defines(statement: Statement) -> bool:
    return statement.text.startswith("const ")


def _defined(statement: Statement) -> str:
    """The name that a statement defines."""
    return statement.text.split(" = ")[0].split()[-1]
