"""Properties of a kernel that follow from its code: which threads may wait for each other, and units of records."""

from __future__ import annotations

from functools import lru_cache

from lngen.ptx.memory import WORD
from lngen.ptx.memory_opcodes import access
from lngen.ptx.parser import Entry, Instruction
from lngen.ptx.values import DTYPES

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
