"""Messages as golden text: a file of Python whose expressions raise, each above a comment with what it raised.

    parse_spec("softmax.fwd:d=8,scale=big")
    # SpecError: spec 'softmax.fwd:d=8,scale=big': 'scale' is expected to be a number, got 'big'.

All other statements make the names of the file. ``tests/messages/README.md`` says more.
"""

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

import commands

WIDTH = 119
NOTHING = "nothing was raised"
UNMEANT = ("AttributeError", "IndexError", "KeyError", "NameError", "UnboundLocalError", "AssertionError")


class Exit(Exception):
    """A command ended with an exit code and this text on standard error."""


def lngen(*words: str | Path) -> None:
    """The command line; raises Exit for a code that is not 0, and prints nothing."""
    done = commands.call(*words)
    if done.exit_code:
        assert done.stdout == ""
        said = done.stderr.rstrip()
        raise Exit(f"{done.exit_code}: {said.partition('Error: ')[2] if said.startswith('Usage: ') else said}")


def rewritten(text: str, folder: Path) -> str:
    """The file with what its expressions raise now; ``folder``, also a name of the file, is printed as FOLDER."""
    names: dict[str, Any] = {"__name__": "messages", "folder": folder, "lngen": lngen}
    lines, found, last = text.splitlines(), list[str](), 0
    raises = False
    for node in ast.parse(text).body:
        first, end = node.lineno - 1, node.end_lineno or node.lineno
        found += [*_kept(lines[last:first], raises), *lines[first:end]]
        code = "\n".join(lines[first:end])
        last, raises = end, isinstance(node, ast.Expr) and not _is_text(node)
        if raises:
            found += comment(_raised(code, names), folder)
        else:
            exec(compile("\n" * first + code, "messages", "exec"), names)
    return "\n".join([*found, *_kept(lines[last:], raises)]) + "\n"


def _kept(lines: list[str], raises: bool) -> list[str]:
    """The lines behind a statement, without the comment on what it raised."""
    start = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return lines[start if raises else 0 :]


def _is_text(node: ast.Expr) -> bool:
    return isinstance(node.value, ast.Constant)


def _raised(code: str, names: dict[str, Any]) -> str:
    try:
        eval(compile(f"({code}\n)", "messages", "eval"), names)
    except Exception as error:
        return f"{type(error).__name__}: {error}" if not isinstance(error, Exit) else f"exit {error}"
    return NOTHING


def unmeant(text: str) -> list[str]:
    """Lines of a file that are no message to a user: no error at all, or one that nobody meant."""
    return [line for line in text.splitlines() if line.startswith(tuple(f"# {name}" for name in (NOTHING, *UNMEANT)))]


def comment(message: str, folder: Path) -> list[str]:
    """The lines of a comment, wrapped; a line of a message that goes on is indented."""
    message = re.sub(r"0x[0-9a-f]{6,}", "0xADDRESS", message.replace(str(folder), "FOLDER"))
    found = []
    for line in message.split("\n"):
        indent = line[: len(line) - len(line.lstrip(" "))]
        found += textwrap.wrap(
            line.strip(),
            WIDTH,
            initial_indent=f"# {indent}",
            subsequent_indent=f"#   {indent}",
            break_on_hyphens=False,
        ) or ["#"]
    return found


def settle(file: Path, now: str, config: pytest.Config) -> None:
    """The file has to hold ``now``; with ``--update`` it is written, and the lines that changed are printed."""
    text = file.read_text(encoding="utf-8")
    if config.option.update and now != text:
        with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print("", *(line for line in now.splitlines() if line not in text.splitlines()), sep="\n")
        file.write_text(now, encoding="utf-8")
    else:
        assert now == text
    assert [line for line in now.splitlines() if len(line) > 120] == []


def check(kind: Any, file: Path, folder: Path, patch: pytest.MonkeyPatch, config: pytest.Config) -> None:
    """A file holds what its lines give in an empty ``folder``; ``kind`` is the module that rewrites such files."""
    patch.chdir(folder)
    now = kind.rewritten(file.read_text(encoding="utf-8"), folder)
    assert kind.unmeant(now) == []
    settle(file, now, config)
