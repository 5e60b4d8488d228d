"""From an entry to a program: every instruction is bound to its step, the code is cut into segments."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from lngen.ptx import barriers, clusters, shuffle
from lngen.ptx.atomics import active_step, atomic_step, fence_step, nothing_step
from lngen.ptx.clusters import mapa_step
from lngen.ptx.copies import copy_step
from lngen.ptx.defined import guarded, watch
from lngen.ptx.dependent import control_step
from lngen.ptx.hints import bulk_prefetch, policy_step, prefetch_step
from lngen.ptx.load_store import access_step
from lngen.ptx.mbarrier import barrier_step
from lngen.ptx.parser import Entry, Instruction
from lngen.ptx.program import Program, Segment, Step, is_control, leaders, unknown
from lngen.ptx.remote_store import async_store_step
from lngen.ptx.scratch import layout
from lngen.ptx.steps import predicated, pure_step

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
    "cp": lambda program, i: bulk_prefetch(program, i) or copy_step(program, i),
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
        program.symbols |= layout([s for s in entry.symbols if s.space == space], 0)[0]
    begins, code = leaders(entry), entry.instructions
    at = 0
    while at < len(code):
        begin, steps = at, list[Step]()
        while not is_control(code[at]):
            steps.append(step(program, code[at]))
            at += 1
            if at in begins or at == len(code):
                break
        control = code[at] if at < len(code) and (at not in begins or at == begin) and is_control(code[at]) else None
        if control is not None:
            _check(program, control)
        program.segments[begin] = Segment(begin, tuple(steps), at, control)
        at += control is not None
    watched = watch(entry)
    if watched.reads:
        for begin, segment in program.segments.items():
            program.segments[begin] = guarded(program, segment, watched)
    return program


def step(program: Program, i: Instruction) -> Step:
    """The step of an instruction that is no control flow."""
    name = i.opcode.split(".", 1)[0]
    maker = async_store_step if i.opcode.startswith("st.async") else STEPS.get(name, pure_step)
    made = maker(program, i)
    return predicated(program, i, made)


def _check(program: Program, i: Instruction) -> None:
    """Bind the operands of a control instruction; PtxError for one that the executor does not know."""
    if i.predicate:
        program.register(i.predicate, i)
    match i.opcode.split(".", 1)[0]:
        case "bra":
            known = i.opcode in ("bra", "bra.uni") and len(i.operands) == 1
            if not known:
                raise unknown(i)
            if i.operands[0].text not in program.entry.labels:
                raise unknown(i, f"jumps to '{i.operands[0].text}', which is not a label")
        case "ret" | "exit":
            if i.opcode not in ("ret", "ret.uni", "exit"):
                raise unknown(i)
        case "barrier" if i.opcode.startswith("barrier.cluster"):
            clusters.check(i)
        case "bar" | "vote" | "elect" if i.opcode.startswith(("bar.warp", "vote", "elect")):
            program.shuffles[i.line] = shuffle.bind_warp(program, i)
        case "bar" | "barrier":
            barriers.check(i)
            for o in i.operands:
                if o.kind == "reg":
                    program.register(o.text, i)
        case "shfl":
            program.shuffles[i.line] = shuffle.bind(program, i)
        case _:
            raise unknown(i)
