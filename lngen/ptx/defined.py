"""Uninitialised registers: a data-flow analysis finds reads that no write dominates, and the run watches those.

Almost every read follows a write on every path; only the other reads cost time. Computing with an unknown value is no
error, since compilers emit such code and drop the result; the result is unknown as well. An error is to use an unknown
value as an address, to store or exchange it, or to branch on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from lngen.ptx.batch import Batch
from lngen.ptx.lanes import Lanes
from lngen.ptx.parser import Entry, Instruction, Operand
from lngen.ptx.program import SPECIAL, Program, Segment, Step, is_control, leaders

_READS_ALL = (
    "st", "bra", "bar", "barrier", "ret", "exit", "red", "fence", "membar", "nanosleep", "cp", "prefetch", "prefetchu",
)  # fmt: skip
_READS_ALL_TOO = ("mbarrier.init", "mbarrier.expect_tx", "mbarrier.inval", "mbarrier.complete_tx")


@dataclass
class Watch:
    """``reads``: registers to check, by instruction number; ``tracked``: registers whose writes are recorded."""

    reads: dict[int, tuple[str, ...]] = field(default_factory=dict)
    tracked: set[str] = field(default_factory=set)


def registers(o: Operand) -> list[str]:
    """Registers that an operand names."""
    if o.items:
        return [r for item in o.items for r in registers(item)]
    is_register = o.kind in ("reg", "mem")
    return [o.text] if is_register and o.text not in SPECIAL else []


def uses(i: Instruction) -> tuple[list[str], list[str]]:
    """Registers that an instruction reads and writes."""
    no_result = i.opcode.split(".", 1)[0] in _READS_ALL or i.opcode.startswith(_READS_ALL_TOO)
    writes = [] if no_result else registers(i.operands[0]) if i.operands else []
    sources = i.operands if no_result else i.operands[1:]
    reads = [r for o in sources for r in registers(o)]
    return reads + ([i.predicate] if i.predicate else []), writes


def is_use(i: Instruction) -> bool:
    """True for an instruction that must not read an unknown value."""
    return is_control(i) or i.opcode.startswith(("ld.", "st.", "atom.", "red.", "cp.", "mbarrier."))


@lru_cache(maxsize=64)
def ever_read(entry: Entry) -> frozenset[str]:
    """The registers that some instruction reads."""
    return frozenset(r for i in entry.instructions for r in uses(i)[0])


def watch(entry: Entry) -> Watch:
    """The reads to check and the registers to track in ``entry``."""
    number = {name: 1 << n for n, name in enumerate(entry.registers)}
    code = entry.instructions
    known, blocks = _before(entry, number), _blocks(entry)
    found = Watch()
    flows: list[tuple[list[str], tuple[str, ...]]] = []
    for begin, state in known.items():
        for at in blocks[begin]:
            reads, writes = uses(code[at])
            maybe = tuple(dict.fromkeys(r for r in reads if r in number and not state & number[r]))
            if is_use(code[at]) and maybe:
                found.reads[at] = maybe
                found.tracked |= set(maybe)
            elif maybe:
                flows.append((writes, maybe))
            state = _after(code[at], state, number)
    size = -1
    while size != len(found.tracked):
        size = len(found.tracked)
        for writes, sources in flows:
            if not found.tracked.isdisjoint(writes):
                found.tracked |= set(sources)
    return found


def _blocks(entry: Entry) -> dict[int, range]:
    """The instructions of each segment, by its start."""
    count = len(entry.instructions)
    begins = sorted(b for b in leaders(entry) if b < count)
    return {b: range(b, e) for b, e in zip(begins, [*begins[1:], count], strict=True)}


def _after(i: Instruction, state: int, number: dict[str, int]) -> int:
    """The registers that are certainly written after ``i``."""
    reads, writes = uses(i)
    if i.predicate:
        return state
    unknown = not is_use(i) and any(r in number and not state & number[r] for r in reads)
    for w in writes:
        state = state & ~number.get(w, 0) if unknown else state | number.get(w, 0)
    return state


def _before(entry: Entry, number: dict[str, int]) -> dict[int, int]:
    """The registers that are certainly written before each reachable segment."""
    code, known, todo = entry.instructions, {0: 0}, [0]
    blocks = _blocks(entry)
    while todo:
        begin = todo.pop()
        if begin not in blocks:
            continue
        state = known[begin]
        for at in blocks[begin]:
            state = _after(code[at], state, number)
        last = code[blocks[begin][-1]]
        for to in _next(entry, last, blocks[begin].stop):
            met = known[to] & state if to in known else state
            if to not in known or met != known[to]:
                known[to] = met
                todo.append(to)
    return {b: s for b, s in known.items() if b in blocks}


def _next(entry: Entry, last: Instruction, end: int) -> list[int]:
    name = last.opcode.split(".", 1)[0]
    to = [entry.labels[last.operands[0].text]] if name == "bra" and last.operands[0].text in entry.labels else []
    if name not in ("bra", "ret", "exit") or last.predicate:
        to.append(end)
    return to


def guarded(program: Program, segment: Segment, watched: Watch) -> Segment:
    """The segment with checks before the watched reads and records after the watched writes."""
    steps: list[Step] = []
    code = program.entry.instructions
    plain = iter(segment.steps)
    for at in range(segment.begin, segment.end + (segment.control is not None)):
        i = code[at]
        if at in watched.reads:
            steps.append(_check(program, i, watched.reads[at]))
        noted = [w for w in uses(i)[1] if w in watched.tracked]
        if noted:  # the record reads operands that the instruction may overwrite, so it goes first
            steps.append(_note(program, i, noted, watched))
        if not is_control(i):
            steps.append(next(plain))
    return Segment(segment.begin, tuple(steps), segment.end, segment.control)


def _check(program: Program, i: Instruction, names: tuple[str, ...]) -> Step:
    slots = [(program.register(n, i), n) for n in names]
    predicate = program.register(i.predicate, i) if i.predicate else -1

    def step(batch: Batch, lanes: Lanes) -> None:
        for slot, name in slots:
            known = batch.known.get(slot, False)
            if known is True:
                continue
            if slot != predicate and predicate >= 0:
                p = batch.R[predicate]
                lanes = lanes.narrow(~p if i.negated else p)
            bad = np.flatnonzero(lanes.mask & ~np.asarray(known))
            if bad.size:
                batch.report("uninitialised", f"The register {name} is used, but nothing wrote it.", i, bad)

    return step


def _note(program: Program, i: Instruction, names: list[str], watched: Watch) -> Step:
    """Records whether results are known: all sources are, or of a selection the chosen one."""
    slots = [program.register(n, i) for n in names]
    sources = [] if is_use(i) else [program.register(n, i) for n in uses(i)[0] if n in watched.tracked]
    chooses = i.opcode.startswith("selp.") and all(o.kind == "reg" for o in i.operands[1:])
    picks = [program.register(o.text, i) for o in i.operands[1:]] if chooses else []
    tracked = {program.register(n, i) for n in watched.tracked}

    def known(batch: Batch, slot: int) -> Any:
        return batch.known.get(slot, False) if slot in tracked else True

    def step(batch: Batch, lanes: Lanes) -> None:
        if picks:
            a, b, p = (known(batch, s) for s in picks)
            value = True if a is True and b is True and p is True else np.where(batch.R[picks[2]], a, b) & p
        else:
            value = True
            for s in sources:
                also = known(batch, s)
                value = also if value is True else value if also is True else value & also
        if lanes.array is not None or i.predicate:
            for slot in slots:
                batch.known[slot] = _merged(batch, i, lanes, value, batch.known.get(slot, False))
            return
        if value is not True and np.all(value):
            value = True
        for slot in slots:
            batch.known[slot] = value

    return step


def _merged(batch: Batch, i: Instruction, lanes: Lanes, value: Any, before: Any) -> Any:
    """``value`` for the lanes that execute ``i``, ``before`` for the others."""
    if value is True and before is True:
        return True
    if i.predicate:
        p = batch.R[batch.program.slots[i.predicate]]
        lanes = lanes.narrow(~p if i.negated else p)
    merged = np.where(lanes.mask, value, before)
    return True if (merged | ~batch.alive.mask).all() else merged
