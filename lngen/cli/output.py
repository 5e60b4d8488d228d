"""The output of a command: a table or a stage on standard output, as text or JSON, or in a file.

Progress and notes go to standard error."""

import contextlib
import io
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from lngen.cli.failures import OutputError
from lngen.files import write_all

Function = TypeVar("Function", bound=Callable[..., Any])

JSON_HELP = "Print JSON."
TABLE_HELP = "Also write the table to this file, as JSON."
STAGE_HELP = "Write to this file instead; a table is also printed, and the file has it as JSON."


class AnyPath(click.Path):
    """A path whose name a file can have."""

    def __init__(self, **rules: Any) -> None:
        super().__init__(path_type=Path, **rules)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; a usage error for a name with a NUL or a lone surrogate."""
        try:
            return super().convert(value, param, ctx)
        except ValueError:
            self.fail(f"'{value}' cannot be used: no file can have this name; name another one.", param, ctx)


class OutFile(click.Path):
    """A file to write, checked before any work: a new file, or a regular file that may be replaced."""

    name = "file"

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path; a usage error with the reason if it cannot be written."""
        path = Path(value)
        if str(value) == "-":
            self.fail("expected a file, got '-'; without this option it goes to standard output.", param, ctx)
        why = unwritable(path)
        if why is not None:
            self.fail(f"'{path}' cannot be written: {why}; name a place that can be written to.", param, ctx)
        return path


def unwritable(path: Path) -> str | None:
    """The reason why no file can be written at ``path``; None if it can, in folders that may have to be made."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        folder = next((p for p in path.parents if p.exists()), Path())
        if not folder.is_dir():
            return f"'{folder}' is not a folder"
        return None if os.access(folder, os.W_OK | os.X_OK) else f"the folder '{folder}' is not writable for you"
    except ValueError:  # a NUL, or a lone surrogate
        return "no file can have this name"
    except OSError as error:
        return error.strerror
    if stat.S_ISREG(mode):
        return None if os.access(path, os.W_OK) else "it is not writable for you"
    return "it is a folder" if stat.S_ISDIR(mode) else "it is not a regular file"


@dataclass(frozen=True)
class Output:
    """The destination of a command's output, from ``--json`` and ``--out``."""

    as_json: bool = False
    file: Path | None = None

    def table(self, data: Any, text: str) -> None:
        """A table: JSON with ``--json``, else its text; the file of ``--out`` also gets the JSON.

        ``data`` is a value that JSON can hold, or a complete JSON document as text.
        """
        document = data if isinstance(data, str) else json_text(data)
        if self.file is not None:
            write_all({self.file: document.encode()})
        write(document if self.as_json else text)

    def stage(self, data: Any, text: str, lexer: str) -> None:
        """A stage: exactly its text, or with ``--json`` the data, on standard output or in the file of ``--out``."""
        if self.file is not None:
            write_all({self.file: (json_text(data) if self.as_json else text).encode()})
        elif self.as_json:
            write(json_text(data))
        else:
            highlight(text, lexer)


def json_option(function: Function) -> Function:
    """``--json`` alone, for a command whose ``--out`` is a folder: passes ``output``."""
    return _with_output(function, JSON_HELP)


def output_options(function: Function) -> Function:
    """``--json`` and ``--out FILE`` of a command that prints a table: passes ``output``."""
    return _with_output(function, JSON_HELP, TABLE_HELP)


def stage_options(function: Function) -> Function:
    """``--json`` and ``--out FILE`` of a command that prints a stage, or a table: passes ``output``."""
    return _with_output(function, JSON_HELP, STAGE_HELP)


def _with_output(function: Function, json_help: str, out_help: str | None = None) -> Function:
    @wraps(function)
    def wrapped(*args: Any, as_json: bool, out_file: Path | None = None, **options: Any) -> Any:
        return function(*args, output=Output(as_json, out_file), **options)

    decorated: Any = wrapped
    if out_help is not None:
        decorated = click.option("--out", "out_file", type=OutFile(), metavar="FILE", help=out_help)(decorated)
    return click.option("--json", "as_json", is_flag=True, help=json_help)(decorated)  # type: ignore[no-any-return]


def json_text(data: Any) -> str:
    """One JSON document, indented, keys in insertion order; numbers are finite."""
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def write(text: str) -> None:
    """Write ``text`` to standard output, byte for byte; OutputError if that fails."""
    try:
        click.echo(text, nl=False)
    except OSError as error:
        raise OutputError(error) from error


def note(text: str) -> None:
    """Write a line to standard error; it is lost if that fails."""
    with contextlib.suppress(OSError):
        click.echo(text, err=True)


def highlight(text: str, lexer: str) -> None:
    """``text`` byte for byte in a pipe, highlighted on a terminal."""
    if not sys.stdout.isatty():
        return write(text)
    from rich.console import Console
    from rich.syntax import Syntax

    highlighted = Syntax("", lexer, theme="ansi_dark", background_color="default").highlight(text)
    Console().print(highlighted, soft_wrap=True, end="")


# ---- tables as text ----


def terminal_width() -> int | None:
    """Columns of the terminal on standard output; None if it is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table for standard output: fitted to a terminal, or at full width in a pipe."""
    return table_text(columns, rows, width=None if sys.stdout.isatty() else 10_000)


def table_text(columns: Sequence[str], rows: Iterable[Sequence[object]], width: int | None = 10_000) -> str:
    """A table of at most ``width`` columns; None: as wide as the terminal."""
    from rich.box import MARKDOWN, SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # The Markdown style is plain ASCII, which any pipe accepts.
    table = Table(box=SIMPLE_HEAD if width is None else MARKDOWN)
    for column in columns:
        table.add_column(column, no_wrap=width is not None, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines if line.strip())
