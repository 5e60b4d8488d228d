"""Packs: a folder of compiled kernels, and the choice of one for a device and a number of rows.

Nothing is compiled here, and nothing is imported but the standard library. Of the manifest, what every program needs is
read at once, a kernel set when it is asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import LngenError, short
from ..files import read, reason
from .driver import gpu
from .kernels import Described, Loaded
from .shape import SCHEMA_VERSION, check_document, check_file_of, check_name, check_set, check_spec, check_version

if TYPE_CHECKING:
    from pathlib import Path

    from .pack_norms import PackNorm

FILE_NAME = "manifest.json"
LARGEST = 2**26  # bytes of a manifest, and of a file it lists; a thousand kernel sets take 5 MB

DISPATCH_RULES = {
    "dispatch": (
        "of a spec's images, in their order, the first that the device runs: a cubin of sm_XY runs on devices of "
        "capability X.Z with Z >= Y, with suffix a on X.Y alone; PTX of sm_XY runs on X.Y and newer, with suffix f on "
        "X.Z with Z >= Y, with suffix a on X.Y alone. Sources are for a compiler. The driver supports at least the "
        "CUDA version in 'driver' of the file, 13000 for 13.0"
    ),
    "classes": (
        "of an image's classes, in their order, the first with rows * row_bytes <= most_bytes * multiprocessors of the "
        "device, else the last"
    ),
    "otherwise": (
        "where a class has 'otherwise', it is taken on a device that cannot launch the kernel set: a block has less "
        "shared memory than the kernels use (static and dynamic), clusters are smaller, or the blocks of a cooperative "
        "kernel cannot run at the same time"
    ),
}


# ---- the text of a manifest ----

_SETS = b'\n "kernel_sets": ['
_AFTER = b'\n ],\n "other_files": '
_SET = b'\n  {\n   "name": '


class Document:
    """The parts of a manifest: ``top``, all of it but the kernel sets, and these by name."""

    def __init__(self, raw: bytes) -> None:
        """ValueError for a text that is no manifest of this version, or whose kernel sets have no names."""
        self._raw = raw
        self._texts: dict[str, tuple[int, int]] = {}
        self._sets: dict[str, Any] = {}
        start, end = raw.find(_SETS), raw.rfind(_AFTER)
        first = start + len(_SETS)
        if 0 <= start < end and raw.startswith(_SET, first):
            self.top = _parsed(raw[:first] + raw[end + 2 :])
            check_version(self.top)
            self._find(first, end)
        else:
            self.top = _parsed(raw)
            check_version(self.top)
            self._sets = {entry["name"]: entry for entry in self.top["kernel_sets"]}

    def _find(self, begin: int, end: int) -> None:
        """Note where the text of each kernel set begins and ends; nothing is copied."""
        raw, places = self._raw, list[int]()
        while 0 <= begin < end:
            places.append(begin + len(_SET))
            begin = raw.find(_SET, begin + 1)
        for place, after in zip(places, [*(p - len(_SET) for p in places[1:]), end]):
            quoted = raw[place : raw.find(b",", place)].decode(errors="replace")
            name = quoted[1:-1] if quoted[:1] == quoted[-1:] == '"' else None
            check_name(name, self._texts)
            self._texts[str(name)] = place, after

    def __contains__(self, name: object) -> bool:
        """True for the name of a kernel set."""
        return name in self._texts or name in self._sets

    def names(self) -> list[str]:
        """The kernel sets."""
        return [*self._texts] or [*self._sets]

    def whole(self) -> Any:
        """The manifest with all its kernel sets."""
        return {**self.top, "kernel_sets": [self.kernel_set(name) for name in self.names()]}

    def kernel_set(self, name: str) -> Any:
        """A kernel set; ValueError if its text is not JSON."""
        if name not in self._sets:
            place, after = self._texts[name]
            self._sets[name] = _parsed(b'{"name": ' + self._raw[place:after].rstrip().rstrip(b","))
        return self._sets[name]


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


# ---- dispatch ----

CLUSTER_CAPABILITY, SMALL_CLUSTER_CAPABILITY = 90, 120  # the first with clusters, and with those of 8 blocks at most


def runs(arch: str, kind: str, capability: tuple[int, int]) -> bool:
    """True if a device of that compute capability runs code for ``arch``, by the rule 'dispatch'."""
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
    """The class of that many rows on a device, by the rule 'classes'."""
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
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = os.fspath(folder)
        with _refusals(self.folder):
            self._document = Document(read(os.path.join(self.folder, FILE_NAME), LARGEST))
        self._dispatch: Mapping[str, Any] = self._document.top["specs"]
        self.specs = tuple(self._dispatch)
        self._checked: set[str] = set()  # names of kernel sets, and texts of specs: each is checked when it is used
        self._images: dict[tuple[str, int], Described] = {}
        self._loaded: dict[tuple[str, int], Loaded] = {}
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        """The folder and its specs."""
        return f"<Pack '{self.folder}': {', '.join(self.specs)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled as its folder, which has to be there when it is loaded again."""
        return Pack, (os.path.abspath(self.folder),)

    def check(self) -> Pack:
        """Check the whole manifest; LngenError for what is wrong."""
        with _refusals(self.folder):
            check_document(self._document.whole())
        return self

    def described(self, spec: str) -> Described:
        """One kernel set of a spec: all of them have the same tensors. LngenError if the spec is not in the pack."""
        for image in self.dispatch(spec)["images"]:
            return self.kernel_set(image["classes"][-1]["kernel_set"])
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
                check_spec(spec, found, self._document)
            self._checked.add(spec)
        return found

    def kernel_set(self, name: str) -> Described:
        """What the manifest says of a kernel set."""
        with _refusals(self.folder):
            found: Described = self._document.kernel_set(name)
            if name not in self._checked:
                check_set(found)
                self._checked.add(name)
        return found

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
            described = self.kernel_set(choice["kernel_set"])
            with _refusals(self.folder):
                check_file_of(spec, choice["file"], described)
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
                self._loaded[file, device] = Loaded(described, data, device, requested=lambda _: shared)
            return self._loaded[file, device]


def load(folder: str | Path) -> Pack:
    """The pack in a folder; nothing is compiled, and no GPU is asked before a call or ``prepare``.

    LngenError if the folder is no pack, or of another schema version. What the manifest says of a spec or a kernel set
    is checked when it is used.
    """
    return Pack(folder)


def content(folder: str | Path, file: str, sha256: str) -> bytes:
    """The bytes of a file of a pack; LngenError if it cannot be read, or is not what the manifest lists."""
    path = os.path.join(folder, file)
    try:
        data = read(path, LARGEST)
    except OSError as error:
        raise LngenError(f"'{path}' of the pack cannot be read: {reason(error)}; build the pack again.") from error
    if hashlib.sha256(data).hexdigest() != sha256:
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
            "name the folder of a build, or build it with this version of lngen."
        ) from error


def _version(cuda: int) -> str:
    return f"{cuda // 1000}.{cuda % 1000 // 10}"


def _listed(names: Any, most: int = 8) -> str:
    """Names in a message, the first of many."""
    names = [*names]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
