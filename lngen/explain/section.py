"""What an explanation is made of: sections of texts, lines and tables, for a terminal, for JSON and for a page."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WIDTH = 110


@dataclass(frozen=True)
class Text:
    """A paragraph, which is wrapped."""

    text: str


@dataclass(frozen=True)
class Lines:
    """Lines of fixed width, such as equations, under an optional heading."""

    lines: tuple[str, ...]
    heading: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns, under an optional heading; numbers are strings already, as they are to be read."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    heading: str = ""


Block = Text | Lines | Table


@dataclass(frozen=True)
class Section:
    """One answer: its blocks for people, and ``data``, the same as JSON values for programs."""

    name: str
    title: str
    blocks: tuple[Block, ...]
    data: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"== {self.title} =="]
        for block in self.blocks:
            parts += ["", *_lines(block)]
        return "\n".join(parts) + "\n"


def _lines(block: Block) -> list[str]:
    if isinstance(block, Text):
        return textwrap.wrap(block.text, WIDTH, break_long_words=False, break_on_hyphens=False)
    head = [block.heading] if block.heading else []
    if isinstance(block, Lines):
        return [*head, *(f"  {line}".rstrip() for line in block.lines)]
    widths = [max(map(len, column)) for column in zip(block.columns, *block.rows, strict=True)]
    rows = (block.columns, *block.rows)
    return [*head, *("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)]
