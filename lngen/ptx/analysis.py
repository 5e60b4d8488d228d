"""What follows from the code of a kernel before it runs: segments, threads that wait, registers nothing wrote.

Reads of registers that no write dominates are found by data flow, and the run watches those. Almost every read follows
a write on every path; only the other reads cost time. Computing with an unknown value is no error, since compilers emit
such code and drop the result; the result is unknown as well. An error is to use an unknown value as an address, to
store or exchange it, or to branch on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from lngen.ptx.memory import WORD
from lngen.ptx.opcodes import access, fence
from lngen.ptx.parser import Entry, Instruction, Operand
from lngen.ptx.program import DTYPES, SPECIAL


def leaders(entry: Entry) -> set[int]:
    """Where segments may begin: the start, every label, the instruction after control flow."""
    found = {0, *entry.labels.values()}
    found |= {n + 1 for n, i in enumerate(entry.instructions) if is_control(i)}
    found |= {n for n, i in enumerate(entry.instructions) if i.opcode.startswith(("shfl", "vote", "elect", "bar.warp"))}
    return found


CONTROL = ("bra", "bar", "barrier", "shfl", "vote", "elect", "ret", "exit", "trap")


def is_control(i: Instruction) -> bool:
    """True for an instruction that moves lanes: branch, barrier, shuffle, exit."""
    return i.opcode.split(".", 1)[0] in CONTROL


ARRIVES = tuple(f"{b}.arrive" for b in ("bar", "bar.cta", "barrier", "barrier.cta"))
_TOGETHER = (
    "atom", "red", "fence", "membar", "mbarrier", "cp", "mapa", "vote", "activemask", "nanosleep", "griddepcontrol",
)  # fmt: skip
WAIT = "griddepcontrol.wait"
PROXY_SPACES = ("shared", "global")
_SPACES = {"global", "shared", "local", "const", "param"}


@lru_cache(maxsize=64)
def ordered(entry: Entry) -> bool:
    """True if threads may wait for each other outside the barriers of their block."""
    if entry.cluster:
        return True
    for i in entry.instructions:
        if (
            i.opcode.split(".", 1)[0] in _TOGETHER
            or i.opcode.startswith(("bar.warp", "barrier.cluster", "st.async", "elect", *ARRIVES))
            or flag(i)
        ):
            return True
    return False


@lru_cache(maxsize=64)
def co_resident(entry: Entry) -> bool:
    """True if blocks of different clusters may wait for each other: all of them then run side by side."""
    for i in entry.instructions:
        if ".shared" not in i.opcode and (i.opcode.startswith(("atom", "red")) or flag(i)):
            return True
    return False


def flag(i: Instruction) -> bool:
    """True for a strong load or store."""
    form = access(i.opcode)
    return form is not None and form.how is not None


@lru_cache(maxsize=64)
def spins(entry: Entry) -> dict[int, int]:
    """Backward jumps over an instruction that may wait, and their targets."""
    found, code = {}, entry.instructions
    for at, i in enumerate(code):
        to = entry.labels.get(i.operands[0].text, at + 1) if i.opcode.startswith("bra") else at + 1
        if to <= at and any(_waits(j) for j in code[to:at]):
            found[at] = to
    return found


def _waits(i: Instruction) -> bool:
    return i.opcode.startswith(("atom", "mbarrier.try_wait", "mbarrier.test_wait", "nanosleep")) or (
        i.opcode.startswith("ld.") and flag(i)
    )


@lru_cache(maxsize=64)
def waits(entry: Entry) -> bool:
    """True if the kernel waits for the previous one: before the wait it may not touch global memory."""
    return any(i.opcode == WAIT for i in entry.instructions)


@lru_cache(maxsize=64)
def proxies(entry: Entry) -> tuple[str, ...]:
    """The memories that bulk copies of the kernel read or write, for which fences matter."""
    return PROXY_SPACES if any(i.opcode.startswith("cp.async.bulk.") for i in entry.instructions) else ()


@lru_cache(maxsize=64)
def narrowest(entry: Entry, space: str) -> int:
    """The bytes of a unit of race detection in a memory: its narrowest access, ``WORD`` at most."""
    found = [WORD]
    for i in entry.instructions:
        op, *parts = i.opcode.split(".")
        spaces = [p.partition("::")[0] for p in parts]
        if op in ("ld", "st") and (space in spaces or _SPACES.isdisjoint(spaces)):
            vec = next((int(p[1]) for p in parts if p in ("v2", "v4")), 1)
            found.append(DTYPES[parts[-1]].itemsize * vec)
    return min(found)


@lru_cache(maxsize=64)
def restricted(entry: Entry) -> bool:
    """True if a fence of the kernel orders shared memory alone."""
    return any(found.restricted for i in entry.instructions if (found := fence(i.opcode)))


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
