"""PTX text divided into statements."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lngen.errors import PtxError

_COMMENT = re.compile(r"//.*|/\*.*?\*/")
LABEL = re.compile(r"([$%\w]+)\s*:(?!:)")
# Directives without an effect on the execution of a kernel.
IGNORED = re.compile(
    r"\.(version|target|address_size|file|section|pragma|maxntid|minnctapersm|reqntid|maxnreg|maxnctapersm|b8|b32|"
    r"explicitcluster|reqnctapercluster|branchtargets|noreturn)\b"
)


def statements(text: str) -> Iterator[tuple[int, str]]:
    """Statements without comments and semicolons, each with the line it starts on; a brace is a statement."""
    pending, start = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = (_COMMENT.sub("", raw) if "/" in raw else raw).strip()
        if not line:
            continue
        if not pending and line[0] not in "{}" and line.endswith(";") and line.count(";") == 1:
            yield number, line[:-1].rstrip()  # by far the most frequent case
            continue
        if not pending and line.startswith((".loc", ".version", ".target", ".address_size", ".file", ".pragma")):
            yield number, line.rstrip(";")
            continue
        for part in re.split(r"(;)", line):
            part = part.strip()
            if not part:
                continue
            if part == ";":
                if pending:
                    yield start, pending
                pending = ""
                continue
            while not pending and part and part[0] in "{}":
                yield number, part[0]
                part = part[1:].lstrip()
            if not part:
                continue
            start = start if pending else number
            pending = f"{pending} {part}".strip()
            label = LABEL.fullmatch(pending)
            if label or _whole(pending):
                yield start, pending
                pending = ""
    if pending:
        raise PtxError(f"PTX line {start}: ';' is expected after '{pending[:80]}'.")


def _whole(statement: str) -> bool:
    """True for text that ends without a semicolon: lines of a parameter list, the header of an entry, directives."""
    if statement.startswith((".param", ")", "(", ".entry", ".visible .entry", ".weak .entry")):
        return True
    return bool(IGNORED.match(statement)) or statement.startswith(".loc")
