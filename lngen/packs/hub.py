"""A hub package: kernels in the layout of Hugging Face ``kernels``, which loads them into PyTorch programs.

``build/torch-cuda`` is its one variant: Python alone, for every version of PyTorch. It has the files of
lngen/launch/hub_package, copies of what launches in lngen, the kernels in ``pack``, and metadata.json with the digest
of every file. Beside it lie build.toml for ``kernel-builder upload``, and the card of the repository.

A build adds to the package as it adds to a pack. lngen.packs.manifest has the rules; they hold for metadata.json, too.
"""

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from lngen.config import PACKAGE, data_dir
from lngen.errors import LngenError
from lngen.files import exclusive, parse_json, read, read_inside, reason, sha256, write_in_order
from lngen.launch.pack import FILE_NAME, LARGEST
from lngen.packs import manifest
from lngen.packs.manifest import LOCK, Facts, Manifest, Step, changes, check_inside, names_of
from lngen.version import __version__

NAME = "lngen-norms"
VARIANT = "build/torch-cuda"
PACK = f"{VARIANT}/pack"
METADATA = "metadata.json"
KINDS = ("cubin",)  # files of kernels by default: sources have no use in the package

# In the variant: the files of lngen/launch/hub_package, and in OWN the modules of lngen that they use.
OWN = "_lngen"
COPIED = ("dtypes.py", "errors.py", "files.py", "rules.py", "launch/*.py")


# ---- the sources ----


def sources() -> dict[str, bytes]:
    """The Python files of the variant, by name, and its license; they are files of lngen, all but two byte for byte."""
    place = PACKAGE / "launch" / "hub_package"
    found = {path.name: path.read_bytes() for path in sorted(place.glob("*.py"))}
    # In lngen this module lies beside what it imports, in the variant it is the package that has it.
    found[f"{OWN}/__init__.py"] = (
        found.pop(f"{OWN}.py").replace(b"from ...", b"from .").replace(b"from ..", b"from .launch.")
    )
    for pattern in COPIED:
        copied = sorted(PACKAGE.glob(pattern))
        found |= {f"{OWN}/{path.relative_to(PACKAGE).as_posix()}": path.read_bytes() for path in copied}
    found[f"{NAME.replace('-', '_')}/__init__.py"] = COMPATIBLE.encode()
    return {**found, "LICENSE": (data_dir("templates").parent / "LICENSE").read_bytes()}


# ---- metadata.json ----


def read_metadata(variant: Path) -> Facts | None:
    """The metadata of a variant that a build has made; None if there is none."""
    try:
        document = parse_json(read(variant / METADATA, LARGEST))
        files = document["digest"]["files"]
        strings = all(isinstance(digest, str) for digest in files.values())
        ours = not files or any(name.startswith((f"{OWN}/", "pack/")) for name in files)
        found: Facts = document
        return found if strings and ours and document["digest"]["algorithm"] == "sha256" else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def digest_of(data: bytes) -> str:
    """The digest of a file, as metadata.json has it."""
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def identifier(digests: Mapping[str, str]) -> str:
    """The name under which Python imports a variant: it follows from the files, so no two variants share it."""
    text = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return f"_{NAME.replace('-', '_')}_cuda_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def capabilities(pack: Manifest) -> list[str]:
    """The compute capabilities that have kernels: ``8.0`` for sm_80, ``9.0+PTX`` if newer GPUs run its PTX."""
    images = {(i["arch"], i["kind"]) for facts in pack.specs.values() for i in facts["images"]}
    arches = {arch: any(i == (arch, "ptx") for i in images) for arch, kind in images if kind != "source"}
    named = {re.sub(r"sm_(\d+)(\d)", r"\1.\2", arch): ptx for arch, ptx in arches.items()}
    ordered = sorted(named, key=lambda n: (float(n.rstrip("af")), n))
    return [f"{name}+PTX" if named[name] else name for name in ordered]


def render(before: Facts | None, digests: Mapping[str, str], archs: list[str]) -> bytes:
    """The bytes of metadata.json: what was changed in it by hand, such as the version, is kept.

    It has no provenance, which would say which kernel-builder made the package.
    """
    kept = {key: value for key, value in (before or {}).items() if key != "provenance"}
    document = {
        "name": NAME,
        "version": 1,
        "license": "MIT",
        "python-depends": [],
        "kernel-depends": [],
        **kept,
        "id": identifier(digests),
        "backend": _backend(archs),
        "digest": {"algorithm": "sha256", "files": dict(sorted(digests.items()))},
    }
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def _backend(archs: list[str]) -> Facts:
    return {"type": "cuda", "archs": archs}


# ---- a build ----


def check_package(folder: Path, directions: Iterable[str], kinds: Iterable[str], ptx: bool) -> None:
    """LngenError if the package cannot be built, before anything is compiled.

    ``directions``: of the specs; ``kinds``: of the files; ``ptx``: an arch has PTX for newer GPUs.
    """
    _check_place(folder)
    there = manifest.read(folder / PACK).specs
    if "fwd" not in {*directions, *(re.findall(r"\.(fwd|bwd):", " ".join(there)))}:
        raise LngenError(
            "a hub package is expected to have one forward spec at least, got backwards alone; name the forward as "
            "well, or build with --layout pack."
        )
    if not ptx and {"cubin", "fatbin"}.isdisjoint(kinds):
        raise LngenError("a hub package is expected to have kernels that a driver runs; emit cubin or fatbin.")


def _check_place(folder: Path) -> None:
    """LngenError if something else lies where the variant would."""
    place = folder / VARIANT
    files = any(not path.is_dir() for path in place.rglob("*")) if place.is_dir() else os.path.lexists(place)
    if not files or read_metadata(place) is not None:
        return
    raise LngenError(
        f"'{place}' is expected to be a hub package that lngen has built, but has something else; name another folder."
    )


def put(folder: Path, new: Manifest, files: Mapping[str, bytes]) -> tuple[list[str], list[str]]:
    """Add kernels to the package in ``folder``: the names of what was written, and what it replaces or leaves.

    LngenError in the cases of ``lngen.packs.manifest.put``, and if something else lies where the package would.
    """
    with exclusive(folder, LOCK) as staging:
        _check_place(folder)
        own = sources()
        check_inside(folder, [*(f"{VARIANT}/{name}" for name in own), *(f"{PACK}/{name}" for name in files)])
        variant = folder / VARIANT
        before = read_metadata(variant)
        pack, whole, replaced = changes(folder / PACK, new, files)
        steps = [*pack, *((variant / name, data) for name, data in own.items())]
        digests = {path.relative_to(variant).as_posix(): digest_of(data) for path, data in steps}
        old: Mapping[str, str] = before["digest"]["files"] if before else {}
        archs = capabilities(whole)
        # Until all is written, metadata.json lists what does not change.
        same = {name: digest for name, digest in old.items() if digests.get(name, digest) == digest}
        first = render(before, same, before["backend"]["archs"] if before else archs)
        last = render(before, {**old, **digests}, archs)
        texts, left = _texts(folder, parse_json(last), whole)
        steps = [(variant / METADATA, first), *steps, *texts, (variant / METADATA, last)]
        write_in_order(steps, staging)
    return names_of(folder, steps), replaced + left


def _texts(folder: Path, metadata: Facts, pack: Manifest) -> tuple[list[Step], list[str]]:
    """build.toml and the card, and a sentence for each that a person has changed, which stays as it is."""
    card = _card(metadata, pack)
    texts = {"build.toml": _build_toml(metadata), "build/CARD.md": card, "README.md": card}
    steps: list[Step] = []
    left = []
    for name, text in texts.items():
        path = folder / name
        try:
            there = read(path, LARGEST).decode(errors="replace") if os.path.lexists(path) else None
        except OSError as error:
            raise LngenError(f"cannot write '{path}': {reason(error)}; name a place that can be written to.") from error
        if there is None or _is_own(there):
            steps.append((path, _marked(text).encode()))
        else:
            left.append(f"'{path}' was changed and is left as it is.")
    return steps, left


# ---- a package that is there ----


def variant_of(folder: Path) -> Path | None:
    """The variant of a hub package, if ``folder`` is one or its variant; None for a pack."""
    places = [] if (folder / FILE_NAME).is_file() else [folder / VARIANT, folder]
    return next((place for place in places if read_metadata(place) is not None), None)


def pack_folder(folder: Path) -> Path:
    """The folder of the pack: in a hub package that of its kernels."""
    variant = variant_of(folder)
    return folder if variant is None else variant / "pack"


def faults(variant: Path) -> tuple[int, list[str], list[str]]:
    """How many files of a variant are as metadata.json lists them, a sentence for each fault, and unlisted files."""
    metadata, pack = read_metadata(variant), manifest.read(variant / "pack")
    listed: Mapping[str, str] = metadata["digest"]["files"] if metadata else {}
    found: list[str] = []
    good: dict[str, bytes] = {}
    for name, digest in listed.items():
        try:
            check_inside(variant, [name])
            data = read_inside(variant, name, LARGEST)
        except OSError as error:
            found.append(f"'{variant / name}' cannot be read: {reason(error)}; build the package again.")
            continue
        if digest_of(data) == digest:
            good[name] = data
        else:
            found.append(f"'{variant / name}' is not the file that {METADATA} lists; build the package again.")
    found += [f"'{variant / 'pack' / n}' is not in {METADATA}." for n in pack.files() if f"pack/{n}" not in listed]
    if metadata and (metadata.get("id"), metadata.get("backend")) != (identifier(listed), _backend(capabilities(pack))):
        found.append(f"'{variant / METADATA}' has an id or archs that do not follow from its files; build it again.")
    found += _foreign(variant, good)
    walked = (p.relative_to(variant) for p in sorted(variant.rglob("*")) if p.is_file() and p.suffix != ".pyc")
    there = [p.as_posix() for p in walked if p.as_posix() not in (METADATA, f"{METADATA}.sigstore")]
    return len(good), found, [name for name in there if name not in listed]


def _foreign(variant: Path, good: Mapping[str, bytes]) -> list[str]:
    """A sentence for each Python file that is not that of this version of lngen, if it made the pack."""
    made = parse_json(good.get(f"pack/{FILE_NAME}", b"{}")).get("lngen_version")
    own = sources() if made == __version__ else {}
    return [
        f"'{variant / name}' is not the file of lngen {made}; build the package again."
        for name in own
        if name in good and good[name] != own[name]
    ]


# ---- the texts that people read ----

# A text that a build wrote has its own hash in it. One that a person has changed has not, and builds leave it alone.

MARK = "lngen build wrote this and rewrites it until it is changed: "
_PLACE = f"# {MARK}HASH\n"

COMPATIBLE = '''"""The package under its own name, where old versions of ``kernels`` look for it."""

import importlib.util
import sys
from pathlib import Path


def _package():
    path = Path(__file__).resolve().parent.parent / "__init__.py"
    name = "_lngen_norms_{:x}".format(hash(path) & (2**64 - 1))
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


__all__ = _package().__all__
globals().update({name: getattr(_package(), name) for name in __all__})
'''

CARD = """---
{place}library_name: kernels
license: {license}
tags: [kernel, cuda, layernorm, rmsnorm]
---

# {name}

LayerNorm and RMSNorm, forward and backward, for PyTorch: CUDA kernels that lngen compiled ahead of time, for compute
capabilities {archs}. Nothing is compiled where they run; they need PyTorch 2.4 or newer and an NVIDIA driver. Every
result is that of lngen's interpreter, bit for bit, on every GPU.

```python
from kernels import get_kernel

norms = get_kernel("OWNER/{name}", version={version})
y = norms.layer_norm(x, (x.shape[-1],), weight, bias, eps=1e-5)
y = norms.rms_norm(x, (x.shape[-1],), weight, eps=1e-6)
```

## Functions

- `layer_norm`, `rms_norm`: as in `torch.nn.functional`, differentiable
- `norm`: any norm of the package, `norm("rmsnorm", d=4096, dtype=torch.bfloat16)`, with `forward` and `backward`

## Layers

- `LayerNorm` for `torch.nn.LayerNorm`
- `RMSNorm` for `torch.nn.RMSNorm` and for norms with `variance_epsilon`
- `LlamaRMSNorm` for that of transformers

They take norms of the last dimension. Norms with a gate, of images [N, C, H, W], with 1 + weight (Gemma) and with
roundings that the package does not have stay as they are; `lngen.torch.patch` takes many of these.

All have a backward, and work under `torch.compile`. A layer whose length, dtypes or eps the package does not have
raises an error with the command that builds them. Tensors that are not contiguous are copied.

## Kernels

| spec | D |
|---|---|
{specs}
"""


def _build_toml(metadata: Facts) -> str:
    """What kernel-builder reads: the name and version, the kinds of files in the package, and its capabilities."""
    kinds = sorted({PurePosixPath(name).suffix[1:] for name in metadata["digest"]["files"]} - {""})
    return (
        f"{_PLACE}[general]\n"
        f'name = "{metadata["name"]}"\n'
        f"version = {metadata['version']}\n"
        "edition = 5\n"
        f'license = "{metadata["license"]}"\n'
        'backends = ["cuda"]\n\n'
        "# [general.hub]\n"
        f'# repo-id = "OWNER/{metadata["name"]}"\n\n'
        "[torch-noarch]\n"
        f"pyext = {_listed(kinds)}\n"
        f"cuda_capabilities = {_listed(metadata['backend']['archs'])}\n"
    )


def _card(metadata: Facts, pack: Manifest) -> str:
    """The card of the repository: how it is used, and what it has."""
    lengths: dict[str, list[int]] = {}
    for text in pack.specs:
        found = re.search(r"\bd=(\d+),?", text)
        if found:
            rest = (text[: found.start()] + text[found.end() :]).rstrip(":,")
            lengths.setdefault(rest, []).append(int(found[1]))
    rows = [f"| `{rest}` | {', '.join(map(str, sorted(of)))} |" for rest, of in sorted(lengths.items())]
    return CARD.format(
        place=_PLACE,
        name=metadata["name"],
        version=metadata["version"],
        license=metadata["license"].lower(),
        archs=", ".join(metadata["backend"]["archs"]),
        specs="\n".join(rows),
    )


def _marked(text: str) -> str:
    """The text with its hash in it."""
    return text.replace(_PLACE, f"# {MARK}{sha256(text.encode())[:16]}\n", 1)


def _is_own(text: str) -> bool:
    """True for a text as a build wrote it."""
    plain, count = re.subn(rf"# {re.escape(MARK)}[0-9a-f]{{16}}\n", _PLACE, text, count=1)
    return count == 1 and _marked(plain) == text


def _listed(values: list[Any]) -> str:
    return "[" + ", ".join(f'"{value}"' for value in values) + "]"
