"""CuPy, which only this module imports: its import makes a folder for a cache, and fails where it cannot."""

from __future__ import annotations

import os
import sys
from typing import Any

from .errors import MissingError

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
