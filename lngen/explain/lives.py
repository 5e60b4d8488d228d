"""Where each value of a kernel lives while a row goes through its phases: global memory, shared memory, registers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from lngen.lower import Kernel
from lngen.lower.parts import Join, Phase, c_name
from lngen.lower.plan import Plan
from lngen.problem.footprint import WARP

GLOBAL, SHARED, CLUSTER, REGISTERS = "global memory or L2", "shared memory", "shared memory of a cluster", "registers"
BEFORE, ARRIVES, FIRST = 0, 1, 2  # columns: before the rows, a row arrives, the first phase
EDGE = 0.25  # of a column: an access at its beginning or end

Stay = tuple[str, float, float]  # at a level, from where to where in columns, each of which is 1 wide


def columns(kernel: Kernel) -> tuple[str, ...]:
    """What happens in the columns of ``lives``."""
    if kernel.row is None:
        return "reads", "computes", "stores"
    last = ("after the rows",) if kernel.accumulators else ()
    return "before the rows", "a row arrives", *(f"phase {p.number}" for p in kernel.phases), *last


def lives(kernel: Kernel, plan: Plan) -> dict[str, list[Stay]]:
    """Where the values live that outlive a loop: inputs, weights, sums, numbers of a row, results; by name, in turn."""
    found: dict[str, list[Stay]] = {}
    for name, level, begin, end in _of_rows(kernel, plan) if kernel.row else _without_rows(kernel):
        found.setdefault(name, []).append((level, begin, end))
    return {name: sorted(stays, key=lambda stay: (stay[1], stay[0] == GLOBAL)) for name, stays in found.items()}


def _without_rows(kernel: Kernel) -> Iterator[tuple[str, str, float, float]]:
    """A kernel of partial sums or vectors: what it reads, shares between threads, and stores."""
    for a in sorted(kernel.arguments, key=lambda a: not a.const):
        if a.kind in ("input", "output", "workspace"):
            yield a.tensor or a.name, GLOBAL, 0 if a.const else 2, 1 if a.const else 3
        if a.const and (kernel.finish or kernel.numbers):
            yield a.tensor or a.name, SHARED, 1, 2
    yield from ((total.name, REGISTERS, 0, 2) for total in kernel.accumulators)


def _of_rows(kernel: Kernel, plan: Plan) -> Iterator[tuple[str, str, float, float]]:
    row, uses = kernel.row, [_Uses(p) for p in kernel.phases]
    assert row is not None
    end = FIRST + len(uses)
    for t in (*kernel.wide_inputs, *kernel.columns):
        used = [FIRST + n for n, u in enumerate(uses) if t.name in u.inputs]
        cached, wide = t in kernel.columns and row.cached, t in kernel.wide_inputs
        if used and (cached or (wide and plan.schedule.form != "multipass")):
            at = ARRIVES if wide or cached == "row" else BEFORE
            staged, held = wide and row.staged, not wide or not row.staged or t in row.in_registers
            last = max(used) + 1 if wide else end
            yield t.name, GLOBAL, at, at + EDGE
            yield from [(t.name, SHARED, at + EDGE, FIRST if held else last)] * staged
            yield from [(t.name, REGISTERS, FIRST if staged else at + EDGE, last)] * held
        else:
            yield from ((t.name, GLOBAL, n, n + EDGE) for n in used)
    for t in kernel.row_inputs:
        last = max((n for n, u in enumerate(uses) if t.cname in u.names), default=0)
        yield t.name, GLOBAL, ARRIVES, ARRIVES + EDGE
        yield t.name, REGISTERS, ARRIVES + EDGE, FIRST + last + 1
    leaving, stored = {place.name for place in row.results}, set[str]()
    for n, phase in enumerate(kernel.phases, FIRST):
        yield from _numbers(plan, phase, uses, n)
        for name in (t.name for t in (*phase.outputs, *phase.row_outputs)):
            stored.add(name)
            at = end if name in leaving else n + 1
            yield from [(name, SHARED, n, at - EDGE)] * (name in leaving)
            yield name, GLOBAL, at - EDGE, at
    finished = [a.tensor for a in kernel.arguments if a.kind == "output" and a.tensor not in stored]
    yield from ((name, GLOBAL, end + 1 - EDGE, end + 1) for name in finished)
    for total in kernel.accumulators:
        yield total.name, REGISTERS, BEFORE + EDGE, end
        yield from [(total.name, SHARED, end, end + 1 - EDGE)] * (row.flush in ("in turn", "ring"))
        yield total.name, GLOBAL, end + 1 - EDGE, end + 1


def _numbers(plan: Plan, phase: Phase, uses: Sequence[_Uses], n: int) -> Iterator[tuple[str, str, float, float]]:
    """Of the phase in column ``n``: what its sums give, and what follows from them and is used in later phases."""
    later = {name: m for m, u in enumerate(uses, FIRST) if m > n for name in u.names}
    folded = {s.name: s.cname for r in phase.reduces for s in r.sums}
    of_rows = [s.name for r in phase.reduces if r.whole_row for s in r.sums] * (plan.schedule.cluster > 1)
    among = dict.fromkeys([*of_rows, *phase.exchanged])
    for name in dict.fromkeys([*folded, *among]):
        block = SHARED if plan.schedule.threads > WARP else REGISTERS
        yield name, CLUSTER if name in among else block, n + 1 - 2 * EDGE, n + 1 - EDGE
    after = {e.out.name: c_name(e.out) for e in plan.graph.eqns if c_name(e.out) in uses[n - FIRST].defined}
    kept = {t.name: f"{t.name}_row_" for t in (*phase.kept, *(t for r in phase.reduces for t in r.kept))}
    for name, cname in (folded | after | kept).items():
        if cname in later:
            yield name, REGISTERS, n + 1 - EDGE, later[cname] + 1


class _Uses:
    """What the statements of a phase use: ``names`` in C, ``inputs`` with a D axis; what follows its reductions."""

    def __init__(self, phase: Phase) -> None:
        lines = [s.text for loop in phase.loops for s in (*loop.vector, *loop.element)]
        after = [s.text for a in phase.after for s in ((*a.statements, a.result) if isinstance(a, Join) else (a,))]
        self.inputs = {name for loop in phase.loops for name in loop.inputs}
        self.defined = {text.split(" = ")[0].split()[-1] for text in after if text.startswith("const ")}
        self.names = {*re.findall(r"\w+", " ".join([*lines, *after]))}
