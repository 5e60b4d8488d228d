"""A pack ahead of time: for each spec, arch and class of rows its best schedule, compiled, with a manifest.

Kernels that coincide are stored once. A build adds to a folder: lngen.packs.manifest has the rules.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from lngen.compiler.compile import Compilation, KernelSet
from lngen.compiler.contract import described
from lngen.compiler.devices import oldest_first
from lngen.compiler.headers import SEARCH, headers_hash, included
from lngen.compiler.schedule import row_bytes
from lngen.compiler.spec import Spec, parse_spec
from lngen.compiler.toolchain import FLAGS, Binary, compile_cubin, compile_ptx, nvrtc_version
from lngen.errors import LngenError, short
from lngen.files import sha256
from lngen.packs import c_library, hub, manifest
from lngen.packs.fatbin import Image, fatbin
from lngen.packs.known_answers import vectors
from lngen.packs.manifest import Facts, Manifest, put
from lngen.packs.request import Choice, Request, choices
from lngen.packs.trace import Workload, read_trace
from lngen.version import __version__

KINDS = ("cu", "ptx", "cubin", "fatbin", "vectors", "c", "cmake")
DEFAULT_KINDS = ("cu", "ptx", "cubin")

HUB = "hf-kernel"
LAYOUTS = ("pack", HUB)

# Called with (finished, total) after each schedule that is chosen and each compilation.
Progress = Callable[[int, int], None]

Result = TypeVar("Result")


@dataclass(frozen=True)
class Built:
    """The result of a build.

    folder    where it is
    manifest  what this build made, without what was in the folder before
    files     names of the files it wrote, the manifest last
    replaced  what it replaced in the folder, a sentence each
    notes     what the caller should know, a sentence each
    """

    folder: Path
    manifest: Manifest
    files: tuple[str, ...]
    replaced: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass
class _Set:
    """A kernel set to build: its archs, those whose PTX a launcher may take, and by arch and kind what is compiled."""

    kernels: KernelSet
    arches: tuple[str, ...] = ()
    ptx: tuple[str, ...] = ()
    compiled: dict[tuple[str, str], Binary | str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the kernel set."""
        return self.kernels.plan.name

    @property
    def text_hash(self) -> str:
        """The hash of the text with its headers."""
        return sha256(self.kernels.bundle.encode())

    def image(self, arch: str, kind: str) -> bytes:
        """The bytes that were compiled."""
        compiled = self.compiled[arch, kind]
        return compiled.image if isinstance(compiled, Binary) else compiled.encode()

    def roles(self, kinds: Sequence[str]) -> dict[str, Facts]:
        """The files: their names, kinds and archs."""
        roles: dict[str, Facts] = {f"{self.name}.cu": {"kind": "cu", "arch": None}} if "cu" in kinds else {}
        for arch in self.arches:
            if "ptx" in kinds or arch in self.ptx:
                roles[f"{self.name}.{arch}.ptx"] = {"kind": "ptx", "arch": arch}
            if "cubin" in kinds:
                roles[f"{self.name}.{arch}.cubin"] = {"kind": "cubin", "arch": arch}
        if "fatbin" in kinds:
            inside = {"arches": list(self.arches), "ptx_arches": list(self.ptx)}
            roles[f"{self.name}.fatbin"] = {"kind": "fatbin", "arch": None, **inside}
        return roles


def build(
    specs: Iterable[str | Spec],
    out: str | Path,
    *,
    arch: str | Sequence[str] = "sm_90",
    rows: int | str | Sequence[int | str] = "many",
    emit: str | Sequence[str] | None = None,
    schedule: str = "",
    lock: str | Path | None = None,
    device: str | None = None,
    bundle: bool = False,
    trace: str | Path | None = None,
    layout: str = "pack",
    embed: bool = False,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> Built:
    """Generate a pack: the kernels of ``specs`` for every arch and class of rows, and manifest.json.

    specs     texts such as ``layernorm.fwd:d=4096,dtype=bf16``, or Specs (``norm.spec("bwd")``)
    out       the folder; a pack in it is added to, and entries of the same spec, arch and rows are replaced
    arch      ``"sm_80,sm_90+ptx"`` or a list; with ``+ptx`` newer GPUs run its PTX
    rows      numbers of rows, ``many``, or ``all`` for every class; one schedule for the class of each
    emit      kinds of files: cu, ptx, cubin, fatbin, vectors; c, a C library of the whole pack, and cmake, its package.
              With cu alone nothing is compiled. By default cu, ptx and cubin, in a hub package cubin.
    schedule  changes of the schedules, ``threads=256``
    lock      a lock file of ``lngen tune``, whose schedules replace the defaults
    device    the described GPU to choose schedules for, ``h200``; by default the one that represents each arch
    bundle    .cu files stand alone; otherwise they include headers in ``include/HASH/lngen``
    trace     a folder of FlashInfer's trace files: what that workload calls is built as well, for its numbers of rows
    layout    ``pack``, or ``hf-kernel`` for a package that Hugging Face ``kernels`` loads (lngen.packs.hub)
    embed     the C library has the kernels inside and needs no other file (lngen.packs.c_library)
    executor  runs the compilations, by default threads; the bytes are the same

    Everything is compiled before the first file is written. LngenError, SpecError, ScheduleError for a wrong request,
    LowerError for a graph that no kernels compute, MissingError without a compiler; then the folder has not changed.
    """
    place, default = _layout(layout, Path(out))
    kinds = _kinds(default if emit is None else emit)
    request = Request.of(arch, rows, schedule, lock, device)
    workload = read_trace(Path(trace)) if trace is not None else Workload((), ())
    wanted = _wanted(specs, workload, request)
    request.check(kinds)
    c_library.check_kinds(kinds, embed, layout == HUB, manifest.read(place))  # refused before anything is compiled
    if layout == HUB:
        hub.check_package(Path(out), [c.spec.direction for c, _ in wanted], kinds, any(t.ptx for t in request.targets))
    with ThreadPoolExecutor() as pool:
        chosen = [c for of in _all([pool.submit(choices, *one) for one in wanted], progress) for c in of]
        sets = _gather(chosen)
        manifest.check_lost(place, manifest.read(place), _planned(sets, kinds))
        nvrtc = _compile(sets, kinds, progress, executor or pool)
    new, files = _contents(sets, chosen, kinds, bundle, nvrtc)
    library = c_library.Wanted("cmake" in kinds, embed) if "c" in kinds else None
    written, replaced = hub.put(Path(out), new, files) if layout == HUB else put(Path(out), new, files, library)
    notes = dict.fromkeys([*workload.notes, *(n for c, asked in wanted for n in asked.notes(c)), *_skipped(workload)])
    return Built(Path(out), new, tuple(written), tuple(replaced), tuple(notes))


def _wanted(specs: Iterable[str | Spec], workload: Workload, request: Request) -> list[tuple[Compilation, Request]]:
    """What is built, each with its rows; LngenError for nothing, LowerError for a graph that no kernels compute."""
    wanted = [(Compilation(s if isinstance(s, Spec) else parse_spec(s)), request) for s in specs]
    wanted += [(Compilation(parse_spec(text)), request.with_rows(seen)) for text, seen in workload.specs]
    if not wanted:
        why = f" The trace has none: {workload.skipped[0]}" if workload.skipped else ""
        raise LngenError(f"a build is expected to have one spec at least, got none; name one.{why}")
    for compilation, _ in wanted:
        compilation.check()
    return wanted


def _skipped(workload: Workload) -> Iterator[str]:
    """A note of the entries of a trace that are not built."""
    if workload.skipped:
        yield f"{len(workload.skipped)} entries of the trace are no norms of lngen: {workload.skipped[0]}"


def _layout(layout: str, folder: Path) -> tuple[Path, tuple[str, ...]]:
    """The folder of the pack, and the kinds of its files by default."""
    if layout not in LAYOUTS:
        raise LngenError(f"there is no layout '{short(layout)}', expected {', '.join(LAYOUTS)}.")
    return (folder / hub.PACK, hub.KINDS) if layout == HUB else (folder, DEFAULT_KINDS)


def _kinds(emit: str | Sequence[str]) -> tuple[str, ...]:
    kinds = tuple(dict.fromkeys(emit.split(",") if isinstance(emit, str) else emit))
    for kind in kinds:
        if kind not in KINDS:
            raise LngenError(f"there is no kind of file '{kind}', expected {', '.join(KINDS)}.")
    if not kinds:
        raise LngenError(f"a build is expected to emit one kind of file at least, of {', '.join(KINDS)}.")
    return kinds


def _all(futures: Sequence[Future[Result]], progress: Progress | None) -> list[Result]:
    """The results in order; the first error cancels what has not begun."""
    try:
        for count, future in enumerate(as_completed(futures), 1):
            future.result()
            if progress is not None:
                progress(count, len(futures))
    except BaseException:
        for future in futures:
            future.cancel()
        raise
    return [future.result() for future in futures]


def _gather(chosen: Iterable[Choice]) -> dict[str, _Set]:
    """The kernel sets of choices by name; LngenError if two that differ have one name."""
    found: dict[str, _Set] = {}
    for choice in chosen:
        target = choice.target
        for kernels in choice.candidates:
            one = found.setdefault(kernels.plan.name, _Set(kernels))
            if one.kernels.text != kernels.text:
                raise LngenError(
                    f"two kernel sets that differ are called '{one.name}'; give one of their graphs another name."
                )
            one.arches = oldest_first([*one.arches, target.arch])
            one.ptx = oldest_first([*one.ptx, *[target.arch] * target.ptx])
    return found


def _planned(sets: Mapping[str, _Set], kinds: Sequence[str]) -> Manifest:
    """The kernel sets with the names of their files, before anything is compiled."""
    entries = {name: {"text_sha256": one.text_hash, "files": one.roles(kinds)} for name, one in sets.items()}
    return Manifest({}, entries, {})


# ---- compilations ----

Version = tuple[int, int]  # of NVRTC


def _compile(
    sets: Mapping[str, _Set], kinds: Sequence[str], progress: Progress | None, executor: Executor
) -> Version | None:
    """All compilations of the build, side by side: NVRTC releases Python's global lock; its version, if there are any.

    Resources come from the cubin's log, so for PTX alone a cubin is compiled as well. Cubins that a kernel set already
    has, from the search for its schedule, are reused.
    """
    jobs = []
    for one in sets.values():
        ptx = {*one.ptx, *(one.arches if "ptx" in kinds else ())}
        if ptx or {*kinds} & {"cubin", "fatbin"}:
            jobs += [(one, arch, kind) for arch in one.arches for kind in ("cubin", *["ptx"] * (arch in ptx))]
    if not jobs:
        return None
    version, waiting = nvrtc_version(), []
    for one, arch, kind in jobs:
        if kind == "cubin" and arch in one.kernels.cubins:
            one.compiled[arch, kind] = one.kernels.cubins[arch]
        else:
            waiting.append((one, arch, kind))
    futures = [executor.submit(_one, one.name, arch, kind, one.kernels.text, version) for one, arch, kind in waiting]
    for (one, arch, kind), compiled in zip(waiting, _all(futures, progress), strict=True):
        one.compiled[arch, kind] = compiled
    return version


def _one(name: str, arch: str, kind: str, source: str, version: Version) -> Binary | str:
    """One compilation, by the NVRTC that the manifest names; runs on any executor."""
    if nvrtc_version() != version:
        here, wanted = (".".join(map(str, v)) for v in (nvrtc_version(), version))
        raise LngenError(f"a worker has NVRTC {here} and this machine {wanted}; install the same on both.")
    return (compile_ptx if kind == "ptx" else compile_cubin)(source, arch, name=f"{name}.cu")


# ---- files, and what the manifest says of them ----


def _contents(
    sets: Mapping[str, _Set], chosen: Sequence[Choice], kinds: Sequence[str], bundle: bool, nvrtc: Version | None
) -> tuple[Manifest, dict[str, bytes]]:
    """The manifest of what is built, and its files in order."""
    new, files, others = Manifest(), dict[str, bytes](), dict[str, bytes]()
    for name, one in sets.items():
        include = None if bundle or "cu" not in kinds else _headers(one.kernels, others)
        roles, plan = one.roles(kinds), one.kernels.plan
        own = {file: _data(one, role, bundle) for file, role in roles.items()}
        files |= own
        new.kernel_sets[name] = {
            **described(plan),
            "text_sha256": one.text_hash,
            "lngen_version": __version__,
            "compile": {"flags": list(FLAGS), "include": include},
            "resources": {
                arch: manifest.resources_of(plan, binary.resources, arch)
                for arch in one.arches
                if isinstance(binary := one.compiled.get((arch, "cubin")), Binary)
            },
            "files": {
                file: {**role, "bytes": len(own[file]), "sha256": sha256(own[file]), **_made_by(role, nvrtc)}
                for file, role in roles.items()
            },
        }
    new.specs = _dispatch(chosen, kinds)
    for spec in dict.fromkeys(c.spec for c in chosen) if "vectors" in kinds else ():
        others |= vectors(spec)
    new.others = {name: {"bytes": len(data), "sha256": sha256(data)} for name, data in sorted(others.items())}
    return new, files | dict(sorted(others.items()))


def _headers(kernels: KernelSet, headers: dict[str, bytes]) -> str:
    """The folder of the headers that a kernel's text includes, which are added to ``headers``."""
    folder = f"include/{headers_hash()}"
    headers |= {f"{folder}/{name}": text.encode() for name, text in included(kernels.text).items()}
    return folder


def _made_by(role: Facts, nvrtc: Version | None) -> Facts:
    """The compiler of a file, and the oldest driver that takes it, as the driver counts: 13000 for CUDA 13.0."""
    if role["kind"] == "cu" or nvrtc is None:
        return {"nvrtc": None, "driver": None}
    major, minor = nvrtc
    # A driver runs machine code of every minor version of its CUDA; it reads PTX of the versions it knows.
    return {"nvrtc": f"{major}.{minor}", "driver": 1000 * major + (10 * minor if role["kind"] == "ptx" else 0)}


def _data(one: _Set, role: Facts, bundle: bool) -> bytes:
    """The bytes of a file. A fat binary has machine code for each arch, and the PTX that newer GPUs run."""
    if role["kind"] == "cu":
        text = one.kernels.file(one.arches[0], bundle=bundle)
        return text.replace(SEARCH, f"-I include/{headers_hash()}", 1).encode()
    if role["kind"] == "fatbin":
        inside = [(arch, kind) for arch in one.arches for kind in ("cubin", *["ptx"] * (arch in one.ptx))]
        return fatbin(Image(arch, kind, one.image(arch, kind)) for arch, kind in inside)
    return one.image(role["arch"], role["kind"])


def _dispatch(chosen: Iterable[Choice], kinds: Sequence[str]) -> dict[str, Facts]:
    """The dispatch of each spec: images by arch, each with its classes of rows."""
    specs: dict[str, Facts] = {}
    for choice in chosen:
        spec = specs.setdefault(str(choice.spec), {"row_bytes": row_bytes(choice.problem), "images": []})
        target = choice.target
        machine_code = "cubin" in kinds or "fatbin" in kinds
        wanted = ["cubin"] * machine_code + ["ptx"] * target.ptx
        for kind in wanted or ["source"]:
            image = next((i for i in spec["images"] if (i["arch"], i["kind"]) == (target.arch, kind)), None)
            if image is None:
                spec["images"].append(image := {"arch": target.arch, "kind": kind, "classes": []})
            image["classes"].append(_class(choice, kind, kinds))
    for spec in specs.values():
        for image in spec["images"]:
            by_class = {c["most_bytes"]: c for c in image["classes"]}
            image["classes"] = [by_class[most] for most in sorted(by_class)]
    return specs


def _class(choice: Choice, kind: str, kinds: Sequence[str]) -> Facts:
    """A class of rows, and what a launcher takes for it."""

    def taken(kernels: KernelSet) -> Facts:
        name, arch = kernels.plan.name, choice.target.arch
        ends = {"ptx": f"{arch}.ptx", "source": "cu" if "cu" in kinds else f"{arch}.ptx"}
        ends["cubin"] = f"{arch}.cubin" if "cubin" in kinds else "fatbin"
        return {"kernel_set": name, "file": f"{name}.{ends[kind]}"}

    other = choice.otherwise
    return {"most_bytes": choice.most_bytes, **taken(choice.kernels), "otherwise": other and taken(other)}
