"""Files: read within bounds, written whole or not at all.

A path from a user may be a device, a FIFO, or a file larger than the memory: none of these is waited for or read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import reprlib
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from .errors import LngenError, MissingError

if TYPE_CHECKING:  # a program that only launches imports no more than it needs
    from pathlib import Path

DEEPEST = 32  # nesting of arrays and objects that parse_json accepts
HELD = 60  # seconds to wait for a lock, which is held for milliseconds
LARGEST = 2**26  # bytes of a file in the cache folder


def opened(path: Path | str) -> BinaryIO:
    """The regular file at ``path``, also through a link, open for reading.

    OSError, whose ``strerror`` says why, for anything else: a directory, a FIFO, a socket, a device.
    """
    try:
        # O_NONBLOCK: without it, open would wait for a FIFO's writer. O_NOCTTY: leave the controlling terminal.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError as error:  # a NUL, or a lone surrogate
        raise OSError(errno.EINVAL, "no file can have this name") from error
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, f"it is a {'FIFO' if stat.S_ISFIFO(mode) else 'device'}, not a regular file")


def read(path: Path | str, limit: int) -> bytes:
    """The bytes of a regular file, ``limit`` at most; OSError, whose ``strerror`` says why, for anything else."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > limit else file.read(size + 1) or b""
        if len(data) > size:  # /proc reports 0, and a file may grow during the read
            data += file.read(limit + 1 - len(data)) or b""
    if size > limit or len(data) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit} bytes")
    return data


def read_inside(folder: Path | str, name: str, limit: int) -> bytes:
    """``read`` of a file in a folder; OSError also for a link that leaves the folder.

    The Hub's cache has links for files: what lies in ``REPOSITORY/snapshots/...`` leads to ``REPOSITORY/blobs``.
    """
    path = os.path.join(folder, name)
    if os.path.islink(path) or os.path.dirname(name):
        home, real = os.path.realpath(folder), os.path.realpath(path)
        repository, cached, _ = home.rpartition("/snapshots/")
        if not real.startswith(f"{home}/") and not (cached and os.path.dirname(real) == f"{repository}/blobs"):
            raise OSError(errno.EXDEV, "it is a link that leaves the folder")
    return read(path, limit)


def plain_json(raw: bytes, **numbers: Any) -> Any:
    """The content of a JSON text in UTF-8, in which no object has a key twice; ValueError with a sentence else.

    Readers differ in which of two values they take. ``numbers``: how numbers are parsed.
    """
    try:
        return json.loads(raw.decode(), object_pairs_hook=_object, **numbers)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"an object has the key {shown(name)} twice")
    return found


def parse_json(raw: bytes) -> Any:
    """``plain_json`` with finite numbers, integers of 64 bits, at most DEEPEST levels.

    ValueError with a sentence for anything else, so that every result can be printed and written again.
    """
    value = plain_json(raw, parse_int=_integer, parse_float=_number, parse_constant=_number)
    _check_depth(value)
    if b"\\u" in raw:  # the only encoding of a lone surrogate
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it holds half of a surrogate pair") from None
    return value


def _integer(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= int(text) < 2**64:
        raise ValueError(f"{text[:20]}... is a number of more than 64 bits")
    return int(text)


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST):
        level = [v for c in level if isinstance(c, (dict, list)) for v in (c.values() if isinstance(c, dict) else c)]
    if any(isinstance(c, (dict, list)) for c in level):
        raise ValueError(f"it is nested deeper than {DEEPEST} levels")


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


def shown(value: Any) -> str:
    """A value from a file for a message: on one line and short, whatever it is."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"a {type(value).__name__} of thousands of digits"


def sha256(data: bytes) -> str:
    """The hash of a file in a manifest."""
    return hashlib.sha256(data).hexdigest()


def write_all(files: Mapping[Path, bytes]) -> None:
    """Write every file beside its destination first, then rename all of them in order; folders are made.

    LngenError names the path that cannot be written; until all bytes are on disk no file has changed.
    """
    write_in_order([*files.items()])


def write_in_order(files: Sequence[tuple[Path, bytes]], staging: Path | None = None) -> None:
    """``write_all`` for files that may replace each other; ``staging``: a folder to write them in first."""
    waiting: list[tuple[Path, Path]] = []
    path: Path | str = staging or ""
    try:
        if staging is not None:
            staging.mkdir(exist_ok=True)
        for path, data in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            _check_place(path)
            temporary = (staging or path.parent) / f".{os.urandom(16).hex()}.tmp"
            waiting.append((temporary, path))
            temporary.write_bytes(data)
        for temporary, path in waiting:
            os.replace(temporary, path)
    except (OSError, ValueError) as error:
        raise LngenError(f"cannot write '{path}': {reason(error)}; name a place that can be written to.") from error
    finally:
        for temporary, _ in waiting:
            with contextlib.suppress(OSError):
                temporary.unlink()


# ---- the cache folder: files that lngen trusts as its own ----


def keep(path: Path, payload: bytes) -> None:
    """Write ``payload`` to a file of the cache, which is the user's alone, as its folders are; OSError if it cannot be.

    The file is the sha256 of the payload, a newline, and the payload. It replaces what is there.
    """
    folder = path.parent
    temporary = path.with_name(f".{os.urandom(16).hex()}.tmp")
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(sha256(payload).encode() + b"\n" + payload)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def kept(path: Path) -> bytes:
    """The payload of a file of the cache: OSError if there is none, ValueError, which says why, if it is not trusted.

    A file is trusted that belongs to the user or root, that nobody else may write, and whose hash is right.
    """
    with opened(path) as file:
        info = os.fstat(file.fileno())
        if info.st_uid not in (os.geteuid(), 0):
            raise ValueError(f"user {info.st_uid} owns it")
        if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError("others may write it")
        raw = file.read(LARGEST + 1)
    if len(raw) > LARGEST:
        raise ValueError(f"it is larger than {LARGEST} bytes")
    digest, _, payload = raw.partition(b"\n")
    if sha256(payload).encode() != digest:
        raise ValueError("it does not have the hash it was written with")
    return payload


# ---- locks and paths ----


@contextlib.contextmanager
def exclusive(folder: Path, name: str, held: float | None = None) -> Iterator[Path]:
    """Hold ``name`` in ``folder`` against every other thread and process that would write it.

    Yields the staging folder for ``write_in_order``, which is removed at the end, with the remains of a killed
    process. The kernel releases the lock when its process ends, however it ends. LngenError if the lock is not
    available within ``held`` seconds, by default HELD.
    """
    import shutil

    from filelock import FileLock, Timeout  # not at the top: its import takes as long as the rest of lngen

    held = HELD if held is None else held
    staging, file = folder / f".{name}.tmp", folder / f".{name}.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(file, timeout=held, poll_interval=0.01, fallback_to_soft=False)
        lock.acquire()
    except Timeout as error:
        raise LngenError(f"another process has held '{file}' for {held} s; wait for its end, and try again.") from error
    except (OSError, ValueError) as error:
        raise LngenError(f"cannot write '{file}': {reason(error)}; name a place that can be written to.") from error
    try:
        yield staging
    finally:
        try:
            shutil.rmtree(staging, ignore_errors=True)
            with contextlib.suppress(OSError):
                file.unlink()  # a waiting process notices that the file has no name, and makes a new one
        finally:
            lock.release()


def resolved(path: Path) -> Path:
    """The file that ``path`` leads to; locks use this name, whatever links lead to the file."""
    try:
        return type(path)(os.path.realpath(path))
    except ValueError:
        return path  # no file can have this name, which opening it reports


def reason(error: OSError | ValueError) -> str:
    """Why a path cannot be used, for a message: the system's words, or that the name is invalid."""
    return error.strerror or str(error) if isinstance(error, OSError) else "no file can have this name"


def _check_place(path: Path) -> None:
    """OSError if no file can be moved to ``path``: a folder, a device it would replace, a name that is too long."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file")


# ---- CuPy, whose import makes a folder for a cache, and fails where it cannot ----

# CuPy asks for a folder that exists, and with a cache in memory it writes nothing to it.
IN_MEMORY = {"CUPY_CACHE_DIR": os.sep, "CUPY_CACHE_IN_MEMORY": "1"}


def load_cupy() -> Any:
    """CuPy, imported; its cache is in memory if the user named no folder for it and the home folder cannot be written.

    ImportError without CuPy, MissingError if the folder that the user named cannot be made.
    """
    if "cupy" not in sys.modules:
        _prepare_cache()
    import cupy

    return cupy


def default_cache() -> str:
    """CuPy's folder if the user names none; it starts with "~" for a user without a home folder."""
    return os.path.expanduser("~/.cupy/kernel_cache")


def _prepare_cache() -> None:
    named = os.environ.get("CUPY_CACHE_DIR")
    if named is None:
        if not _can_write(default_cache()):
            os.environ.update(IN_MEMORY)
        return
    try:
        os.makedirs(named, exist_ok=True)
    except OSError as error:
        raise MissingError(
            f"CuPy cannot make its cache folder '{named}' ({error.strerror}); "
            "set CUPY_CACHE_DIR to a folder that can be written to."
        ) from error


def _can_write(folder: str) -> bool:
    """Whether files can be made in a folder, which is made if it is missing."""
    if not os.path.isabs(folder):  # there is no home folder, and CuPy would make one named "~"
        return False
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=True)
