"""Files that are either whole or not there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

from lngen.errors import LngenError


def sha256(data: bytes) -> str:
    """The hash by which a manifest knows a file."""
    return hashlib.sha256(data).hexdigest()


def write_all(files: Mapping[Path, bytes]) -> None:
    """Write every file beside its place first, then move them into place in order; folders are made.

    LngenError names the path that cannot be written; until the last byte is on disk no file has changed.
    """
    waiting: dict[Path, Path] = {}
    path = Path()
    try:
        for path, data in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise IsADirectoryError(0, "it is a folder")
            temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
            waiting[temporary] = path
            temporary.write_bytes(data)
        for temporary, path in waiting.items():
            os.replace(temporary, path)
    except OSError as error:
        raise LngenError(f"cannot write '{path}': {error.strerror}; name a place that can be written to.") from error
    finally:
        for temporary in waiting:
            with contextlib.suppress(OSError):
                temporary.unlink()
