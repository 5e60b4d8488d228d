"""From an entry to a program: every instruction is bound to its step, the code is cut into segments.

Reads of registers that no write dominates are found by data flow, and the run watches those. Almost every read follows
a write on every path; only the other reads cost time. Computing with an unknown value is no error, since compilers emit
such code and drop the result; the result is unknown as well. An error is to use an unknown value as an address, to
store or exchange it, or to branch on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from lngen.proof.ptx import barriers, clusters
from lngen.proof.ptx.async_copies import copy_step
from lngen.proof.ptx.atomics import atomic_step, control_step, fence_step, nothing_step
from lngen.proof.ptx.batch import Batch
from lngen.proof.ptx.bulk_copies import async_store_step, bulk_prefetch, bulk_step
from lngen.proof.ptx.clusters import mapa_step
from lngen.proof.ptx.computing import pure_step
from lngen.proof.ptx.load_store import access_step, policy_step, prefetch_step
from lngen.proof.ptx.mbarriers import barrier_step
from lngen.proof.ptx.memory import layout
from lngen.proof.ptx.opcodes import is_control, leaders, uses
from lngen.proof.ptx.parser import Entry, Instruction
from lngen.proof.ptx.program import Jump, Lanes, Program, Segment, Step, unknown
from lngen.proof.ptx.warps import active_step, shuffle_jump, together_jump

STEPS: dict[str, Callable[[Program, Instruction], Step]] = {
    "ld": access_step,
    "st": access_step,
    "atom": atomic_step,
    "red": atomic_step,
    "fence": fence_step,
    "membar": fence_step,
    "nanosleep": nothing_step,
    "activemask": active_step,
    "mapa": mapa_step,
    "cp": lambda program, i: bulk_prefetch(program, i) or bulk_step(program, i) or copy_step(program, i),
    "createpolicy": policy_step,
    "prefetch": prefetch_step,
    "prefetchu": prefetch_step,
    "mbarrier": barrier_step,
    "griddepcontrol": control_step,
}


@lru_cache(maxsize=64)
def compile_entry(entry: Entry, globals_: tuple[tuple[str, int], ...]) -> Program:
    """The program of ``entry``; ``globals_`` are the addresses of the module's variables."""
    program = Program(entry)
    program.symbols |= dict(globals_)
    for space in ("shared", "local"):
        program.symbols |= layout([s for s in entry.symbols if s.space == space])[0]
    begins, code = leaders(entry), entry.instructions
    at = 0
    while at < len(code):
        begin, steps = at, list[Step]()
        while not is_control(code[at]):
            steps.append(_step(program, code[at]))
            at += 1
            if at in begins or at == len(code):
                break
        control = code[at] if at < len(code) and (at not in begins or at == begin) and is_control(code[at]) else None
        jump = None if control is None else _jump(program, control)
        program.segments[begin] = Segment(begin, tuple(steps), at, control, jump)
        at += control is not None
    watched = watch(entry)
    if watched.reads:
        for begin, segment in program.segments.items():
            program.segments[begin] = guarded(program, segment, watched)
    return program


def _step(program: Program, i: Instruction) -> Step:
    """The step of an instruction that is no control flow, of the lanes whose predicate holds."""
    name = i.opcode.split(".", 1)[0]
    maker = async_store_step if i.opcode.startswith("st.async") else STEPS.get(name, pure_step)
    step = maker(program, i)
    if not i.predicate:
        return step
    slot, negated = program.register(i.predicate, i), i.negated

    def predicated(batch: Batch, lanes: Lanes) -> None:
        p = batch.R[slot]
        some = lanes.narrow(~p if negated else p)
        if some.count:
            step(batch, some)

    return predicated


def _jump(program: Program, i: Instruction) -> Jump | None:
    """What a control instruction does, None for a branch; PtxError for one that the executor does not know."""
    if i.predicate:
        program.register(i.predicate, i)
    match i.opcode.split(".", 1)[0]:
        case "bra" if i.opcode in ("bra", "bra.uni") and len(i.operands) == 1:
            if i.operands[0].text not in program.entry.labels:
                raise unknown(i, f"jumps to '{i.operands[0].text}', which is not a label")
            return None
        case "ret" | "exit" if i.opcode in ("ret", "ret.uni", "exit"):
            return _end
        case "barrier" if i.opcode.startswith("barrier.cluster"):
            return clusters.barrier_jump(i)
        case "bar" | "vote" | "elect" if i.opcode.startswith(("bar.warp", "vote", "elect")):
            return together_jump(program, i)
        case "bar" | "barrier":
            return barriers.barrier_jump(program, i)
        case "shfl":
            return shuffle_jump(program, i)
        case _:
            raise unknown(i)


def _end(batch: Batch, pc: int, lanes: Lanes) -> None:
    batch.alive = batch.alive.without(lanes)
    batch.touched()


@dataclass
class Watch:
    """``reads``: registers to check, by instruction number; ``tracked``: registers whose writes are recorded."""

    reads: dict[int, tuple[str, ...]] = field(default_factory=dict)
    tracked: set[str] = field(default_factory=set)


def is_use(i: Instruction) -> bool:
    """True for an instruction that must not read an unknown value."""
    return is_control(i) or i.opcode.startswith(("ld.", "st.", "atom.", "red.", "cp.", "mbarrier."))


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
            steps.append(_guard(program, i, watched.reads[at]))
        noted = [w for w in uses(i)[1] if w in watched.tracked]
        if noted:  # the record reads operands that the instruction may overwrite, so it goes first
            steps.append(_record(program, i, noted, watched))
        if not is_control(i):
            steps.append(next(plain))
    return replace(segment, steps=tuple(steps))


def _guard(program: Program, i: Instruction, names: tuple[str, ...]) -> Step:
    slots = [(program.register(n, i), n) for n in names]

    def step(batch: Batch, lanes: Lanes) -> None:
        for slot, name in slots:
            known = batch.known.get(slot, False)
            if known is True:
                continue
            who = lanes if name == i.predicate else batch.obeys(i, lanes)
            bad = np.flatnonzero(who.mask & ~np.asarray(known))
            if bad.size:
                batch.report("uninitialised", f"The register {name} is used, but nothing wrote it.", i, bad)

    return step


def _record(program: Program, i: Instruction, names: list[str], watched: Watch) -> Step:
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
    merged = np.where(batch.obeys(i, lanes).mask, value, before)
    return True if (merged | ~batch.alive.mask).all() else merged
