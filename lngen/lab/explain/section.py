"""What is explained, and what of: a subject; sections of texts, lines and tables, for a terminal, JSON and a page."""

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lngen.compiler.compile import Compilation, KernelSet
from lngen.compiler.devices import Device
from lngen.compiler.lower import Plan
from lngen.compiler.problem import Problem, Schedule
from lngen.compiler.schedule import workload
from lngen.compiler.schedule.table import rows_of
from lngen.lab.explain.timings import Run, runs

WIDTH = 110  # of a terminal


@dataclass(frozen=True)
class Subject:
    """A spec on its way to kernels, and the kernels under the schedule that is explained.

    ``expected``   the rows for which the schedule was chosen, None for many
    ``changed``    the text of the user's change to the default schedule, empty for the default
    """

    compilation: Compilation
    kernels: KernelSet
    device: Device
    expected: int | None = None
    changed: str = ""

    @property
    def plan(self) -> Plan:
        """The plan of the kernels."""
        return self.kernels.plan

    @property
    def schedule(self) -> Schedule:
        """The schedule that is explained."""
        return self.plan.schedule

    @property
    def scheduled(self) -> bool:
        """True if kernels depend on the schedule; one that reduces vectors to numbers does not."""
        return any(kernel.role != "numbers" for kernel in self.plan.kernels)

    @cached_property
    def problem(self) -> Problem:
        """The facts that a schedule has to fit."""
        return self.compilation.problem

    @cached_property
    def most(self) -> int:
        """The most rows of the workload class, for which the class is ranked."""
        return max(1, rows_of(self.problem, workload(self.problem, self.expected, self.device), self.device))

    @cached_property
    def runs(self) -> list[Run]:
        """The recorded runs of the workload class; first one on this GPU that compares the chosen schedule, if any."""
        found = runs(str(self.plan.spec), self.problem, self.device, self.expected or self.most)
        name, mine = self.device.name, self.schedule
        return sorted(found, key=lambda r: (r.device != name, mine not in r.times, len(r.times) < 2))

    @cached_property
    def rows(self) -> int:
        """The rows of all numbers: the expected ones; for many, those of the first run, or the most of the class."""
        return self.expected or (self.runs[0].rows if self.runs else self.most)


# ---- sections ----


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
    """Rows of cells under columns, under an optional heading; numbers are strings; the last column is wrapped."""

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


class _Wrapper(textwrap.TextWrapper):
    """Keeps words whole, which may be equations or schedules."""

    def __init__(self, width: int, first: str, rest: str) -> None:
        super().__init__(width, first, rest, break_long_words=False, break_on_hyphens=False)


class _CellWrapper(_Wrapper):
    """Also breaks a line behind a comma."""

    wordsep_simple_re = re.compile(r"(\s+)|(?<=,)(?=\S)")


def wrapped(text: str, first: str = "", rest: str = "", width: int = WIDTH - 2) -> list[str]:
    """Lines of at most ``width`` columns, by default those of ``Lines``, and what precedes the first and the others."""
    return _Wrapper(width, first, rest).wrap(text)


def entry(label: str, text: str) -> list[str]:
    """Lines of a label and its text, which begins and goes on in one column."""
    return wrapped(text, f"{label:<20} ", " " * 21)


def _lines(block: Block) -> list[str]:
    if isinstance(block, Text):
        return wrapped(block.text, width=WIDTH)
    head = [block.heading] if block.heading else []
    if isinstance(block, Lines):
        return [*head, *(f"  {line}".rstrip() for line in block.lines)]
    rows = (block.columns, *block.rows)
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    for *cells, last in rows:
        left = "".join(f"  {cell:<{width}}" for cell, width in zip(cells, widths, strict=True)) + "  "
        wide = max(WIDTH, len(left) + WIDTH // 2)
        head += _CellWrapper(wide, left, " " * len(left)).wrap(last) or [left.rstrip()]
    return head
