"""Tables as text."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterable, Sequence


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
