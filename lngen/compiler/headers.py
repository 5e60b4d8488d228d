"""The device headers: what each provides, which ones a kernel includes, and the text that stands alone.

The headers lie in ``templates/include/lngen``. An emitted kernel includes those that provide a name it uses. A header
includes what it needs itself, and has an include guard, so each compiles alone and any number of kernels can share a
translation unit.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import cache

from lngen.config import data_dir

PREFIX = "lngen/"  # of an include: #include "lngen/tma.cuh"
# The compiler option that finds them, for a shell: this module prints their folder.
SEARCH = '-I "$(python -m lngen.headers)"'

_COMMENT = re.compile(r"//.*")
_WORD = re.compile(r"[A-Za-z_]\w*")
_INCLUDE = re.compile(rf'^#include "{PREFIX}(\w+)\.cuh"\n', re.MULTILINE)
_TYPE = re.compile(r"^(?:template <[^;{]*?>\s*)?(?:struct|union) (?:alignas\(.*?\) )?(\w+)", re.MULTILINE)
_FUNCTION = re.compile(r"^(?:\S.*)?__device__ [^;{]*?(\w+)\(", re.MULTILINE)


@cache
def text_of(header: str) -> str:
    """The text of a header."""
    return (data_dir("templates") / "include" / "lngen" / f"{header}.cuh").read_text(encoding="utf-8")


def declared(text: str) -> set[str]:
    """The types and functions that a header declares in namespace lngen. A value of a graph takes no such name."""
    code = _COMMENT.sub("", text.partition("namespace lngen {")[2])
    return {*_TYPE.findall(code), *_FUNCTION.findall(code)}


HEADERS = tuple(sorted(path.stem for path in (data_dir("templates") / "include" / "lngen").glob("*.cuh")))
HEADER_OF = {name: header for header in HEADERS for name in declared(text_of(header))}


def includes(code: str) -> str:
    """The sorted include lines for CUDA ``code``: the headers that provide the names it uses."""
    words = {*_WORD.findall(_COMMENT.sub("", code))}
    headers = sorted({header for name, header in HEADER_OF.items() if name in words})
    return "\n".join(f'#include "{PREFIX}{header}.cuh"' for header in headers)


def included(text: str, texts: Callable[[str], str] | None = None) -> dict[str, str]:
    """Every header that ``text`` includes, directly or through another, by the name of its include.

    A header follows those that it includes itself. ``texts``: the text of a header, by default lngen's own.
    """
    found: dict[str, str] = {}
    for header in _INCLUDE.findall(text):
        of_header = (texts or text_of)(header)
        found |= included(of_header, texts) | {f"{PREFIX}{header}.cuh": of_header}
    return found


@cache
def headers_hash() -> str:
    """16 hex digits that stand for the texts of all headers."""
    texts = "".join(f"{header}\0{text_of(header)}\0" for header in HEADERS)
    return hashlib.sha256(texts.encode()).hexdigest()[:16]


def bundled(text: str, texts: Callable[[str], str] | None = None) -> str:
    """``text`` with whole headers in place of its includes: one file that stands alone, as its commands say.

    The headers keep their guards, so that several such files can be one translation unit.
    """
    first = _INCLUDE.search(text)
    if not first:
        return text
    headers = (_INCLUDE.sub("", of_header) for of_header in included(text, texts).values())
    kernels = _INCLUDE.sub("", text[first.start() :]).lstrip()
    comment = text[: first.start()]
    for option, alone in ((f"{SEARCH} ", ""), ("lngen show ", "lngen show --bundle "), ("bundle=False", "bundle=True")):
        comment = comment.replace(option, alone, 1)
    return comment + "\n".join([*headers, kernels])


if __name__ == "__main__":
    print(data_dir("templates") / "include")
