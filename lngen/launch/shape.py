"""The parts of a manifest that a program reads, and what each has to be: wrong ones are found before they are used.

schema.json in lngen/aot says more of each part; a launcher needs no library that reads it.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from typing import Any

SCHEMA_VERSION = 3
ARCH = re.compile(r"sm_\d{2,3}[af]?", re.ASCII)


class Each:
    """An object whose values all have one shape."""

    def __init__(self, shape: Any) -> None:
        self.shape = shape


# A shape is a type, a tuple of types, a pattern, a list with the shape of its parts, an object with the keys that have
# to be there, or Each.
_COUNT = (int, type(None))
_EXTENT = {"fixed": _COUNT, "per": _COUNT, "limit": _COUNT, "times": int, "least": int}
_KERNEL = {
    "name": str,
    "arguments": [{"name": str, "kind": str, "tensor": (str, type(None))}],
    "grid": {"x": _EXTENT, "y": _EXTENT},
    "block": int,
    "cluster": int,
    "dynamic_shared_bytes": int,
    "cooperative": bool,
    "launch_for_no_rows": bool,
}
_NAMES = (list, type(None))
_SPEC = {
    "graph": str,
    "direction": str,
    "d": int,
    "strides": int,
    "outputs": [str],
    "options": dict,
    "wrt": _NAMES,
    "of": _NAMES,
    "forward": str,
}
_TENSOR = {
    "name": str,
    "role": str,
    "dtype": str,
    "element_bytes": int,
    "axes": [str],
    "alignment": int,
    "added_to": (str, type(None)),
}
FILE = {"kind": str, "bytes": int, "sha256": str, "nvrtc": (str, type(None)), "driver": _COUNT}
FATBIN = {"arches": [ARCH], "ptx_arches": [ARCH]}  # of the machine code, and of the PTX in it
OTHER_FILE = {"bytes": int, "sha256": str}
KERNEL_SET = {
    "name": str,
    "spec": _SPEC,
    "schedule": {"form": str, "vec": int},
    "tensors": [_TENSOR],
    "same_tensor": Each(str),
    "in_place": {"reads_again": bool},
    "programmatic_stream_serialization": {"minimum_arch": ARCH},
    "kernels": [_KERNEL],
    "workspace": {"buffers": [{"name": str, "element_bytes": int, "fixed": int, "per_row": int, "zeroed": bool}]},
    "text_sha256": str,
    "lngen_version": str,
    "compile": {"flags": [str], "include": (str, type(None))},
    "resources": Each(Each({"shared": int, "launch_shared_bytes": int})),
    "files": Each(FILE),
}


def fault(value: Any, shape: Any, where: str = "") -> str:
    """Where a value has another shape, as ``kernels.0.name``; empty if it has this one."""
    if isinstance(shape, Mapping):
        if not isinstance(value, dict):
            return where or "it"
        keys = ((k, s, f"{where}.{k}".lstrip(".")) for k, s in shape.items())
        return next(filter(None, (fault(value[k], s, at) if k in value else at for k, s, at in keys)), "")
    if isinstance(shape, (list, Each)):
        inner = shape[0] if isinstance(shape, list) else shape.shape
        if not isinstance(value, list if isinstance(shape, list) else dict):
            return where or "it"
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        return next(filter(None, (fault(v, inner, f"{where}.{str(k)[:40]}".lstrip(".")) for k, v in parts)), "")
    if isinstance(shape, re.Pattern):
        fits = isinstance(value, str) and shape.fullmatch(value) is not None
    else:
        types = shape if isinstance(shape, tuple) else (shape,)
        fits = isinstance(value, types) and (bool in types or not isinstance(value, bool))
    return "" if fits else where or "it"


# ---- a whole manifest ----


def check_version(document: Any) -> None:
    """ValueError unless a manifest has this version, and specs and kernel sets with names."""
    if not isinstance(document, dict) or document.get("schema_version") is not SCHEMA_VERSION:
        found = document.get("schema_version") if isinstance(document, dict) else None
        raise ValueError("another schema version" + (f", {str(found)[:40]}" if found is not None else ""))
    sets, specs, others = (document.get(key) for key in ("kernel_sets", "specs", "other_files"))
    if not isinstance(sets, list):
        raise ValueError("no list of kernel sets")
    known: dict[str, None] = {}
    for entry in sets:
        name = entry.get("name") if isinstance(entry, dict) and isinstance(entry.get("files"), dict) else None
        check_name(name, known)
        known[str(name)] = None
    if not isinstance(specs, dict) or not isinstance(others, dict):
        raise ValueError("no specs, or no other files")


def check_name(name: Any, known: Container[str]) -> None:
    """ValueError for the name of a kernel set that is none, or one of those that are known."""
    if not isinstance(name, str) or not _SET.fullmatch(name):
        raise ValueError("a kernel set without a name and files")
    if name in known:
        raise ValueError(f"two kernel sets are called '{name}'")


def check_others(document: Any) -> None:
    """ValueError unless the other files that a manifest lists are ones that a pack may have."""
    for name, facts in document["other_files"].items():
        _check_file(name, facts, _OTHER)
        if wrong := fault(facts, OTHER_FILE):
            raise ValueError(f"file '{name}' has no valid {wrong!r}")


def check_document(document: Any) -> None:
    """ValueError unless a manifest has this version, and names files that a pack may have and kernel sets it lists."""
    check_version(document)
    for entry in document["kernel_sets"]:
        check_set(entry)
    check_others(document)
    sets = {entry["name"]: entry for entry in document["kernel_sets"]}
    for text, facts in document["specs"].items():
        check_spec(text, facts, sets)
        for choice in choices_of(facts):
            check_file_of(text, choice["file"], sets[choice["kernel_set"]])


_SET = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_OTHER = re.compile(r"(?:include/[0-9a-f]{16}/lngen/\w+\.cuh|vectors/[\w-]+(?:/\w+)?/[\w.-]*\w|c/[\w.-]*\w)")


def check_set(entry: Mapping[str, Any]) -> None:
    """ValueError unless a kernel set, which has a name and files, is valid."""
    name = entry["name"]
    if wrong := fault(entry, KERNEL_SET):
        raise ValueError(f"kernel set '{name}' has no valid {wrong!r}")
    for file, facts in entry["files"].items():
        _check_file(file, facts, re.compile(rf"{name}\.(?:cu|fatbin|{ARCH.pattern}\.(?:ptx|cubin))"))
        *arch, kind = file[len(name) + 1 :].split(".")
        if facts["kind"] != kind or facts.get("arch") != (arch[0] if arch else None):
            raise ValueError(f"'{file}' with another kind or arch")
        if kind == "fatbin" and fault(facts, FATBIN):
            raise ValueError(f"no archs of '{file}'")


def _check_file(name: str, facts: Any, allowed: re.Pattern[str]) -> None:
    """ValueError unless a build writes a file of that name, and its hash is there."""
    if not re.fullmatch(allowed.pattern, name, re.ASCII) or ".." in name:
        raise ValueError(f"{name[:100]!r} is not a file that a build writes here")
    if not isinstance(facts, dict) or not isinstance(facts.get("sha256"), str):
        raise ValueError(f"no sha256 of {name!r}")


def check_spec(text: str, facts: Any, known: Container[str]) -> None:
    """ValueError unless the dispatch of a spec leads to ``known`` kernel sets."""
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


def _check_class(text: str, entry: Any, known: Container[str]) -> None:
    """ValueError unless a class of rows names kernel sets and files."""
    if not isinstance(entry, dict) or not _is_count(entry.get("most_bytes")) or "otherwise" not in entry:
        raise ValueError(f"a class of rows of spec {text[:100]!r} without most_bytes and otherwise")
    for choice in (entry, *([entry["otherwise"]] if entry["otherwise"] is not None else [])):
        name, file = (choice.get("kernel_set"), choice.get("file")) if isinstance(choice, dict) else (None, None)
        if not isinstance(name, str) or name not in known or not isinstance(file, str):
            raise ValueError(f"spec {text[:100]!r} names a kernel set that is not listed")


def check_file_of(text: str, file: str, kernel_set: Mapping[str, Any]) -> None:
    """ValueError unless a file that the dispatch of a spec names is one of the kernel set's."""
    if file not in kernel_set["files"]:
        raise ValueError(f"spec {text[:100]!r} names a file that kernel set '{kernel_set['name']}' does not have")


def choices_of(facts: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The kernel sets and files that the dispatch of a spec names."""
    for entry in (entry for image in facts["images"] for entry in image["classes"]):
        yield from filter(None, (entry, entry["otherwise"]))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
