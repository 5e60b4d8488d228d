"""Ahead of time: sources, PTX and cubins of many kernel sets for many archs, and the manifest that describes them.

Building into a folder that has a manifest merges by name: entries of other kernel sets are kept, an entry of the same
name (the same spec and schedule) is replaced. A build is refused if an entry would lose a file by it, because the build
is for other archs or of other kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from lngen.aot import manifest
from lngen.aot.folder import put, replaceable
from lngen.compile import KernelSet
from lngen.devices import oldest_first
from lngen.errors import LngenError
from lngen.files import sha256
from lngen.problem import check_arch
from lngen.toolchain import Binary, compile_cubin, compile_ptx, nvrtc_version

KINDS = ("cu", "ptx", "cubin")

# Called with (finished, total) after each compilation.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Built:
    """The result of a build: the folder, the manifest's entries of this build, and file names."""

    folder: Path
    entries: tuple[dict[str, Any], ...]
    files: tuple[str, ...]


@dataclass(frozen=True)
class _Job:
    """One compilation: a kernel set's source for one arch to one kind."""

    name: str
    arch: str
    kind: str


def build(
    sets: Iterable[KernelSet],
    folder: Path,
    *,
    arches: Sequence[str],
    version: str,
    kinds: Sequence[str] = KINDS,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> Built:
    """Generate ``sets`` into ``folder`` as ``kinds`` of files (cu, ptx, cubin), and manifest.json.

    Everything is compiled before the first file is written; lngen.aot.folder has the order of replacements.
    ScheduleError if one of ``arches`` lacks what a form needs, LngenError if kernel sets that differ have one name, or
    if one that the folder has would lose a file. With only "cu" nothing is compiled, and the manifest has no
    resources. ``version`` is lngen's own, which the manifest records. ``executor`` runs the compilations, by default
    threads; the bytes are the same, and so they are in any order of ``arches``: oldest first.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise LngenError(f"there is no kind of file '{kind}', expected {', '.join(KINDS)}.")
    arches = oldest_first(arches)
    by_name = _by_name(sets, arches if {*kinds} - {"cu"} else ())
    roles = {name: _roles(name, arches, kinds) for name in by_name}
    replaceable(folder, by_name, {n for own in roles.values() for n in own})  # before anything is compiled
    compiled = _compile(by_name, arches, kinds, progress, executor)
    nvrtc = ".".join(map(str, nvrtc_version())) if compiled else None

    files: dict[str, bytes] = {}
    entries: dict[str, dict[str, Any]] = {}
    for name, kernels in by_name.items():
        binaries = {a: b for a in arches if isinstance(b := compiled.get(_Job(name, a, "cubin")), Binary)}
        own = {n: _data(_Job(name, role["arch"], role["kind"]), kernels, compiled) for n, role in roles[name].items()}
        files |= own
        entries[name] = manifest.entry(kernels.plan, {a: b.resources for a, b in binaries.items()})
        entries[name] |= {
            "lngen_version": version,
            "nvrtc_version": nvrtc,
            "files": {n: {**roles[name][n], "bytes": len(data), "sha256": sha256(data)} for n, data in own.items()},
        }
    put(folder, entries, files, version=version, nvrtc=nvrtc)
    return Built(folder, tuple(entries.values()), (*files, manifest.FILE_NAME))


def _by_name(sets: Iterable[KernelSet], arches: Sequence[str]) -> dict[str, KernelSet]:
    """The kernel sets by name; LngenError if two that differ have one name, ScheduleError if an arch lacks a form."""
    found: dict[str, KernelSet] = {}
    for kernels in sets:
        name = kernels.plan.name
        if found.setdefault(name, kernels).text != kernels.text:
            raise LngenError(f"two kernel sets that differ are called '{name}'; give one of their graphs another name.")
    for kernels, arch in product(found.values(), arches):
        check_arch(kernels.plan.schedule, arch)
    return found


def _compile(
    sets: dict[str, KernelSet],
    arches: Sequence[str],
    kinds: Sequence[str],
    progress: Progress | None,
    executor: Executor | None,
) -> dict[_Job, Binary | str]:
    """All compilations of the build, side by side: NVRTC releases Python's global lock.

    Resources come from the cubin's log, so for PTX alone a cubin is compiled as well. Cubins that a kernel set already
    has, from the search for its schedule, are reused.
    """
    if executor is None:
        with ThreadPoolExecutor() as pool:
            return _compile(sets, arches, kinds, progress, pool)
    wanted = [kind for kind in ("cubin", "ptx") if kind in kinds or (kind == "cubin" and "ptx" in kinds)]
    jobs = [_Job(name, arch, kind) for name in sets for arch in arches for kind in wanted]
    compiled: dict[_Job, Binary | str] = {
        job: sets[job.name].cubins[job.arch]
        for job in jobs
        if job.kind == "cubin" and job.arch in sets[job.name].cubins
    }
    version = nvrtc_version() if jobs else (0, 0)
    futures = {executor.submit(_one, job, sets[job.name].text, version): job for job in jobs if job not in compiled}
    try:
        for count, future in enumerate(as_completed(futures), 1):
            future.result()
            if progress is not None:
                progress(count, len(futures))
    except BaseException:
        for future in futures:
            future.cancel()
        raise
    return compiled | {job: future.result() for future, job in futures.items()}


def _one(job: _Job, source: str, version: tuple[int, int]) -> Binary | str:
    """One compilation, by the NVRTC that the manifest names; runs on any executor."""
    if nvrtc_version() != version:
        here, wanted = (".".join(map(str, v)) for v in (nvrtc_version(), version))
        raise LngenError(f"a worker has NVRTC {here} and this machine {wanted}; install the same on both.")
    name = f"{job.name}.cu"
    if job.kind == "ptx":
        return compile_ptx(source, job.arch, name=name)
    return compile_cubin(source, job.arch, name=name)


def _roles(name: str, arches: Sequence[str], kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The files of one kernel set: each name with its kind and its arch."""
    roles: dict[str, dict[str, Any]] = {f"{name}.cu": {"kind": "cu", "arch": None}} if "cu" in kinds else {}
    compiled = [kind for kind in ("ptx", "cubin") if kind in kinds]
    return roles | {f"{name}.{a}.{kind}": {"kind": kind, "arch": a} for a in arches for kind in compiled}


def _data(job: _Job, kernels: KernelSet, compiled: dict[_Job, Binary | str]) -> bytes:
    """The bytes of a file."""
    result = kernels.bundle if job.kind == "cu" else compiled[job]
    return result.image if isinstance(result, Binary) else result.encode()
