"""The conditions of a result besides the task: device, versions, kernels, method."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from lngen.bench.engines import Engine
from lngen.bench.measure import Method
from lngen.bench.peers import known
from lngen.config import data_dir
from lngen.version import __version__

PEERS = (
    "torch",
    "triton",
    "numpy",
    "liger-kernel",
    "quack-kernels",
    "flash-attn",
    "mamba-ssm",
    "flashinfer-python",
    "apex",
)
BYTES = "GB/s: every input and result of the graph once, over the time; of a ceiling its [M, D] tensors alone"
# The files that determine the kernel of a spec; changes of the benchmark and the command line are not counted.
SOURCES = ("spec", "compile.py", "ir", "graphs", "passes", "schedule", "lower", "emit", "toolchain", "runtime")


def conditions(engine: Engine, method: Method) -> dict[str, str]:
    """By name, sorted when written. Records of different conditions are never mixed."""
    import cupy

    found = {
        "bytes": BYTES,
        "device": engine.device()[1],
        "engine": engine.name,
        "driver": str(cupy.cuda.runtime.driverGetVersion()),
        "runtime": str(cupy.cuda.runtime.runtimeGetVersion()),
        "cupy": str(cupy.__version__),
        "lngen": __version__,
        "kernels": source_digest(),
        "python": platform.python_version(),
        "method": str(method),
        **{name: _version(name) for name in PEERS},
        **{f"provider {name}": p.settings for name, p in known().items() if p.available()},
    }
    return {name: text for name, text in found.items() if text}


def source_digest() -> str:
    """Twelve hex digits that change with the generator or a template."""
    package = Path(__file__).resolve().parent.parent
    files = [f for name in SOURCES for f in _files(package / name, "*.py")] + [*_files(data_dir("templates"), "*")]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _files(path: Path, pattern: str) -> Iterable[Path]:
    return [path] if path.is_file() else sorted(f for f in path.rglob(pattern) if f.is_file())


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
