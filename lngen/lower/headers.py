"""The device headers, divided into definitions, so that an emitted file contains only those it uses.

A header under ``templates/device`` is a sequence of definitions at namespace level, separated by blank lines, each with
its comment above it. A definition is needed if the kernels, or other needed definitions, use its name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache, cached_property

from lngen.config import data_dir
from lngen.errors import EmitError

# In the order of an emitted file: a header uses those before it.
HEADERS = (
    "launch", "numeric", "vector", "preload", "mbarrier", "cluster", "row_layout", "row_reduce", "segments", "exchange",
    "row_scheduler", "cp_async", "tma", "dynamic_tma", "unaligned_tma", "column_sums", "finish", "grid_barrier",
    "vector_sums",
)  # fmt: skip

_COMMENT = re.compile(r"//.*")
_WORD = re.compile(r"[A-Za-z_]\w*")
_TEMPLATE = re.compile(r"^\s*template\s*<.*?>\s*(?=struct|union|using|__device__|extern)", re.DOTALL)
_TYPE = re.compile(r"\s*(?:struct|union|using)\s+(?:alignas\(.*?\)\s+)?(\w+)")
_FUNCTION = re.compile(r"(\w+)\s*\(")


@dataclass(frozen=True)
class Part:
    """Some lines of a definition: a member function with the comment above it, or (no ``name``) what always stays."""

    name: str
    text: str

    @cached_property
    def uses(self) -> frozenset[str]:
        """The words of its code."""
        return words(self.text)


@dataclass(frozen=True)
class Definition:
    """A definition of a header: its ``text`` with the comment above it, and the ``name`` it defines."""

    header: str
    name: str
    text: str

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Its text, cut before and after every member function."""
        return tuple(_members(self.text, self.name))

    def only(self, used: set[str]) -> Definition:
        """The definition without the member functions whose names are not ``used``."""
        lines = "\n".join(part.text for part in self.parts if not part.name or part.name in used)
        return replace(self, text=re.sub(r"\n\n(?=\n|};)", "\n", lines))


def words(code: str) -> frozenset[str]:
    """Every identifier of ``code`` outside comments."""
    return frozenset(_WORD.findall(_COMMENT.sub("", code)))


@cache
def definitions() -> tuple[Definition, ...]:
    """The definitions of all headers, in the order of an emitted file."""
    folder = data_dir("templates") / "device"
    return tuple(d for name in HEADERS for d in cut(name, (folder / f"{name}.cuh").read_text(encoding="utf-8")))


def cut(header: str, text: str) -> tuple[Definition, ...]:
    """The definitions of a header; an EmitError for one without a name."""
    found: list[Definition] = []
    for part in _parts(text):
        code = _TEMPLATE.sub("", _COMMENT.sub("", part))
        name = _TYPE.match(code) or _FUNCTION.search(code)
        if name is None:
            raise EmitError(f"header '{header}': a definition is expected to name a type or a function, got '{part}'.")
        found.append(Definition(header, name[1], part))
    return tuple(found)


def _parts(text: str) -> list[str]:
    """Blocks between blank lines outside braces."""
    parts, lines, depth = list[str](), list[str](), 0
    for line in [*text.rstrip("\n").split("\n"), ""]:
        if not line and depth == 0:
            if any(not row.startswith("//") for row in lines):
                parts.append("\n".join(lines))
                lines = []
            elif lines:
                lines.append(line)
            continue
        lines.append(line)
        depth += line.count("{") - line.count("}")
    return parts


def _members(text: str, name: str) -> list[Part]:
    """The lines of a definition, those of each member function of the type ``name`` together."""
    parts, waiting, depth = [Part("", "")], list[str](), 0
    member = ""
    for line in text.split("\n"):
        code = _COMMENT.sub("", line)
        if depth == 1 and not member:
            member = _member(code, name)
        waiting.append(line)
        depth += code.count("{") - code.count("}")
        begins = code.lstrip().startswith("template") and "__device__" not in code
        if depth > 1 or (depth == 1 and (line.lstrip().startswith("//") or begins)):
            continue  # the lines of a body, or what stands above a member
        if depth == 1 and member and not code.rstrip().endswith("}"):
            continue  # a signature of several lines
        parts.append(Part(member, "\n".join(waiting)))
        waiting, member = [], ""
    return parts[1:]


def _member(code: str, type_name: str) -> str:
    """The name of the member function whose signature begins in a line; "" for operators and constructors."""
    found = _FUNCTION.search(code.partition("__device__")[2].replace("__forceinline__", ""))
    return found[1] if found and "operator" not in code and found[1] != type_name else ""


def needed(code: str) -> tuple[Definition, ...]:
    """The definitions that ``code`` uses, directly or through others, in order, without members that nothing uses."""
    listed = definitions()
    used, grown = set[str](), set(words(code))
    while grown - used:
        used |= grown
        there = (d for d in listed if d.name in used)
        grown = {w for d in there for p in d.parts if not p.name or p.name in used for w in p.uses}
    return tuple(d.only(used) for d in listed if d.name in used)
