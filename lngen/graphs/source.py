"""Definitions that are not lngen's own: from a file with the text of a graph, or from a function of a module."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from lngen.errors import ParseError, SpecError, VerifyError
from lngen.files import read
from lngen.graphs.builder import GraphBuilder
from lngen.graphs.definition import Definition
from lngen.imports import imported, is_function
from lngen.ir import parse

ENDING = ".graph"
LARGEST = 1 << 20  # bytes of a file

# In a spec: the source, the direction, the keys. A file's name may have dots, and a function's has a colon.
_FILE = re.compile(rf"(.+?{re.escape(ENDING)})(?:\.(\w*))?(?::(.*))?")
_FUNCTION = re.compile(r"([^:,=]+:[^:,=]+?)\.(fwd|bwd)(?::(.*))?")


def is_source(name: str) -> bool:
    """True for the name of a file that ends in ``.graph``, and for ``module:function``."""
    return name.endswith(ENDING) or is_function(name)


def split(spec: str) -> tuple[str, str, str] | None:
    """Source, direction and keys of a spec whose graph is in a file or a module; None for any other spec."""
    found = _FILE.fullmatch(spec) or _FUNCTION.fullmatch(spec)
    return (found[1], found[2] or "", found[3] or "") if found else None


def definition_from(name: str) -> Definition:
    """The definition in a file, or by a function, also of a module in the current folder.

    The name of a function is that of its graph; a Definition in a module has its own. SpecError for a file that cannot
    be read or holds no graph, or a module or function that is not there.
    """
    return _from_file(Path(name)) if name.endswith(ENDING) else _from_module(name)


def _from_file(path: Path) -> Definition:
    try:
        text = read(path, LARGEST).decode()
    except OSError as error:
        raise SpecError(f"'{path}' is expected to be a file with a graph, but {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"'{path}' is expected to be a file with a graph, but it is not UTF-8 text.") from error
    try:
        return Definition.from_graph(parse(text))
    except (ParseError, SpecError, VerifyError) as error:
        raise SpecError(f"'{path}' is expected to hold a forward graph: {error}") from error


@dataclass(frozen=True)
class FromModule:
    """Describes a graph as ``module:function`` does, in any process; ``folder`` is searched after all other places."""

    name: str
    folder: str

    def __call__(self, b: GraphBuilder) -> None:
        """Call the function."""
        found = imported(self.name, Path(self.folder))
        (found.describe if isinstance(found, Definition) else found)(b)


def _from_module(name: str) -> Definition:
    found, describe = imported(name, Path.cwd()), FromModule(name, str(Path.cwd()))
    if isinstance(found, Definition):
        return replace(found, describe=describe)
    if not callable(found):
        kind = type(found).__name__
        raise SpecError(f"'{name}' is expected to be a function that describes a graph, or a Definition, got {kind}.")
    return Definition(getattr(found, "__name__", name.rpartition(":")[2]), describe)
