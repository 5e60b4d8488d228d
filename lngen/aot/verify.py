"""``lngen.verify``: the files of a pack against its manifest, and against what the compiler makes of their sources."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lngen.aot import hub, manifest
from lngen.aot.manifest import Facts, Manifest
from lngen.errors import LngenError, MissingError
from lngen.headers import bundled, headers_hash
from lngen.launch.pack import FILE_NAME, content
from lngen.toolchain import FLAGS, compile_cubin, compile_ptx, nvrtc_version

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Verified:
    """What is known of a pack.

    files       files whose hashes are as listed
    recompiled  files that the compiler made again, with the same bytes
    faults      a sentence for each file that is missing, changed, or compiled to other bytes
    skipped     a sentence for each reason why files were not compiled again, with their number
    unlisted    files in the folder that the manifest does not name; a launcher does not use them
    """

    files: int
    recompiled: int
    faults: tuple[str, ...]
    skipped: tuple[str, ...]
    unlisted: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True without faults."""
        return not self.faults


def verify(folder: str | Path, *, progress: Progress | None = None) -> Verified:
    """Check every hash of a pack or a hub package, and compile again what this NVRTC made.

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
    recompiled, skipped = 0, dict[str, int]()
    work = [*_compilations(pack, good)]
    for count, (name, facts, source) in enumerate(work, 1):
        why = _reason_not_to(facts, source)
        if why:
            skipped[why] = skipped.get(why, 0) + 1
        else:
            assert source is not None
            fault = _compared(name, facts, source, good[name])
            faults += [fault] if fault else []
            recompiled += not fault
        if progress is not None:
            progress(count, len(work))
    there = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")}
    unlisted = sorted(there - listed.keys() - {FILE_NAME})
    counts = {why: f"{count} files are" if count > 1 else "1 file is" for why, count in skipped.items()}
    reasons = (f"{why}: {count} not compiled again." for why, count in counts.items())
    return Verified(len(good), recompiled, tuple(faults), tuple(reasons), tuple(unlisted))


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
        return "the pack has no whole source of theirs (--emit cu)"
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
