"""Compiled kernels on disk, one file per key, safe under any number of processes.

A file is the sha256 of the payload, a newline, and the payload: one JSON line (arch, log) and the image.
"""

import contextlib
import hashlib
import json
import os
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lngen import config

_FORMAT = 1  # raise it when the layout of a file changes

_complained: set[Path] = set()


@dataclass(frozen=True)
class Entry:
    """What one compilation gave: the cubin or PTX, and NVRTC's log."""

    arch: str
    log: str
    image: bytes


def key_of(source: str, options: Sequence[str], arch: str, kind: str, version: tuple[int, int]) -> str:
    """The name of an entry: a hash of everything the compiled bytes depend on."""
    parts = [_FORMAT, source, list(options), arch, kind, list(version)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def load(key: str) -> Entry | None:
    """The entry of ``key``, or None if there is none; a damaged one gives a RuntimeWarning and None."""
    path = _path(key)
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    try:
        return _decoded(raw)
    except (ValueError, KeyError, TypeError):
        warnings.warn(
            f"The cached kernel {path} is damaged; it is compiled again and the file replaced.",
            RuntimeWarning,
            stacklevel=4,
        )
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def store(key: str, entry: Entry) -> None:
    """Keep ``entry``; a folder that cannot be written to gives one RuntimeWarning and is left alone."""
    path = _path(key)
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(_encoded(entry))
        os.replace(temporary, path)
    except OSError as error:
        _complain(path.parent.parent, error)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _path(key: str) -> Path:
    return config.cache_dir() / "kernels" / key[:2] / key


def _encoded(entry: Entry) -> bytes:
    payload = json.dumps({"arch": entry.arch, "log": entry.log}).encode() + b"\n" + entry.image
    return hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload


def _decoded(raw: bytes) -> Entry:
    digest, _, payload = raw.partition(b"\n")
    if hashlib.sha256(payload).hexdigest().encode() != digest:
        raise ValueError("the payload does not have the hash it was written with")
    line, _, image = payload.partition(b"\n")
    header = json.loads(line)
    return Entry(arch=header["arch"], log=header["log"], image=image)


def _complain(folder: Path, error: OSError) -> None:
    if folder in _complained:
        return
    _complained.add(folder)
    warnings.warn(
        f"Compiled kernels will not be kept, because {folder} cannot be written to ({error.strerror}); "
        "set LNGEN_CACHE_DIR to a folder that can.",
        RuntimeWarning,
        stacklevel=5,
    )
