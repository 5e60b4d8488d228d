"""The package's data folders: inside the wheel, or beside the package in a checkout."""

from importlib.resources import files
from pathlib import Path
from typing import Literal

from lngen.errors import MissingError


def data_dir(name: Literal["templates", "generated"]) -> Path:
    """The folder ``name``: ``lngen/_data/name`` in a wheel, else ``name`` beside the package."""
    package = Path(str(files("lngen")))
    candidates = (package / "_data" / name, package.parent / name)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise MissingError(
        f"the data folder {name!r} is missing: expected it at {candidates[0]} (installed wheel) or at "
        f"{candidates[1]} (checkout); reinstall lngen, or run it from a complete checkout"
    )
