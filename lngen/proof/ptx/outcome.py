"""The outcome of a run: findings that name PTX, CUDA and IR, and traffic."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lngen.compiler.ir.numerics import Array
from lngen.proof.ptx.parser import Instruction, Loc
from lngen.proof.ptx.program import WARP


@dataclass(frozen=True)
class Finding:
    """An illegal action of a kernel: where it happens first, and in which thread.

    ``kind``: out-of-bounds, misaligned, uninitialised, never-written, shared-race, global-race, divergent-barrier,
    barrier-count, no-such-barrier, inactive-shuffle, async-read, proxy, mbarrier, early-access (before the wait for the
    previous kernel), early-remote and early-exit (of a block of the cluster), deadlock. Lines are 0 and names are empty
    where there are none. ``header``: the line of a device header, as name:line, that ``cuda_line`` calls.
    """

    kind: str
    message: str
    kernel: str = ""
    ptx_line: int = 0
    instruction: str = ""
    cuda_line: int = 0
    header: str = ""
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
            text += f" CUDA line {self.cuda_line}" + (f", in {self.header}" if self.header else "")
            text += f", equation {self.equation}." if self.equation else "."
        return text


@dataclass(frozen=True)
class Traffic:
    """Data moved, by kernel.

    ``tensors``: by tensor bytes_read, bytes_written and the 32-byte sectors of each warp's accesses, sectors_read,
    sectors_written, and prefetches of a thread; ``instructions``: by opcode, counted once a warp; ``shared``: accesses
    (of warps), bytes_read, bytes_written, bank_conflicts (wavefronts beyond an access's fewest); ``barriers``: waits,
    counted once a warp; ``in_flight``: the most bytes that asynchronous copies to a block had in flight at once;
    ``segments``: the most segments of straight code that a batch of blocks ran.
    """

    tensors: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    instructions: dict[str, dict[str, int]] = field(default_factory=dict)
    shared: dict[str, dict[str, int]] = field(default_factory=dict)
    barriers: dict[str, int] = field(default_factory=dict)
    in_flight: dict[str, int] = field(default_factory=dict)
    segments: dict[str, int] = field(default_factory=dict)

    def open(self, kernel: str) -> None:
        """Starts a kernel with rows of zeros."""
        self.shared.setdefault(kernel, dict.fromkeys(("accesses", "bytes_read", "bytes_written", "bank_conflicts"), 0))
        for tables in (self.tensors, self.instructions):
            tables.setdefault(kernel, {})
        for counts in (self.barriers, self.in_flight, self.segments):
            counts.setdefault(kernel, 0)


@dataclass(frozen=True)
class Outcome:
    """Results by name, findings in the order of their discovery, traffic."""

    results: dict[str, Array]
    findings: tuple[Finding, ...]
    traffic: Traffic


class Stop(Exception):
    """Ends a run at its first finding."""


_NOTE = re.compile(r"//\s*(%.+)$")
_BUFFER = re.compile(r" of '(\w+?)(?:_partials_)?'")
_TENSOR = re.compile(r"\b(\w+?)(?:_partial)?_(?:ptr|out|acc|sums)_?\b")


class Reporter:
    """Collects findings, each kind once per instruction, with the CUDA line and the IR equation it came from."""

    def __init__(self, source: str, stop: bool, headers: Mapping[int, str]) -> None:
        self._lines, self._headers = source.splitlines(), headers
        self._seen: set[tuple[str, str, int, str]] = set()
        self.stop = stop
        self.findings: list[Finding] = []

    def add(
        self, kind: str, message: str, kernel: str = "", at: Instruction | None = None, key: str = "", **where: int
    ) -> None:
        """Adds a finding, unless its instruction already has one of this kind (and ``key``).

        ``where``: block, thread and address.
        """
        line, text, loc = (at.line, at.text, at.loc) if at else (0, "", Loc())
        if (kind, kernel, line, key) in self._seen:
            return
        self._seen.add((kind, kernel, line, key))
        name = self._headers.get(loc.file, "")
        own, header = (0, f"{name}:{loc.line}") if name else (loc.line, "")  # own: a line of the kernel's text
        equation = self._note(own) or self._note(loc.inlined_at) or self._of_buffer(message)
        cuda_line = own or loc.inlined_at
        self.findings.append(Finding(kind, message, kernel, line, text, cuda_line, header, equation, **where))
        if self.stop:
            raise Stop

    def _note(self, line: int) -> str:
        """The IR equation of a CUDA line: its note, or for a load or store the equation of that tensor."""
        if not 0 < line <= len(self._lines):
            return ""
        text = self._lines[line - 1]
        if note := _NOTE.search(text):
            return note[1]
        tensor = _TENSOR.search(text)
        return self._of_tensor(tensor[1]) if tensor else ""

    def _of_buffer(self, message: str) -> str:
        """The equation of the tensor that a message names, since device functions are inlined several times."""
        buffer = _BUFFER.search(message)
        return self._of_tensor(buffer[1]) if buffer else ""

    def _of_tensor(self, tensor: str) -> str:
        """The IR equation that computes a tensor, or the first that reads it."""
        name = re.escape(tensor)
        for wanted in (rf"%{name}\s*:", rf"=.*%{name}\b"):
            for candidate in self._lines:
                if (note := _NOTE.search(candidate)) and "=" in note[1] and re.search(wanted, note[1]):
                    return re.sub(r"\s+", " ", note[1])
        return ""


def sectors(address: Array, who: Array, count: int) -> int:
    """32-byte sectors that each warp touches, or a bulk copy."""
    if count > 32:
        last = address + address.dtype.type(count - 1)
        return int((last // np.uint64(32) - address // np.uint64(32)).sum()) + len(address)
    first = (address // np.uint64(32)).astype(np.int64)
    key = first + (who // WARP << 44)
    steps = np.diff(key)
    if (steps >= 0).all():
        return int(np.count_nonzero(steps)) + 1
    return int(np.unique(key).size)


def banks(address: Array, lanes: Array, count: int) -> tuple[int, int]:
    """Accesses of warps to shared memory, and the wavefronts beyond the least number these need.

    A wavefront serves 128 bytes, one word a bank; 8- and 16-byte accesses go by half and quarter warps.
    """
    if not address.size:
        return 0, 0
    group = lanes // (WARP if count <= 4 else WARP * 4 // count)
    accesses = int(np.count_nonzero(np.diff(lanes // WARP))) + 1
    words = address // 4
    steps = np.diff(words)[np.diff(group) == 0]
    if (steps == max(1, count // 4)).all() or (steps == 0).all():  # neighbours side by side, or all at one place
        return accesses, 0
    spread = words[:, None] + np.arange(max(1, count // 4))
    key = np.sort((group[:, None].astype(np.int64) << 32 | spread).ravel())
    key = key[np.append(True, key[1:] != key[:-1])]
    first = np.append(0, np.cumsum(np.diff(key >> 32) != 0))
    per = np.bincount(first * WARP + (key & 31))
    table = np.pad(per, (0, -per.size % WARP)).reshape(-1, WARP)
    return accesses, int((table.max(axis=1) - 1).sum())
