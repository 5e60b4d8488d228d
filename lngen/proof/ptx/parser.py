"""PTX text to frozen dataclasses: entries with parameters, registers, memory symbols, labels and instructions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from lngen.errors import PtxError

INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?")


def integer(text: str) -> int:
    """The value of an integer constant; as in C, a leading 0 means octal."""
    sign, body = (-1, text[1:]) if text.startswith("-") else (1, text)
    body = body.removesuffix("U")
    return sign * int(body, 8 if body.isdigit() and body.startswith("0") else 0)


_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+))?")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"[^"]*?(lngen/\w+\.cuh)"', re.MULTILINE)
_DEEPEST = 8  # depth of nested calls that is followed

Line = tuple[int, int]  # the number of a file, and of a line in it


@dataclass(frozen=True, slots=True)
class Loc:
    """A line of a file, and the line of the kernel into which it was inlined (0: it was not)."""

    file: int = 0
    line: int = 0
    inlined_at: int = 0


def included_headers(ptx: str) -> dict[int, str]:
    """The headers among the files that a PTX text numbers."""
    return {int(number): name for number, name in _FILE.findall(ptx)}


class Callers:
    """Follows inlined lines to the kernel: a .loc of the caller precedes the .loc of the code inlined into it."""

    def __init__(self) -> None:
        self._of: dict[Line, Line] = {}

    def chain(self, statement: str) -> tuple[Line, ...] | None:
        """The line of a .loc directive, and those it is inlined at, up to the kernel's; None for another statement."""
        found = _LOC.match(statement)
        if not found:
            return None
        file, line, of_file, of_line = (int(number or 0) for number in found.groups())
        here, caller = (file, line), (of_file, of_line)
        if here != caller:  # else a function inlined into itself
            self._of[here] = caller
        lines = [here]
        while caller[1] and len(lines) < _DEEPEST:
            lines.append(caller)
            caller = self._of.get(caller, (0, 0))
        return tuple(lines)

    def loc(self, statement: str) -> Loc | None:
        """The meaning of a .loc directive; None for another statement."""
        lines = self.chain(statement)
        return Loc(*lines[0], lines[-1][1] if len(lines) > 1 else 0) if lines else None


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


@dataclass(frozen=True, slots=True)
class Operand:
    """``kind``: reg, imm, sym (also label-like names), mem ([base+offset]), vec ({a, b}), pair (a|b)."""

    kind: str
    text: str
    items: tuple[Operand, ...] = ()
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its predicate register (and whether it is negated), opcode, operands, PTX line and .loc."""

    opcode: str
    operands: tuple[Operand, ...]
    line: int
    loc: Loc
    text: str
    predicate: str = ""
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable in shared, local, global or const memory.

    ``init`` is the initial value of a global variable; the launch sets the size of a ``dynamic`` one.
    """

    name: str
    space: str
    align: int
    element: str
    count: int
    init: tuple[str, ...] = ()
    dynamic: bool = False


@dataclass(frozen=True, eq=False)
class Entry:
    """A kernel; compared by identity."""

    name: str
    params: tuple[tuple[str, str], ...]
    registers: dict[str, str]
    symbols: tuple[Symbol, ...]
    labels: dict[str, int]
    instructions: tuple[Instruction, ...]
    cluster: tuple[int, ...] = ()


@dataclass(frozen=True)
class Module:
    """A PTX file."""

    target: str
    entries: dict[str, Entry]
    symbols: tuple[Symbol, ...] = field(default=())
    headers: Mapping[int, str] = field(default_factory=dict)  # by the number of their file


_ENTRY = re.compile(r"(?:\.visible\s+|\.weak\s+)?\.entry\s+([\w$]+)")
_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr\b[^,]*?\s)?([\w$]+)\s*,?$")
_REG = re.compile(r"\.reg\s+\.(\w+)\s+(.+)")
_VARIABLE = re.compile(
    r"(?:\.(visible|extern|weak)\s+)?\.(shared|local|global|const)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)"
    r"(?:\[(\d*)\])?\s*(?:=\s*(.+))?"
)
_INSTRUCTION = re.compile(r"(?:@(!?)([%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_OPERAND = re.compile(r"\s*(\{[^}]*\}|\[[^\]]*\]|[^,]+?)\s*(?:,|$)")


@lru_cache(maxsize=32)
def parse(text: str) -> Module:
    """The module in ``text``; PtxError with the line of a malformed statement."""
    reader = _Reader()
    for number, statement in statements(text):
        reader.statement(number, statement)
    if reader.entry is not None:
        raise PtxError(f"PTX ends inside the kernel '{reader.entry}': a closing brace is expected.")
    if not reader.entries:
        raise PtxError("PTX with at least one .entry is expected, found none.")
    return Module(reader.target, reader.entries, tuple(reader.globals), included_headers(text))


@dataclass
class _Scope:
    """A block in braces: the names it declares, with their names in the kernel; the index of its first instruction."""

    begin: int
    registers: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)


class _Reader:
    """Reads one entry after the other."""

    def __init__(self) -> None:
        self.target = ""
        self.entries: dict[str, Entry] = {}
        self.globals: list[Symbol] = []
        self.shared: list[Symbol] = []  # of the module: every kernel that uses one has its own copy
        self.entry: str | None = None
        self.depth = 0
        self.section = False
        self._fresh()

    def _fresh(self) -> None:
        self.params: list[tuple[str, str]] = []
        self.registers: dict[str, str] = {}
        self.symbols: list[Symbol] = []
        self.labels: dict[str, int] = {}
        self.instructions: list[Instruction] = []
        self.loc = Loc()
        self.callers = Callers()
        self.cluster: tuple[int, ...] = ()
        self.scopes: list[_Scope] = []

    def statement(self, number: int, text: str) -> None:
        """Read one statement."""
        if text in "{}":
            self._brace(text, number)
        elif self.section and self.entry is None:
            return  # debug data
        elif text[0] == ".":
            self._directive(number, text)
        elif self.entry is None or not self.depth:
            if text not in (")", "("):
                raise PtxError(f"PTX line {number}: a directive is expected outside a kernel, got '{text[:80]}'.")
        else:
            self._instruction(number, text)

    def _brace(self, brace: str, number: int) -> None:
        if self.entry is None:
            self.section = self.section and brace == "{"
            return
        self.depth += 1 if brace == "{" else -1
        if brace == "{" and self.depth > 1:
            self.scopes.append(_Scope(len(self.instructions)))
        elif brace == "}" and self.depth:
            self._close(self.scopes.pop())
        if self.depth == 0:
            self.entries[self.entry] = Entry(
                self.entry,
                tuple(self.params),
                self.registers,
                (*self.symbols, *self._named_here()),
                self.labels,
                tuple(self.instructions),
                self.cluster,
            )
            self.entry = None

    def _named_here(self) -> list[Symbol]:
        """The module's shared variables that the kernel uses."""
        if not self.shared:
            return []
        names = {o.text for i in self.instructions for o in i.operands} | {
            item.text for i in self.instructions for o in i.operands for item in o.items
        }
        return [s for s in self.shared if s.name in names]

    def _directive(self, number: int, text: str) -> None:
        if loc := self.callers.loc(text):
            self.loc = loc
        elif entry := _ENTRY.match(text):
            self._fresh()
            self.entry, self.depth = entry[1], 0
            if text[entry.end() :].strip() not in ("", "(", "()"):
                raise PtxError(
                    f"PTX line {number}: each parameter is expected on a line of its own, got '{text[:80]}'."
                )
        elif text.startswith(".param") and (param := _PARAM.match(text)):
            self.params.append((param[2], param[1]))
        elif reg := _REG.match(text):
            for name in reg[2].split(","):
                self._declare(name.strip(), reg[1])
        elif variable := _VARIABLE.match(text):
            self._variable(*variable.groups())
        elif text.startswith(".reqnctapercluster"):
            self.cluster = tuple(int(n) for n in text.split(None, 1)[1].split(","))
        elif text.startswith(".target"):
            self.target = text.split()[1].rstrip(",")
        elif text.startswith(".section"):
            self.section = True
        elif not IGNORED.match(text):
            raise PtxError(f"PTX line {number}: unknown directive '{text[:80]}'.")

    def _variable(
        self, linkage: str, space: str, align: str, element: str, name: str, count: str, init: str
    ) -> None:  # fmt: skip
        values = tuple(v.strip() for v in (init or "").strip("{} ").split(",") if v.strip())
        dynamic = linkage == "extern" and space == "shared" and count == ""
        many = 0 if dynamic else int(count or (len(values) or 1))
        found = Symbol(name, space, int(align or 1), element, many, values, dynamic)
        if self.entry is not None:
            self.symbols.append(found)
        else:
            (self.shared if space == "shared" else self.globals).append(found)

    def _declare(self, name: str, kind: str) -> None:
        if many := re.fullmatch(r"([%\w$]+)<(\d+)>", name):
            self.registers.update((f"{many[1]}{n}", kind) for n in range(int(many[2])))
        else:
            self.registers[self._fresh_name(name, self.registers, "registers")] = kind

    def _fresh_name(self, name: str, taken: dict[str, Any], what: str) -> str:
        """The name of ``name`` in the kernel: inline assembly may declare it once per copy."""
        if not self.scopes:
            return name
        number, found = 1, name
        while found in taken:
            number, found = number + 1, f"{name}@{number + 1}"
        getattr(self.scopes[-1], what)[name] = found
        return found

    def _register(self, name: str) -> str:
        return next((s.registers[name] for s in reversed(self.scopes) if name in s.registers), name)

    def _named(self, o: Operand) -> Operand:
        """An operand with the kernel's names; the name of a register need not begin with %."""
        if o.items:
            return replace(o, items=tuple(self._named(item) for item in o.items))
        if o.kind not in ("reg", "sym", "mem"):
            return o
        name = self._register(o.text) if self.scopes else o.text
        kind = "reg" if o.kind == "sym" and name in self.registers else o.kind
        return o if kind == o.kind and name == o.text else Operand(kind, name, o.items, o.offset)

    def _close(self, scope: _Scope) -> None:
        """Binds jumps in a block to its labels."""
        names = {old: new for old, new in scope.labels.items() if old != new}
        for n in range(scope.begin, len(self.instructions)) if names else ():
            i = self.instructions[n]
            if i.opcode.startswith("bra") and i.operands[0].text in names:
                self.instructions[n] = replace(i, operands=(Operand("sym", names[i.operands[0].text]),))

    def _instruction(self, number: int, text: str) -> None:
        while label := LABEL.match(text):
            self.labels[self._fresh_name(label[1], self.labels, "labels")] = len(self.instructions)
            text = text[label.end() :].lstrip()
        if not text:
            return
        found = _INSTRUCTION.fullmatch(text)
        if found is None:
            raise PtxError(f"PTX line {number}: an instruction is expected, got '{text[:80]}'.")
        negated, predicate, opcode, rest = found.groups()
        operands = tuple(self._named(_operand(o, number)) for o in _OPERAND.findall(rest)) if rest else ()
        predicate = self._register(predicate or "")
        self.instructions.append(
            Instruction(opcode, operands, number, self.loc, text.replace("\t", " "), predicate, bool(negated))
        )


_FLOAT = re.compile(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|-?\d+(?:\.\d*(?:[eE][+-]?\d+)?|[eE][+-]?\d+)")
_MEMORY = re.compile(rf"\[\s*([%\w$]+)\s*(?:\+\s*({INTEGER.pattern}))?\s*\]")


def _operand(text: str, number: int) -> Operand:
    first = text[0]
    if first == "%" and "|" not in text:
        return Operand("reg", text)
    if first == "{":
        return Operand("vec", text, tuple(_operand(t.strip(), number) for t in text[1:-1].split(",")))
    if first == "[":
        found = _MEMORY.fullmatch(text)
        if found is None:
            raise PtxError(f"PTX line {number}: an address [base+offset] is expected, got '{text}'.")
        return Operand("mem", found[1], offset=integer(found[2] or "0"))
    if "|" in text:
        return Operand("pair", text, tuple(_operand(t.strip(), number) for t in text.split("|")))
    if INTEGER.fullmatch(text) or _FLOAT.fullmatch(text):
        return Operand("imm", text)
    return Operand("sym", text)
