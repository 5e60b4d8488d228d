"""Packs: a folder of compiled kernels, and the choice of one for a device and a number of rows.

Nothing is compiled here, and nothing is imported but the standard library. Of the manifest, what every program needs is
read at once, a kernel set when it is asked for.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import LngenError, short
from ..files import plain_json, read_inside, reason, sha256
from .driver import gpu
from .kernels import Described, Loaded
from .shape import SCHEMA_VERSION, check_choice, check_dispatch, check_document, check_set, check_top

if TYPE_CHECKING:
    from pathlib import Path

    from .pack_norms import PackNorm

FILE_NAME = "manifest.json"
LARGEST = 2**26  # bytes of a manifest, and of a file it lists; a thousand kernel sets take 5 MB


# ---- the text of a manifest ----

# It is read as it was written, byte by byte. At its beginning stands the SHA-256 of what follows up to the kernel sets,
# which come last. In that part, 'texts' has the length and the SHA-256 of each kernel set.
HEAD, SETS = b'{\n "schema_version": %d,\n "sha256": "%s",\n', b',\n "kernel_sets": ['
INDENT, END, NO_SETS = b"\n  ", b"\n ]\n}\n", b"]\n}\n"
CHANGED = "it is not as a build wrote it"


def head(rest: bytes) -> bytes:
    """What a manifest begins with; ``rest``: what follows up to its kernel sets."""
    return HEAD % (SCHEMA_VERSION, sha256(rest).encode())


class Document:
    """A manifest: ``top``, all of it but the kernel sets, and these by name, each parsed when it is used."""

    def __init__(self, raw: bytes) -> None:
        """ValueError for a text that is no manifest of this version, or not as a build wrote it."""
        self._raw, end = raw, raw.find(SETS)
        if end < 0 or not raw.startswith(head(raw[len(head(b"")) : end])):
            check_top(plain_json(raw))
            raise ValueError(CHANGED)
        self.top = plain_json(raw[:end] + SETS + NO_SETS)
        check_top(self.top)
        self._texts: Mapping[str, Any] = self.top["texts"]
        self._sets: dict[str, Any] = {}
        try:
            self._places = self._find(end + len(SETS))
        except (TypeError, ValueError):
            raise ValueError(CHANGED) from None

    def _find(self, at: int) -> dict[str, tuple[int, int]]:
        """Where the text of each kernel set begins and ends; ValueError or TypeError if there is anything else."""
        raw, before, found = self._raw, INDENT, dict[str, tuple[int, int]]()
        for name, (size, _) in self._texts.items():
            begin = at + len(before)
            if raw[at:begin] != before:
                raise ValueError(name)
            at, before = begin + size, b"," + INDENT
            found[name] = begin, at
        if raw[at:] != (END if found else NO_SETS):
            raise ValueError("more text")
        return found

    def __contains__(self, name: object) -> bool:
        """True for the name of a kernel set."""
        return name in self._places

    def whole(self) -> Any:
        """The manifest with all its kernel sets; ValueError for what is wrong in it."""
        found = {**self.top, "kernel_sets": [self._entry(name) for name in self._places]}
        check_document(found)
        return found

    def kernel_set(self, name: str) -> Any:
        """A kernel set; ValueError if it is not as a build wrote it, or cannot be launched."""
        if name not in self._sets:
            entry = self._entry(name)
            check_set(entry, name)
            self._sets[name] = entry
        return self._sets[name]

    def _entry(self, name: str) -> Any:
        begin, end = self._places[name]
        text = self._raw[begin:end]
        if sha256(text) != self._texts[name][1]:
            raise ValueError(f"kernel set '{name}' is not as a build wrote it")
        return plain_json(text)


# ---- dispatch ----

CLUSTER_CAPABILITY, SMALL_CLUSTER_CAPABILITY = 90, 120  # the first with clusters, and with those of 8 blocks at most


def runs(arch: str, kind: str, capability: tuple[int, int]) -> bool:
    """True if a device of that compute capability runs code for ``arch``, as ``lngen help manifest`` says."""
    number, suffix = re.fullmatch(r"sm_(\d+)([af]?)", arch).groups()  # type: ignore[union-attr]
    own, here = divmod(int(number), 10), capability
    if kind == "source":
        return False
    if suffix == "a":
        return own == here
    if kind == "cubin" or suffix == "f":
        return own[0] == here[0] and own[1] <= here[1]
    return own <= here


def image_for(images: Sequence[Described], capability: tuple[int, int]) -> Described | None:
    """The first of the images that a device runs; None if there is none."""
    return next((i for i in images if runs(i["arch"], i["kind"], capability)), None)


def class_for(classes: Sequence[Described], rows: int, row_bytes: int, multiprocessors: int) -> Described:
    """The class of that many rows on a device."""
    return next((c for c in classes if rows * row_bytes <= c["most_bytes"] * multiprocessors), classes[-1])


def lacking(described: Described, arch: str, capability: tuple[int, int], shared_bytes: int) -> str:
    """What a device has too little of for the kernel set, without loading it; empty if there is nothing.

    ``shared_bytes``: the shared memory that a block of the device can have at most.
    """
    here = 10 * capability[0] + capability[1]
    largest = 1 if here < CLUSTER_CAPABILITY else 16 if here < SMALL_CLUSTER_CAPABILITY else 8
    for kernel in described["kernels"]:
        static = described["resources"].get(arch, {}).get(kernel["name"], {}).get("shared", 0)
        if static + kernel["dynamic_shared_bytes"] > shared_bytes:
            return f"{static + kernel['dynamic_shared_bytes']} bytes of shared memory for a block"
        if kernel["cluster"] > largest:
            return f"clusters of {kernel['cluster']} blocks"
    return ""


class Pack:
    """The kernels in a folder, loaded per device when they are first used, or by ``prepare``.

    specs    the texts of its specs
    overlap  calls may start while earlier work on the stream drains, as in ``Loaded``
    """

    def __init__(self, folder: str | Path, overlap: bool = False) -> None:
        self.folder, self.overlap = os.fspath(folder), overlap
        with _refusals(self.folder):
            self._document = Document(read_inside(self.folder, FILE_NAME, LARGEST))
        self._dispatch: Mapping[str, Any] = self._document.top["specs"]
        self.specs = tuple(self._dispatch)
        self._checked: set[str] = set()  # texts of specs: each is checked when it is used
        self._images: dict[tuple[str, int], Described] = {}
        self._loaded: dict[tuple[str, int], Loaded] = {}
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        """The folder and its specs."""
        return f"<Pack '{self.folder}': {', '.join(self.specs)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled as its folder, which has to be there when it is loaded again."""
        return Pack, (os.path.abspath(self.folder), self.overlap)

    def check(self) -> Pack:
        """Check the whole manifest; LngenError for what is wrong."""
        with _refusals(self.folder):
            self._document.whole()
        return self

    def described(self, spec: str) -> Described:
        """One kernel set of a spec: all of them have the same tensors. LngenError if the spec is not in the pack."""
        for image in self.dispatch(spec)["images"]:
            return self._chosen(spec, image["classes"][-1])
        raise LngenError(f"the pack '{self.folder}' has no kernels of '{short(spec)}'; build it again.")

    def norm(self, graph: str, **keys: Any) -> PackNorm:
        """A norm whose kernels the pack has: ``pack.norm("layernorm", d=4096, dtype="bf16")``.

        ``graph`` is the name of a graph, with keys of a spec as ``lngen.compile`` takes them, or a whole forward spec.
        LngenError if the pack has no such norm, or several.
        """
        from .pack_norms import norm_of  # not at the top: who launches by address needs no arrays

        return norm_of(self, graph, keys)

    def prepare(self, device: int = 0, rows: int | None = None, specs: Sequence[str] = ()) -> None:
        """Load what calls on a device need, before a CUDA graph is captured or the first request comes.

        ``rows``: of the calls; None for any number. ``specs``: of the calls; all that the device can run, if empty.
        """
        here = gpu(device)
        runnable = [s for s in self.specs if image_for(self.dispatch(s)["images"], here.capability) is not None]
        for spec in specs or runnable or self.specs:
            image = self._image(spec, device)
            for entry in image["classes"] if rows is None else [self._class(spec, device, rows)]:
                self._kernels(spec, image, entry, device)

    def suits(self, spec: str, device: int) -> bool:
        """True if the pack has the spec for a device."""
        found = spec in self.specs and image_for(self.dispatch(spec)["images"], gpu(device).capability)
        return bool(found)

    def row_counts(self, spec: str, device: int) -> list[int]:
        """The most rows of each class of a spec on a device; of the last, which takes all others, any more."""
        each, here = self.dispatch(spec)["row_bytes"], gpu(device).multiprocessors
        return [c["most_bytes"] * here // each for c in self._image(spec, device)["classes"]]

    def kernels(self, spec: str, device: int, rows: int) -> Loaded:
        """The kernels of a spec for so many rows on a device, loaded.

        LngenError if the pack has none for the device, its driver is too old for them, or a file is not as listed.
        """
        return self._kernels(spec, self._image(spec, device), self._class(spec, device, rows), device)

    def dispatch(self, spec: str) -> Described:
        """What the manifest says of a spec: its images, each with its classes of rows."""
        if spec not in self._dispatch:
            raise LngenError(
                f"the pack '{self.folder}' does not have '{short(spec)}', but {_listed(self.specs)}; build it: "
                f"lngen build {short(spec)} --out DIR."
            )
        found: Described = self._dispatch[spec]
        if spec not in self._checked:
            with _refusals(self.folder):
                check_dispatch(spec, found, self._document)
            self._checked.add(spec)
        return found

    def kernel_set(self, name: str) -> Described:
        """What the manifest says of a kernel set."""
        with _refusals(self.folder):
            found: Described = self._document.kernel_set(name)
        return found

    def _chosen(self, spec: str, choice: Described) -> Described:
        """The kernel set that an entry of the dispatch names, which has to be one of its spec."""
        described = self.kernel_set(choice["kernel_set"])
        with _refusals(self.folder):
            check_choice(spec, choice["file"], described)
        return described

    def _image(self, spec: str, device: int) -> Described:
        """The image of a spec that a device runs, checked against its driver."""
        if (spec, device) not in self._images:
            here, images = gpu(device), self.dispatch(spec)["images"]
            found = image_for(images, here.capability)
            if found is None:
                there = _listed([f"{i['arch']} ({i['kind']})" for i in images]) if images else "nothing"
                raise LngenError(
                    f"the pack '{self.folder}' has no kernel of {spec} for {here.name}, which is {here.arch}: it has "
                    f"{there}; build it: lngen build {spec} --arch {here.arch} --out DIR."
                )
            self._images[spec, device] = found
        return self._images[spec, device]

    def _class(self, spec: str, device: int, rows: int) -> Described:
        facts = self.dispatch(spec)
        return class_for(self._image(spec, device)["classes"], rows, facts["row_bytes"], gpu(device).multiprocessors)

    def _kernels(self, spec: str, image: Described, entry: Described, device: int) -> Loaded:
        """The kernels of a class, or what the device takes otherwise."""
        why = ""
        for choice in filter(None, (entry, entry["otherwise"])):
            described = self._chosen(spec, choice)
            needs = lacking(described, image["arch"], gpu(device).capability, gpu(device).shared_bytes)
            if not needs:
                loaded = self._load(described, choice["file"], image["arch"], device)
                if loaded.fits():
                    return loaded
                needs = "room for all blocks of a cooperative kernel at the same time"
            why = why or needs
        raise LngenError(
            f"'{entry['kernel_set']}' of the pack '{self.folder}' needs {why}, which {gpu(device).name} does not have; "
            f"build it for this GPU: lngen build {spec} --arch {gpu(device).arch} --out DIR."
        )

    def _load(self, described: Described, file: str, arch: str, device: int) -> Loaded:
        with self._lock:
            if (file, device) not in self._loaded:
                here, facts = gpu(device), described["files"][file]
                if facts["driver"] and here.cuda < facts["driver"]:
                    raise LngenError(
                        f"'{file}' was made by NVRTC {facts['nvrtc']} and needs a driver for CUDA "
                        f"{_version(facts['driver'])} or newer, got one for {_version(here.cuda)}; update the driver, "
                        "or build with an older NVRTC."
                    )
                data = content(self.folder, file, facts["sha256"])
                used = described["resources"].get(arch, {}) if here.arch == arch.rstrip("af") else {}
                wanted = [used.get(k["name"], {}).get("launch_shared_bytes", 0) for k in described["kernels"]]
                least = [k["dynamic_shared_bytes"] for k in described["kernels"]]
                shared = [max(pair) for pair in zip(wanted, least)]
                self._loaded[file, device] = Loaded(described, data, device, self.overlap, lambda _: shared)
            return self._loaded[file, device]


def load(folder: str | Path) -> Pack:
    """The pack in a folder; nothing is compiled, and no GPU is asked before a call or ``prepare``.

    LngenError if the folder is no pack, or of another schema version. What the manifest says of a spec or a kernel set
    is checked when it is used.
    """
    return Pack(folder)


def content(folder: str | Path, file: str, digest: str) -> bytes:
    """The bytes of a file of a pack; LngenError if it cannot be read, or is not what the manifest lists."""
    path = os.path.join(folder, file)
    try:
        data = read_inside(folder, file, LARGEST)
    except OSError as error:
        raise LngenError(f"'{path}' of the pack cannot be read: {reason(error)}; build the pack again.") from error
    if sha256(data) != digest:
        raise LngenError(f"'{path}' is not the file that the pack's manifest lists; build the pack again.")
    return data


@contextmanager
def _refusals(folder: str) -> Iterator[None]:
    """What is wrong with a manifest becomes an LngenError."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else error
        raise LngenError(
            f"'{folder}' is expected to be a pack, whose {FILE_NAME} has schema_version {SCHEMA_VERSION}, but: {why}; "
            "name the folder of a build, or build it again with this version of lngen."
        ) from error


def _version(cuda: int) -> str:
    return f"{cuda // 1000}.{cuda % 1000 // 10}"


def _listed(names: Any, most: int = 8) -> str:
    """Names in a message, the first of many."""
    names = [*names]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
