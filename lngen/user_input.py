"""What users write: numbers, and functions by their name ``module:function``; where code of theirs fails."""

from __future__ import annotations

import importlib
import operator
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from lngen.errors import SpecError, short

# ---- numbers in specs, schedules and options: one strict reading of them ----

# ``int`` and ``float`` accept more: digits of any script, underscores, spaces, NaN, and any number of digits.

LARGEST = 2**31 - 1
MOST_CHARACTERS = 32
_DECIMAL = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)


def whole(value: object, least: int = 0, most: int = LARGEST) -> int | None:
    """The whole number in ``value``, a text of ASCII digits or an integer; None if it is not one in range."""
    if isinstance(value, str):
        if not (value.isascii() and value.isdigit() and len(value) <= MOST_CHARACTERS):
            return None
        number = int(value)
    else:
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            return None
        if isinstance(value, bool):
            return None
    return number if least <= number <= most else None


def decimal(value: object, least: float = 0.0, most: float = float("inf")) -> float | None:
    """The number in ``value``, a text such as 1e-5 or a number; None if it is not one in range, NaN included."""
    if isinstance(value, str) and not (len(value) <= MOST_CHARACTERS and _DECIMAL.fullmatch(value)):
        return None
    try:
        number = float(value) + 0.0  # type: ignore[arg-type]  # no negative zero
    except (TypeError, ValueError, OverflowError):
        return None
    return number if least <= number <= most and number != float("inf") else None


# ---- functions, and what they raise ----

_LNGEN = f"{Path(__file__).parent}/"


def imported(name: str, folder: Path | None = None) -> Any:
    """What is at ``module:attribute``; SpecError if it cannot be imported, with the reason.

    ``folder`` is searched for modules after all other places, and only during the import.
    """
    module_name, _, path = name.partition(":")
    try:
        with _also_from(folder):
            found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise SpecError(f"'{name}' cannot be imported: {failure(error)}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise SpecError(f"'{name}' cannot be imported: '{module_name}' has no '{path}'.")
        found = getattr(found, part)
    return found


def module_name(module: ModuleType) -> str:
    """The name by which ``imported`` finds a module, which may be the program that runs; empty if there is none."""
    if module.__name__ != "__main__":
        return module.__name__
    if module.__spec__:
        return module.__spec__.name
    return Path(getattr(module, "__file__", None) or "").stem


def failure(error: BaseException) -> str:
    """An exception that code of a user raised: its kind, its first line, and the line of that code."""
    text = ""
    with suppress(Exception):  # its __str__ is code of the user, too
        text = str(error).strip()
    what = ": ".join([type(error).__name__, *map(short, text.splitlines()[:1])])
    line = line_of(error)
    return f"{what} ({line})" if line else what


def line_of(error: BaseException) -> str:
    """The last line of code of a user that an exception passed: file, number and text; empty if there is none."""
    frame = _innermost(error)
    if frame is None:
        return ""
    return f"'{frame.filename}', line {frame.lineno}{': ' * bool(frame.line)}{short(frame.line or '')}"


def _innermost(error: BaseException) -> traceback.FrameSummary | None:
    """The last frame in a file of the user; in an installed package, if there is no other."""
    libraries = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_LNGEN, "<frozen "))]
    theirs = [f for f in frames if not f.filename.startswith(libraries)]
    return [None, *(f for f in frames if "site-packages" in f.filename), *theirs][-1]


def is_function(name: str) -> bool:
    """True for the form ``module:function``."""
    module_name, colon, path = name.partition(":")
    return bool(colon and module_name and path) and not module_name.startswith(".")


@contextmanager
def _also_from(folder: Path | None) -> Iterator[None]:
    """Modules of ``folder`` can be imported; modules of the same name elsewhere take precedence."""
    if folder is None or str(folder) in sys.path:
        yield
        return
    sys.path.append(str(folder))
    try:
        yield
    finally:
        with suppress(ValueError):  # the module may have removed it
            sys.path.remove(str(folder))
