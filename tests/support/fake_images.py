"""Images that a fake driver can load: which PTX each stands for, and which GPU and driver take it."""

import ctypes
import hashlib
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path

import pytest

from c_calls import Refused, refuse_if
from lngen.compiler.toolchain import Binary, Resources, compile_ptx
from lngen.compiler.toolchain.nvrtc_results import elf_length
from lngen.errors import PtxError
from lngen.proof.ptx import parse
from lngen.proof.ptx.parser import Entry, Module

REGISTERS = 32  # per thread of a kernel for which no number is given

_ARCH = re.compile(r"sm_(\d+)(\d)([af]?)")
_ELF = struct.Struct("<4sBBB9sHHIQQQIHHHHHH")  # the header of an ELF64 file
_SHARED = re.compile(r"\.shared\s+\.align\s+\d+\s+\.[bu](\d+)\s+[\w$]+(?:\[(\d+)\])?;")
_LIMITS = re.compile(r"\.entry\s+([\w$]+)[^{]*?\.(?:max|req)ntid\s+(\d+)")

# The newest PTX of a driver of CUDA 12, by its minor version; from CUDA 13 on it is that of CUDA minus 4.
_PTX_OF_12 = (80, 81, 82, 83, 84, 85, 85, 86, 87, 88)


@dataclass(frozen=True)
class Image:
    """What an image stands for: PTX, the arch it is compiled for (PTX itself: for no arch), registers by kernel.

    ``source``: the CUDA text, which findings quote.
    """

    ptx: str
    arch: str = ""
    registers: Mapping[str, int] = field(default_factory=dict)
    source: str = ""

    @cached_property
    def module(self) -> Module:
        """The PTX, parsed; PtxError if it is malformed."""
        return parse(self.ptx)

    @cached_property
    def most_threads(self) -> dict[str, int]:
        """Threads that a block may have, by kernel, where the kernel says so."""
        return {name: int(threads) for name, threads in _LIMITS.findall(self.ptx)}

    def entry(self, name: str) -> Entry:
        """A kernel; refused if there is none of that name."""
        refuse_if(name not in self.module.entries, "NOT_FOUND")
        return self.module.entries[name]

    def check(self, capability: tuple[int, int], driver: int) -> None:
        """Refuses what a GPU of that capability under a driver of that version does not load."""
        if self.arch:
            refuse_if(not runs(self.arch, capability), "NO_BINARY_FOR_GPU")
            return
        version = re.search(r"^\.version\s+(\d+)\.(\d+)", self.ptx, re.MULTILINE)
        target = re.search(r"^\.target\s+(sm_\w+)", self.ptx, re.MULTILINE)
        if version is None or target is None:
            raise Refused("INVALID_PTX")
        refuse_if(int(version[1]) * 10 + int(version[2]) > newest_ptx(driver), "UNSUPPORTED_PTX_VERSION")
        refuse_if(not compiles(target[1], capability), "INVALID_PTX")
        try:
            _ = self.module
        except PtxError as error:
            raise Refused("INVALID_PTX") from error


def newest_ptx(driver: int) -> int:
    """The newest version of PTX, 87 for 8.7, that a driver compiles; ``driver`` as it reports its own, 12080."""
    major, minor = driver // 1000, driver % 1000 // 10
    if major == 12:
        return _PTX_OF_12[min(minor, len(_PTX_OF_12) - 1)]
    return (major - 4) * 10 + minor if major > 12 else 78


def _arch(arch: str) -> tuple[int, int, str]:
    found = _ARCH.fullmatch(arch)
    assert found, f"An arch such as sm_90 is expected, got '{arch}'."
    return int(found[1]), int(found[2]), found[3]


def runs(arch: str, capability: tuple[int, int]) -> bool:
    """True if a GPU runs a cubin: its own major version, and a minor version that is not newer."""
    major, minor, kind = _arch(arch)
    if kind == "a":
        return (major, minor) == capability
    return major == capability[0] and minor <= capability[1]


def compiles(arch: str, capability: tuple[int, int]) -> bool:
    """True if the driver can compile PTX for a GPU: that of any older arch, unless it is for one arch only."""
    major, minor, kind = _arch(arch)
    return runs(arch, capability) if kind else (major, minor) <= capability


def made_up_cubin(ptx: str, arch: str) -> bytes:
    """Bytes that stand for PTX compiled for an arch: the header of an ELF64 file, and a hash."""
    content = hashlib.sha256(f"{arch}\n{ptx}".encode()).digest()
    end = _ELF.size + len(content)
    sizes = _ELF.size, 56, 0, 64, 0, 0
    return _ELF.pack(b"\x7fELF", 2, 1, 1, b"", 2, 190, 1, 0, end, 0, 0, *sizes) + content


@contextmanager
def cubins_of_ptx() -> Iterator[None]:
    """Builds make up their cubins, for a fake driver: PTX is compiled, and no machine code, which takes longer."""

    def made(source: str, arch: str, *, name: str, lines: bool = False) -> Binary:
        ptx = compile_ptx(source, arch, name=name, lines=lines)
        _, *parts = re.split(r"\.entry\s+([\w$]+)", ptx)
        used = {}
        for kernel, body in zip(parts[::2], parts[1::2], strict=True):
            shared = sum(int(bits) // 8 * int(count or 1) for bits, count in _SHARED.findall(body))
            used[kernel] = Resources(REGISTERS, 0, 0, 0, shared, None, 0)
        return Binary(arch, made_up_cubin(ptx, arch), "", used)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("lngen.packs.build", "lngen.packs.verify", "lngen.compiler.compile"):
            patch.setattr(import_module(module), "compile_cubin", made)
        yield


def content_at(address: int, size: int | None) -> bytes:
    """The image at an address, of which ``size`` bytes are there if that is known; refused if it is cut off.

    The header of an ELF file tells its length; any other image ends before its first NUL, if no size is known.
    """
    start = ctypes.string_at(address, min(4, 4 if size is None else size))
    if start != b"\x7fELF":
        return ctypes.string_at(address) if size is None else ctypes.string_at(address, size)
    refuse_if(size is not None and size < _ELF.size, "INVALID_IMAGE")
    length = elf_length(ctypes.string_at(address, _ELF.size))
    refuse_if(size is not None and size < length, "INVALID_IMAGE")
    return ctypes.string_at(address, length)


def pack_images(folder: Path, compiled: Callable[[str, str], str] | None = None) -> list[tuple[bytes, str, str, str]]:
    """The cubins of a folder, each with its PTX, its arch and its CUDA text ("" if there is none).

    ``x.sm_90.cubin`` goes with ``x.sm_90.ptx``; where that is missing, with what ``compiled`` makes of the text of
    ``x.cu`` for sm_90 (NVRTC if it is not given).
    """
    make = compiled or (lambda source, arch: compile_ptx(source, arch, lines=True))
    found = []
    for path in sorted(Path(folder).rglob("*.cubin")):
        name, arch = re.fullmatch(r"(.+?)[._](sm_\d+[af]?)", path.stem).groups()  # type: ignore[union-attr]
        text, ptx = path.with_name(f"{name}.cu"), path.with_suffix(".ptx")
        source = text.read_text(encoding="utf-8") if text.is_file() else ""
        written = ptx.read_text(encoding="utf-8") if ptx.is_file() else make(source, arch)
        found.append((path.read_bytes(), written, arch, source))
    assert found, f"{folder} has no cubin."
    return found
