"""What opcodes say: their modifiers, the combinations that the PTX manual allows for loads, stores, atomics and fences.

It also derives, for a kernel: the instructions that move lanes, the barriers between threads, the registers that an
instruction reads and writes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from lngen.proof.ptx.memory import WORD
from lngen.proof.ptx.parser import Entry, Instruction, Operand
from lngen.proof.ptx.program import DTYPES, SPECIAL


class Opcode:
    """The groups of ``pattern`` in ``text``. Every variable part of an opcode has a name, so that code can read it."""

    def __init__(self, found: re.Match[str]) -> None:
        self.text = found.string
        self._parts: dict[str, Any] = found.groupdict()
        self._left = {name for name, part in self._parts.items() if part is not None}

    def __getitem__(self, name: str) -> Any:
        """The modifier of that name, None if there is none."""
        self._left.discard(name)
        return self._parts[name]

    @property
    def left(self) -> tuple[str, ...]:
        """Modifiers that no code has read."""
        return tuple(sorted(self._parts[name] for name in self._left))


def read(pattern: re.Pattern[str], text: str) -> Opcode | None:
    """The modifiers of an opcode; None if the pattern does not match."""
    found = pattern.fullmatch(text)
    return Opcode(found) if found else None


LEVELS = {"cta": 0, "cluster": 1, "gpu": 2, "sys": 3}  # of scopes


@dataclass(frozen=True)
class Semantics:
    """The ordering of a strong access: whether it acquires or releases, and the level of its scope."""

    acquire: bool
    release: bool
    level: int


_SCOPE = r"(?:\.(?P<scope>cta|cluster|gpu|sys))?"
_WINDOW = r"(?P<window>::cta|::cluster|::entry)?"
_ACCESS = re.compile(
    rf"(?P<op>ld|st)(?:\.(?P<sem>weak|volatile|relaxed|acquire|release))?{_SCOPE}"
    rf"(?:\.(?P<space>global|shared|local|const|param){_WINDOW})?"
    r"(?:\.(?P<cop>ca|cg|cs|lu|cv|wb|wt))?(?P<nc>\.nc)?"
    r"(?:\.(?P<level1>L1::(?:evict_normal|evict_unchanged|evict_first|evict_last|no_allocate)))?"
    r"(?P<policy>\.L2::cache_hint)?(?P<size>\.L2::(?:64|128|256)B)?"
    r"(?:\.v(?P<v>[24]))?\.(?P<t>[bus](?:8|16|32|64)|f32|f64)"
)
_ATOMIC = re.compile(
    rf"(?P<op>atom|red)(?:\.(?P<sem>relaxed|acquire|release|acq_rel))?{_SCOPE}(?:\.(?P<space>global|shared){_WINDOW})?"
    r"\.(?P<does>add|inc|dec|min|max|exch|cas|or|and|xor)\.(?P<t>[bus](?:32|64)|f32|f64)"
)
_FENCE = re.compile(
    r"fence(?:\.(?P<sem>sc|acq_rel|acquire|release))?(?P<restricted>\.sync_restrict::shared::cluster)?"
    rf"{_SCOPE}"
)
_MEMBAR = re.compile(r"membar\.(?P<scope>cta|gl|sys)")
PATTERNS = (_ACCESS, _ATOMIC, _FENCE, _MEMBAR)
_ORDERS: dict[str, tuple[str | None, ...]] = {
    "ld": (None, "weak", "volatile", "relaxed", "acquire"),
    "st": (None, "weak", "volatile", "relaxed", "release"),
    "atom": (None, "relaxed", "acquire", "release", "acq_rel"),
    "red": (None, "relaxed", "release"),
}
_CACHED: dict[str, tuple[str | None, ...]] = {
    "ld": (None, "ca", "cg", "cs", "lu", "cv"),
    "st": (None, "wb", "cg", "cs", "wt"),
}
_WORDS = ("b32", "b64")
_DOES = {
    "add": ("u32", "s32", "u64", "f32", "f64"), "inc": ("u32",), "dec": ("u32",),
    "min": ("u32", "s32", "u64", "s64"), "max": ("u32", "s32", "u64", "s64"),
    "or": _WORDS, "and": _WORDS, "xor": _WORDS, "exch": _WORDS, "cas": _WORDS,
}  # fmt: skip


@dataclass(frozen=True)
class Access:
    """A load or store: its memory (``own``: only the block's own shared memory), elements and order.

    ``constant``: nothing writes there while the kernel runs; ``policy``: an operand is a cache policy.
    """

    op: str
    space: str
    own: bool
    constant: bool
    vec: int
    kind: str
    how: Semantics | None
    policy: bool


@dataclass(frozen=True)
class Atomic:
    """A read-modify-write: operation, type and number of elements, memory and order."""

    op: str
    does: str
    space: str
    own: bool
    kind: str
    how: Semantics


@dataclass(frozen=True)
class Fence:
    """A fence: its scope, whether it acquires or releases, and whether it orders shared memory alone."""

    scope: str
    acquire: bool
    release: bool
    restricted: bool = False


@cache
def access(opcode: str) -> Access | None:
    """A load or store; None for another opcode, or for modifiers that exclude each other."""
    m = read(_ACCESS, opcode)
    if m is None:
        return None
    op, sem, scope, space, window = m["op"], m["sem"], m["scope"], m["space"], m["window"]
    cop, constant, level1, policy, size = m["cop"], bool(m["nc"]), m["level1"], bool(m["policy"]), m["size"]
    weak = sem in (None, "weak")
    fits = (
        sem in _ORDERS[op]
        and (scope is not None) == (sem in ("relaxed", "acquire", "release"))
        and _windowed(space, window)
        and (cop is None or (weak and level1 is None and cop in _CACHED[op]))
        and (space in (None, "global") or not (cop or level1 or policy or size))
        and not (sem == "volatile" and (level1 or policy))
        and (not constant or (op == "ld" and sem is None and space == "global"))
        and (size is None or op == "ld")
        and (space not in ("const", "param") or (op == "ld" and weak))
    )
    own, how = space == "shared" and window != "::cluster", None if weak else _order(sem, scope)
    found = Access(op, space or "generic", own, constant, int(m["v"] or 1), m["t"], how, policy)
    return found if fits and not m.left else None


@cache
def atomic(opcode: str) -> Atomic | None:
    """A read-modify-write; None for another opcode, or for modifiers that exclude each other."""
    m = read(_ATOMIC, opcode)
    if m is None:
        return None
    op, sem, does, kind, space, window = m["op"], m["sem"], m["does"], m["t"], m["space"], m["window"]
    how = _order(sem, m["scope"])
    fits = sem in _ORDERS[op] and kind in _DOES[does] and (op == "atom" or does not in ("exch", "cas"))
    if not fits or not _windowed(space, window) or m.left:
        return None
    return Atomic(op, does, space or "generic", space == "shared" and window != "::cluster", kind, how)


def semantics(opcode: str) -> Semantics | None:
    """The ordering of a load, store or atomic; None for a weak access and for other opcodes."""
    found = access(opcode) or atomic(opcode)
    return found.how if found else None


def _order(sem: str | None, scope: str | None) -> Semantics:
    both = sem == "acq_rel"
    level = LEVELS[scope or ("sys" if sem == "volatile" else "gpu")]
    return Semantics(both or sem == "acquire", both or sem == "release", level)


def _windowed(space: str | None, window: str | None) -> bool:
    return window is None or (space == "shared" and window != "::entry") or (space, window) == ("param", "::entry")


@cache
def fence(opcode: str) -> Fence | None:
    """A fence between threads; None for another opcode, or for modifiers that exclude each other."""
    if old := read(_MEMBAR, opcode):
        return Fence({"gl": "gpu"}.get(old["scope"], old["scope"]), True, True)
    m = read(_FENCE, opcode)
    if m is None or m["scope"] is None:
        return None
    sem, scope, limited = m["sem"] or "acq_rel", m["scope"], bool(m["restricted"])
    if m.left or (limited and (sem, scope) != ("acquire", "cluster")):
        return None
    return Fence(scope, sem != "release", sem != "acquire", limited)


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


@lru_cache(maxsize=64)
def ever_read(entry: Entry) -> frozenset[str]:
    """The registers that some instruction reads."""
    return frozenset(r for i in entry.instructions for r in uses(i)[0])
