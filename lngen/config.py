"""What the surroundings set: environment variables, read on demand and only here, and the folders beside the package.

LNGEN_DEBUG      0 (default) to 5: how much lngen prints on stderr about its work
LNGEN_DUMP       a folder for files to inspect later, such as sources that did not compile
LNGEN_CACHE_DIR  the folder of compiled kernels and compiled templates; the user's cache folder by default
LNGEN_PACKS      packs into which a norm looks before it compiles, separated as in PATH
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

import platformdirs

from lngen.errors import LngenError, MissingError

PACKAGE = Path(__file__).parent
_LEVELS = {str(level): level for level in range(6)}


def debug_level() -> int:
    """0 (silent) to 5 (everything); LngenError for any other value of LNGEN_DEBUG."""
    text = os.environ.get("LNGEN_DEBUG", "").strip() or "0"
    if text not in _LEVELS:
        raise LngenError(f"LNGEN_DEBUG must be a whole number from 0 to 5 (default 0), not {text!r}.")
    return _LEVELS[text]


def dump_dir() -> Path | None:
    """The folder named by LNGEN_DUMP, which may not exist yet, or None if it is unset or empty."""
    return _folder("LNGEN_DUMP")


def cache_dir() -> Path:
    """The folder of all that lngen keeps between runs; it may not exist yet.

    MissingError for a user without a home folder, who names none.
    """
    named = _folder("LNGEN_CACHE_DIR")
    if named is not None:
        return named
    with suppress(RuntimeError):  # there is no home folder, which other versions of platformdirs call "~"
        folder = platformdirs.user_cache_path("lngen")
        if folder.is_absolute():
            return folder
    raise MissingError(
        f"user {os.getuid()} has no home folder, and so no folder for lngen's cache; "
        "set LNGEN_CACHE_DIR to a folder that can be written to."
    )


def pack_dirs() -> tuple[Path, ...]:
    """The folders that LNGEN_PACKS names."""
    texts = os.environ.get("LNGEN_PACKS", "").split(os.pathsep)
    return tuple(_expanded("LNGEN_PACKS", text) for text in texts if text)


def _folder(variable: str) -> Path | None:
    text = os.environ.get(variable, "")
    return _expanded(variable, text) if text else None


def _expanded(variable: str, text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise LngenError(f"{variable} is expected to be a folder; the home folder in '{text}' is unknown.") from None


def data_dir(name: Literal["templates", "generated"]) -> Path:
    """A folder of data: ``lngen/_data/name`` in a wheel, ``name`` beside the package in a checkout."""
    candidates = (PACKAGE / "_data" / name, PACKAGE.parent / name)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise MissingError(
        f"the data folder {name!r} is missing: expected it at {candidates[0]} (installed wheel) or at "
        f"{candidates[1]} (checkout); reinstall lngen, or run it from a complete checkout"
    )
