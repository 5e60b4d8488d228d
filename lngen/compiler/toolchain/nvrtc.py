"""NVRTC through CuPy's binding and the disk cache; needs neither a GPU nor a driver."""

import functools
import os
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from lngen import config
from lngen.compiler.headers import included
from lngen.compiler.toolchain import cache
from lngen.compiler.toolchain.nvrtc_results import UNIT, Resources, entries, explained, repaired, resources, tidied
from lngen.errors import CompileError, LngenError, MissingError
from lngen.files import load_cupy
from lngen.version import install_hint

ARCHES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

Kind = Literal["cubin", "ptx"]

FLAGS = ("-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true", "-std=c++17")  # IEEE arithmetic, as written
# There is no include path: headers come from memory; the cache's key has their text.
_OPTIONS = ("--no-source-include", *FLAGS)
_LINES = ("-lineinfo",)
_INSTALL = f"install them with: {install_hint('cuda13')}"

_loading = threading.Lock()
_compiling: dict[str, threading.Lock] = {}  # by the key of what is compiled


@dataclass(frozen=True)
class Binary:
    """A cubin for ``arch`` (a whole ELF file), NVRTC's log, and its kernels' resources in source order.

    ``key``: the name under which it is in the cache, if it is.
    """

    arch: str
    image: bytes
    log: str
    resources: Mapping[str, Resources]
    key: str = field(default="", compare=False)


def compile_cubin(source: str, arch: str, *, name: str = UNIT, fresh: bool = False, lines: bool = False) -> Binary:
    """Compile CUDA text, with the device headers that it includes, for ``arch`` ("sm_90", "sm_90a").

    It is taken from the disk cache if it is there and not ``fresh``. ``name`` is its name in messages. With ``lines``
    the image has the source line of every instruction, and names the current folder; the instructions are the same.
    CompileError if NVRTC refuses the text, LngenError for an arch it does not know, MissingError without CuPy or NVRTC.
    Any number of threads may call it at once; those that ask for the same wait for one that compiles it.
    """
    key, entry = _entry(source, arch, "cubin", name, _LINES if lines else (), fresh=fresh)
    return _binary(key, entry)


def cached_cubin(key: str) -> Binary | None:
    """The cubin that ``compile_cubin`` left in the cache under a key, without NVRTC; None if it is not there."""
    entry = cache.load(key)
    return None if entry is None else _binary(key, entry)


def _binary(key: str, entry: cache.Entry) -> Binary:
    return Binary(entry.arch, entry.image, entry.log, resources(entry.log), key)


def compile_ptx(source: str, arch: str, *, name: str = UNIT, lines: bool = False) -> str:
    """The PTX of ``compile_cubin``'s cubin; errors and cache are the same.

    ``lines``: with a .loc for every instruction, its line of ``source``; the instructions are the same.
    """
    return _entry(source, arch, "ptx", name, _LINES if lines else ())[1].image.decode()


def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC in use."""
    return _library().version


def library_stamp() -> tuple[str, int, int] | None:
    """The file of the NVRTC that this process has loaded: its path, bytes, and time of change in ns; None without one.

    Whoever sees the same file needs not load it to know that it is the same compiler.
    """
    try:
        mapped = re.search(r"/.*/libnvrtc\.so.*", Path("/proc/self/maps").read_text(encoding="utf-8"))
        return file_stamp(mapped[0]) if mapped else None
    except OSError:
        return None


def file_stamp(path: str) -> tuple[str, int, int]:
    """The path, bytes and time of change of a file; OSError if there is none."""
    found = os.stat(path)
    return path, found.st_size, found.st_mtime_ns


@functools.cache
def compiler_build() -> str:
    """The build of NVRTC, as it identifies itself: its version does not include patches."""
    library = _library()
    arch = library.arches[0]
    ptx = _compiled(library, "", arch, "ptx", _options(arch, "ptx", library.version), UNIT).image.decode()
    return "\n".join(line for line in ptx.splitlines() if line.startswith("//"))


def supported_arches() -> tuple[str, ...]:
    """Every arch this NVRTC compiles for, ascending; some also exist with an "a" or "f" suffix."""
    return _library().arches


class _Binding(Protocol):
    """The functions used of ``cupy.cuda.nvrtc``; a program is a handle."""

    NVRTCError: type[RuntimeError]

    def getVersion(self) -> tuple[int, int]: ...
    def getSupportedArchs(self) -> tuple[int, ...]: ...
    def createProgram(self, src: str, name: str, headers: Any, include_names: Any) -> int: ...
    def compileProgram(self, prog: int, options: Sequence[str]) -> None: ...
    def getProgramLog(self, prog: int) -> str: ...
    def getCUBIN(self, prog: int) -> bytes: ...
    def getPTX(self, prog: int) -> bytes: ...
    def destroyProgram(self, prog: int) -> None: ...


@dataclass(frozen=True)
class _Library:
    api: _Binding
    version: tuple[int, int]
    arches: tuple[str, ...]


def _library() -> _Library:
    # CuPy searches the shared library on the first call, in Python, so only one thread may do it.
    with _loading:
        return _load()


@functools.cache
def _load() -> _Library:
    try:
        load_cupy()
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise MissingError(f"Compiling needs CuPy, which cannot be imported ({error}); {_INSTALL}") from error
    api = cast(_Binding, nvrtc)
    try:
        version, arches = api.getVersion(), api.getSupportedArchs()
    except (RuntimeError, AssertionError, ImportError, OSError) as error:
        why = str(error).strip()
        raise MissingError(f"Compiling needs NVRTC, and CuPy cannot load libnvrtc ({why}); {_INSTALL}") from error
    return _Library(api, version, tuple(f"sm_{number}" for number in sorted(arches)))


def _entry(
    source: str, arch: str, kind: Kind, name: str, extra: tuple[str, ...] = (), *, fresh: bool = False
) -> tuple[str, cache.Entry]:
    start = time.perf_counter()
    library = _library()
    plain = re.fullmatch(r"(sm_\d+)[af]?", arch)
    if not plain or plain[1] not in library.arches:
        raise _unknown(arch, library)
    options = tuple(sorted((*_options(arch, kind, library.version), *extra)))
    key = cache.key_of(source, included(source), options, arch, kind, compiler_build())
    with _compiling.setdefault(key, threading.Lock()):
        entry, how = None if fresh else cache.load(key), "cached"
        if entry is None:
            entry, how = _compiled(library, source, arch, kind, options, name), "built"
            cache.store(key, entry)
    if config.debug_level() >= 1:
        _report(entry, kind, name, how, 1e3 * (time.perf_counter() - start))
    return key, entry


def _options(arch: str, kind: Kind, version: tuple[int, int]) -> tuple[str, ...]:
    options = {*_OPTIONS, f"-arch={arch if kind == 'cubin' else arch.replace('sm_', 'compute_')}"}
    if kind == "cubin":
        options.add("--ptxas-options=-v")
    if version >= (12, 9):
        # NVRTC's own cache, new in 12.9 and used where there is a driver, would suppress ptxas and its log.
        # Without textures and runtime calls a compile takes a tenth less, for the same bytes.
        options |= {"--no-cache", "--minimal"}
    return tuple(sorted(options))


def _compiled(library: _Library, source: str, arch: str, kind: Kind, options: Sequence[str], name: str) -> cache.Entry:
    api = library.api
    headers = included(source)  # CuPy takes them as bytes
    texts = tuple(text.encode() for text in headers.values())
    program = api.createProgram(source, UNIT, texts, tuple(name.encode() for name in headers))
    try:
        try:
            api.compileProgram(program, options)
        except api.NVRTCError as error:
            text = tidied(api.getProgramLog(program)) or str(error)
            if "--gpu-architecture" in text or "--nv_arch" in text:
                raise _unknown(arch, library) from error
            if "libnvrtc-builtins" in text:
                raise MissingError(f"Compiling needs a whole NVRTC ({text}); {_INSTALL}") from error
            ptx = api.getPTX(program).decode() if text.startswith("ptxas") else ""
            raise _refused(text, name, arch, source, ptx) from error
        image = repaired(api.getCUBIN(program)) if kind == "cubin" else api.getPTX(program)
        text = tidied(api.getProgramLog(program))
        kernels = tuple(resources(text)) if kind == "cubin" else entries(image.decode())
        return cache.Entry(arch, text, image, kernels)
    finally:
        api.destroyProgram(program)


def _unknown(arch: str, library: _Library) -> LngenError:
    version = ".".join(map(str, library.version))
    return LngenError(f"Unknown arch {arch!r}: NVRTC {version} compiles for {', '.join(library.arches)}.")


def _refused(text: str, name: str, arch: str, source: str, ptx: str) -> CompileError:
    explanation = explained(text, name, source, ptx)
    return CompileError(f"NVRTC refused {name} for {arch}:\n{explanation}{_dumped(source, name)}")


def _dumped(source: str, name: str) -> str:
    """Write a refused source to LNGEN_DUMP, if set; returns a sentence with its path."""
    folder = config.dump_dir()
    if folder is None:
        return ""
    path = folder / re.sub(r"[^\w.,=+-]", "_", name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    except OSError as error:
        return f"\n\nThe source could not be written to {path} ({error.strerror}); see LNGEN_DUMP."
    return f"\n\nThe source is in {path}"


def _report(entry: cache.Entry, kind: Kind, name: str, how: str, milliseconds: float) -> None:
    kernels = resources(entry.log).items()
    counts = "".join(f", {k} {r.registers} registers{' with spills' * r.spills}" for k, r in kernels)
    print(f"lngen: {how} {name} {entry.arch} {kind} in {milliseconds:.1f} ms{counts}", file=sys.stderr)
    if config.debug_level() >= 5 and entry.log:
        print(entry.log, file=sys.stderr)
