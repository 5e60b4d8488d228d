"""What a module holds, by its name: ``module:function``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lngen.errors import SpecError


def imported(name: str, folder: Path | None = None) -> Any:
    """What is at ``module:attribute``; SpecError with the first line of the failure.

    Only during the import, ``folder`` is searched for modules after all other places.
    """
    module_name, _, path = name.partition(":")
    try:
        with _also_from(folder):
            found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise SpecError(f"'{name}' cannot be imported: {type(error).__name__}: {first}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise SpecError(f"'{name}' cannot be imported: '{module_name}' has no '{path}'.")
        found = getattr(found, part)
    return found


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
