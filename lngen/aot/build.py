"""Ahead of time: sources, PTX and cubins of many plans for many archs, and the manifest that describes them.

Building into a folder that has a manifest merges by name: entries of other kernel sets stay, one of the same
name (the same spec and schedule) is replaced, together with its files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from lngen.aot import manifest
from lngen.aot.folder import put
from lngen.emit import emit
from lngen.errors import LngenError
from lngen.files import sha256
from lngen.lower import Plan
from lngen.schedule import check_arch
from lngen.toolchain import Binary, compile_cubin, compile_ptx, nvrtc_version

KINDS = ("cu", "ptx", "cubin")

# Called with (finished, of how many) after each compilation.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Built:
    """What a build wrote: the folder, the manifest's entries of this build, the files' names, and what to tell."""

    folder: Path
    entries: tuple[dict[str, Any], ...]
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Job:
    """One compilation: a plan's source for one arch to one kind."""

    name: str
    arch: str
    kind: str


def build(
    plans: Iterable[Plan],
    folder: Path,
    *,
    arches: Sequence[str],
    version: str,
    kinds: Sequence[str] = KINDS,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> Built:
    """Generate ``plans`` into ``folder`` as ``kinds`` of files (cu, ptx, cubin), and manifest.json.

    Everything is compiled before the first file is written; lngen.aot.folder says in which order they are replaced.
    ScheduleError if one of ``arches`` lacks what a plan's form needs, LngenError if plans that differ have one name.
    With only "cu" nothing is compiled, and the manifest has no resources. ``version`` is lngen's own, which the
    manifest records. ``executor`` runs the compilations, by default threads; the bytes are the same.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise LngenError(f"there is no kind of file '{kind}', expected {', '.join(KINDS)}.")
    manifest.read(folder)  # what is wrong with it is said before anything is compiled
    by_name: dict[str, Plan] = {}
    sources: dict[str, str] = {}
    for plan in plans:
        source = emit(plan)
        if sources.setdefault(plan.name, source) != source:
            raise LngenError(
                f"two kernel sets that differ are called '{plan.name}'; give one of their graphs another name."
            )
        by_name[plan.name] = plan
    for plan, arch in product(by_name.values(), arches if set(kinds) - {"cu"} else ()):
        check_arch(plan.schedule, arch)
    compiled = _compile(sources, arches, kinds, progress, executor)
    nvrtc = ".".join(map(str, nvrtc_version())) if compiled else None

    files: dict[str, bytes] = {}
    entries: dict[str, dict[str, Any]] = {}
    for name, plan in by_name.items():
        binaries = {a: b for a in arches if isinstance(b := compiled.get(_Job(name, a, "cubin")), Binary)}
        own = _files(name, sources[name], arches, kinds, compiled)
        files |= {n: data for n, (data, _) in own.items()}
        entries[name] = manifest.entry(plan, {a: b.resources for a, b in binaries.items()})
        entries[name] |= {
            "lngen_version": version,
            "nvrtc_version": nvrtc,
            "files": {n: {**role, "bytes": len(data), "sha256": sha256(data)} for n, (data, role) in own.items()},
        }
    notes = put(folder, entries, files, version=version, nvrtc=nvrtc)
    return Built(folder, tuple(entries.values()), (*files, manifest.FILE_NAME), tuple(notes))


def _compile(
    sources: dict[str, str],
    arches: Sequence[str],
    kinds: Sequence[str],
    progress: Progress | None,
    executor: Executor | None,
) -> dict[_Job, Binary | str]:
    """Every compilation the build needs, side by side: NVRTC leaves Python's lock alone.

    Resources come from the cubin's log, so PTX alone is compiled to a cubin, too.
    """
    if executor is None:
        with ThreadPoolExecutor() as pool:
            return _compile(sources, arches, kinds, progress, pool)
    wanted = [kind for kind in ("cubin", "ptx") if kind in kinds or (kind == "cubin" and "ptx" in kinds)]
    jobs = [_Job(name, arch, kind) for name in sources for arch in arches for kind in wanted]
    version = nvrtc_version() if jobs else (0, 0)
    futures = {executor.submit(_one, job, sources[job.name], version): job for job in jobs}
    try:
        for count, future in enumerate(as_completed(futures), 1):
            future.result()
            if progress is not None:
                progress(count, len(jobs))
    except BaseException:
        for future in futures:
            future.cancel()
        raise
    return {job: future.result() for future, job in futures.items()}


def _one(job: _Job, source: str, version: tuple[int, int]) -> Binary | str:
    """One compilation, by the NVRTC that the manifest will name; a job for any executor."""
    if nvrtc_version() != version:
        here, wanted = (".".join(map(str, v)) for v in (nvrtc_version(), version))
        raise LngenError(f"a worker has NVRTC {here} and this machine {wanted}; install the same on both.")
    name = f"{job.name}.cu"
    if job.kind == "ptx":
        return compile_ptx(source, job.arch, name=name)
    return compile_cubin(source, job.arch, name=name)


def _files(
    name: str, source: str, arches: Sequence[str], kinds: Sequence[str], compiled: dict[_Job, Binary | str]
) -> dict[str, tuple[bytes, dict[str, Any]]]:
    """The files of one kernel set: name, bytes and role."""
    files: dict[str, tuple[bytes, dict[str, Any]]] = {}
    if "cu" in kinds:
        files[f"{name}.cu"] = source.encode(), {"kind": "cu", "arch": None}
    for arch in arches:
        for kind in ("ptx", "cubin"):
            if kind in kinds:
                result = compiled[_Job(name, arch, kind)]
                data = result.image if isinstance(result, Binary) else result.encode()
                files[f"{name}.{arch}.{kind}"] = data, {"kind": kind, "arch": arch}
    return files
