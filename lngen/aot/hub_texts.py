"""The texts of a hub package that people read: build.toml, the card of its repository, and a module for old loaders.

A text that a build wrote has its own hash in it. One that a person has changed has not, and builds leave it alone.
"""

import re
from pathlib import PurePosixPath
from typing import Any

from lngen.aot.manifest import Facts, Manifest
from lngen.files import sha256

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
capabilities {archs}. Nothing is compiled where they run; they need PyTorch and an NVIDIA driver. Every result is that
of lngen's interpreter, bit for bit, on every GPU.

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

All have a backward; `torch.compile` is not supported. A layer whose length, dtypes or eps the package does not have
raises an error with the command that builds them. Tensors that are not contiguous are copied.

## Kernels

| spec | D |
|---|---|
{specs}
"""


def build_toml(metadata: Facts) -> str:
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


def card(metadata: Facts, pack: Manifest) -> str:
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


def marked(text: str) -> str:
    """The text with its hash in it."""
    return text.replace(_PLACE, f"# {MARK}{sha256(text.encode())[:16]}\n", 1)


def is_own(text: str) -> bool:
    """True for a text as a build wrote it."""
    plain, count = re.subn(rf"# {re.escape(MARK)}[0-9a-f]{{16}}\n", _PLACE, text, count=1)
    return count == 1 and marked(plain) == text


def _listed(values: list[Any]) -> str:
    return "[" + ", ".join(f'"{value}"' for value in values) + "]"
