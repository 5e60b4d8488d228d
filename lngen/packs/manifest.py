"""The manifest of a pack: its kernel sets, which of them a launcher takes, and every file with its hash.

``manifest.json`` is described by schema.json beside this module. It has no dates, paths or machine names: the same
request gives the same bytes. A build adds to a folder, so that manifest and files never contradict each other.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lngen.compiler.devices import device_for, oldest_first
from lngen.compiler.lower import Plan, requested_shared
from lngen.compiler.toolchain import Resources
from lngen.errors import LngenError
from lngen.files import exclusive, parse_json, read_inside, reason, sha256, write_in_order
from lngen.launch.pack import END, FILE_NAME, INDENT, LARGEST, NO_SETS, SETS, Document, content, head
from lngen.launch.shape import SCHEMA_VERSION
from lngen.version import __version__

Facts = dict[str, Any]


@dataclass
class Manifest:
    """What a pack has: specs by text, kernel sets and other files by name."""

    specs: dict[str, Facts] = field(default_factory=dict)
    kernel_sets: dict[str, Facts] = field(default_factory=dict)
    others: dict[str, Facts] = field(default_factory=dict)

    def render(self) -> bytes:
        """The bytes of manifest.json, sorted by name."""
        top = {
            "lngen_version": __version__,
            "specs": {text: self.specs[text] for text in sorted(self.specs)},
            "other_files": {name: self.others[name] for name in sorted(self.others)},
        }
        return written(top, {name: text_of(self.kernel_sets[name]) for name in sorted(self.kernel_sets)})

    def files(self) -> dict[str, str]:
        """The sha256 of every file, by its path in the pack."""
        own = (e["files"] for e in self.kernel_sets.values())
        return {name: facts["sha256"] for listed in (*own, self.others) for name, facts in listed.items()}

    def without(self, names: set[str]) -> Manifest:
        """What is left without the kernel sets of these names; dispatch never names a kernel set that is not listed."""
        kept = {n: e for n, e in self.kernel_sets.items() if n not in names}
        specs = {text: _without(facts, names) for text, facts in self.specs.items()}
        return Manifest({t: f for t, f in specs.items() if f["images"]}, kept, self.others)


def _without(facts: Facts, names: set[str]) -> Facts:
    images = [{**i, "classes": [c for c in i["classes"] if names.isdisjoint(_named(c))]} for i in facts["images"]]
    return {**facts, "images": [i for i in images if i["classes"]]}


def _named(entry: Facts) -> set[str]:
    """The kernel sets that an entry of the dispatch names."""
    return {entry["kernel_set"], *([entry["otherwise"]["kernel_set"]] if entry["otherwise"] else [])}


def resources_of(plan: Plan, kernels: Mapping[str, Resources], arch: str) -> Facts:
    """The resources of each kernel on an arch, and the dynamic shared memory to launch it with."""
    launched = requested_shared(plan, {name: used.registers for name, used in kernels.items()}, device_for(arch))
    return {k.name: {**asdict(kernels[k.name]), "launch_shared_bytes": launched[k.name]} for k in plan.kernels}


def read(folder: Path) -> Manifest:
    """The manifest of a pack; an empty one if ``folder`` has none.

    LngenError for an invalid manifest. Each file it names is in the folder and one that lngen writes.
    """
    path = folder / FILE_NAME
    try:
        raw = read_inside(folder, FILE_NAME, LARGEST)
        parse_json(raw)  # all of it can be written again
        document = Document(raw).whole()
    except (FileNotFoundError, NotADirectoryError):
        return Manifest()
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else error
        raise LngenError(
            f"'{path}' is expected to be a manifest with schema_version {SCHEMA_VERSION} but is not "
            f"({why}); name another folder, or remove the file."
        ) from error
    return Manifest(document["specs"], {e["name"]: e for e in document["kernel_sets"]}, document["other_files"])


# ---- two builds in one folder ----


def merged(old: Manifest, new: Manifest) -> tuple[Manifest, list[str]]:
    """The manifest of a folder after a build, and what the build replaces, a sentence each.

    Entries of the dispatch with the same spec, arch and class of rows are replaced, all others are kept. Kernel sets
    of one name and text are united. ``check_lost`` has to allow it first.
    """
    replaced: list[str] = []
    specs = {**old.specs}
    for text, facts in new.specs.items():
        images = _by_arch(old.specs[text]["images"]) if text in old.specs else {}
        for key, image in _by_arch(facts["images"]).items():
            before = {c["most_bytes"]: c for c in images[key]["classes"]} if key in images else {}
            after = {c["most_bytes"]: c for c in image["classes"]}
            replaced += [
                f"{text} on {key[0]}, up to {most} bytes a multiprocessor: {after[most]['kernel_set']} replaces "
                f"{before[most]['kernel_set']}."
                for most in sorted(before.keys() & after.keys())
                if before[most]["kernel_set"] != after[most]["kernel_set"]
            ]
            images[key] = {**image, "classes": [c for _, c in sorted((before | after).items())]}
        specs[text] = {**facts, "images": _newest_first(images)}
    sets = {**old.kernel_sets}
    for name, entry in new.kernel_sets.items():
        if name in sets and sets[name]["text_sha256"] == entry["text_sha256"]:
            united = {key: {**sets[name][key], **entry[key]} for key in ("resources", "files")}
            entry = {**entry, **{key: dict(sorted(of.items())) for key, of in united.items()}}
            if f"{name}.cu" not in new.kernel_sets[name]["files"]:  # the source that is there needs its headers
                entry["compile"] = sets[name]["compile"]
        sets[name] = entry
    return Manifest(specs, sets, {**old.others, **new.others}), replaced


def check_lost(folder: Path, old: Manifest, new: Manifest) -> None:
    """LngenError if a kernel set would lose a file: another text has its name, or a fatbin would lose an arch."""
    for name, entry in new.kernel_sets.items():
        before = old.kernel_sets.get(name)
        if before is None:
            continue
        same = before["text_sha256"] == entry["text_sha256"]
        lost = [*_lost_archs(before, entry)] if same else [n for n in before["files"] if n not in entry["files"]]
        if lost:
            listed = ", ".join(n.removeprefix(name) for n in lost)
            why = "" if same else f" from another text, of lngen {before['lngen_version']}"
            raise LngenError(
                f"'{folder}' has kernel set '{name}' also as {listed}{why}, which this build does not make and would "
                "take from it; name another folder, or build all archs and kinds at once."
            )


def _lost_archs(before: Facts, after: Facts) -> Iterator[str]:
    """The fat binaries of which the new one has fewer archs, with these archs."""
    for name, facts in after["files"].items():
        if facts["kind"] == "fatbin" and name in before["files"]:
            there = before["files"][name]
            gone = [a for a in there["arches"] if a not in facts["arches"]]
            gone += [f"{a} (ptx)" for a in there["ptx_arches"] if a not in facts["ptx_arches"]]
            yield from [f"{name} for {', '.join(gone)}"] if gone else []


def _by_arch(images: list[Facts]) -> dict[tuple[str, str], Facts]:
    return {(i["arch"], i["kind"]): i for i in images}


def _newest_first(images: Mapping[tuple[str, str], Facts]) -> list[Facts]:
    """Cubins before PTX, PTX before sources; of each kind the newest arch first."""
    kinds = ("cubin", "ptx", "source")
    order = [*reversed(oldest_first(arch for arch, _ in images))]
    return [images[a, kind] for kind in kinds for a in order if (a, kind) in images]


# ---- a folder ----

# One build at a time changes a folder, and none deletes a file. Whenever the build is killed, each file that the
# manifest lists exists with the hash in the list. A kernel set whose files change is not listed during the change; all
# others are.

LOCK = "lngen"  # locks the folder as a whole

Step = tuple[Path, bytes]  # a file to write

# Files that follow from the manifest of the whole folder, and from the bytes of the files that it lists, by name.
Derived = Callable[[Manifest, Callable[[str], bytes]], Mapping[str, bytes]]


def put(
    folder: Path, new: Manifest, files: Mapping[str, bytes], derived: Derived | None = None
) -> tuple[list[str], list[str]]:
    """Add what is in ``new``, and its files, to ``folder``: the names of what was written, and what it replaces there.

    ``derived``: also what follows from the whole.

    LngenError if the folder cannot be written to, its manifest is invalid, or a kernel set in it would lose a file;
    then nothing has changed.
    """
    with exclusive(folder, LOCK) as staging:
        steps, _, replaced = changes(folder, new, files, derived)
        write_in_order(steps, staging)
    return names_of(folder, steps), replaced


def names_of(folder: Path, steps: Sequence[Step]) -> list[str]:
    """The names of the files in a folder, in the order in which the last bytes of each are written."""
    return [*dict.fromkeys(path.relative_to(folder).as_posix() for path, _ in reversed(steps))][::-1]


def changes(
    folder: Path, new: Manifest, files: Mapping[str, bytes], derived: Derived | None = None
) -> tuple[list[Step], Manifest, list[str]]:
    """Three results: the writes of ``put`` in order, the manifest last; the new manifest; the entries it replaces.

    The caller holds the lock.
    """
    target = folder / FILE_NAME
    old = read(folder)
    check_lost(folder, old, new)
    after, replaced = merged(old, new)
    listed = old.files()
    if derived is not None:
        own = files
        more = derived(after, lambda name: own[name] if name in own else content(folder, name, listed[name]))
        after.others |= {name: {"bytes": len(data), "sha256": sha256(data)} for name, data in more.items()}
        files = {**files, **more}
    check_inside(folder, files)
    changed = {name for name, data in files.items() if name in listed and listed[name] != sha256(data)}
    replaced += [f"'{name}' has other bytes than before." for name in sorted(changed)]
    changing = {name for name, entry in old.kernel_sets.items() if not changed.isdisjoint(entry["files"])}
    before = old.without(changing)
    before.others = {name: facts for name, facts in old.others.items() if name not in changed}
    steps = [(target, before.render())] if changed else []
    steps += [(folder / name, data) for name, data in files.items()]
    return [*steps, (target, after.render())], after, replaced


def check_inside(folder: Path, files: Iterable[str]) -> None:
    """LngenError if a folder of the pack is a link to another place, where files would be written."""
    here = os.path.realpath(folder)
    for parent in {Path(name).parent for name in files}:
        if os.path.realpath(folder / parent) != os.path.normpath(os.path.join(here, parent)):
            raise LngenError(
                f"cannot write '{folder / parent}': it is a link that leaves the pack ({os.strerror(errno.EXDEV)}); "
                "remove the link."
            )


# ---- text ----


def written(top: Facts, kernel_sets: Mapping[str, bytes]) -> bytes:
    """The bytes of a manifest as ``Document`` reads it; ``kernel_sets``: their texts, by name."""
    digests = {name: [len(text), sha256(text)] for name, text in kernel_sets.items()}
    rest = "".join(_laid_out({**top, "texts": digests}))[2:-2].encode()
    sets = b",".join(INDENT + text for text in kernel_sets.values())
    return head(rest) + rest + SETS + sets + (END if sets else NO_SETS)


def text_of(kernel_set: Facts) -> bytes:
    """The text of a kernel set in a manifest."""
    return "".join(_laid_out(kernel_set, 2)).encode()


def _laid_out(value: Any, depth: int = 0) -> Iterator[str]:
    """JSON in which an object or a list of plain values is one line, and all others have a line for each part."""
    parts = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(value, dict | list) or not any(isinstance(p, dict | list) and p for p in parts):
        yield json.dumps(value, ensure_ascii=False)
        return
    open_, close = "{}" if isinstance(value, dict) else "[]"
    inner = "\n" + " " * (depth + 1)
    yield open_
    for n, part in enumerate(value.items() if isinstance(value, dict) else value):
        yield f"{',' if n else ''}{inner}"
        if isinstance(value, dict):
            key, part = part
            yield f"{json.dumps(key, ensure_ascii=False)}: "
        yield from _laid_out(part, depth + 1)
    yield f"\n{' ' * depth}{close}"
