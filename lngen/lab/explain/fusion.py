"""Explains the fusion: the phases and what separates them, where each value lives, the bytes of unfused kernels."""

from collections import Counter
from collections.abc import Iterator

from lngen.compiler.ir import D, is_over_segments
from lngen.compiler.lower import Kernel, Plan
from lngen.compiler.problem.footprint import static_shared, turned_shared
from lngen.compiler.spec import Spec
from lngen.lab.explain.cost import Amount, as_json, at, bytes_of, formula, is_free, joined, listed, moved, si
from lngen.lab.explain.section import Lines, Section, Subject, Table, Text, entry
from lngen.lab.explain.steps import REGISTERS, lives, reads, steps


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
        "lives": {k.role: lives(k, plan) for k in plan.kernels},
        "reads": reads(plan),
        "workspace": {b.name: b.bytes(subject.rows) for b in plan.workspace},
        "moved": as_json(whole, subject),
        "unfused": {"kernels": count, **as_json(apart, subject), "factor": factor},
    }
    compared = tuple(
        (name, str(n), formula(amount), si(at(amount, subject), "B"))
        for name, n, amount in (("fused", len(kernels), whole), ("unfused", count, apart))
    )
    text = (
        "Unfused, each equation of the derived graph is a kernel of its own. It writes its result to memory in the "
        f"dtype it is computed in. Fusion moves {factor:.3g} times fewer bytes."
    )
    blocks = (
        Lines(tuple(_phase_lines(plan)), "A phase goes over a row and ends with the sums that need the whole row:"),
        Lines(tuple(_place_lines(subject)), "Where values live:"),
        Text(f"A call launches {len(kernels)} kernel{'s' * (len(kernels) > 1)}. {' '.join(k['why'] for k in kernels)}"),
        Text(text),
        Table(("", "kernels", "bytes moved", f"at {subject.rows} rows"), compared),
    )
    return Section("fusion", "Fusion", blocks, data)


def _phase_lines(plan: Plan) -> Iterator[str]:
    constants = {e.out.name for e in plan.graph.eqns if is_free(e)}
    before: dict[str, set[str]] = {k.role: set() for k in plan.kernels}
    for step in steps(plan):
        kernel = next(k for k in plan.kernels if k.role == step["kernel"])
        if not before[kernel.role]:
            yield from entry(kernel.role, kernel.launch_rule())
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
            yield from entry(f"{head:<11}{what}", parts[what])
            head = ""
        before[kernel.role] |= {*step["defines"]}


def _place_lines(subject: Subject) -> Iterator[str]:
    plan, kernel, made = subject.plan, subject.plan.kernels[0], subject.plan.graph.values()
    stays = [(name, level) for k in plan.kernels for name, of in lives(k, plan).items() for level, *_ in of]
    held = [v.name for v in plan.inputs if D in v.type.axes and (v.name, REGISTERS) in stays]
    held += [a.name for k in plan.kernels for a in k.accumulators]
    held += [t.name for k in plan.kernels for p in k.phases for t in (*p.kept, *(t for r in p.reduces for t in r.kept))]
    yield from entry("registers", f"{listed(held)}; " * bool(held) + "all other elements, within their phase")
    again = subject.schedule.form == "multipass"
    joined_sums = (p.exchanged if not again else [s.name for r in p.reduces for s in r.sums] for p in kernel.phases)
    shared = [name for names in joined_sums for name in names if is_over_segments(made[name])]
    if kernel.row:
        staged, static = listed(p.name for p in kernel.row.places), static_shared(subject.schedule, subject.problem)
        exchanged = f"{listed(shared)} of all segments" * bool(shared)
        turned = turned_shared(subject.schedule, subject.problem)
        parts = [f"{staged} in {kernel.dynamic - turned} bytes of stages" * bool(staged), exchanged]
        parts.append(f"{turned} bytes for elements of rotated heads" * bool(turned))
        parts.append(f"{static} static bytes for sums and barriers" * bool(static))
        parts.append("row sums of the other blocks of a cluster" * (kernel.cluster > 1))
        yield from entry("shared memory", "; ".join(filter(None, parts)))
    counts = Counter((read["tensor"], read["per"]) for read in reads(plan) for _ in range(read["count"]))
    times = {name: "once" if n == 1 else f"{n} times" for name, n in counts.items()}
    found = (f"{t} {many}{f' for each {per}' * (per != 'call')}" for (t, per), many in times.items())
    yield from entry("times read", ", ".join(found))
    buffers = ", ".join(f"{b.name} {si(b.bytes(subject.rows), 'B')}" for b in plan.workspace)
    l2 = f"; the L2 cache of {subject.device.name} has {subject.device.l2_mib} MiB"
    yield from entry("workspace", buffers + l2 if buffers else "none")


def _why(kernel: Kernel) -> str:
    """Why this kernel is one of its own."""
    sentences = {
        "rows": "No row needs another one, so one kernel computes all that has rows.",
        "columns": "In form multipass no block holds a row. So a kernel of its own reads rows again and adds columns.",
        "elementwise": "Results without rows have a kernel of their own.",
        "numbers": "One block reduces vectors to numbers, after the kernels that store them.",
    }
    text = sentences.get(kernel.role, "")
    if kernel.finish:
        sums = listed(a.name for a in kernel.finish.accumulators)
        where = "after a grid barrier of a cooperative launch" if kernel.phases else "by a kernel of its own"
        text += f" Reductions over all rows: {sums}. Each block stores the results of its rows. They are joined in the "
        text += f"order that the graph states, {where}."
    if kernel.maxima:
        text += f" Maxima over all rows: {listed(m.name for m in kernel.maxima.maxima)}. The first block stores what "
        text += "results begin with, and each joins its own by an atomic: a maximum has no order."
    return text.strip()
