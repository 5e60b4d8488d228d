"""``lngen.verify``: a pack against its manifest, and both against what lngen and the compiler make again."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lngen.compiler.compile import Compilation
from lngen.compiler.contract import described
from lngen.compiler.devices import device_for
from lngen.compiler.graphs import GRAPHS
from lngen.compiler.headers import bundled, headers_hash
from lngen.compiler.lower import Plan, requested_shared
from lngen.compiler.problem import ANY, parse_schedule
from lngen.compiler.schedule import row_bytes
from lngen.compiler.spec import parse_spec
from lngen.compiler.toolchain import FLAGS, compile_cubin, compile_ptx, nvrtc_version
from lngen.errors import LngenError, MissingError
from lngen.files import sha256
from lngen.launch.pack import FILE_NAME, content
from lngen.packs import hub, manifest
from lngen.packs.manifest import Facts, Manifest
from lngen.version import __version__

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Verified:
    """What is known of a pack.

    files       files whose hashes are as listed
    recompiled  files that the compiler made again, with the same bytes
    rebuilt     kernel sets of which lngen made the launch data again from spec and schedule, with the same result
    faults      a sentence for each file that is missing, changed, or compiled to other bytes, and for other launch data
    skipped     a sentence for each reason why files or launch data were not made again, with their number
    unlisted    files in the folder that the manifest does not name; a launcher does not use them
    """

    files: int
    recompiled: int
    rebuilt: int
    faults: tuple[str, ...]
    skipped: tuple[str, ...]
    unlisted: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True without faults."""
        return not self.faults


def verify(folder: str | Path, *, progress: Progress | None = None) -> Verified:
    """Check every hash of a pack or a hub package, and make again what this lngen and this NVRTC made.

    LngenError if ``folder`` is neither. Nothing is written but the cache of compiled kernels.
    """
    folder = Path(folder)
    variant = hub.variant_of(folder)
    if variant is not None:
        pack, (good, faults, unlisted) = _pack(variant / "pack", progress), hub.faults(variant)
        return replace(pack, files=good, faults=(*pack.faults, *faults), unlisted=tuple(unlisted))
    if not (folder / FILE_NAME).is_file():
        raise LngenError(f"'{folder}' is expected to be a pack, but has no {FILE_NAME}; name the folder of a build.")
    return _pack(folder, progress)


def _pack(folder: Path, progress: Progress | None) -> Verified:
    """What is known of a pack, or of the one in a hub package."""
    pack = manifest.read(folder)
    listed = pack.files()
    faults: list[str] = []
    good: dict[str, bytes] = {}
    for name, digest in listed.items():
        try:
            good[name] = content(folder, name, digest)
        except LngenError as error:
            faults.append(str(error))
    recompiled, rebuilt, skipped = 0, 0, Counter[tuple[str, str]]()
    work = [*_compilations(pack, good)]
    total = len(work) + len(pack.kernel_sets)
    for count, (name, facts, source) in enumerate(work, 1):
        why = _reason_not_to(facts, source)
        if why:
            skipped["file", why] += 1
        else:
            assert source is not None
            fault = _compared(name, facts, source, good[name])
            faults += [fault] if fault else []
            recompiled += not fault
        if progress is not None:
            progress(count, total)
    compilations: dict[str, Compilation] = {}
    for count, (name, entry) in enumerate(pack.kernel_sets.items(), len(work) + 1):
        why = _reason_not_to_rebuild(entry)
        if why:
            skipped["kernel set", why] += 1
        else:
            fault = _rebuilt(entry, pack.specs, compilations)
            faults += [f"kernel set '{name}' {fault}"] if fault else []
            rebuilt += not fault
        if progress is not None:
            progress(count, total)
    there = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")}
    unlisted = sorted(there - listed.keys() - {FILE_NAME})
    return Verified(len(good), recompiled, rebuilt, tuple(faults), tuple(_sentences(skipped)), tuple(unlisted))


def _sentences(skipped: Mapping[tuple[str, str], int]) -> Iterator[str]:
    """What was not made again, and why."""
    for (what, why), count in skipped.items():
        counted = f"{count} {what}s are" if count > 1 else f"1 {what} is"
        yield f"{why}: {counted} not {'compiled again' if what == 'file' else 'compared with spec and schedule'}."


# ---- launch data ----


def _reason_not_to_rebuild(entry: Facts) -> str:
    """Why the launch data of a kernel set cannot be made again here; empty if they can."""
    spec, version = entry["spec"], entry["lngen_version"]
    if version != __version__:
        return f"they are of lngen {version}, and this one is {__version__}"
    # No other text may be parsed: it could name a module, which would be imported.
    if spec["graph"] not in GRAPHS or spec["text"].partition(":")[0] != f"{spec['graph']}.{spec['direction']}":
        return "their graphs are not lngen's"
    return ""


def _rebuilt(entry: Facts, specs: Mapping[str, Facts], compilations: dict[str, Compilation]) -> str:
    """What a kernel set has that does not follow from its spec and schedule; empty if all does."""
    text = entry["spec"]["text"]
    try:
        if text not in compilations:
            compilations[text] = Compilation(parse_spec(text))
        problem = compilations[text].problem
        kernels = compilations[text].kernels(parse_schedule(entry["schedule"]["text"], ANY))
        made = {**described(kernels.plan), "text_sha256": sha256(kernels.bundle.encode())}
        made["resources"] = {a: _launched(kernels.plan, used, a) for a, used in entry["resources"].items()}
    except LngenError as error:
        return f"does not follow from its spec and schedule: {error}"
    where = _difference(made, {key: entry.get(key) for key in made}, "")
    if not where and text in specs and specs[text]["row_bytes"] != row_bytes(problem):
        where = "row_bytes"
    return f"has another '{where}' than lngen {__version__} makes of its spec and schedule." if where else ""


def _launched(plan: Plan, used: Facts, arch: str) -> Facts:
    """The resources of kernels on an arch, with the shared memory that they are launched with."""
    registers = {k.name: used.get(k.name, {"registers": 0})["registers"] for k in plan.kernels}
    launched = requested_shared(plan, registers, device_for(arch))
    return {name: {**used.get(name, {}), "launch_shared_bytes": size} for name, size in launched.items()}


def _difference(made: Any, there: Any, where: str) -> str:
    """Where two values of JSON differ, as ``kernels.0.name``; empty if they do not."""
    if made == there:
        return ""
    if isinstance(made, list) and isinstance(there, list):
        made, there = dict(enumerate(made)), dict(enumerate(there))
    if not isinstance(made, dict) or not isinstance(there, dict) or made.keys() != there.keys():
        return where
    parts = (_difference(made[key], there[key], f"{where}.{key}".lstrip(".")) for key in made)
    return next(filter(None, parts))


# ---- files ----


def _compilations(pack: Manifest, good: Mapping[str, bytes]) -> Iterator[tuple[str, Facts, str | None]]:
    """The files that NVRTC made, with their facts and their source; None if the pack has no source of theirs."""
    for name, entry in pack.kernel_sets.items():
        include = entry["compile"]["include"]
        text = good[f"{name}.cu"].decode(errors="replace") if f"{name}.cu" in good else None
        if text is not None and include and include != f"include/{headers_hash()}":
            text = _with_headers(text, include, good)
        for file, facts in entry["files"].items():
            if facts["kind"] in ("ptx", "cubin", "fatbin") and file in good:
                yield file, {**facts, "flags": entry["compile"]["flags"], "set": name}, text


def _with_headers(text: str, include: str, good: Mapping[str, bytes]) -> str | None:
    """A source with the headers of another version of lngen, which lie in the pack; None if one is missing."""
    prefix = f"{include}/lngen/"
    headers = {
        name.removeprefix(prefix).removesuffix(".cuh"): data.decode(errors="replace")
        for name, data in good.items()
        if name.startswith(prefix)
    }
    try:
        return bundled(text, headers.__getitem__)
    except KeyError:
        return None


def _reason_not_to(facts: Facts, source: str | None) -> str:
    """Why a file cannot be compiled again here; empty if it can."""
    try:
        here = ".".join(map(str, nvrtc_version()))
    except MissingError as error:
        return f"there is no compiler ({str(error).partition(',')[0]})"
    if facts["nvrtc"] != here:
        return f"they are of NVRTC {facts['nvrtc']}, and this one is {here}"
    if facts["flags"] != [*FLAGS]:
        return "they were compiled with other flags"
    if source is None:
        return "the pack has no CUDA source of them, which a build with --emit cu adds"
    return ""


def _compared(name: str, facts: Facts, source: str, data: bytes) -> str:
    """The fault of a file that is compiled again; empty if it has the same bytes."""
    text, arches = f"{facts['set']}.cu", facts.get("arches", [facts["arch"]])
    try:
        if facts["kind"] == "ptx":
            made = [compile_ptx(source, facts["arch"], name=text).encode()]
        else:
            made = [compile_cubin(source, arch, name=text).image for arch in arches]
    except LngenError as error:
        return f"'{name}': its source does not compile: {error}"
    # A fat binary has its cubins as they are, without compression.
    same = all(image in data for image in made) if facts["kind"] == "fatbin" else made == [data]
    return "" if same else f"'{name}' is not what NVRTC {facts['nvrtc']} makes of '{facts['set']}.cu'."
