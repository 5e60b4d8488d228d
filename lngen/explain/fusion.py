"""Why a call is so few kernels: its phases and what separates them, where each value lives, what separate kernels move.

All of it is read from the plan. A phase goes once over a row and ends with the sums that need the whole row.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from lngen.explain.amounts import Amount, as_json, at, bytes_of, formula, is_free, joined, listed, si, times
from lngen.explain.section import WIDTH, Lines, Section, Text
from lngen.explain.subject import Subject
from lngen.ir import WIDE, D, S, Value, is_column_fold, is_number_fold, is_row_fold
from lngen.lower import Kernel, Plan
from lngen.passes import downstream
from lngen.problem.footprint import static_shared
from lngen.spec import Spec

Step = dict[str, Any]

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
    phases, rest = kernel.phases, (kernel.statements, kernel.finish, kernel.numbers)
    for n, part in enumerate((*phases, rest)):
        early = (kernel.uniform, kernel.per_row) if n == 0 else ()
        eqns = [made[name] for name in dict.fromkeys(_defined((early, part)))]
        kinds: dict[str, list[str]] = {"computes": [], "sums": [], "then": [], "columns": []}
        for e in eqns:
            of_row, name = is_row_fold(e) or is_number_fold(e), e.out.name
            kind = "sums" if of_row else "columns" if is_column_fold(e) else ""
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


# ---- memory: reads, places, and what separate kernels would move ----


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


def moved(plan: Plan) -> Amount:
    """Bytes of all inputs and results: an [M, D] input as often as kernels read it, all else once."""
    again = Counter(read["tensor"] for read in reads(plan) for _ in range(read["count"]))
    inputs = (times(bytes_of(v), again[v.name] if v.type.axes == WIDE else 1) for v in plan.inputs)
    return joined([*inputs, bytes_of(*plan.outputs)])


def values(plan: Plan) -> list[dict[str, Any]]:
    """Every value of the graph: its axes, its place, and the steps that compute it, or of an input those that use it.

    place   register: in those of the thread that has the column; shared: in shared memory; global: read where it is
            used, through the caches; uniform: one number, the same in every thread of a row, or in all
    """
    every, found = steps(plan), []
    kernels, made = {k.role: k for k in plan.kernels}, {e.out.name for e in plan.graph.eqns}
    for v in plan.graph.values().values():
        users = {e.out.name for e in plan.graph.eqns if v in e.args} if v.name not in made else {v.name}
        uses = [(s["kernel"], s["phase"]) for s in every if not users.isdisjoint(s["defines"])]
        kernel, phase = uses[0] if uses else ("", None)
        about = {
            "name": v.name,
            "type": str(v.type),
            "axes": [*map(str, v.type.axes)],
            "kernel": kernel,
            "phase": phase,
        }
        place = _place(v, kernels[kernel], v.name not in made) if uses else "unused"
        found.append({**about, "uses": uses, "place": place, "stored": any(v.name in s["stores"] for s in every)})
    return found


def _place(v: Value, kernel: Kernel, given: bool) -> str:
    wide, row = v.type.axes == WIDE, kernel.row
    again = row is not None and row.schedule.form == "multipass"
    if S in v.type.axes:
        sums = (s.name for p in kernel.phases for r in p.reduces for s in r.sums)
        exchanged = (name for p in kernel.phases for name in p.exchanged)
        return "shared" if v.name in (sums if again else exchanged) else "register"
    if D not in v.type.axes or not given:
        return "register" if D in v.type.axes else "uniform"
    if row is None or (again if wide else not row.cached):
        return "global"
    return "shared" if wide and row.staged and not row.in_registers else "register"


def unfused(spec: Spec) -> tuple[int, Amount]:
    """The kernels and bytes of a call that computes each equation of the derived graph by a kernel of its own.

    Each kernel reads its operands and writes its result in the dtype that the equation has; views move nothing.
    """
    graph = spec.trace()["cse"]
    apart = [e for e in graph.eqns if not is_free(e)]
    numbers = {*graph.by_value, *(e.out for e in graph.eqns if is_free(e) and not e.out.type.axes)}
    return len(apart), joined(bytes_of(e.out, *({*e.args} - numbers)) for e in apart)


# ---- the section ----


def fusion(subject: Subject) -> Section:
    """Phases and what separates them, places of values, reads, kernels and workspace, and the unfused sequence."""
    plan = subject.plan
    (count, apart), whole = unfused(plan.spec), moved(plan)
    factor = at(apart, subject) / max(at(whole, subject), 1)
    kernels = [{"role": k.role, "launch": k.launch_rule(), "why": _why(k)} for k in plan.kernels]
    data = {
        "kernels": kernels,
        "phases": steps(plan),
        "values": values(plan),
        "reads": reads(plan),
        "workspace": {b.name: b.bytes(subject.rows) for b in plan.workspace},
        "moved": as_json(whole, subject),
        "unfused": {"kernels": count, **as_json(apart, subject), "factor": factor},
    }
    text = (
        f"Unfused, with a kernel for each equation of the derived graph that writes its result to memory in the dtype "
        f"it is computed in: kernels {count}, bytes {formula(apart)}, {si(at(apart, subject), 'B')} for {subject.rows} "
        f"rows. Fused: kernels {len(kernels)}, bytes {formula(whole)}, {si(at(whole, subject), 'B')}, {factor:.3g} "
        "times less."
    )
    blocks = (
        Lines(tuple(_phase_lines(plan)), "A phase goes over a row and ends with the sums that need the whole row:"),
        Lines(tuple(_place_lines(subject)), "Where values live:"),
        Text(f"Launches of a call: {len(kernels)}. {' '.join(k['why'] for k in kernels)}"),
        Text(text),
    )
    return Section("fusion", "Fusion", blocks, data)


def _phase_lines(plan: Plan) -> Iterator[str]:
    constants = {e.out.name for e in plan.graph.eqns if is_free(e)}
    before: dict[str, set[str]] = {k.role: set() for k in plan.kernels}
    for step in steps(plan):
        kernel = next(k for k in plan.kernels if k.role == step["kernel"])
        if not before[kernel.role]:
            yield from _entry(kernel.role, kernel.launch_rule())
        new = [name for name in step["computes"] if name not in before[kernel.role]]
        again = listed(name for name in step["computes"] if name in before[kernel.role])
        needed = listed(name for used in step["needs"].values() for name in used)
        parts = {
            "computes": listed(new) + f"; again {again}" * bool(again),
            "reduces": listed(step["sums"]) + f" over the whole row, before {needed}" * bool(needed),
            "then": listed(name for name in step["then"] if name not in constants),
            "over rows": listed(step["columns"]),
            "stores": listed(step["stores"]),
        }
        head = f"  phase {step['phase']}" if step["inside"] else "  end"
        for what in filter(parts.get, parts):
            yield from _entry(f"{head:<11}{what}", parts[what])
            head = ""
        before[kernel.role] |= {*step["defines"]}


def _place_lines(subject: Subject) -> Iterator[str]:
    plan, kernel = subject.plan, subject.plan.kernels[0]
    places, inputs = {v["name"]: v["place"] for v in values(plan)}, [v.name for v in plan.inputs]
    held = [name for name in inputs if places[name] == "register"]
    held += [a.name for k in plan.kernels for a in k.accumulators]
    held += [t.name for k in plan.kernels for p in k.phases for t in (*p.kept, *(t for r in p.reduces for t in r.kept))]
    yield from _entry("registers", f"{listed(held)}; " * bool(held) + "all other elements within their phase")
    shared = [name for name, place in places.items() if place == "shared" and name not in inputs]
    if kernel.row:
        staged, static = listed(p.name for p in kernel.row.places), static_shared(subject.schedule, subject.problem)
        exchanged = f"{listed(shared)} of all segments" * bool(shared)
        parts = [f"{staged} in {kernel.dynamic} bytes of stages" * bool(staged), exchanged]
        parts.append(f"{static} static bytes for sums and barriers" * bool(static))
        parts.append("row sums of the other blocks of a cluster" * (kernel.cluster > 1))
        yield from _entry("shared memory", "; ".join(filter(None, parts)))
    counts = Counter((read["tensor"], read["per"]) for read in reads(plan) for _ in range(read["count"]))
    found = (f"{t} {n}{f' for each {per}' * (per != 'call')}" for (t, per), n in counts.items())
    yield from _entry("times read", ", ".join(found))
    buffers = ", ".join(f"{b.name} {si(b.bytes(subject.rows), 'B')}" for b in plan.workspace)
    l2 = f"; L2 of {subject.device.name} has {subject.device.l2_mib} MiB"
    yield from _entry("workspace", buffers + l2 if buffers else "none")


def _why(kernel: Kernel) -> str:
    """Why this kernel is one of its own."""
    sentences = {
        "rows": "No row needs another one, so one kernel computes all that has rows.",
        "columns": "In form multipass no block holds a row, so a kernel of its own reads rows again and adds columns.",
        "elementwise": "Results without rows have a kernel of their own.",
        "numbers": "One block reduces vectors to numbers, after the kernels that store them.",
    }
    text = sentences.get(kernel.role, "")
    if kernel.finish:
        sums = listed(a.name for a in kernel.finish.accumulators)
        where = "after a grid barrier of a cooperative launch" if kernel.phases else "by a kernel of its own"
        text += f" Reductions over all rows: {sums}. Each block stores those of its rows, and they are joined in the "
        text += f"order of the graph, {where}."
    return text.strip()


def _entry(label: str, text: str) -> list[str]:
    """Lines of a label and its text."""
    return textwrap.wrap(text, WIDTH - 2, initial_indent=f"{label:<21}", subsequent_indent=" " * 21)
