"""Why a schedule was chosen, and not another: its origin, its expected time, its fields and their neighbours."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from lngen.compiler.devices import Device, default_device
from lngen.compiler.problem import STAGED, Problem, Schedule, check, check_arch, parse_schedule
from lngen.compiler.problem.footprint import most_blocks
from lngen.compiler.problem.legal import MIN_STAGES
from lngen.compiler.problem.schedule import FORMS, changes, value_text
from lngen.compiler.schedule import workload
from lngen.compiler.schedule.model import estimated, features
from lngen.compiler.schedule.space import FIELDS, FLAG_FIELDS, Numbers, Schedules
from lngen.compiler.schedule.table import MANY, Key, origins
from lngen.errors import CompileError, EmitError, LowerError, MissingError, ScheduleError
from lngen.files import sha256
from lngen.lab.explain.evidence import PARTS, PHRASES, Evidence, Verdict, percent, predicted
from lngen.lab.explain.section import Block, Lines, Section, Subject, Table, Text, entry
from lngen.lab.tune.recorded import REPEATED

OTHERS, MEASURED = 5, 3  # schedules that are shown besides the chosen one, and how many of them by measured time
TIMES = "predicted_us", "measured_us"
OTHER = "The best other schedules, as changes of this one: first by measured, then by predicted time"
ADD_UP = (
    "The parts of the predicted time add up. Waiting, issuing and starting overlap with memory, so only what they add "
    "is theirs."
)
FIELDS_HEAD = "Each field, and what its neighbouring values would change:"
UNSCHEDULED = "One block reduces vectors to numbers, with every schedule alike."
SIGNS = (
    "A value with + is slower than the chosen one by so much, one with - is faster. 'Cannot tell' means that the "
    "predicted difference is smaller than the model's error."
)


def reasons(subject: Subject) -> Section:
    """Where the schedule comes from, its expected time, the best others, its fields, and how much was measured."""
    if not subject.scheduled:
        data: dict[str, Any] = {"chosen": str(subject.schedule), "rows": subject.rows}
        return Section("schedule", "Schedule", (Text(UNSCHEDULED),), data)
    e = Evidence(subject)
    source, about = _source(e)
    time = e.expected(subject.schedule)
    others, fields = _others(e), [*_fields(e)]
    recorded = {s for run in e.runs if run.device == subject.device.name for s in run.trials}
    times = [key for key in TIMES if any(o[key] for o in others)]
    best = tuple((*(f"{o[key]:.4g}" if o[key] else "-" for key in times), o["changes"]) for o in others)
    blocks = (
        Text(about),
        Text(
            f"The model predicts {time.us:.4g} us for {e.rows} rows on the {subject.device.name}. The call is bound by "
            f"{time.by}: {PHRASES[time.by]}. {ADD_UP}"
        ),
        Table(("part", "us", "what it is"), tuple((n, f"{us:.4g}", PARTS[n]) for n, us in time.parts.items() if us)),
        Text(_error(e, time.by)),
        Text(_measured(e)),
        Table((*(key.replace("_us", " us") for key in times), "changes"), best, OTHER),
        Text(SIGNS),
        Lines(tuple(_lines(subject.schedule, fields)), FIELDS_HEAD),
        Text(
            f"{len(e.space)} schedules are legal for this spec and have room on this GPU. On it, "
            f"{len(recorded) or 'none'} have recorded times for this workload class."
        ),
    )
    return Section("schedule", "Schedule", blocks, {
        "chosen": str(subject.schedule), "source": source, "rows": e.rows, "predicted_us": time.us,
        "parts": time.parts, "by": time.by, "error": asdict(e.stated), "runs": [str(run) for run in e.runs],
        "others": others, "fields": fields, "space": {"legal": len(e.space), "recorded": len(recorded)},
        "trials": _trials(e),
    })  # fmt: skip


# ---- where it comes from ----


def _source(e: Evidence) -> tuple[dict[str, Any], str]:
    s, chosen = e.subject, e.subject.schedule
    most = workload(s.problem, s.expected, s.device)
    order = estimated(s.problem, s.device, rows=s.expected)
    tried = s.compilation.tried
    data: dict[str, Any] = {"rank": order.index(chosen) if chosen in order else None, "of": len(order)}
    entries = {o: (table, key) for table, key, o in origins(s.problem, most, s.device)}
    if s.changed:
        data |= {"kind": "user", "changed": s.changed}
        text = f"You chose this schedule, by {s.changed}."
        text += f" The default is {min(tried, key=tried.__getitem__)}." if tried else ""
    elif chosen in entries:
        table, key = entries[chosen]
        data |= {"kind": "table", "table": table.file, "key": asdict(key), "class": most}
        text = f"lngen took this schedule from its table of measured schedules for the {table.device} "
        text += f"(lngen/compiler/devices/tables/{table.file}). {_entry(key, most, s.problem)}"
    else:
        data |= {"kind": "model"}
        near = "The nearest measured schedule was refused" if entries else "lngen has measured no schedule of such rows"
        text = f"{near}. So lngen took the first one in its model's order that was accepted."
    if not s.changed:
        data["spilled"] = {str(t): n for t, n in tried.items() if n}
        text += "".join(f" It tried {t} as well. That spills {n} bytes a thread." for t, n in data["spilled"].items())
    return data, f"{text} {_favourite(e, order, data['rank'])}"


def _entry(key: Key, most: int, p: Problem) -> str:
    """What an entry of a table holds for."""
    size = f"up to {most}" if most <= MANY else f"more than {MANY}"
    way = {"fwd": "forward", "bwd": "backward"}[key.direction]
    text = f"The entry holds for {way}, {8 * key.element}-bit rows of D = {key.d} and {size} KiB of inputs for each "
    text += "multiprocessor."
    text += f" That D is the nearest to {p.d} in the table." if key.d != p.d else ""
    more = f"{key.more} more [M, D] input{'s' * (key.more > 1)} than a norm"
    text += f" It is for graphs with {more}." if key.more else ""
    return text + (f" Its graph has {key.heavy} equations for each element." if key.heavy else "")


def _favourite(e: Evidence, order: list[Schedule], rank: int | None) -> str:
    """What the model alone would choose, and how it fares."""
    if rank == 0:
        return f"It is also the first of the {len(order)} schedules that the model ranks."
    spills = e.expected(e.subject.schedule).parts["spills"] > 0
    why = "it expects registers to spill" if spills else "it is not among those that it ranks"
    text = f"The model ranks it at place {rank + 1} of {len(order)}." if rank else f"The model does not rank it: {why}."
    return f"{text} The model's own first choice would be {changes(e.subject.schedule, order[0])}{_fares(e, order[0])}."


def _fares(e: Evidence, other: Schedule) -> str:
    """How another schedule fares against the chosen one, as the end of a sentence."""
    found = e.against(other)
    if found.numbers is None:
        return f". It {found.short}"
    ratio = found.numbers[0] / found.numbers[1]
    source = f"measured {found.short.partition(' % ')[2]}".rstrip() if found.kind == "measured" else "predicted"
    within = ", which is within the model's error" * (found.kind == "unknown")
    return f"; {source}, it takes {percent(ratio)[1:]} {'more' if ratio > 1 else 'less'} time{within}"


# ---- what it takes ----


def _error(e: Evidence, by: str) -> str:
    a, fitted = e.stated, default_device().name
    off, most, apart, apart_most = (percent(math.exp(n))[1:] for n in (a.off, a.off_most, a.apart, a.apart_most))
    known = a.dominated.get(by)
    where = f" ({percent(math.exp(known))[1:]} where {by} bounds the call)" if known else ""
    elsewhere = "" if e.subject.device.name == fitted else f" On the {e.subject.device.name} the error is not known."
    return (
        f"lngen compared its model with {a.schedules} recorded times on the {fitted}. Half of the predicted times are "
        f"within {off}{where}, nine in ten within {most}. Half of the predicted ratios of two times are within "
        f"{apart}, nine in ten within {apart_most}. So it cannot order two schedules whose predicted times differ by "
        f"less than {apart_most}. Of pairs that differ by more, it orders {100 * a.told:.0f} % right.{elsewhere}"
    )


def _measured(e: Evidence) -> str:
    """The run that the measured times are of, and how the chosen schedule fares in it."""
    if not e.runs:
        return "No time of this spec itself is recorded here for this workload class."
    run, s, count = e.runs[0], e.subject, len(e.runs[0].times)
    us = run.times.get(s.schedule)
    many = "schedules of this spec were" if count != 1 else "schedule of this spec was"
    text = f"{count} {many} measured on {run.place}."
    if us is None:
        return f"{text} The chosen one is not among them."
    kernel, faster = run.trials[s.schedule].kernel, sum(other < us for other in run.times.values())
    here = "today's" if kernel == sha256(s.kernels.bundle.encode())[:16] else "an earlier one"
    place = f"place {faster + 1} of {count} by time" if faster else f"the least of {count}" if count > 1 else "alone"
    text += f" The chosen one took {us:.4g} us, {place}."
    return f"{text} The CUDA text that was measured is {here if kernel else 'not recorded'}."


def _others(e: Evidence) -> list[dict[str, Any]]:
    """The best others: some as they were measured, then as the model ranks them at these rows."""
    times = e.runs[0].times if e.runs else {}
    p, device = e.subject.problem, e.subject.device
    legal = (s for s in times if s != e.subject.schedule and not broken_rule(s, p, device))
    by_time = sorted(legal, key=times.__getitem__)[:MEASURED]
    clean = np.flatnonzero(features(e.space, p, e.rows, device).spill_factor <= 1)
    _, first = np.unique(np.round(e.times[clean], 2), return_index=True)  # of those that the model cannot tell apart
    by_model = e.space.take(clean[first[: OTHERS + 1]])
    chosen = [s for s in dict.fromkeys((*by_time, *by_model)) if s != e.subject.schedule][:OTHERS]
    return [
        {"schedule": str(s), "changes": changes(e.subject.schedule, s), "predicted_us": us, "measured_us": times.get(s)}
        for s, us in zip(chosen, e.predicted(*chosen).round(4).tolist(), strict=True)
    ]


def _trials(e: Evidence) -> list[dict[str, Any]]:
    """All trials of the first run, each with the time that the model expects for its rows."""
    if not e.runs:
        return []
    run = e.runs[0]
    times = predicted(run.trials, e.subject.problem, run.rows, e.subject.device).tolist()
    return [
        {"schedule": str(s), "predicted_us": round(us, 4), "measured_us": r.us, "status": r.status}
        for us, (s, r) in zip(times, run.trials.items(), strict=True)
    ]


# ---- its fields ----


def _fields(e: Evidence) -> Iterator[dict[str, Any]]:
    """Every field against its neighbours."""
    s, chosen = e.subject, e.subject.schedule
    for name in FIELDS:
        for value in values(chosen, name):
            other, rule = neighbour(chosen, name, value, e.space, e.times, s.problem, s.device)
            found = Verdict("rule", rule.partition(", got ")[0], rule) if rule else e.against(other)
            about = {"field": name, "value": getattr(chosen, name), "other": value, "neighbour": str(other)}
            yield {**about, "changes": changes(chosen, other), **vars(found)}


def _lines(chosen: Schedule, fields: list[dict[str, Any]]) -> Iterator[str]:
    """A paragraph for each field; values that break the same rule share it."""
    for name in FIELDS:
        said: dict[tuple[str, bool], list[str]] = {}
        for f in (f for f in fields if f["field"] == name):
            rule = f["kind"] == "rule"
            also = ",".join(c for c in f["changes"].split(",") if not c.startswith(f"{name}="))
            with_ = f" with {also}" if also and not rule else ""
            said.setdefault((f["short"], rule), []).append(value_text(f["other"]) + with_)
        text = "; ".join(f"{' or '.join(v)}{' is illegal' * rule}: {short}" for (short, rule), v in said.items())
        yield from entry(f"{name}={value_text(getattr(chosen, name))}", text)


# ---- neighbours: in one field, each as a legal schedule or with the rule that forbids it ----

Value = str | int | bool
DOUBLED = ("threads", "rows_per_block", "vec", "cluster", "grid")  # fields whose values are far apart


def values(s: Schedule, name: str) -> list[Value]:
    """The values next to the one that the field has: every other form, the other flag, the next larger and smaller."""
    value = getattr(s, name)
    if name == "form":
        return [form for form in FORMS if form != value]
    if name in FLAG_FIELDS:
        return [not value]
    if not value:
        return [MIN_STAGES if name == "stages" else 1]
    return [n for n in ([2 * value, value // 2] if name in DOUBLED else [value + 1, value - 1]) if n]


def broken_rule(s: Schedule, p: Problem, device: Device) -> str:
    """The rule that forbids a schedule on a GPU, as legality words it; empty if none does."""
    try:
        check(s, p)
        check_arch(s, device.arch)
    except ScheduleError as error:
        return str(error).rpartition(f"is illegal for D={p.d}: ")[2].rstrip(".")
    room = most_blocks(s, p, device)
    return "" if s.blocks_per_sm <= room else f"a multiprocessor has room for {room} such blocks"


def neighbour(
    s: Schedule, name: str, value: Value, space: Schedules, times: Numbers, p: Problem, device: Device
) -> tuple[Schedule, str]:
    """The schedule with that value nearest to ``s``, and the rule that forbids it, which is empty if it is legal.

    Where a change of the field alone is illegal, and for another form, it is the schedule of the ``space`` with the
    fewest other changes, and of these with the shortest of the expected ``times``. Flags that are off stay off, and
    form and cluster stay, unless the form is what changes.
    """
    wanted = changed(s, f"{name}={value_text(value)}", p, device)
    why = broken_rule(wanted, p, device)
    if name == "grid" or not (why or name == "form"):
        return wanted, why
    other = {f: space.field(f) != float(getattr(wanted if f == name else s, f)) for f in FIELDS[1:] if f != "grid"}
    other["form"] = space.has_form(wanted.form) == 0
    kept = {name, *(("form", "cluster", *(f for f in FLAG_FIELDS if not getattr(s, f))) if name != "form" else ())}
    allowed = np.flatnonzero(~np.any([other[f] for f in kept], axis=0))
    if not len(allowed):
        return wanted, why
    count = np.sum([other[f][allowed] for f in other], axis=0)
    return next(iter(space.take(allowed[np.lexsort((times[allowed], count))[:1]]))), ""


def changed(s: Schedule, text: str, p: Problem, device: Device) -> Schedule:
    """``s`` changed by ``text``; ScheduleError if it is no schedule.

    Unless the text names them, stages are the fewest if a form needs them, and the grid follows: as many blocks as run
    at a time, if they are persistent without column sums.
    """
    named, found = {part.partition("=")[0] for part in text.split(",")}, parse_schedule(text, s)
    if found.form in STAGED and not found.stages and "stages" not in named:
        found = replace(found, stages=MIN_STAGES)
    persistent = found.form in STAGED and not p.column_sums
    grid = device.resident_clusters(found.cluster) * found.blocks_per_sm if persistent else 0
    return found if "grid" in named else replace(found, grid=grid)


# ---- another schedule ----


def why_not(subject: Subject, text: str) -> Section:
    """The subject's schedule changed by ``text``, against it; ScheduleError for a text that is no schedule.

    Stages and the grid follow, unless the text names them.
    """
    chosen = subject.schedule
    asked = changed(chosen, text, subject.problem, subject.device)
    data: dict[str, Any] = {"chosen": str(chosen), "asked": str(asked)}
    rule = broken_rule(asked, subject.problem, subject.device)
    used: list[dict[str, int]] = []
    try:
        with suppress(MissingError):  # without a compiler nothing is known of registers
            used = [] if rule else [_resources(subject, s) for s in (chosen, asked)]
    except (LowerError, EmitError, CompileError) as error:
        rule = str(error).rstrip(".")
    if rule or asked == chosen or not subject.scheduled:
        same = "It is the chosen schedule." if asked == chosen else UNSCHEDULED
        kind, answer = ("rule", f"It is illegal: {rule}.") if rule else ("same", same)
        return _section(data | {"kind": kind, "sentence": rule or answer}, Text(answer))
    e = Evidence(subject)
    found, both = e.against(asked), [e.expected(s) for s in (chosen, asked)]
    data |= {"rows": e.rows, **vars(found)}
    for name, (us, parts, _), compiled in zip(("chosen", "asked"), both, used or ({}, {}), strict=True):
        data[f"{name}_numbers"] = {"predicted_us": us, "parts": parts, "resources": compiled}
    mine, other = ({"predicted us": us, **parts} for us, parts, _ in both)
    used_parts = [name for name, n in mine.items() if n or other[name]]
    cells: list[tuple[str, ...]] = [(name, f"{mine[name]:.4g}", f"{other[name]:.4g}") for name in used_parts]
    cells += [(f"{name} a thread", *(str(one[kind]) for one in used)) for kind, name in USED.items() if used]
    spills = f"It spills {used[1]['spilled']} bytes a thread. " if used and used[1]["spilled"] else ""
    head = f"For {e.rows} rows on the {subject.device.name}, the predicted time in us and its parts:"
    return _section(data, Text(spills + _answer(found)), Table(("", "chosen", "asked"), tuple(cells), head))


def _section(data: dict[str, Any], *blocks: Block) -> Section:
    return Section("why_not", "Why not", (Text(f"Asked: {data['asked']}"), *blocks), data)


USED = {"registers": "registers", "spilled": "bytes spilled"}


def _resources(subject: Subject, s: Schedule) -> dict[str, int]:
    """The most registers of a kernel, and bytes a thread that spill."""
    used = subject.compilation.kernels(s).cubin(subject.device.arch).resources.values()
    return {"registers": max(r.registers for r in used), "spilled": sum(r.spilled for r in used)}


def _answer(found: Verdict) -> str:
    """What follows from the numbers, and the numbers."""
    if found.numbers is None:
        return found.sentence
    if found.kind == "unknown":
        return f"{found.sentence} 'lngen tune' measures both."
    us, mine = found.numbers
    same = found.kind == "measured" and abs(math.log(us / mine)) < REPEATED
    word = "as fast, as far as times repeat" if same else "slower" if us > mine else "faster"
    return f"It is {'expected to be ' * (found.kind == 'predicted')}{word}. {found.sentence}"
