"""What NVRTC returns: its log, with the resources of each kernel and the lines of errors, and the cubin.

CuPy 14.2 drops the last byte of a cubin, which it takes for a string's NUL; ``repaired`` puts it back.
"""

import re
import struct
from dataclasses import dataclass

from lngen.compiler.headers import included
from lngen.errors import CompileError

# The one file name that NVRTC gets, so that neither bytes nor log depend on the name of a kernel.
UNIT = "kernel.cu"

_CONTEXT = 2  # lines shown on either side of an error

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers.*")
_TIME = re.compile(r"^ptxas info *: Compile time = .*\n?", re.MULTILINE)
_SOURCE_ERROR = re.compile(rf"^({re.escape(UNIT)}|lngen/\w+\.cuh)\((\d+)\): [^:]*\berror\b", re.MULTILINE)
_PTX_ERROR = re.compile(r"^ptxas .*\bline (\d+); error\b", re.MULTILINE)


@dataclass(frozen=True)
class Resources:
    """The resources of one kernel, as ptxas reports them.

    Registers and barriers are numbers (registers per thread); the rest is bytes: spills and stack per
    thread, static shared memory per block, and constant memory, None where ptxas does not report it.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int
    constant: int | None
    barriers: int

    @property
    def spilled(self) -> int:
        """Bytes per thread of values that belong in registers and are in local memory."""
        return self.spill_stores + self.spill_loads + self.stack

    @property
    def spills(self) -> bool:
        """True if there are any."""
        return self.spilled > 0


def tidied(log: str) -> str:
    """``log`` without the NUL after ptxas' part, and without times, which differ between two equal runs."""
    return _TIME.sub("", log.replace("\0", "")).strip()


def resources(log: str) -> dict[str, Resources]:
    """The resources of each kernel in a log of ``--ptxas-options=-v``, in source order."""
    _, *parts = _ENTRY.split(log)
    found = {name: _resources(name, text) for name, text in zip(parts[::2], parts[1::2], strict=True)}
    # ptxas processes the kernels from last to first.
    return dict(reversed(found.items()))


def entries(ptx: str) -> tuple[str, ...]:
    """The names of the kernels in a PTX text, in its order."""
    return tuple(re.findall(r"\.entry\s+([\w$]+)", ptx))


def _resources(name: str, text: str) -> Resources:
    # Functions that were not inlined follow their kernel: the first match is the kernel's.
    frame, used = _STACK.search(text), _USED.search(text)
    if not frame or not used:
        raise CompileError(f"The log of ptxas lacks the registers or spills of {name!r}:\n{text.strip()}")
    stack, stores, loads = map(int, frame.groups())
    constants = re.findall(r"(\d+) bytes cmem", used[0])
    return Resources(
        registers=int(used[1]),
        spill_stores=stores,
        spill_loads=loads,
        stack=stack,
        shared=_number(r"(\d+) bytes smem", used[0]),
        constant=sum(map(int, constants)) if constants else None,
        barriers=_number(r"used (\d+) barriers", used[0]),
    )


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0


def explained(log: str, name: str, source: str, ptx: str) -> str:
    """``log`` with the kernel's name, then the numbered lines of source, headers and PTX that its errors name."""
    marked: dict[str, list[int]] = {}
    for file, line in _SOURCE_ERROR.findall(log):
        marked.setdefault(file, []).append(int(line))
    marked_ptx = [int(line) for line in _PTX_ERROR.findall(log)]
    parts = [re.sub(rf"{re.escape(UNIT)}(?=[(\"])", lambda _: name, log.strip())]
    texts = {UNIT: source, **included(source)}
    parts += [f"{name if file == UNIT else file}:\n{numbered(texts[file], lines)}" for file, lines in marked.items()]
    if marked_ptx and ptx:
        parts.append(f"PTX of {name}:\n{numbered(ptx, marked_ptx)}")
    return "\n\n".join(parts)


def numbered(text: str, marked: list[int]) -> str:
    """The lines around ``marked`` (from 1), which ``>`` marks; ``...`` replaces a gap."""
    lines = text.split("\n")
    near = {n for mark in marked for n in range(mark - _CONTEXT, mark + _CONTEXT + 1)}
    shown = near & set(range(1, len(lines) + 1))
    width = len(str(max(shown, default=0)))
    rows: list[str] = []
    for n in sorted(shown):
        if rows and n - 1 not in shown:
            rows.append("  ...")
        rows.append(f"{'>' if n in marked else ' '} {n:{width}} | {lines[n - 1]}".rstrip())
    return "\n".join(rows)


# ---- cubins ----

# A program header ends in p_align and a section header in sh_entsize, 64-bit little-endian numbers
# below 2**32: their last four bytes are zero, so up to four missing bytes are known.
_KNOWN_ZEROS = 4

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")


def repaired(image: bytes) -> bytes:
    """The complete ``image``; CompileError if it is not a cubin or lacks more bytes than are known."""
    missing = elf_length(image) - len(image)
    if missing > _KNOWN_ZEROS:
        raise CompileError(
            f"NVRTC returned a truncated image: {len(image)} bytes, and {missing} more belong to it. "
            "Reinstall CuPy and NVRTC, or report it."
        )
    return image + bytes(max(missing, 0))


def elf_length(image: bytes) -> int:
    """Bytes up to the end of the later of the two header tables, where a cubin ends."""
    if len(image) < _HEADER.size or image[:5] != b"\x7fELF\x02":
        raise CompileError(f"NVRTC returned a truncated image: {len(image)} bytes, not a whole ELF64 header.")
    fields = _HEADER.unpack_from(image)
    program, section, _, _, program_size, programs, section_size, sections = fields[5:13]
    return int(max(program + program_size * programs, section + section_size * sections))
