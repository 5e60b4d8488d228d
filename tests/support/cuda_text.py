"""CUDA text taken apart, as far as tests need it: the functions it defines, and which of them nothing calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lngen.errors import CompileError

CLOSING = {"(": ")", "{": "}", "[": "]"}
NO_NAMES = {"alignas", "decltype", "noexcept", "requires", "__align__", "__launch_bounds__"}  # before a parenthesis


@dataclass(frozen=True)
class Function:
    """A function with its body: the struct it is a member of (or empty), its name, and where it is in the text."""

    owner: str
    name: str
    start: int  # of its declaration, template parameters included
    body: int  # the brace its body begins with
    end: int

    def __str__(self) -> str:
        return f"{self.owner}::{self.name}" if self.owner else self.name


def code(text: str) -> str:
    """The text with comments and strings blanked out; every other character keeps its position."""
    blank = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
    return blank.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def closed(text: str, at: int) -> int:
    """The position after the bracket that closes the one at ``at``."""
    opened = []
    for n in range(at, len(text)):
        if text[n] in CLOSING:
            opened.append(CLOSING[text[n]])
        elif opened and text[n] == opened[-1]:
            opened.pop()
            if not opened:
                return n + 1
    raise AssertionError(f"nothing closes {text[at : at + 60]!r}")


def functions(text: str) -> list[Function]:
    """Every ``__device__`` and ``__global__`` function that has a body, in the order of ``code(text)``."""
    plain = code(text)
    scopes = [(s[2], s.end() - 1, closed(plain, s.end() - 1)) for s in _structs(plain)]
    found = []
    for mark in re.finditer(r"\b__(?:device|global)__\b", plain):
        if found and mark.start() < found[-1].body:
            continue  # __host__ __device__, or a lambda in a default
        made = _function(plain, mark.start())
        if made is not None:
            inside = [(begin, name) for name, begin, end in scopes if begin < mark.start() < end]
            name, body, end = made
            found.append(Function(max(inside, default=(0, ""))[1], name, _begin(plain, mark.start()), body, end))
    return found


def _structs(plain: str) -> Iterator[re.Match[str]]:
    return re.finditer(r"\b(struct|class|union)\s+(?:alignas\([^)]*\)\s*)?(\w+)[^;{}()<>]*(?:<[^;{}]*>)?\s*\{", plain)


def _begin(plain: str, at: int) -> int:
    """Where the declaration around ``at`` begins: after the end of another one, or after a preprocessor line."""
    ends = re.compile(r"[;{}]|(?:public|private|protected)\s*:|^\s*#[^\n]*", re.MULTILINE)
    return max((end.end() for end in ends.finditer(plain, 0, at)), default=0)


def _function(plain: str, start: int) -> tuple[str, int, int] | None:
    """Name, body and end of what is declared at ``start``; None for a variable or a mere declaration."""
    name, at = "", start
    while at < len(plain):
        if plain[at] in ";=" and not plain[:at].endswith("operator"):
            return None
        if plain[at] == "(":
            before = re.search(r"(operator\s*\S+?|~?\w+)\s*$", plain[start:at])
            word = before[1] if before else ""
            if re.search(r"operator\s*$", plain[start:at]):  # operator()
                name, at = "operator()", closed(plain, closed(plain, at) if plain[at + 1] == ")" else at)
                break
            if word not in NO_NAMES:
                name, at = word, closed(plain, at)
                break
            at = closed(plain, at)
        else:
            at += 1
    while at < len(plain) and plain[at] not in "{;":
        at = closed(plain, at) if plain[at] in "([" else at + 1
    if at == len(plain) or plain[at] == ";":
        return None
    body = at
    while True:  # past the braces of a constructor's initialisers
        end = closed(plain, body)
        behind = re.match(r"\s*(?:,[^{;}]*)?\{", plain[end:])
        if not behind:
            return name, body, end
        body = end + behind.end() - 1


def never_called(text: str, compiled: Callable[[str], str]) -> list[str]:
    """The ``__device__`` functions that leave no trace in the PTX and without which the text compiles.

    ``compiled`` gives the PTX of a text, or raises CompileError. A call that the compiler removes, in a branch that is
    never taken for example, leaves no trace, but the text does not compile without the function. Overloads count as one
    function.
    """
    plain, defined = code(text), [f for f in functions(text) if "__global__" not in code(text)[f.start : f.body]]
    marked = text
    for n, f in reversed([*enumerate(defined)]):
        if "constexpr" not in plain[f.start : f.body]:  # a constexpr function cannot hold a statement of PTX
            marked = f'{marked[: f.body + 1]} asm volatile("// called {n};");{marked[f.body + 1 :]}'
    present = {int(n) for n in re.findall(r"// called (\d+);", compiled(marked))}
    waiting = [f for n, f in enumerate(defined) if n not in present]
    needless: list[Function] = []
    while True:
        found = next((f for f in waiting if _compiles(_without(text, [*needless, f]), compiled)), None)
        if found is None:
            called = {str(f) for f in defined if f not in needless}
            return [str(f) for f in sorted(needless, key=lambda f: f.start) if str(f) not in called]
        needless.append(found)
        waiting.remove(found)


def _without(text: str, left_out: list[Function]) -> str:
    """The text without some functions."""
    for f in sorted(left_out, key=lambda f: -f.start):
        text = f"{text[: f.start]} {text[f.end :]}"
    return text


def _compiles(text: str, compiled: Callable[[str], str]) -> bool:
    try:
        compiled(text)
    except CompileError:
        return False
    return True
