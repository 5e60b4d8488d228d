"""What a process leaves for those after it: the call of a spec, the kernels that were chosen for it, what it rebuilds.

For each there is a file beside the cubins in the cache. Its name is a hash of all that decides what is in it, the
sources of lngen included, so no file is ever out of date. A process that finds both derives and lowers nothing. A file
that is torn, or not the user's own, is not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from lngen import config
from lngen.compiler.compile import Compilation
from lngen.compiler.contract import call as description
from lngen.compiler.ir import Graph, parse
from lngen.compiler.passes import rebuilt
from lngen.compiler.problem import Problem
from lngen.compiler.spec import Spec
from lngen.compiler.toolchain import Binary, cached_cubin, file_stamp, library_stamp
from lngen.errors import MissingError
from lngen.files import keep, kept, plain_json
from lngen.launch.kernels import Described
from lngen.version import __version__

FORMAT = 1  # increment it when the content of a file changes
SOURCES = (".py", ".toml", ".jinja", ".cuh")


class Outline(NamedTuple):
    """What calls of a spec need before there are kernels: the description of a call, and the facts about the graph."""

    call: Described
    problem: Problem

    @classmethod
    def of(cls, compilation: Compilation) -> Outline:
        """That of a graph, which this derives; errors as of ``Compilation``."""
        return cls(description(compilation.spec, compilation.graph), compilation.problem)

    @classmethod
    def recalled(cls, spec: Spec) -> Outline | None:
        """That of a spec of which kernels were compiled before; None if it is not known."""
        found = _recalled("call", spec.fingerprint)
        if found is None:
            return None
        facts: dict[str, Any] = {k: tuple(n) if isinstance(n, list) else n for k, n in found["problem"].items()}
        return cls(found["call"], Problem(**facts))

    def remember(self, spec: Spec) -> None:
        """Leave it for other processes."""
        _remember({"call": self.call, "problem": asdict(self.problem)}, "call", spec.fingerprint)


class Choice(NamedTuple):
    """The kernels that were chosen: their description, a cubin, and bytes of dynamic shared memory for each kernel."""

    described: Described
    binary: Binary
    shared: tuple[int, ...]

    @classmethod
    def recalled(cls, spec: Spec, *decided_by: object) -> Choice | None:
        """What was chosen for a spec, a GPU, rows and accesses; None if it is not known, or NVRTC is another one."""
        found = _recalled("kernels", spec.fingerprint, *decided_by)
        if found is None or not _same_file(found["nvrtc"]):
            return None
        binary = cached_cubin(found["cubin"])
        return None if binary is None else cls(found["described"], binary, tuple(found["shared"]))

    def remember(self, spec: Spec, *decided_by: object) -> None:
        """Leave it for other processes; without a cubin that is in the cache it is not left."""
        about = {"described": self.described, "cubin": self.binary.key, "shared": self.shared}
        if self.binary.key and (nvrtc := library_stamp()):
            _remember({**about, "nvrtc": nvrtc}, "kernels", spec.fingerprint, *decided_by)


def rebuilding(backward: Spec) -> Graph | None:
    """The graph by which a backward rebuilds its row; None if it has none. It is derived if it is not known."""
    found = _recalled("rebuilding", backward.fingerprint)
    if found is not None:
        return parse(found["graph"]) if found["graph"] else None
    graph = rebuilt(backward.trace()["save"], backward.forward())
    _remember({"graph": str(graph or "")}, "rebuilding", backward.fingerprint)
    return graph


def _same_file(stamp: tuple[str, int, int]) -> bool:
    with contextlib.suppress(OSError):
        return file_stamp(stamp[0]) == tuple(stamp)
    return False


# ---- files ----


def _recalled(*decided_by: object) -> Any:
    """The content that is decided by these; None if it is not known, or stages of the compiler are to be seen."""
    if config.dump_dir() or config.debug_level() >= 3:
        return None
    key = _key(decided_by)
    try:
        found = plain_json(kept(_path(key)))
    except (OSError, ValueError, MissingError):
        return None
    return found["content"] if isinstance(found, dict) and found.get("key") == key else None


def _remember(content: Mapping[str, Any], *decided_by: object) -> None:
    """Leave it for other processes, if it can be written; whoever compiles warns where nothing can."""
    key = _key(decided_by)
    with contextlib.suppress(OSError, MissingError):
        keep(_path(key), json.dumps({"key": key, "content": content}).encode())


def _key(decided_by: tuple[object, ...]) -> str:
    return hashlib.sha256(json.dumps([FORMAT, sources(), *map(str, decided_by)]).encode()).hexdigest()


def _path(key: str) -> Path:
    return config.cache_dir() / "choices" / key[:2] / key


@cache
def sources() -> str:
    """A hash of all of lngen that a kernel and its choice depend on: the compiler, its tables and templates."""
    found = hashlib.blake2b(__version__.encode())
    for path in _files():
        with open(path, "rb") as file:
            text = file.read()
        found.update(b"%d\0" % len(text) + text)
    return found.hexdigest()


def _files() -> Iterator[str]:
    yield from (str(config.PACKAGE / name) for name in ("dtypes.py", "rules.py"))
    for root in (config.PACKAGE / "compiler", config.PACKAGE / "launch" / "runtime", config.data_dir("templates")):
        for folder, _, names in sorted(os.walk(root)):
            for name in sorted(names):
                if name.endswith(SOURCES) and not name.startswith("."):
                    yield os.path.join(folder, name)
