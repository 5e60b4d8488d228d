"""Plan -> CUDA text: Python makes every decision, the templates lay it out, and every line is indented and broken."""

from __future__ import annotations

import hashlib
import re
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import groupby
from pathlib import Path

import jinja2
from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError
from jinja2.bccache import Bucket, BytecodeCache

from lngen.compiler.devices import DEFAULT_ARCH
from lngen.compiler.headers import SEARCH, includes
from lngen.compiler.ir import ctype, print_graph
from lngen.compiler.lower import Plan
from lngen.config import cache_dir, data_dir
from lngen.errors import EmitError, LngenError
from lngen.files import keep, kept

# Without these options the bits differ: contraction, and approximate division and square root.
COMPILE = "-std=c++17 -fmad=false -prec-div=true -prec-sqrt=true -ftz=false"


def emit(plan: Plan) -> str:
    """The CUDA source of a plan's kernels, which includes the device headers it uses."""
    real = ctype(plan.accumulator)
    try:
        rendered = [environment().get_template(k.template).render(kernel=k, real=real) for k in plan.kernels]
        kernels = "\n\n".join(laid_out(text).strip() for text in rendered)
        text = environment().get_template("module.cu.jinja").render(
            **_head(plan), commands=commands(plan), includes=includes(kernels), kernels=kernels
        )  # fmt: skip
    except TemplateError as e:
        raise EmitError(f"'{plan.name}' could not be laid out: {_where(e)}: {e}.") from e
    return text.rstrip() + "\n"


def _head(plan: Plan) -> dict[str, str]:
    """The comment at the start of a file, and the name of its namespace."""
    ir = print_graph(plan.graph)
    lines = {
        "spec": str(plan.spec),
        "schedule": str(plan.schedule),
        **{f"launch {n}": f"{k.role}, {k.launch_rule()}" for n, k in enumerate(plan.kernels, 1)},
        **({"workspace": "; ".join(map(str, plan.workspace))} if plan.workspace else {}),
        "names": "in kernels, variables that end in _ are lngen's, all others are values of the graph",
        "ir-sha256": hashlib.sha256(ir.encode()).hexdigest()[:12],
    }
    facts = "\n".join(f"//   {name:<10} : {text}" for name, text in lines.items())
    comment = {"facts": laid_out(facts).rstrip(), "ir": laid_out(_commented(ir)).rstrip()}
    return {"name": plan.name, "stem": plan.stem, **comment}


def _commented(text: str) -> str:
    return "\n".join(f"// {line}".rstrip() for line in text.splitlines())


def _where(error: TemplateError) -> str:
    """The template and line of the innermost frame, which Jinja writes into the traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith(".jinja")]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "module.cu.jinja"


def commands(plan: Plan, arch: str = DEFAULT_ARCH, source: str = "") -> str:
    """The lines of a header that write the text again and compile it: each can be pasted, and is not broken.

    ``source``: where the command line finds a graph of one's own.
    """
    lines = {"regenerate": _regenerate(plan, arch, source)}
    lines["compile"] = f"nvcc -cubin -arch={arch} {SEARCH} {COMPILE} {plan.name}.cu"
    return "\n".join(f"//   {name:<10} : {text}" for name, text in lines.items())


def _regenerate(plan: Plan, arch: str, source: str) -> str:
    """The command line that writes the text, or Python where the graph ``g`` is defined if only that has it."""
    spec, schedule, direction = plan.spec, str(plan.schedule), plan.spec.direction
    keys = str(spec).partition(":")[2]
    if spec.builtin or source:
        text = str(spec) if spec.builtin else shlex.quote(f"{source}.{direction}:{keys}")
        return f"lngen show {text} --schedule {schedule}{f' --arch {arch}' * (arch != DEFAULT_ARCH)} > {plan.name}.cu"
    options = ", ".join(
        f"{k}={v if k == 'd' else repr(v)}" for k, _, v in (key.partition("=") for key in keys.split(","))
    )
    call = f"lngen.compile(g, {options}, schedule={{'{direction}': '{schedule}'}})"
    return f"{call}.source('{direction}', '{arch}', bundle=False)"


@cache
def environment() -> Environment:
    """The one Jinja environment: undefined names are errors, control lines and ends of macros produce no output."""
    return Environment(
        loader=FileSystemLoader(data_dir("templates")),
        bytecode_cache=_CompiledTemplates(),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: value.rstrip() if isinstance(value, str) else value,
        autoescape=False,
    )


class _CompiledTemplates(BytecodeCache):
    """Templates as Python bytecode in the cache folder, which takes a tenth of the time that Jinja takes to make it.

    The name of a file covers what the bytecode depends on: the template, Jinja's source, this module, and the
    interpreter. A file that cannot be read or is not trusted is made again; one that cannot be written is not kept.
    """

    def load_bytecode(self, bucket: Bucket) -> None:
        with suppress(OSError, ValueError, LngenError):
            bucket.bytecode_from_string(kept(self._path(bucket)))

    def dump_bytecode(self, bucket: Bucket) -> None:
        with suppress(OSError, LngenError):
            keep(self._path(bucket), bucket.bytecode_to_string())

    def _path(self, bucket: Bucket) -> Path:
        made_of = f"{_made_by()} {sys.implementation.cache_tag} {bucket.key} {bucket.checksum}"
        return cache_dir() / "templates" / hashlib.sha256(made_of.encode()).hexdigest()


@cache
def _made_by() -> str:
    """The hash of the sources that turn a template into bytecode: Jinja's, and this module with its options."""
    jinja = Path(jinja2.__file__).parent
    sources = [
        *(jinja / f"{name}.py" for name in ("compiler", "lexer", "nodes", "optimizer", "parser")),
        Path(__file__),
    ]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


# ---- the layout of lines ----


WIDTH = 120

_STRING = re.compile(r'"(?:\\.|[^"\\])*"')
_OPEN, _CLOSE = "([{", ")]}"
_NOTE = "  // "


def laid_out(text: str) -> str:
    """``text`` with every line indented by its open brackets, and blank lines only between statements.

    Lines of spaces are dropped: they are macros that wrote nothing. Empty lines are kept.
    """
    lines = list(_tight(_indented([line for line in text.splitlines() if not line or line.strip()])))
    listed: list[str] = []
    for (noted, _), group in groupby(lines, key=lambda line: (_NOTE in line.lstrip(), _indent(line))):
        neighbours = list(group)
        listed += _in_columns(neighbours) if noted else [part for line in neighbours for part in fitted(line)]
    return "\n".join(listed) + "\n"


def _indented(lines: list[str]) -> Iterator[str]:
    openers: list[int] = []  # for each open bracket the line that opened it
    for number, line in enumerate(map(str.strip, lines)):
        code = _STRING.sub('""', line.partition("//")[0])
        leading = len(code) - len(code.lstrip("".join(_CLOSE)))
        still, closed = openers[: len(openers) - leading], openers[len(openers) - leading :]
        depth = len({*still} - {*closed[:1]})  # a line that closes stands where the line stands that opened
        for c in code:
            if c in _OPEN:
                openers.append(number)
            elif c in _CLOSE:
                openers.pop()
        yield "    " * depth + line if line else ""


def _tight(lines: Iterator[str]) -> Iterator[str]:
    """The lines without repeated blank lines, and without those inside braces at their ends or at pragmas."""
    before, blank = "{", False
    for line in lines:
        if not line:
            blank = True
            continue
        if blank and not before.endswith("{") and not line.lstrip().startswith("}"):
            yield ""
        yield line
        before, blank = line, False


def _in_columns(lines: list[str]) -> list[str]:
    """Neighbouring statements with their notes in one column, as far as they fit.

    Else an equation, which names its value, precedes its statement, and any other note stays behind its end.
    """
    pairs = [(code.rstrip(), note) for code, _, note in (line.partition(_NOTE) for line in lines)]
    fit = [len(code) for code, note in pairs if len(code) + len(_NOTE) + len(note) <= WIDTH]
    column = max((w for w in fit if all(w + len(_NOTE) + len(n) <= WIDTH for c, n in pairs if len(c) <= w)), default=0)
    listed: list[str] = []
    for code, note in pairs:
        aligned = f"{code:<{column}}{_NOTE}{note}"
        if len(aligned) <= WIDTH:
            listed.append(aligned)
        elif note.startswith("%"):
            listed += [*_wrapped(note, _indent(code)), *fitted(code)]
        else:
            listed += _with_note(fitted(code), note)
    return listed


def _with_note(lines: list[str], note: str) -> list[str]:
    """A broken statement with its note behind the last line."""
    lines[-1] += f"{_NOTE}{note}"
    if len(lines[-1]) > WIDTH:
        raise EmitError(f"the note '{note}' does not fit behind its statement; make it a comment above.")
    return lines


def fitted(line: str) -> list[str]:
    """The lines for ``line``: code breaks after a comma or before an operator.

    Continuation lines are indented more, except inside a bracket that an earlier line opened.
    """
    if len(line) <= WIDTH:
        return [line]
    indent = _indent(line)
    if line.lstrip().startswith("//"):
        text = line.strip()[2:]
        return _wrapped(text.strip(), indent, _indent(text))
    deeper = "" if line.count("(") < line.count(")") else "    "
    lines, rest, start = list[str](), line, indent
    while len(rest) > WIDTH:
        breaks = [rest.rfind(mark, len(start) + 1, WIDTH - len(mark)) + offset for mark, offset in _BREAKS]
        cut = max(b for b in breaks)
        if cut <= len(start) + 2:
            break
        lines.append(rest[:cut].rstrip())
        start = indent + deeper
        rest = start + rest[cut:].lstrip()
    return [*lines, rest]


_BREAKS = ((", ", 2), (" && ", 1), (" ? ", 1), (" ^ ", 1), (" + ", 1), (" & ", 1))


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _wrapped(note: str, indent: str, space: str = " ") -> list[str]:
    """A comment in lines that fit: continued lines are indented further, and more so within a word."""
    lines: list[str] = []
    start = f"{indent}//{space}"
    for word in note.split(" "):
        if lines and len(lines[-1]) + 1 + len(word) <= WIDTH:
            lines[-1] += f" {word}"
            continue
        rest = start + word
        if lines and len(rest) > WIDTH and "," in word[: WIDTH - len(lines[-1]) - 1]:
            rest = f"{lines.pop()} {word}"
        while len(rest) > WIDTH and "," in rest[:WIDTH]:
            cut = rest.rindex(",", 0, WIDTH) + 1
            lines.append(rest[:cut])
            rest = f"{indent}//       {rest[cut:]}"
        lines.append(rest)
        start = f"{indent}//     "
    return lines
