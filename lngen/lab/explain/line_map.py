"""Which value of the graph, CUDA statement, line of PTX and machine instruction belong together.

The hub is a statement of the CUDA text. It has the values that its note names, or, without a note, those whose own or
derived names it uses: loads, stores, exchanges. PTX and SASS carry lines of that text and of the device headers, each
with the lines that it was inlined at; the innermost statement with a value decides.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lngen.compiler.headers import PREFIX
from lngen.compiler.ir import Graph
from lngen.compiler.lower.cuda.fragments import c_name
from lngen.lab.inspect.machine_code import KernelCode
from lngen.lab.inspect.sass import Location, location
from lngen.proof.ptx.parser import Callers, included_headers

# What a kernel derives of a value ends in one of these words and an underscore; a number of a phase may follow.
DERIVED = (
    "ptr", "stride", "outer", "padded", "row", "next", "cached", "wide", "shared", "out", "sums", "partials", "own",
    "all", "acc", "value",
)  # fmt: skip

_NOTE = re.compile(r"%([A-Za-z_]\w*) = ")
_NAME = re.compile(r"(?<![\w.:>])[A-Za-z_]\w*")  # no member of an object or a type
_DERIVED = re.compile(rf"(\w+?)_(?:{'|'.join(DERIVED)})_(?:\d+_)?")


class Stated(NamedTuple):
    """A statement of the CUDA text: its first and last line, from 1, and the names of its values."""

    first: int
    last: int
    values: tuple[str, ...]


@dataclass(frozen=True)
class Line:
    """A line of PTX, or an instruction: its text, and the source lines from the innermost to the kernel's."""

    text: str
    where: tuple[Location, ...] = ()


@dataclass(frozen=True)
class LineMap:
    """The statements of a CUDA text, and for each of its lines the number of its statement."""

    statements: tuple[Stated, ...]
    of_line: Mapping[int, int]

    def decides(self, where: Iterable[Location]) -> int | None:
        """The number of the statement for code from there: the innermost with a value, or the innermost."""
        lines = (place.line for place in where if not place.file.startswith(PREFIX))
        found = [self.of_line[line] for line in lines if line in self.of_line]
        return next((n for n in found if self.statements[n].values), found[0] if found else None)


def line_map(text: str, graph: Graph) -> LineMap:
    """The map of a plan's CUDA text."""
    values = {c_name(v): v.name for v in (*graph.params, *(e.out for e in graph.eqns))}
    found = tuple(_statements(text, values))
    return LineMap(found, {n: i for i, s in enumerate(found) for n in range(s.first, s.last + 1)})


def _statements(text: str, values: Mapping[str, str]) -> Iterator[Stated]:
    """The statements after the includes; a note that does not fit behind its statement precedes it."""
    lines = text.splitlines()
    begin = max((n for n, line in enumerate(lines) if line.startswith("#include")), default=0) + 1
    first, code, noted = 0, "", list[str]()
    for number, line in enumerate(lines[begin:], begin + 1):
        body, _, comment = (part.strip() for part in line.partition("//"))
        note = _NOTE.match(comment)
        if not code and not noted:
            first = number
        noted += [note[1]] if note else []
        code = f"{code} {body}".strip()
        if body.endswith((";", "{", "}")) or body.startswith("#"):
            own = () if "__global__" in code else dict.fromkeys(noted or _used(code, values))
            yield Stated(first, number, tuple(own))
            code, noted = "", []


def _used(code: str, values: Mapping[str, str]) -> Iterator[str]:
    """The values that a line without a note uses, directly or through a derived name such as ``x_ptr_``."""
    by_name = {*values.values()}
    for name in _NAME.findall(code):
        derived = _DERIVED.fullmatch(name)
        if name in values:
            yield values[name]
        elif derived and derived[1] in by_name:
            yield derived[1]


# ---- PTX and SASS ----


def ptx_lines(ptx: str, kernel: str) -> tuple[Line, ...]:
    """The lines of a PTX text with line numbers, without these: what is read of it, and where it comes from."""
    callers, headers = Callers(), included_headers(ptx)
    where: tuple[Location, ...] = ()
    found = []
    for line in ptx.partition("\n\t.file\t")[0].splitlines():
        statement = line.strip()
        chain = callers.chain(statement)
        if chain is not None:
            where = tuple(location(kernel, headers.get(file, ""), number) for file, number in chain)
        else:
            coded = statement.endswith(";") and not statement.startswith((".", "//"))
            shown = "    " * line.startswith("\t") + " ".join(statement.split())
            found.append(Line(shown, where if coded else ()))
    return tuple(found)


def sass_lines(codes: Iterable[KernelCode]) -> tuple[Line, ...]:
    """The instructions of kernels in their order, each kernel under a line with its name."""
    found = []
    for kernel in codes:
        found += [Line(f"// {kernel.name}"), *(Line(f"{i.address:04x}  {i.text}", i.where) for i in kernel.code)]
    return tuple(found)
