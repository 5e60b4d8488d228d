"""Packs: a folder of compiled kernels, and the choice of one for a device and a number of rows.

Nothing is compiled here, and nothing is imported but the standard library.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import LngenError, short
from ..files import parse_json, read, reason
from .driver import Gpu, gpu
from .kernels import Described, Loaded
from .shape import ARCH, FATBIN, KERNEL_SET, OTHER_FILE, fault

SCHEMA_VERSION = 3
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


# ---- the manifest ----


def check_document(document: Any) -> None:
    """ValueError unless a manifest has this version, and names files that a pack may have and kernel sets it lists."""
    if not isinstance(document, dict) or document.get("schema_version") is not SCHEMA_VERSION:
        found = document.get("schema_version") if isinstance(document, dict) else None
        raise ValueError("another schema version" + (f", {str(found)[:40]}" if found is not None else ""))
    sets, specs, others = (document.get(key) for key in ("kernel_sets", "specs", "other_files"))
    if not isinstance(sets, list):
        raise ValueError("no list of kernel sets")
    known = _checked_sets(sets)
    if not isinstance(specs, dict) or not isinstance(others, dict):
        raise ValueError("no specs, or no other files")
    for name, facts in others.items():
        _check_file(name, facts, _OTHER)
        if wrong := fault(facts, OTHER_FILE):
            raise ValueError(f"file '{name}' has no valid {wrong!r}")
    for text, facts in specs.items():
        _check_images(text, facts, known)


_SET = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_OTHER = re.compile(r"(?:include/[0-9a-f]{16}/lngen/\w+\.cuh|vectors/[\w-]+(?:/\w+)?/[\w.-]*\w)")


def _checked_sets(listed: list[Any]) -> dict[str, Mapping[str, Any]]:
    """The kernel sets by name; ValueError for an invalid one."""
    known: dict[str, Mapping[str, Any]] = {}
    for entry in listed:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not _SET.fullmatch(name) or not isinstance(entry.get("files"), dict):
            raise ValueError("a kernel set without a name and files")
        if name in known:
            raise ValueError(f"two kernel sets are called '{name}'")
        if wrong := fault(entry, KERNEL_SET):
            raise ValueError(f"kernel set '{name}' has no valid {wrong!r}")
        for file, facts in entry["files"].items():
            _check_file(file, facts, re.compile(rf"{name}\.(?:cu|fatbin|{ARCH.pattern}\.(?:ptx|cubin))"))
            *arch, kind = file.removeprefix(f"{name}.").split(".")
            if facts["kind"] != kind or facts.get("arch") != (arch[0] if arch else None):
                raise ValueError(f"'{file}' with another kind or arch")
            if kind == "fatbin" and fault(facts, FATBIN):
                raise ValueError(f"no archs of '{file}'")
        known[name] = entry
    return known


def _check_file(name: str, facts: Any, allowed: re.Pattern[str]) -> None:
    """ValueError unless a build writes a file of that name, and its hash is there."""
    if not re.fullmatch(allowed.pattern, name, re.ASCII) or ".." in name:
        raise ValueError(f"{name[:100]!r} is not a file that a build writes here")
    if not isinstance(facts, dict) or not isinstance(facts.get("sha256"), str):
        raise ValueError(f"no sha256 of {name!r}")


def _check_images(text: str, facts: Any, known: Mapping[str, Mapping[str, Any]]) -> None:
    """ValueError unless the dispatch of a spec leads to files of listed kernel sets."""
    rows = facts.get("row_bytes") if isinstance(facts, dict) else None
    if not _is_count(rows) or not isinstance(facts.get("images"), list):
        raise ValueError(f"spec {text[:100]!r} without row_bytes and images")
    for image in facts["images"]:
        classes = image.get("classes") if isinstance(image, dict) else None
        arch = image.get("arch") if isinstance(image, dict) else None
        if not isinstance(arch, str) or not ARCH.fullmatch(arch):
            raise ValueError(f"an image of spec {text[:100]!r} without an arch")
        if image.get("kind") not in ("cubin", "ptx", "source") or not isinstance(classes, list) or not classes:
            raise ValueError(f"an image of spec {text[:100]!r} without a kind and classes")
        for entry in classes:
            _check_class(text, entry, known)


def _check_class(text: str, entry: Any, known: Mapping[str, Mapping[str, Any]]) -> None:
    """ValueError unless a class of rows names kernel sets, each with one of its files."""
    if not isinstance(entry, dict) or not _is_count(entry.get("most_bytes")) or "otherwise" not in entry:
        raise ValueError(f"a class of rows of spec {text[:100]!r} without most_bytes and otherwise")
    for choice in (entry, *([entry["otherwise"]] if entry["otherwise"] is not None else [])):
        name, file = (choice.get("kernel_set"), choice.get("file")) if isinstance(choice, dict) else (None, None)
        if not isinstance(name, str) or name not in known or not isinstance(file, str):
            raise ValueError(f"spec {text[:100]!r} names a kernel set that is not listed")
        if file not in known[name]["files"]:
            raise ValueError(f"spec {text[:100]!r} names a file that kernel set '{name}' does not have")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


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


def lacking(described: Described, arch: str, device: Gpu) -> str:
    """What a device has too little of for the kernel set, without loading it; empty if there is nothing."""
    here = 10 * device.capability[0] + device.capability[1]
    largest = 1 if here < CLUSTER_CAPABILITY else 16 if here < SMALL_CLUSTER_CAPABILITY else 8
    for kernel in described["kernels"]:
        static = described["resources"].get(arch, {}).get(kernel["name"], {}).get("shared", 0)
        if static + kernel["dynamic_shared_bytes"] > device.shared_bytes:
            return f"{static + kernel['dynamic_shared_bytes']} bytes of shared memory for a block"
        if kernel["cluster"] > largest:
            return f"clusters of {kernel['cluster']} blocks"
    return ""


class PackFolder:
    """The kernels in a folder, loaded per device when they are first used, or by ``prepare``.

    specs        the dispatch by spec; ``kernel_sets`` by name, as the manifest has them
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        document = _document(folder)
        self.specs: Mapping[str, Described] = document["specs"]
        self.kernel_sets: Mapping[str, Described] = {e["name"]: e for e in document["kernel_sets"]}
        self._images: dict[tuple[str, int], Described] = {}
        self._loaded: dict[tuple[str, int], Loaded] = {}
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        """The folder and its specs."""
        return f"<Pack '{self.folder}': {', '.join(self.specs)}>"

    def described(self, spec: str) -> Described:
        """A kernel set of a spec, whose tensors all others have too; LngenError if the spec is not in the pack."""
        for image in self._facts(spec)["images"]:
            found: Described = self.kernel_sets[image["classes"][-1]["kernel_set"]]
            return found
        raise LngenError(f"the pack '{self.folder}' has no kernels of '{short(spec)}'; build it again.")

    def prepare(self, device: int = 0, rows: int | None = None, specs: Sequence[str] = ()) -> None:
        """Load what calls on a device need, before a CUDA graph is captured or the first request comes.

        ``rows``: of the calls; None for any number. ``specs``: of the calls; all that the device can run, if empty.
        """
        here = gpu(device)
        runnable = [s for s, facts in self.specs.items() if image_for(facts["images"], here.capability) is not None]
        for spec in specs or runnable or self.specs:
            image = self._image(spec, device)
            for entry in image["classes"] if rows is None else [self._class(spec, device, rows)]:
                self._kernels(spec, image, entry, device)

    def kernels(self, spec: str, device: int, rows: int) -> Loaded:
        """The kernels of a spec for so many rows on a device, loaded.

        LngenError if the pack has none for the device, its driver is too old for them, or a file is not as listed.
        """
        return self._kernels(spec, self._image(spec, device), self._class(spec, device, rows), device)

    def _facts(self, spec: str) -> Described:
        if spec not in self.specs:
            raise LngenError(
                f"the pack '{self.folder}' does not have '{short(spec)}', but {_listed(self.specs)}; build it: "
                f"lngen build {short(spec)} --out DIR."
            )
        return self.specs[spec]

    def _image(self, spec: str, device: int) -> Described:
        """The image of a spec that a device runs, checked against its driver."""
        if (spec, device) not in self._images:
            here, images = gpu(device), self._facts(spec)["images"]
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
        facts = self._facts(spec)
        return class_for(self._image(spec, device)["classes"], rows, facts["row_bytes"], gpu(device).multiprocessors)

    def _kernels(self, spec: str, image: Described, entry: Described, device: int) -> Loaded:
        """The kernels of a class, or what the device takes otherwise."""
        why = ""
        for choice in filter(None, (entry, entry["otherwise"])):
            described = self.kernel_sets[choice["kernel_set"]]
            needs = lacking(described, image["arch"], gpu(device))
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


def content(folder: Path, file: str, sha256: str) -> bytes:
    """The bytes of a file of a pack; LngenError if it cannot be read, or is not what the manifest lists."""
    try:
        data = read(folder / file, LARGEST)
    except OSError as error:
        why = reason(error)
        raise LngenError(f"'{folder / file}' of the pack cannot be read: {why}; build the pack again.") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise LngenError(f"'{folder / file}' is not the file that the pack's manifest lists; build the pack again.")
    return data


def _document(folder: Path) -> Mapping[str, Any]:
    """The manifest of a pack, valid; LngenError if there is none."""
    path = folder / FILE_NAME
    try:
        document = parse_json(read(path, LARGEST))
        check_document(document)
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else error
        raise LngenError(
            f"'{folder}' is expected to be a pack, whose {FILE_NAME} has schema_version {SCHEMA_VERSION}, but: {why}; "
            "name the folder of a build, or build it with this version of lngen."
        ) from error
    found: Mapping[str, Any] = document
    return found


def _version(cuda: int) -> str:
    return f"{cuda // 1000}.{cuda % 1000 // 10}"


def _listed(names: Any, most: int = 8) -> str:
    """Names in a message, the first of many."""
    names = [*names]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
