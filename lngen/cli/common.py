"""What the commands share: their common options, tables, JSON, and text for people or for pipes."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
schedule_option = click.option(
    "--schedule",
    default="",
    metavar="K=V,...",
    help="Change the default schedule, for example threads=256,vec=4.",
)
rows_option = click.option(
    "--rows", type=click.IntRange(1), metavar="M", help="The schedule for about M rows; without it, for many."
)


def arch_option(text: str) -> Callable[[Function], Function]:
    """``--arch``, a list; ``text`` says what the command does with it."""
    from lngen.runtime.choose import DEFAULT_ARCH  # not above: doctor has to run without NumPy

    return click.option(
        "--arch",
        "arches",
        default=DEFAULT_ARCH,
        show_default=True,
        metavar="SM,...",
        callback=words,
        help=text,
    )


def on_option(text: str) -> Callable[[Function], Function]:
    """``--on``, what runs the kernels; ``text`` says what ``auto`` means."""
    choice = click.Choice(["auto", "gpu", "ptx", "interpreter"])
    return click.option("--on", type=choice, default="auto", show_default=True, help=text)


def words(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    """A comma-separated list without repetitions; an empty one is a usage error."""
    found = tuple(dict.fromkeys(word.strip() for word in value.split(",") if word.strip()))
    if not found:
        raise click.BadParameter("expected at least one value.", ctx, param)
    return found


def print_json(data: Any) -> None:
    """One JSON document, indented, keys as they come."""
    click.echo(json.dumps(data, indent=2))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on stdout: fitted to a terminal, or as wide as it needs to be in a pipe."""
    click.echo(table_text(columns, rows, width=None if sys.stdout.isatty() else 10_000), nl=False)


def table_text(columns: Sequence[str], rows: Iterable[Sequence[object]], width: int | None = 10_000) -> str:
    """A table as text, ``width`` columns wide at most; None: drawn for a terminal, as wide as it is."""
    from rich.box import MARKDOWN, SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Markdown is plain ASCII, which any pipe takes.
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


def print_text(text: str, lexer: str) -> None:
    """``text`` byte for byte in a pipe, highlighted on a terminal."""
    if not sys.stdout.isatty():
        click.echo(text, nl=False)
        return
    from rich.console import Console
    from rich.syntax import Syntax

    highlighted = Syntax("", lexer, theme="ansi_dark", background_color="default").highlight(text)
    Console().print(highlighted, soft_wrap=True, end="")


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A function (done, total) that moves a bar on stderr; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
