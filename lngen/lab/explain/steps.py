"""What the kernels of a plan do step by step: what each phase computes, how often tensors are read, where values live.

All of it is read from the plan. A phase goes once over a row and ends with the sums that need the whole row.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from lngen.compiler.ir import WIDE, D, is_column_fold, is_number_fold, is_over_segments, is_row_fold
from lngen.compiler.ir.places import downstream
from lngen.compiler.lower import Kernel, Plan
from lngen.compiler.lower.cuda.fragments import PhaseText
from lngen.compiler.problem.facts import WARP

GLOBAL, SHARED, CLUSTER, REGISTERS = "global memory or L2", "shared memory", "shared memory of a cluster", "registers"
BEFORE, ARRIVES, FIRST = 0, 1, 2  # columns of a drawing: before the rows, a row arrives, the first phase
EDGE = 0.25  # of a column: an access at its beginning or end

Step = dict[str, Any]
Stay = tuple[str, float, float]  # at a level, from where to where in columns, each of which is 1 wide

# ---- what a kernel does, step by step ----


def steps(plan: Plan) -> list[Step]:
    """The phases of all kernels, each kernel's followed by what it does outside of phases; values by name.

    kernel, phase   the kernel by its role, and the number of the step in it; ``inside``: it is a phase
    loads           [M, D] and [D] inputs, once for each loop that reads them
    computes        values of elements, again in each phase that needs them
    sums            reductions along a row, or of a vector, which end the phase
    needs           why they end it: by sum, the values of later phases that use it, or a number that follows from it
    then            numbers that follow from the sums, or from inputs alone
    columns         reductions over rows: partial ones in a phase, complete ones outside
    stores          results, and values for a later kernel
    """
    graph = plan.graph
    numbers = [e for e in graph.eqns if D not in e.out.type.axes and not is_row_fold(e)]
    along_d = [e for e in graph.eqns if any(D in v.type.axes for v in (e.out, *e.args))]
    every = [step for kernel in plan.kernels for step in _steps(kernel, plan) if step["defines"]]
    for n, step in enumerate(every):
        phases = [s for s in every[n + 1 :] if s["inside"] and s["kernel"] == step["kernel"]]
        later = [e for e in along_d if any(e.out.name in s["defines"] for s in phases)]
        follow = {name: downstream(numbers, [graph.values()[name]]) for name in step["sums"] if later}
        step["needs"] = {s: [e.out.name for e in later if not v.isdisjoint(e.args)] for s, v in follow.items()}
    return every


def _steps(kernel: Kernel, plan: Plan) -> Iterator[Step]:
    made, along_d = {e.out.name: e for e in plan.graph.eqns}, {p.name for p in plan.inputs if D in p.type.axes}
    stored = {*(v.name for v in plan.outputs), *(b.name for b in plan.workspace)}
    phases = kernel.phases if kernel.role in ("rows", "columns") else ()
    rest = (kernel.finish, kernel.maxima, *([] if phases else kernel.phases))
    of_all = {*_defined([*(p.maxima for p in phases), kernel.maxima and kernel.maxima.maxima])}
    for n, part in enumerate((*phases, rest)):
        early = (kernel.uniform, kernel.per_row) if n == 0 else ()
        eqns = [made[name] for name in dict.fromkeys(_defined((early, part)))]
        kinds: dict[str, list[str]] = {"computes": [], "sums": [], "then": [], "columns": []}
        for e in eqns:
            of_row, name = is_row_fold(e) or is_number_fold(e), e.out.name
            over_rows = is_column_fold(e) or name in of_all
            kind = "columns" if over_rows else "sums" if of_row else ""
            kinds[kind or ("computes" if D in e.out.type.axes else "then")].append(name)
        defines = [e.out.name for e in eqns]
        step = {"kernel": kernel.role, "phase": n, "inside": n < len(phases), **kinds, "defines": defines}
        if n < len(phases):
            loads = [name for loop in phases[n].loops for name in loop.inputs]
            stores = [t.name for t in (*phases[n].outputs, *phases[n].row_outputs)]
        else:
            loads = [*dict.fromkeys(a.name for e in eqns if not is_column_fold(e) for a in e.args if a.name in along_d)]
            stores = [name for name in defines if name in stored]
        yield step | {"loads": loads, "stores": stores}


def _defined(part: Any) -> Iterator[str]:
    """The values of the equations that stand beside statements and sums in a part of a plan."""
    if note := getattr(part, "note", ""):
        yield note.split()[0].removeprefix("%")
    parts = [getattr(part, f.name) for f in fields(part)] if is_dataclass(part) else part
    for inner in parts if isinstance(parts, list | tuple) else ():
        yield from _defined(inner)


# ---- how often tensors are read ----


def reads(plan: Plan) -> list[dict[str, Any]]:
    """How often each kernel reads each input along D from global memory or L2: ``count`` times for each ``per``.

    An [M, D] tensor is read once a call into registers or a stage, and by each loop in form multipass. A [D] tensor is
    read for each row group if it stays in registers, else by each loop of each row; the compiler may join such loads.
    Not counted: idle row groups, and ``prefetch``, read a row of another once more, which the L2 cache has.
    """
    found: list[dict[str, Any]] = []
    loops = Counter((s["kernel"], s["inside"], name) for s in steps(plan) for name in s["loads"])
    for (role, inside, name), count in loops.items():
        row = next(k.row for k in plan.kernels if k.role == role)
        again = inside and (row is None or row.schedule.form != "multipass")
        if plan.graph.values()[name].type.axes == WIDE:
            count, per = 1 if again else count, "call"
        elif not inside or row is None:
            per = "block" if inside else "call"
        else:
            count, per = (1 if row.cached else count), "row group" if row.cached and row.persistent else "row"
        found.append({"tensor": name, "kernel": role, "count": count, "per": per})
    return found


# ---- where values live ----


def columns(kernel: Kernel) -> tuple[str, ...]:
    """What happens in the columns of ``lives``."""
    if kernel.row is None:
        return "reads", "computes", "stores"
    last = ("after the rows",) if kernel.accumulators or kernel.maxima else ()
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
        if a.const and (kernel.finish or kernel.shared):
            yield a.tensor or a.name, SHARED, 1, 2
    yield from ((total.name, REGISTERS, 0, 2) for total in kernel.accumulators)


def _of_rows(kernel: Kernel, plan: Plan) -> Iterator[tuple[str, str, float, float]]:
    row, end = kernel.row, FIRST + len(kernel.phases)
    assert row is not None
    inside = {FIRST + s["phase"]: s for s in _steps(kernel, plan) if s["inside"]}
    operands = {e.out.name: e.args for e in plan.graph.eqns}
    last = {a.name: n for n, s in inside.items() for name in s["defines"] for a in operands[name]}  # phase that uses it
    for t in (*kernel.inputs.element, *kernel.inputs.column):
        used = [n for n, s in inside.items() if t.name in s["loads"]]
        cached, wide = t in kernel.inputs.column and row.cached, t in kernel.inputs.element
        if used and (cached or (wide and plan.schedule.form != "multipass")):
            at = ARRIVES if wide or cached == "row" else BEFORE
            staged, held = wide and row.staged, not wide or not row.staged or t in row.in_registers
            until = max(used) + 1 if wide else end
            yield t.name, GLOBAL, at, at + EDGE
            yield from [(t.name, SHARED, at + EDGE, FIRST if held else until)] * staged
            yield from [(t.name, REGISTERS, FIRST if staged else at + EDGE, until)] * held
        else:
            yield from ((t.name, GLOBAL, n, n + EDGE) for n in used)
    for t in kernel.inputs.row:
        yield t.name, GLOBAL, ARRIVES, ARRIVES + EDGE
        yield t.name, REGISTERS, ARRIVES + EDGE, last.get(t.name, FIRST) + 1
    leaving, stored = {place.name for place in row.results}, set[str]()
    for n, phase in enumerate(kernel.phases, FIRST):
        yield from _numbers(plan, phase, last, n)
        for name in (t.name for t in (*phase.outputs, *phase.row_outputs)):
            stored.add(name)
            at = end if name in leaving else n + 1
            yield from [(name, SHARED, n, at - EDGE)] * (name in leaving)
            yield name, GLOBAL, at - EDGE, at
    finished = [a.tensor for a in kernel.arguments if a.kind == "output" and a.tensor not in stored]
    yield from ((name, GLOBAL, end + 1 - EDGE, end + 1) for name in finished)
    for most in kernel.maxima.maxima if kernel.maxima else ():
        yield most.name, REGISTERS, BEFORE + EDGE, end + 1 - EDGE
    for total in kernel.accumulators:
        yield total.name, REGISTERS, BEFORE + EDGE, end
        yield from [(total.name, SHARED, end, end + 1 - EDGE)] * (row.flush in ("in turn", "ring"))
        yield total.name, GLOBAL, end + 1 - EDGE, end + 1


def _numbers(plan: Plan, phase: PhaseText, last: Mapping[str, int], n: int) -> Iterator[tuple[str, str, float, float]]:
    """Of the phase in column ``n``: what its sums give, and what follows from them and is used in later phases."""
    sums = [s.name for r in phase.reduces for s in r.sums]
    of_rows = [s.name for r in phase.reduces if r.whole_row for s in r.sums] * (plan.schedule.cluster > 1)
    among = dict.fromkeys([*of_rows, *phase.exchanged])
    for name in dict.fromkeys([*sums, *among]):
        block = SHARED if plan.schedule.threads > WARP else REGISTERS
        yield name, CLUSTER if name in among else block, n + 1 - 2 * EDGE, n + 1 - EDGE
    kept = [t.name for t in (*phase.kept, *(t for r in phase.reduces for t in r.kept))]
    for name in dict.fromkeys([*sums, *_defined(phase.after), *kept]):
        of_segments = name in sums and is_over_segments(plan.graph.values()[name])
        level = SHARED if of_segments and plan.schedule.form == "multipass" else REGISTERS
        yield from [(name, level, n + 1 - EDGE, last.get(name, 0) + 1)] * (last.get(name, 0) > n)
