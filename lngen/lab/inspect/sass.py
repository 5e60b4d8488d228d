"""The machine code (SASS) of a cubin: its instructions by kernel, each with the source lines that it comes from.

The disassembler is NVIDIA's nvdisasm, which needs neither a GPU nor a driver and reads cubins of every arch:
https://docs.nvidia.com/cuda/cuda-binary-utilities.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from lngen.compiler.headers import HEADERS, PREFIX, text_of
from lngen.compiler.toolchain.nvrtc_results import UNIT
from lngen.errors import LngenError, MissingError
from lngen.version import install_hint

PACKAGE = "nvidia-cuda-nvdisasm"


@dataclass(frozen=True)
class Location:
    """A line of STEM.cu, where the kernels are STEM__rows and so on, or of a device header ("lngen/vector.cuh").

    ``function``: the function or struct of the header that has this line, or the kernel.
    """

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Instruction:
    """One instruction: its ``address`` in bytes from the kernel's start, and its text, a predicate included.

    Targets of branches are addresses. ``opcode``: the text's, with suffixes ("LDG.E.128.CONSTANT"). ``where``: the
    innermost line, then the lines it is inlined at, up to the kernel's or that of a struct's initialiser; empty without
    line information.
    """

    address: int
    text: str
    opcode: str
    where: tuple[Location, ...] = ()


def disassemble(cubin: bytes, *, lines: bool = False) -> dict[str, tuple[Instruction, ...]]:
    """The instructions of each kernel of a cubin, by name; with ``lines``, where the cubin has them, their lines.

    LngenError for bytes that are no cubin, MissingError without nvdisasm.
    """
    _, *parts = _SECTION.split(_text(cubin, ("-c", "-ndf", *(("-gi",) if lines else ()))))
    return {name: tuple(_instructions(name, text)) for name, text in zip(parts[::2], parts[1::2], strict=True)}


@lru_cache(64)  # nvdisasm takes half a second
def _text(cubin: bytes, options: tuple[str, ...]) -> str:
    """What nvdisasm prints for a cubin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        try:
            done = subprocess.run([_program(), *options, path], capture_output=True, check=False)
        except OSError as error:
            raise MissingError(f"SASS needs nvdisasm, which cannot be run ({error}); {_hint()}") from error
    if done.returncode:
        why = done.stderr.decode(errors="replace").replace(str(path), "the image").partition(":")[2].strip()
        raise LngenError(f"a cubin is expected, and nvdisasm refuses this one ({why}); name one that lngen built.")
    return done.stdout.decode(errors="replace")


def _program() -> str:
    """The path of nvdisasm: of its package, on the PATH, or of a CUDA toolkit."""
    try:
        owned = [str(f.locate()) for f in files(PACKAGE) or () if f.stem == "nvdisasm"]
    except PackageNotFoundError:
        owned = []
    homes = (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    toolkit = os.pathsep.join(str(Path(home) / "bin") for home in homes if home)
    found = next(iter(owned), None) or shutil.which("nvdisasm") or shutil.which("nvdisasm", path=toolkit)
    if found is None:
        raise MissingError(f"SASS needs the disassembler nvdisasm, which is not installed; {_hint()}")
    return found


def _hint() -> str:
    return f"install it with: {install_hint('cuda13')}, or: pip install {PACKAGE}"


# ---- the text of nvdisasm ----

_SECTION = re.compile(r"^\.text\.(\S+):\n", re.MULTILINE)
# An instruction, a label of the next one, or a line of the next ones, of which the innermost is the first of a chain.
_PARTS = re.compile(
    r"^ +/\*(?P<address>[0-9a-f]+)\*/ +(?P<text>(?:@!?\w+ +)?(?P<opcode>[\w.]+).*?) *;"
    r"|^(?P<label>\.L\S+):$"
    r'|^\t//## File "(?P<file>.*?)", line (?P<line>\d+)',
    re.MULTILINE,
)


def _instructions(kernel: str, text: str) -> Iterator[Instruction]:
    """The instructions of a kernel's section; a chain of lines holds up to the next one."""
    labels: dict[str, int] = {}
    found: list[Instruction] = []
    where: tuple[Location, ...] = ()
    named: list[str] = []
    begun = False
    for part in _PARTS.finditer(text):
        if part["label"]:
            named.append(part["label"])
        elif part["file"]:
            where = (*(where if begun else ()), location(kernel, part["file"], int(part["line"])))
            begun = True
        else:
            address = int(part["address"], 16)
            labels.update(dict.fromkeys(named, address))
            named, begun = [], False
            found.append(Instruction(address, part["text"], part["opcode"], where))
    for one in found:
        target = re.sub(r"`\((.*?)\)", lambda m: f"{labels[m[1]]:#x}" if m[1] in labels else m[1], one.text)
        yield replace(one, text=target)


def location(kernel: str, path: str, line: int) -> Location:
    """A line of a file that nvdisasm names by the folder of the compilation."""
    name = path.replace("\\", "/").rpartition("/")[2]
    header = name.removesuffix(".cuh")
    if header != name and header in HEADERS:
        function = next((of for first, of in reversed(_functions(header)) if first <= line), header)
        return Location(f"{PREFIX}{name}", line, function)
    return Location(f"{kernel.rpartition('__')[0] or kernel}.cu" if name == UNIT else name, line, kernel)


@cache
def _functions(header: str) -> tuple[tuple[int, str], ...]:
    """The first lines and names of the functions of a device header: Struct::name in a struct, which has a line too."""
    struct, found = "", []
    for number, line in enumerate(text_of(header).splitlines(), 1):
        if outer := re.match(r"(?:template <.*> )?(?:struct|union) (\w+)", line):
            struct = outer[1]
            found.append((number, struct))
        if named := re.search(r"__device__ .*?(operator\W+|\w+)\(", line):
            found.append((number, f"{struct}::{named[1]}" if line.startswith(" ") else named[1]))
    return tuple(found)
