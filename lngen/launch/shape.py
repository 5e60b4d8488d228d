"""The parts of a manifest that a program reads, and what each has to be: wrong ones are found before they are used.

schema.json in lngen/packs says more of each part; a launcher needs no library that reads it.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from typing import Any

from ..dtypes import READ
from ..files import shown
from ..rules import ROW_KINDS, SETS, Stretch
from .signature import LENGTH, OF_EPS, WIDE

SCHEMA_VERSION = 5
ARCH = re.compile(r"sm_\d{2,3}[af]?", re.ASCII)


class Each:
    """An object whose values all have one shape."""

    def __init__(self, shape: Any) -> None:
        self.shape = shape


# A shape is a type, a range of whole numbers, a set of words or numbers, a pattern, a tuple of shapes of which one has
# to fit, a list with the shape of its parts, an object with the keys that have to be there, or Each.
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_WHOLE, _COUNT, _BYTES = range(2**62), range(1, 2**62), range(2**31)
_SOME, _TEXT, _TEXTS = (_COUNT, type(None)), (str, type(None)), ([str], type(None))
_DTYPES = {t.value: t.size for t in READ}
_KINDS = {"input", "output", "workspace", "value", *ROW_KINDS}
_EXTENT = {"fixed": (range(1, 2**31), type(None)), "per": _SOME, "limit": _SOME, "times": _COUNT, "least": _WHOLE}
_KERNEL = {
    "name": _NAME,
    "arguments": [{"name": str, "kind": _KINDS, "tensor": _TEXT}],
    "grid": {"x": _EXTENT, "y": _EXTENT},
    "block": range(1, 1025),
    "cluster": range(1, 17),
    "dynamic_shared_bytes": _BYTES,
    "cooperative": bool,
    "launch_for_no_rows": bool,
}
_SPEC = {
    "text": str,
    "graph": str,
    "direction": {"fwd", "bwd"},
    "d": _COUNT,
    "strides": {1, 2},
    "outputs": [str],
    "options": dict,
    "wrt": _TEXTS,
    "of": _TEXTS,
    "forward": str,
}
_TENSOR = {
    "name": str,
    "role": {"input", "output"},
    "dtype": {*_DTYPES},
    "element_bytes": {*_DTYPES.values()},
    "axes": [_NAME],
    "shape": [LENGTH],
    "strides": [({"stride", "outer_stride", "column_stride", "table_stride"}, LENGTH)],
    "alignment": _COUNT,
    "added_to": _TEXT,
}
_NUMBER = {"name": str, "dtype": {"f32", "f64"}, "of": {"eps"}, "rule": {*OF_EPS}}
_EPS = (float, {"run"}, type(None))
_CALL = {"leader": str, "returned": [str], "cotangents": [str], "eps": _EPS, "numbers": [_NUMBER]}
_BUFFER = {"name": str, "element_bytes": {4, 8}, "fixed": _WHOLE, "per_row": _WHOLE, "zeroed": bool}
_STRETCHES = {"per_stretch": _COUNT, "stretch": dict.fromkeys(Stretch._fields, range(1, 2**31))}
_FILE = {"kind": str, "bytes": _WHOLE, "sha256": _SHA256, "nvrtc": _TEXT, "driver": _SOME}
_FATBIN = {"arches": [ARCH], "ptx_arches": [ARCH]}  # of the machine code, and of the PTX in it
_KERNEL_SET = {
    "name": str,
    "spec": _SPEC,
    "schedule": {"text": str, "form": str, "vec": _COUNT},
    "tensors": [_TENSOR],
    "same_tensor": Each(str),
    "call": _CALL,
    "in_place": {"outputs": Each([str]), "reads_again": bool},
    "programmatic_stream_serialization": {"minimum_arch": re.compile(r"sm_\d{2,3}", re.ASCII)},
    "kernels": [_KERNEL],
    "workspace": {"buffers": [_BUFFER]},
    "text_sha256": _SHA256,
    "lngen_version": str,
    "compile": {"flags": [str], "include": _TEXT},
    "resources": Each(Each({"registers": range(256), "shared": _BYTES, "launch_shared_bytes": _BYTES})),
    "files": Each(_FILE),
}
_CHOICE = {"kernel_set": str, "file": str}
_CLASS = {**_CHOICE, "most_bytes": _COUNT, "otherwise": (_CHOICE, type(None))}
_IMAGE = {"arch": ARCH, "kind": {"cubin", "ptx", "source"}, "classes": [_CLASS]}
_DISPATCH = {"row_bytes": _COUNT, "images": [_IMAGE]}
_LISTED = {"bytes": _WHOLE, "sha256": _SHA256}  # another file


def fault(value: Any, shape: Any, where: str = "") -> str:
    """Where a value has another shape, as ``kernels.0.name``; empty if it has this one."""
    kind = type(shape)
    if kind is dict:
        if not isinstance(value, dict):
            return where or "it"
        for key, inner in shape.items():
            at = f"{where}.{key}" if where else key
            if key not in value or (at := fault(value[key], inner, at)):
                return at
        return ""
    if kind is list or kind is Each:
        inner = shape[0] if kind is list else shape.shape
        if type(value) is not (list if kind is list else dict):
            return where or "it"
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            if at := fault(part, inner, f"{where}.{str(key)[:40]}" if where else str(key)[:40]):
                return at
        return ""
    if kind is tuple:
        fits = any(not fault(value, one) for one in shape)
    elif kind is range:
        fits = type(value) is int and value in shape
    elif kind is set:
        fits = type(value) in (int, str) and value in shape
    elif kind is re.Pattern:
        fits = type(value) is str and shape.fullmatch(value) is not None
    else:
        fits = type(value) is shape
    return "" if fits else where or "it"


# ---- a kernel set ----

_SET = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_ENDING = re.compile(rf"cu|fatbin|{ARCH.pattern}\.(?:ptx|cubin)", re.ASCII)  # of a file, behind the name of the set


def check_set(entry: Any, name: str) -> None:
    """ValueError unless an entry is the kernel set of that name and can be launched as it says."""
    if not _SET.fullmatch(name):
        raise ValueError(f"{shown(name)} is no name of a kernel set")
    if wrong := fault(entry, _KERNEL_SET):
        raise ValueError(f"kernel set '{name}' has no valid {wrong!r}")
    if entry["name"] != name:
        raise ValueError(f"kernel set '{name}' is called {shown(entry['name'])}")
    for file, facts in entry["files"].items():
        own, _, ending = file.partition(".")
        _check_file(file, own == name and _ENDING.fullmatch(ending))
        *arch, kind = ending.split(".")
        if facts["kind"] != kind or facts.get("arch") != (arch[0] if arch else None):
            raise ValueError(f"'{file}' with another kind or arch")
        if kind == "fatbin" and fault(facts, _FATBIN):
            raise ValueError(f"no archs of '{file}'")
    if wrong := _contradiction(entry):
        raise ValueError(f"kernel set '{name}' {wrong}")


def _contradiction(entry: Mapping[str, Any]) -> str:
    """Which parts of a kernel set, each of its shape, contradict each other; empty if none do."""
    spec, tensors, kernels, same, call = (entry[k] for k in ("spec", "tensors", "kernels", "same_tensor", "call"))
    names = [t["name"] for t in tensors]
    inputs, outputs = ([t["name"] for t in tensors if t["role"] == role] for role in ("input", "output"))
    buffers = [b["name"] for b in entry["workspace"]["buffers"]]
    if any(fault(b, _STRETCHES) for b in entry["workspace"]["buffers"] if "stretch" in b):
        return "has a buffer of stretches that there are not"
    if not (inputs and outputs and kernels):
        return "has no inputs, outputs or kernels"
    if names != inputs + outputs or len({*names, *buffers}) < len(names + buffers):
        return "has tensors in another order, or two of one name"
    for t in tensors:
        if not _is_array(t) or t["element_bytes"] != _DTYPES[t["dtype"]]:
            return f"has {shown(t['name'])} with axes or an element size that there are not"
        if t["added_to"] is not None and (t["role"] == "input" or t["added_to"] not in inputs):
            return f"adds {shown(t['name'])} to what is no input"
    rows = [t["name"] for t in tensors if t["axes"] == ["M", "D"]]
    sets = [t["name"] for t in tensors if t["shape"][:1] == [SETS]]
    numbers = [n["name"] for n in call["numbers"]]
    columns = [t["name"] for t in tensors if t["strides"][:1] == ["column_stride"]]
    of_kind = {"input": inputs, "output": outputs, "workspace": buffers, "stride": rows, "outer_stride": rows + sets}
    tables = [t["name"] for t in tensors if t["strides"][:1] == ["table_stride"]]
    of_kind |= {"column_stride": columns, "padded": columns, "table_stride": tables}
    for a in (a for kernel in kernels for a in kernel["arguments"]):
        if a["tensor"] not in of_kind[a["kind"]] if a["kind"] in of_kind else a["tensor"] is not None:
            return f"has an argument {shown(a['name'])} of what there is not"
        if a["kind"] == "value" and a.get("number") not in numbers:
            return f"has a value {shown(a['name'])} that is none of the numbers of its call"
    if any((e["fixed"] is None) == (e["per"] is None) for k in kernels for e in k["grid"].values()):
        return "has a grid whose blocks are neither fixed nor for so many rows"
    if spec["direction"] == "fwd":
        right = spec["outputs"] == outputs[: len(spec["outputs"])] == call["returned"] != []
    elif right := spec["wrt"] is not None and spec["of"] is not None:
        right = sorted([*outputs, *same]) == sorted(call["returned"])
        right = right and {f"d{name}" for name in spec["wrt"]} <= {*call["returned"]}
    if not right or not {*same.values()} <= {*outputs}:
        return "has other outputs than its spec"
    may = entry["in_place"]["outputs"]
    if not ({*may} <= {*outputs} and all({*names} <= {*inputs} for names in may.values())):
        return "has an output in the place of what is no input"
    if not {call["leader"], *call["cotangents"]} <= {*inputs}:
        return "has a call of what there is not"
    return ""


def _is_array(t: Mapping[str, Any]) -> bool:
    """True for axes that a tensor can have: rows, then features or what is derived from them, each with its length.

    A tensor that is stored by columns has rows last, and its columns a distance.
    """
    axes, bases, steps = t["axes"], WIDE, len(t["strides"]) - (t["strides"][:2] == ["outer_stride", "stride"])
    if (len(axes) == 2 and axes[1] == "M") or "column_stride" in t["strides"]:
        by_columns = t["strides"] == ["column_stride", "1"] and t["shape"][1:] == axes[1:] == ["M"]
        return by_columns and axes[0] not in bases and t["shape"][0] not in bases
    known = [axis == size if axis in bases else size not in bases for axis, size in zip(axes, t["shape"])]
    return all(known) and len(axes) == len(t["shape"]) == steps < 3 and "M" not in axes[1:]


def _check_file(name: str, allowed: object) -> None:
    """ValueError unless a build writes a file of that name, which is so if it is ``allowed`` and leads nowhere else."""
    if not allowed or ".." in name:
        raise ValueError(f"{name[:100]!r} is not a file that a build writes here")


# ---- a whole manifest ----

_OTHER = re.compile(r"(?:include/[0-9a-f]{16}/lngen/\w+\.cuh|vectors/[\w-]+(?:/\w+)?/[\w.-]*\w|c/[\w.-]*\w)", re.ASCII)


def check_top(document: Any) -> None:
    """ValueError unless a manifest, but for its specs and kernel sets, is one of this version."""
    if not isinstance(document, dict) or document.get("schema_version") is not SCHEMA_VERSION:
        found = document.get("schema_version") if isinstance(document, dict) else None
        raise ValueError("another schema version" + (f", {shown(found)}" if found is not None else ""))
    if wrong := fault(document, {"specs": dict, "texts": dict, "kernel_sets": list, "other_files": dict}):
        raise ValueError(f"no valid {wrong!r}")


def check_document(document: Any) -> None:
    """ValueError unless a manifest is one of this version, and all that it names is in it, or a file of a pack."""
    check_top(document)
    sets = dict(zip(document["texts"], document["kernel_sets"]))
    for name, entry in sets.items():
        check_set(entry, name)
    for name, facts in document["other_files"].items():
        _check_file(name, _OTHER.fullmatch(name))
        if wrong := fault(facts, _LISTED):
            raise ValueError(f"file '{name}' has no valid {wrong!r}")
    for text, facts in document["specs"].items():
        check_dispatch(text, facts, sets)
        for choice in choices_of(facts):
            check_choice(text, choice["file"], sets[choice["kernel_set"]])


def check_dispatch(text: str, facts: Any, known: Container[str]) -> None:
    """ValueError unless the dispatch of a spec leads to ``known`` kernel sets."""
    if wrong := fault(facts, _DISPATCH):
        raise ValueError(f"spec {shown(text)} has no valid {wrong!r}")
    if not all(image["classes"] for image in facts["images"]):
        raise ValueError(f"spec {shown(text)} has an image without classes of rows")
    if not all(choice["kernel_set"] in known for choice in choices_of(facts)):
        raise ValueError(f"spec {shown(text)} names a kernel set that is not listed")


def check_choice(text: str, file: str, kernel_set: Mapping[str, Any]) -> None:
    """ValueError unless the dispatch of a spec names a kernel set of that spec, and a file of it."""
    if kernel_set["spec"]["text"] != text:
        raise ValueError(f"spec {shown(text)} names kernel set '{kernel_set['name']}', which is of another spec")
    if file not in kernel_set["files"]:
        raise ValueError(f"spec {shown(text)} names a file that kernel set '{kernel_set['name']}' does not have")


def choices_of(facts: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The kernel sets and files that the dispatch of a spec names."""
    for entry in (entry for image in facts["images"] for entry in image["classes"]):
        yield from filter(None, (entry, entry["otherwise"]))
