"""What a run shows: findings that name PTX, CUDA and IR, and traffic."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from lngen.ir.numerics import Array
from lngen.ptx.parser import Instruction, Loc


@dataclass(frozen=True)
class Finding:
    """Something a kernel must not do, where it does it first, and who did it.

    ``kind``: out-of-bounds, misaligned, uninitialised, never-written, shared-race, global-race, divergent-barrier,
    barrier-count, no-such-barrier, inactive-shuffle, async-read, proxy, mbarrier, early-access (before the wait for the
    kernel ahead), early-remote and early-exit (of a block of the cluster), deadlock. Lines are 0 and
    names empty where there are none.
    """

    kind: str
    message: str
    kernel: str = ""
    ptx_line: int = 0
    instruction: str = ""
    cuda_line: int = 0
    equation: str = ""
    block: int = -1
    thread: int = -1
    address: int = -1

    def __str__(self) -> str:
        text = f"{self.kind}: {self.message}"
        if self.kernel:
            text += f" In kernel {self.kernel}"
            if self.block >= 0:
                text += f", block {self.block}"
            if self.thread >= 0:
                text += f", thread {self.thread}"
            text += "."
        if self.instruction:
            text += f" PTX line {self.ptx_line}: {self.instruction};"
        if self.cuda_line:
            text += f" CUDA line {self.cuda_line}"
            text += f", equation {self.equation}." if self.equation else "."
        return text


@dataclass(frozen=True)
class Traffic:
    """What moved, by kernel.

    ``tensors``: by tensor bytes_read, bytes_written and the 32-byte sectors of each warp's accesses, sectors_read,
    sectors_written, and prefetches of a thread; ``instructions``: by opcode, counted once a warp; ``shared``: accesses
    (of warps), bytes_read, bytes_written, bank_conflicts (wavefronts beyond an access's fewest); ``barriers``: waits,
    counted once a warp; ``in_flight``: the most bytes that asynchronous copies to a block had under way at once.
    """

    tensors: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    instructions: dict[str, dict[str, int]] = field(default_factory=dict)
    shared: dict[str, dict[str, int]] = field(default_factory=dict)
    barriers: dict[str, int] = field(default_factory=dict)
    in_flight: dict[str, int] = field(default_factory=dict)

    def open(self, kernel: str) -> None:
        """Rows of zeros for a kernel that is about to run."""
        self.tensors.setdefault(kernel, {})
        self.instructions.setdefault(kernel, {})
        self.shared.setdefault(kernel, dict.fromkeys(("accesses", "bytes_read", "bytes_written", "bank_conflicts"), 0))
        self.barriers.setdefault(kernel, 0)
        self.in_flight.setdefault(kernel, 0)


@dataclass(frozen=True)
class Outcome:
    """Results by name, findings in the order of their discovery, traffic."""

    results: dict[str, Array]
    findings: tuple[Finding, ...]
    traffic: Traffic


class Stop(Exception):
    """Ends a run at its first finding."""


_NOTE = re.compile(r"//\s*(%.+)$")
_TENSOR = re.compile(r"\b(\w+?)(?:_partial)?_(?:ptr|out|acc)\b")


class Reporter:
    """Collects findings, each kind once per instruction, with the CUDA line and the IR equation it came from."""

    def __init__(self, source: str, stop: bool) -> None:
        self._lines = source.splitlines()
        self._seen: set[tuple[str, str, int, str]] = set()
        self.stop = stop
        self.findings: list[Finding] = []

    def add(
        self,
        kind: str,
        message: str,
        kernel: str = "",
        instruction: Instruction | None = None,
        block: int = -1,
        thread: int = -1,
        address: int = -1,
        key: str = "",
    ) -> None:
        """One more, unless this instruction has one of this kind (and ``key``)."""
        where = (kind, kernel, instruction.line if instruction else 0, key)
        if where in self._seen:
            return
        self._seen.add(where)
        loc = instruction.loc if instruction else Loc()
        self.findings.append(
            Finding(
                kind,
                message,
                kernel,
                instruction.line if instruction else 0,
                instruction.text if instruction else "",
                loc.line,
                self._note(loc.line) or self._note(loc.inlined_at),
                block,
                thread,
                address,
            )
        )
        if self.stop:
            raise Stop

    def seen(self, kind: str, kernel: str, instruction: Instruction) -> bool:
        """True if ``add`` would change nothing."""
        return (kind, kernel, instruction.line, "") in self._seen

    def _note(self, line: int) -> str:
        """The IR equation of a CUDA line: its note, or for a load or store the equation of that tensor."""
        if not 0 < line <= len(self._lines):
            return ""
        text = self._lines[line - 1]
        if note := _NOTE.search(text):
            return note[1]
        if tensor := _TENSOR.search(text):
            name = re.escape(tensor[1])
            for wanted in (rf"%{name}\s*:", rf"=.*%{name}\b"):
                for candidate in self._lines:
                    if (note := _NOTE.search(candidate)) and "=" in note[1] and re.search(wanted, note[1]):
                        return re.sub(r"\s+", " ", note[1])
        return ""
