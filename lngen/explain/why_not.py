"""Why not that schedule: the rule that it breaks, or what it takes against the chosen one."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

from lngen.errors import CompileError, EmitError, LowerError, MissingError
from lngen.explain.evidence import Evidence, Verdict
from lngen.explain.neighbours import broken_rule, changed
from lngen.explain.section import Block, Section, Table, Text
from lngen.explain.subject import Subject
from lngen.problem import Schedule
from lngen.schedule.accuracy import REPEATED
from lngen.schedule.model import TERMS


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
    if rule or asked == chosen:
        kind, answer = ("rule", f"It is illegal: {rule}.") if rule else ("same", "It is the chosen schedule.")
        return _section(data | {"kind": kind, "sentence": rule or answer}, Text(answer))
    e = Evidence(subject)
    found, both = e.against(asked), [e.terms(s) for s in (chosen, asked)]
    data |= {"rows": e.rows, **vars(found)}
    columns = ("", "predicted us", *TERMS, *(("registers", "spilled") if used else ("spills",)))
    cells = []
    for name, (us, parts), compiled in zip(("chosen", "asked"), both, used or ({}, {}), strict=True):
        data[f"{name}_numbers"] = {"predicted_us": us, "terms": parts, "resources": compiled}
        last = compiled.values() if used else (parts["spill_factor"],)
        cells.append((name, *(f"{n:.3g}" for n in (us, *(parts[t] for t in TERMS))), *map(str, last)))
    spills = f"It spills {used[1]['spilled']} bytes a thread. " if used and used[1]["spilled"] else ""
    table = Table(columns, tuple(cells), f"For {e.rows} rows on {subject.device.name}, us:")
    return _section(data, Text(spills + _answer(found)), table)


def _section(data: dict[str, Any], *blocks: Block) -> Section:
    return Section("why_not", "Why not", (Text(f"Asked: {data['asked']}"), *blocks), data)


def _resources(subject: Subject, s: Schedule) -> dict[str, int]:
    """The most registers of a kernel, and bytes a thread that spill."""
    used = subject.compilation.kernels(s).cubin(subject.device.arch).resources.values()
    return {"registers": max(r.registers for r in used), "spilled": sum(r.spilled for r in used)}


def _answer(found: Verdict) -> str:
    """One sentence, and what follows from it."""
    if found.kind == "unknown" or found.numbers is None:
        more = "the model cannot tell; 'lngen tune' measures it" if found.numbers else "it did not get as far as a time"
        return f"{found.sentence[0].upper()}{found.sentence[1:]}: {more}."
    us, mine = found.numbers
    same = found.kind == "measured" and abs(math.log(us / mine)) < REPEATED
    word = "as fast, as far as times repeat" if same else "slower" if us > mine else "faster"
    return f"It is {'expected to be ' * (found.kind == 'predicted')}{word}: {found.sentence}."
