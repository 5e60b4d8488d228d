"""Compiled kernels on disk, one file per key, safe under any number of processes.

The payload of a file is one JSON line (key, arch, kernels, log) and the image. A file that ``lngen.files.kept`` does
not trust is not used, and replaced.
"""

import contextlib
import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lngen import config
from lngen.compiler.toolchain.nvrtc_results import resources
from lngen.errors import CompileError, MissingError
from lngen.files import keep, kept, parse_json

_FORMAT = 2  # increment it when the layout of a file changes

_complained: set[str] = set()


@dataclass(frozen=True)
class Entry:
    """The result of one compilation: the cubin or PTX, NVRTC's log, and the names of the kernels in both."""

    arch: str
    log: str
    image: bytes
    kernels: tuple[str, ...] = ()


def key_of(source: str, headers: Mapping[str, str], options: Sequence[str], arch: str, kind: str, compiler: str) -> str:
    """The name of an entry: a hash of everything that determines the compiled bytes; ``compiler``: its build."""
    parts = [_FORMAT, source, [*headers.items()], list(options), arch, kind, compiler]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def load(key: str) -> Entry | None:
    """The entry of ``key``, or None if there is none; an entry that is not trusted gives a RuntimeWarning and None."""
    try:
        path = _path(key)
        return _decoded(kept(path), key)
    except (OSError, MissingError):
        return None
    except (ValueError, CompileError) as error:
        warnings.warn(
            f"The cached kernel {path} is damaged, or not yours ({error}); it is compiled again and the file replaced.",
            RuntimeWarning,
            stacklevel=4,
        )
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def store(key: str, entry: Entry) -> None:
    """Store ``entry``; a folder that is unknown or cannot be written to gives one RuntimeWarning and is not used."""
    try:
        keep(_path(key), _encoded(key, entry))
    except MissingError as error:
        _complain(str(error))
    except OSError as error:
        why = f"{config.cache_dir()} cannot be written to ({error.strerror})"
        _complain(f"{why}; set LNGEN_CACHE_DIR to a folder that can.")


def _path(key: str) -> Path:
    return config.cache_dir() / "kernels" / key[:2] / key


def _encoded(key: str, entry: Entry) -> bytes:
    header = {"key": key, "arch": entry.arch, "kernels": entry.kernels, "log": entry.log}
    return json.dumps(header).encode() + b"\n" + entry.image


def _decoded(payload: bytes, key: str) -> Entry:
    """The entry that was stored under ``key``; ValueError or CompileError for anything else."""
    line, _, image = payload.partition(b"\n")
    header = parse_json(line)
    if not isinstance(header, dict) or header.get("key") != key:
        raise ValueError("it is the entry of another key")
    kernels = header.get("kernels")
    if not isinstance(kernels, list) or not all(isinstance(name, str) for name in kernels):
        raise ValueError("it names no kernels")
    entry = Entry(_text(header, "arch"), _text(header, "log"), image, tuple(kernels))
    # A cubin's log names its kernels, and every image contains their names.
    named = tuple(resources(entry.log))
    if (named and named != entry.kernels) or not all(name.encode() in image for name in kernels):
        raise ValueError("its kernels are others than it names")
    return entry


def _text(header: dict[str, Any], name: str) -> str:
    text = header.get(name)
    if not isinstance(text, str):
        raise ValueError(f"it has no {name}")
    return text


def _complain(why: str) -> None:
    if why not in _complained:
        _complained.add(why)
        warnings.warn(f"Compiled kernels will not be kept, because {why}", RuntimeWarning, stacklevel=5)
