"""Compiled kernels on disk, one file per key, safe under any number of processes.

A file is the sha256 of the payload, a newline, and the payload: one JSON line (key, arch, kernels, log) and the image.
Only files of the user (or root) that nobody else may write are used; folders and files are the user's alone. Any other
file is not used, and replaced.
"""

import contextlib
import hashlib
import json
import os
import stat
import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lngen import config
from lngen.errors import CompileError
from lngen.files import opened, parse_json
from lngen.toolchain.nvrtc_results import resources

_FORMAT = 2  # increment it when the layout of a file changes
_LARGEST = 2**26  # bytes of a file

_complained: set[Path] = set()


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
    path = _path(key)
    try:
        with opened(path) as file:
            _check_owner(os.fstat(file.fileno()))
            raw = file.read(_LARGEST + 1)
        if len(raw) > _LARGEST:
            raise ValueError(f"it is larger than {_LARGEST} bytes")
        return _decoded(raw, key)
    except OSError:
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
    """Store ``entry``; a folder that cannot be written to gives one RuntimeWarning and is not used."""
    path = _path(key)
    folder = path.parent
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(_encoded(key, entry))
        os.replace(temporary, path)
    except OSError as error:
        _complain(config.cache_dir(), error)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _path(key: str) -> Path:
    return config.cache_dir() / "kernels" / key[:2] / key


def _check_owner(info: os.stat_result) -> None:
    """ValueError for a file that others could have written."""
    if info.st_uid not in (os.geteuid(), 0):
        raise ValueError(f"user {info.st_uid} owns it")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError("others may write it")


def _encoded(key: str, entry: Entry) -> bytes:
    header = {"key": key, "arch": entry.arch, "kernels": entry.kernels, "log": entry.log}
    payload = json.dumps(header).encode() + b"\n" + entry.image
    return hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload


def _decoded(raw: bytes, key: str) -> Entry:
    """The entry that was stored under ``key``; ValueError or CompileError for anything else."""
    digest, _, payload = raw.partition(b"\n")
    if hashlib.sha256(payload).hexdigest().encode() != digest:
        raise ValueError("it does not have the hash it was written with")
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
