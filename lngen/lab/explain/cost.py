"""What a call costs: operations, bytes, what is kept, the roofline of every described GPU, what bounds it, records."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import log, prod
from typing import Any

from lngen.compiler.devices import Device, described
from lngen.compiler.ir import FOLDS, WIDE, Axis, D, DType, Eqn, Graph, Lengths, M, S, Value, axes_union
from lngen.compiler.ir.types import sets_in
from lngen.compiler.lower import Plan
from lngen.compiler.spec import Spec
from lngen.errors import LngenError
from lngen.lab.bench.tasks import floor_bytes, gb_s
from lngen.lab.explain.evidence import PHRASES, expected, memory_us
from lngen.lab.explain.section import Block, Section, Subject, Table, Text
from lngen.lab.explain.steps import reads
from lngen.lab.explain.timings import UNKNOWN, records

# ---- amounts: polynomials in the lengths of axes, such as 6*M*D + 8*M, and their text ----

Amount = Counter[tuple[Axis, ...]]
PREFIXES = ((12, "T"), (9, "G"), (6, "M"), (3, "k"))
MOST_NAMES = 10  # that a line lists


def is_free(eqn: Eqn) -> bool:
    """True for an equation that neither computes nor moves anything: a number, a view, a cast to its own dtype."""
    same = eqn.op == "cast" and eqn.out.type == eqn.args[0].type
    return same or eqn.op in ("const", "size", "iota", "expand", "detach", "stop_gradient")


def joined(amounts: Iterable[Amount]) -> Amount:
    """Their sum."""
    return sum(amounts, Counter[tuple[Axis, ...]]())


def bytes_of(*values: Value) -> Amount:
    """The bytes of the values."""
    return joined(Counter({v.type.axes: v.type.dtype.size}) for v in values)


def formula(amount: Amount) -> str:
    """The polynomial, its highest terms first; S is the number of segments of a row."""
    ordered = sorted(amount.items(), key=lambda item: (-len(item[0]), [axis.key for axis in item[0]]))
    terms = ([*([str(n)] if n > 1 or not axes else []), *map(str, axes)] for axes, n in ordered)
    return " + ".join(map("*".join, terms)) or "0"


def at(amount: Amount, subject: Subject) -> int:
    """Its value for the subject's rows."""
    named = (axis for axes in amount for axis in axes if isinstance(axis.number, str))
    sets = {axis: subject.rows if axis.of_table else sets_in(subject.rows) for axis in named}
    length = Lengths({M: subject.rows, D: subject.problem.d, S: subject.problem.segments, **sets})
    return sum(n * prod(length[axis] for axis in axes) for axes, n in amount.items())


def as_json(amount: Amount, subject: Subject) -> dict[str, Any]:
    """Formula and value."""
    return {"formula": formula(amount), "value": at(amount, subject)}


def si(number: float, unit: str = "") -> str:
    """Four digits and a decimal prefix: 100.7 MB."""
    power, prefix = next(((p, word) for p, word in PREFIXES if number >= 10**p), (0, ""))
    return f"{number / 10**power:.4g} {prefix}{unit}".rstrip()


def listed(names: Iterable[str]) -> str:
    """Names, each once; of many, the first."""
    every = [*dict.fromkeys(names)]
    more = len(every) - MOST_NAMES
    return ", ".join(every[:MOST_NAMES]) + f" and {more} more" * (more > 0)


def moved(plan: Plan) -> Amount:
    """Bytes of all inputs and results: an [M, D] input as often as kernels read it, all else once."""
    again = Counter(read["tensor"] for read in reads(plan) for _ in range(read["count"]))
    inputs = [v for v in plan.inputs for _ in range(again[v.name] if v.type.axes == WIDE else 1)]
    return bytes_of(*inputs, *plan.outputs)


# ---- operations, and what is kept ----

# Flops of an operation. Casts, comparisons, signs and operations on bits are counted beside them.
FLOPS = {"add": 1, "mul": 1, "fma": 2, "div": 1, "sqrt": 1, "cast": 0, "other": 0}
KIND = {"sub": "add", "reduce_sum": "add", "reduce_dot": "fma"}


def operations(graph: Graph) -> dict[str, Amount]:
    """The operations of a graph by kind, those of ``FLOPS``; each equation is computed once.

    An equation has an operation for each element of its result, a reduction one for each element that it takes.
    """
    found: dict[str, Amount] = {}
    for e in graph.eqns:
        kind = KIND.get(e.op, e.op if e.op in FLOPS else "other")
        axes = axes_union(*(a.type.axes for a in e.args)) if e.op in FOLDS else e.out.type.axes
        if not is_free(e):
            found[kind] = found.get(kind, Counter()) + Counter({axes: 1})
    return {kind: found[kind] for kind in FLOPS if kind in found}


def flops(graph: Graph) -> Amount:
    """The floating-point operations."""
    return joined(amount for kind, amount in operations(graph).items() for _ in range(FLOPS[kind]))


def kept(spec: Spec) -> Mapping[str, list[Value]]:
    """What backward takes besides cotangents: results of forward, and inputs; nothing for a graph without backward."""
    try:
        tensors = spec.with_direction("bwd").graph().tensors
    except LngenError:
        return {}
    forward = spec.forward()
    ours = {"saved by forward": forward.results, "inputs kept": forward.params}
    return {what: [t for t in tensors if t.name in {v.name for v in of}] for what, of in ours.items()}


# ---- times: the roofline, the model, and records ----


def peak(device: Device) -> float:
    """Flops of f32 per second, an fma on every lane each cycle.

    CUDA C++ Programming Guide, "Arithmetic Instructions": a multiprocessor has 64 lanes up to sm_80, else 128.
    """
    return device.multiprocessors * (64 if device.capability <= 80 else 128) * 2 * device.clock_mhz * 1e6


def roofline(device: Device, moved_bytes: int, work: int, *, double: bool) -> dict[str, Any]:
    """Microseconds of all bytes at the memory's bandwidth, and of all flops at the peak, which f64 is not described."""
    memory, arithmetic = memory_us(moved_bytes, device), None if double else work / peak(device) * 1e6
    larger = None if arithmetic is None else "memory" if memory >= arithmetic else "arithmetic"
    return {"GPU": device.name, "memory us": memory, "arithmetic us": arithmetic, "larger": larger}


def bound(subject: Subject) -> dict[str, Any]:
    """The model's time of a call in microseconds, its parts, which add up, and what bounds it; nothing without rows."""
    if subject.plan.kernels[0].row is None:
        return {}
    found = expected(subject.schedule, subject.plan.spec, subject.problem, subject.rows, subject.device)
    return found._asdict()


def measured(subject: Subject) -> list[dict[str, Any]]:
    """Recorded times of the spec by GPU and way of calling, at the recorded rows nearest to the subject's.

    There it is the time of the subject's schedule, or else the shortest.
    """
    spec, schedule, found = subject.plan.spec, str(subject.schedule), dict[tuple[str, str], dict[str, Any]]()
    timed = [(abs(log(r.rows / subject.rows)), r.schedule != schedule, r.us, r) for r in records(str(spec)) if r.us]
    for *_, us, r in sorted(timed, key=lambda item: item[:3]):
        about = {"GPU": r.device, "rows": r.rows, "us": us, "GB/s": gb_s(floor_bytes(spec, r.rows), us)}
        version = " ".join(filter(None, (r.version, r.date)))
        about |= {"calls": r.calls, "schedule": r.schedule, "version": version, "generator": r.generator}
        found.setdefault((r.device, r.calls), about)
    return [*found.values()]


# ---- the section ----


ROOFLINE = "Roofline: each input and result moves once at the memory's bandwidth, all flops run at the peak of f32:"
HEADS = {"larger": "the larger one", "generator": "lngen's generator"}  # of columns, where the names of data are short


def cost(subject: Subject) -> Section:
    """Operations and bytes, what is kept, the roofline of every described GPU, what bounds it, and records."""
    plan, device, kinds, work = subject.plan, subject.device, operations(subject.plan.graph), flops(subject.plan.graph)
    least, buffers = bytes_of(*plan.inputs, *plan.outputs), plan.workspace_bytes(subject.rows)
    amounts = {
        "bytes read": (bytes_of(*plan.inputs), listed(v.name for v in plan.inputs)),
        "bytes written": (bytes_of(*plan.outputs), listed(v.name for v in plan.outputs)),
        "read again": (moved(plan) - least, "by later phases and kernels, as far as no cache has it"),
        **{what: (bytes_of(*of), listed(v.name for v in of)) for what, of in kept(plan.spec).items()},
    }
    each = f"{at(work, subject) / at(least, subject):.3g} for each byte"
    table = [("flops", formula(work), si(at(work, subject)), each)]
    table += ((name, formula(n), si(at(n, subject), "B"), text) for name, (n, text) in amounts.items() if n)
    cached = f"meant to stay in the L2 cache of {device.l2_mib} MiB"
    table += [("workspace", "", si(buffers, "B"), cached)] * bool(buffers)
    double, limit, found = plan.accumulator is DType.F64, bound(subject), measured(subject)
    roofs = [roofline(d, at(least, subject), at(work, subject), double=double) for d in described().values()]
    mine, near = {str(subject.schedule): "this one"}, f"Recorded times, at the recorded rows nearest to {subject.rows}:"
    operations_text = ", ".join(f"{kind} {formula(n)}" for kind, n in kinds.items())
    blocks: tuple[Block, ...] = (
        Table(("", "formula", f"at {subject.rows} rows", ""), tuple(table)),
        Text(f"Operations: {operations_text}. An fma counts as two flops; casts and others count as none."),
        _table(roofs, ROOFLINE),
        Text(_expected(limit, subject)),
        _table([{**r, "schedule": mine.get(r["schedule"], "another")} for r in found], near)
        if found
        else Text("No time of this spec is recorded here."),
    )
    data = {name: as_json(n, subject) for name, (n, _) in [("flops", (work, "")), *amounts.items()]}
    more = {"operations": {kind: as_json(n, subject) for kind, n in kinds.items()}, "workspace": buffers}
    return Section("cost", "Cost", blocks, data | more | {"roofline": roofs, "bound": limit, "records": found})


def _expected(limit: Mapping[str, Any], subject: Subject) -> str:
    if not limit:
        return "The model predicts the time of rows, and this call has none."
    parts = ", ".join(f"{name} {us:.4g}" for name, us in limit["parts"].items() if us)
    columns = any(k.role == "columns" for k in subject.plan.kernels)
    text = f"The model of lngen predicts {limit['us']:.4g} us on the {subject.device.name}."
    text += " That leaves out the kernel that only adds columns." * columns
    return f"{text} Its parts in us: {parts}. The call is bound by {limit['by']}: {PHRASES[limit['by']]}."


def _table(rows: Sequence[Mapping[str, Any]], heading: str = "") -> Table:
    """Rows as a table, without the columns of which nothing is recorded."""
    kept = [name for name in rows[0] if any(row[name] not in ("", UNKNOWN) for row in rows)]
    cells = tuple(tuple(_cell(row[name]) for name in kept) for row in rows)
    return Table(tuple(HEADS.get(name, name) for name in kept), cells, heading)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.{4 if value < 1e4 else 6}g}"
    return "-" if value in (None, "", UNKNOWN) else str(value)
