"""Transcripts: command lines in an empty folder, each above what it printed, wrote and exited with.

    $ lngen show rmsnorm.fwd:d=8 --stage graph | head 1
      graph @rmsnorm_fwd(

``tests/transcripts/README.md`` says what a file may have.
"""

import ast
import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import commands
from lngen.version import __version__

INDENT, WIDTH = "  ", 117
UNMEANT = ("internal error of lngen", "Traceback (most recent call last)")
MORE = {"$ ": "> ", ">>> ": "... "}  # what the first line of a step begins with, and its others


def rewritten(text: str, folder: Path) -> str:
    """The transcript with what its steps give now; ``folder`` is empty and the current one."""
    found, lines = list[str](), re.sub(rf"(\n+{INDENT}.*)+", "", text).splitlines()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        steps = Steps(folder, patch, {"folder": folder, "patch": patch, "stack": stack, "needs": needs})
        while lines:
            found.append(line := lines.pop(0))
            if start := next((first for first in MORE if line.startswith(first)), ""):
                more = []
                while lines and f"{lines[0]} ".startswith(MORE[start]):
                    more.append(lines.pop(0))
                found += [*more, *steps.shown(line, more)]
    return "\n".join(found).rstrip() + "\n"


@dataclass
class Steps:
    """The folder, and the names of the Python of a transcript."""

    folder: Path
    patch: pytest.MonkeyPatch
    names: dict[str, Any]
    said: list[str] = field(default_factory=list)

    def shown(self, first: str, more: Sequence[str]) -> list[str]:
        """A step is done; the lines to put below it."""
        before = self.files()
        if first.startswith(">>> "):
            found = self.python("\n".join(line[4:] for line in (first, *more)))
        else:
            words, *filters = split(shlex.split(self.filled(first[2:])))
            if words[0] == "cat":
                found = self.cat(words[1:], [line[2:] for line in more])
            else:
                assert not more, f"only 'cat > FILE' has lines, not {first!r}"
                found = self.command(words)
            for one in filters if found else ():
                found = filtered(found, *one)
            found += [*self.said, *changes(before, self.files())] if words[0] != "cat" else []
        while found and not found[-1].strip():
            found.pop()
        return [line for text in found for line in wrapped(normalised(text, self.folder))]

    def filled(self, line: str) -> str:
        """A command with the values of the names in it that stand in braces."""
        return re.sub(r"\{([A-Za-z]\w*)\}", lambda found: str(self.names.get(found[1], found[0])), line)

    def python(self, code: str) -> list[str]:
        """What the code prints, or the value of its last line."""
        tree = ast.parse(code)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with redirect_stdout(StringIO()) as printed:
            exec(compile(tree, "transcript", "exec"), self.names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "transcript", "eval"), self.names)
                if value is not None:
                    print(value if isinstance(value, str) else repr(value))
        return printed.getvalue().splitlines()

    def cat(self, words: Sequence[str], lines: Sequence[str]) -> list[str]:
        """A file is written, or shown."""
        if words[0] == ">":
            Path(words[1]).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            return []
        return Path(words[0]).read_text(encoding="utf-8").splitlines()

    def command(self, words: Sequence[str]) -> list[str]:
        """What ``lngen`` prints; ``said`` are its messages, and an exit code that is not 0."""
        variables = [*itertools.takewhile(lambda word: re.match("[A-Z_]+=", word), words)]
        name, *args = words[len(variables) :]
        assert name == "lngen", f"expected lngen or cat, got {name!r}"
        with pytest.MonkeyPatch.context() as patch:
            for variable in variables:
                patch.setenv(*variable.split("=", 1))
            done = commands.call(*args)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        code = [f"exit {done.exit_code}"] * (done.exit_code != 0)
        self.said = [*(f"! {line}".rstrip() for line in done.stderr.splitlines()), *code]
        return done.stdout.splitlines()

    def files(self) -> dict[str, bytes]:
        """The contents of all files, by their names."""
        found = (path for path in self.folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in found}


def needs(*modules: str) -> None:
    """Skips the transcript where one of these cannot be imported."""
    for name in modules:
        pytest.importorskip(name)


def split(words: Sequence[str]) -> Iterator[list[str]]:
    """The commands of a pipe."""
    for pipe, group in itertools.groupby(words, lambda word: word == "|"):
        if not pipe:
            yield [*group]


def filtered(lines: list[str], name: str, arg: str = "", other: str = "") -> list[str]:
    """The lines behind a filter."""
    match name:
        case "head":
            return lines[: int(arg)]
        case "tail":
            return lines[-int(arg) :]
        case "grep":
            return [line for line in lines if re.search(arg, line)]
        case "mask":
            return [re.sub(arg, other or "...", line) for line in lines]
        case "squeeze":
            return [re.sub("-{4,}", "---", re.sub(" {2,}", " ", line)) for line in lines]
        case "count":
            return [f"{len(lines)} lines"]
        case "json":
            value = json.loads("\n".join(lines))
            for key in filter(None, arg.split(".")):
                value = value[int(key) if isinstance(value, list) else key]
            return json.dumps(value, indent=2 if other else None).splitlines()
    raise ValueError(f"expected a filter (head tail grep mask squeeze count json), got {name!r}")


def changes(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> list[str]:
    """A line for every file that was made (+), changed (*) or removed (-); more than three of a folder are counted."""
    marks = {name: "+" if name not in before else "-" if name not in after else "*" for name in {**before, **after}}
    names = sorted(name for name in marks if before.get(name) != after.get(name))
    found = []
    for (top, mark), group in itertools.groupby(names, lambda name: (name.partition("/")[0], marks[name])):
        alike = [*group]
        kinds = Counter(Path(name).suffix.lstrip(".") for name in alike)
        counted = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        found += [f"{mark} {name}" for name in alike] if len(alike) <= 3 else [f"{mark} {top}/ ({counted})"]
    return found


def normalised(line: str, folder: Path) -> str:
    """A line without what another folder, version or text of a template changes."""
    line = line.replace(str(folder), "FOLDER").replace(__version__, "VERSION")
    line = re.sub(r"0x[0-9a-f]{6,}", "0xADDRESS", line)
    return re.sub(r"(?<![0-9a-f])(?=[0-9a-f]*[a-f])[0-9a-f]{12,64}(?![0-9a-z])", "DIGEST", line)


def wrapped(line: str) -> list[str]:
    """The line, indented; a long one in pieces, which but for the last end in a backslash."""
    found = list[str]()
    while len(line) > WIDTH:
        at = line.rfind(" ", WIDTH // 2, WIDTH) + 1 or WIDTH
        found.append(f"{INDENT}{line[:at]}\\")
        line = line[at:]
    return [*found, f"{INDENT}{line}".rstrip()]


def unmeant(text: str) -> list[str]:
    """Lines that no user should see."""
    return [line for line in text.splitlines() if any(words in line for words in UNMEANT)]
