"""Packs for tests: made-up kernel sets, and every way in which a manifest can be wrong."""

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lngen.compiler.compile import Compilation
from lngen.compiler.contract import described
from lngen.compiler.spec import parse_spec
from lngen.config import PACKAGE
from lngen.files import sha256
from lngen.launch.pack import FILE_NAME, SETS, head
from lngen.packs import manifest
from lngen.packs.manifest import Manifest

SCHEMA = json.loads((PACKAGE / "packs" / "schema.json").read_text(encoding="utf-8"))
TRIVIAL = "form=registers,threads=1,rows_per_block=32,vec=4"


@cache
def trivial() -> dict[str, Any]:
    """The description of a kernel set."""
    return described(Compilation(parse_spec("rmsnorm.fwd:d=8,dtype=f32")).changed(TRIVIAL, "sm_90").plan)


def kernel_set(name: str, files: Mapping[str, bytes], text: str = "", **more: Any) -> dict[str, Any]:
    """A made-up entry of a manifest; ``text`` stands for its source."""
    return {
        **trivial(),
        "name": name,
        "spec": {**trivial()["spec"], "text": f"spec {name}"},
        "text_sha256": sha256(text.encode()),
        "lngen_version": "0.9",
        "compile": {"flags": [], "include": None},
        "resources": {},
        "files": {file: facts_of(name, file, data) for file, data in files.items()},
        **more,
    }


def facts_of(name: str, file: str, data: bytes) -> dict[str, Any]:
    """What a manifest says of a made-up file; the content of a fatbin lists its archs."""
    *arch, kind = file.removeprefix(f"{name}.").split(".")
    facts: dict[str, Any] = {"kind": kind, "arch": arch[0] if arch else None}
    if kind == "fatbin":
        machine_code, _, ptx = data.decode().partition("|")
        facts |= {"arches": machine_code.split(), "ptx_arches": ptx.split()}
    compiled = {"nvrtc": None, "driver": None} if kind == "cu" else {"nvrtc": "13.0", "driver": 13000}
    return facts | {"bytes": len(data), "sha256": sha256(data), **compiled}


def put(folder: Path, pack: Mapping[str, Mapping[str, bytes]], text: str = "", others: str = "") -> list[str]:
    """Add made-up kernel sets to a folder, each for a spec of its name; ``others``: what its test vectors hold."""
    extra = {"vectors/s/vectors.json": others.encode()} if others else {}
    new = Manifest(
        {f"spec {name}": dispatch(name, next(iter(files))) for name, files in pack.items()},
        {name: kernel_set(name, files, text + name) for name, files in pack.items()},
        {name: {"bytes": len(data), "sha256": sha256(data)} for name, data in extra.items()},
    )
    return manifest.put(folder, new, {n: data for own in pack.values() for n, data in own.items()} | extra)[1]


def dispatch(name: str, file: str) -> dict[str, Any]:
    """The dispatch of a spec that has one file for any rows."""
    entry = {"most_bytes": 1024, "kernel_set": name, "file": file, "otherwise": None}
    return {"row_bytes": 32, "images": [{"arch": "sm_90", "kind": "source", "classes": [entry]}]}


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder, by their paths in it."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def manifest_of(folder: Path) -> Any:
    """The manifest of a pack, as it is written."""
    return json.loads((folder / FILE_NAME).read_bytes())


def written(document: Mapping[str, Any], texts: Mapping[str, bytes] | None = None) -> bytes:
    """The bytes of a manifest with that content, and with the digests that a build would give it.

    ``texts``: of its kernel sets, by name, in place of those in it.
    """
    top = {k: v for k, v in document.items() if k not in ("schema_version", "sha256", "texts", "kernel_sets")}
    own = {e["name"]: manifest.text_of(e) for e in document["kernel_sets"]} if texts is None else texts
    return manifest.written(top, own)


def sealed(raw: bytes) -> bytes:
    """A manifest that was changed in front of its kernel sets, with the digest of that part."""
    begin, end = len(head(b"")), raw.index(SETS)
    return head(raw[begin:end]) + raw[begin:]


def edit(folder: Path, change: Callable[[Any], object]) -> None:
    """Change the manifest of a pack: a build of somebody else, whose digests are right."""
    document = manifest_of(folder)
    change(document)
    (folder / FILE_NAME).write_bytes(written(document))


# ---- wrong manifests ----

# Objects whose keys are names, and keys that need not be there.
NAMED = ("specs", "resources", "resources.*", "files", "other_files", "texts", "outputs", "options", "same_tensor")
OPTIONAL = ("stride_multiple",)
WRONG: tuple[Any, ...] = (None, True, -1, 1.5, "", [])

Place = tuple[str | int, ...]


def places(value: Any, place: Place = ()) -> Iterator[tuple[Place, str]]:
    """Every value in a document, with the rule that it follows: its path without numbers and names. One per rule."""
    seen: set[str] = set()

    def walk(value: Any, place: Place, rule: str) -> Iterator[tuple[Place, str]]:
        if rule not in seen:
            seen.add(rule)
            yield place, rule
        names = is_named(rule)
        for key, part in value.items() if isinstance(value, dict) else enumerate(value if type(value) is list else ()):
            yield from walk(part, (*place, key), f"{rule}.{'*' if names or isinstance(key, int) else key}".lstrip("."))

    yield from walk(value, place, "")


def is_named(rule: str) -> bool:
    """True for an object whose keys are names."""
    return rule.endswith(NAMED) and not rule.endswith("schedule.options")


def changed(document: Any, place: Place, value: Any = None, *, delete: bool = False) -> Any:
    """A copy with another value in a place, or without it."""
    made = inner = copy.copy(document)
    for key in place[:-1]:  # what is beside the path is shared
        inner[key] = copy.copy(inner[key])
        inner = inner[key]
    if delete:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return made


def at(document: Any, place: Place) -> Any:
    """The value in a place."""
    for key in place:
        document = document[key]
    return document


def without_keys(document: Any) -> Iterator[tuple[str, Any]]:
    """The document without each of its required keys in turn."""
    for place, rule in [*places(document)]:
        if place and isinstance(place[-1], str) and not rule.endswith((".*", *OPTIONAL)):
            yield rule, changed(document, place, delete=True)


def with_wrong_values(document: Any) -> Iterator[tuple[str, Any, Any]]:
    """The document with a value of every other class in each place in turn."""
    for place, rule in [*places(document)]:
        here = at(document, place)
        for value in WRONG if place else ():
            alike = type(value) is type(here) and value not in ("", -1)
            if not alike and value != here and (value != 1.5 or type(here) in (int, str)):
                yield rule, value, changed(document, place, value)
