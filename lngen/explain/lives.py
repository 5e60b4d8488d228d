"""Where each value of a kernel lives while a row goes through its phases: global memory, shared memory, registers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from lngen.lower import Kernel
from lngen.lower.parts import Join, Phase, Tensor, c_name
from lngen.lower.plan import Plan
from lngen.problem.footprint import WARP

GLOBAL, SHARED, CLUSTER, REGISTERS = "global memory or L2", "shared memory", "shared memory of a cluster", "registers"
LEVELS = (GLOBAL, SHARED, CLUSTER, REGISTERS)
BEFORE, ARRIVES, FIRST = 0, 1, 2  # columns: before the rows, a row arrives, the first phase
EDGE = 0.3  # of a column: an access at its beginning or end


@dataclass(frozen=True)
class Life:
    """A value, by name: from where to where it lives at which level, in columns; a column is 1 wide."""

    name: str
    stays: tuple[tuple[str, float, float], ...]


def columns(kernel: Kernel) -> tuple[str, ...]:
    """What happens in the columns of ``lives``."""
    if kernel.row is None:
        return "reads", "computes", "stores"
    first = "before the rows" if kernel.row.persistent else "at the start"
    last = ("after the rows",) if kernel.accumulators else ()
    return first, "a row arrives", *(f"phase {p.number}" for p in kernel.phases), *last


def lives(kernel: Kernel, plan: Plan) -> tuple[Life, ...]:
    """The values of a kernel that live longer than a loop: inputs, weights, sums, numbers of a row, results."""
    stays: dict[str, list[tuple[str, float, float]]] = {}
    for life in _of_rows(kernel, plan) if kernel.row else _without_rows(kernel):
        stays.setdefault(life.name, []).extend(life.stays)
    return tuple(Life(name, tuple(sorted(found, key=lambda s: s[1]))) for name, found in stays.items() if found)


def _without_rows(kernel: Kernel) -> Iterator[Life]:
    """A kernel of partial sums or vectors: what it reads, shares between threads, and stores."""
    shared = ((SHARED, 1.0, 2.0),) if kernel.finish or kernel.numbers else ()
    for a in sorted(kernel.arguments, key=lambda a: not a.const):
        if a.kind in ("input", "output", "workspace"):
            yield Life(a.tensor or a.name, ((GLOBAL, 0.0, 1.0), *shared) if a.const else ((GLOBAL, 2.0, 3.0),))
    for total in kernel.accumulators:
        yield Life(total.name, ((REGISTERS, 0.0, 2.0),))


def _of_rows(kernel: Kernel, plan: Plan) -> Iterator[Life]:
    row, phases = kernel.row, kernel.phases
    assert row is not None
    uses = [_Uses(p) for p in phases]
    end = FIRST + len(phases)
    cached = {t.name for t in row.columns} if row.cached else set()
    held = {t.name for t in row.in_registers} if row.staged else set()
    for t in kernel.wide_inputs:
        yield Life(t.name, tuple(_wide(kernel, t, [n for n, u in enumerate(uses) if t.name in u.inputs], held)))
    for t in kernel.columns:
        used = [FIRST + n for n, u in enumerate(uses) if t.name in u.inputs]
        loaded = ARRIVES if row.cached == "row" else BEFORE
        first = (GLOBAL, loaded, loaded + EDGE), (REGISTERS, loaded + EDGE, end)
        yield Life(t.name, first if t.name in cached else tuple((GLOBAL, n, n + EDGE) for n in used))
    for t in kernel.row_inputs:
        last = max((n for n, u in enumerate(uses) if t.cname in u.names), default=0)
        yield Life(t.name, ((GLOBAL, ARRIVES, ARRIVES + EDGE), (REGISTERS, ARRIVES + EDGE, FIRST + last + 1)))
    for n, phase in enumerate(phases):
        yield from _numbers(kernel, plan, n, uses)
        for t in phase.outputs:
            leaves = {place.name for place in row.results}
            stored = ((SHARED, FIRST + n, end - EDGE),) if t.name in leaves else ()
            at = end if t.name in leaves else FIRST + n + 1
            yield Life(t.name, (*stored, (GLOBAL, at - EDGE, at)))
        for t in phase.row_outputs:
            yield Life(t.name, ((GLOBAL, FIRST + n + 1 - EDGE, FIRST + n + 1),))
    for total in kernel.accumulators:
        shared = ((SHARED, end, end + 1 - EDGE),) if row.flush in ("in turn", "ring") else ()
        registers = (REGISTERS, BEFORE + EDGE, end)
        yield Life(total.name, (registers, *shared, (GLOBAL, end + 1 - EDGE, end + 1)))


def _wide(kernel: Kernel, t: Tensor, used: list[int], held: set[str]) -> Iterator[tuple[str, float, float]]:
    """An [M, D] input: staged in shared memory, held in registers, or read again in every phase."""
    row = kernel.row
    assert row is not None
    last = FIRST + max(used, default=0) + 1
    if row.schedule.form == "multipass":
        yield from ((GLOBAL, FIRST + n, FIRST + n + EDGE) for n in used)
        return
    yield GLOBAL, ARRIVES, ARRIVES + EDGE
    if row.staged:
        yield SHARED, ARRIVES + EDGE, FIRST if t.name in held else last
    if t.name in held or not row.staged:
        yield REGISTERS, FIRST if row.staged else ARRIVES + EDGE, last


def _numbers(kernel: Kernel, plan: Plan, n: int, uses: list[_Uses]) -> Iterator[Life]:
    """The numbers that the reductions of phase ``n`` give, and what follows from them and is used in later phases."""
    phase, end = kernel.phases[n], FIRST + n + 1
    later = {name: m for m in range(n + 1, len(uses)) for name in uses[m].names}
    folded = {s.name: s.cname for r in phase.reduces for s in r.sums}
    block = SHARED if plan.schedule.threads > WARP else REGISTERS
    among = {s.name for r in phase.reduces for s in r.sums if r.whole_row} if plan.schedule.cluster > 1 else set()
    among |= {*phase.exchanged}
    values = {e.out.name: c_name(e.out) for e in plan.graph.eqns}
    after = {name: cname for name, cname in values.items() if cname in uses[n].defined and name not in folded}
    kept = {t.name: f"{t.name}_row_" for r in (*phase.reduces, phase) for t in r.kept}
    for name, cname in (folded | after | kept).items():
        stay = ((REGISTERS, end, FIRST + later[cname] + 1),) if cname in later else ()
        meets = CLUSTER if name in among else block
        yield Life(name, (((meets, end - EDGE, end), *stay) if name in folded else stay))
    for name in among - folded.keys():
        yield Life(name, ((CLUSTER, end - EDGE, end),))


class _Uses:
    """What the statements of a phase use: ``names`` in C, ``inputs`` with a D axis; what follows its reductions."""

    def __init__(self, phase: Phase) -> None:
        lines = [s.text for loop in phase.loops for s in (*loop.vector, *loop.element)]
        after = [s for a in phase.after for s in ((*a.statements, a.result) if isinstance(a, Join) else (a,))]
        self.inputs = {name for loop in phase.loops for name in loop.inputs}
        self.defined = {s.text.split(" = ")[0].split()[-1] for s in after if s.text.startswith("const ")}
        self.names = {*re.findall(r"\w+", " ".join([*lines, *(s.text for s in after)]))}
