"""What the text of a kernel is made of: arguments, constants, statements, sums, phases, places in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from lngen.ir import Value

Spell = Callable[[Value], str]  # how a value is spelled in C

# How a fold ends: with the sums of a row, of segments, or with a sum and a spread. And where blocks meet for it.
ROW_SUMS, SEGMENT_SUMS, ROW_SPREAD = "_row_sums.cuh.jinja", "_segment_sums.cuh.jinja", "_row_spread.cuh.jinja"
MEETING = {ROW_SUMS: "_cluster_sums.cuh.jinja", ROW_SPREAD: "_cluster_spread.cuh.jinja"}


@dataclass(frozen=True)
class Streamed:
    """A fold of rows that are read a segment at a time: the templates before the first segment, with what a segment
    comes to, and behind the last.
    """

    before: str
    segment: str
    after: tuple[str, ...] = ()


BARRIER = "_streamed_barrier.cuh.jinja"
STREAMED = {
    ROW_SUMS: Streamed(
        "_streamed_sums.cuh.jinja", "_streamed_sums_add.cuh.jinja", after=("_streamed_sums_fold.cuh.jinja",)
    ),
    SEGMENT_SUMS: Streamed(
        "_streamed_segments.cuh.jinja", "_streamed_segments_keep.cuh.jinja", after=(BARRIER,)
    ),
    ROW_SPREAD: Streamed(
        "_streamed_spread.cuh.jinja",
        "_streamed_spread_keep.cuh.jinja",
        after=(BARRIER, "_streamed_spread_combine.cuh.jinja"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Argument:
    """A kernel argument. ``kind``: rows, input, output, workspace (pointers), stride (of ``tensor``, in elements)."""

    name: str
    ctype: str
    kind: str
    tensor: str = ""
    const: bool = False

    @property
    def declaration(self) -> str:
        """As it stands in the kernel's signature."""
        if self.kind in ("rows", "stride"):
            return f"const long long {self.name}"
        return f"{'const ' if self.const else ''}{self.ctype}* __restrict__ {self.name}"


@dataclass(frozen=True)
class Statement:
    """A line of C and the IR equation it stands for."""

    text: str
    note: str
    width: int = 0

    @property
    def line(self) -> str:
        """Text and note; the notes of neighbours stand in one column."""
        return f"{self.text:<{self.width}}  // {self.note}" if self.note else self.text


def aligned(statements: Iterable[Statement]) -> tuple[Statement, ...]:
    """The statements with their notes in one column."""
    listed = tuple(statements)
    width = max((len(s.text) for s in listed if s.note), default=0)
    return tuple(replace(s, width=width) for s in listed)


@dataclass(frozen=True)
class Tensor:
    """An input or output as a kernel sees it: its IR name and C type."""

    name: str
    ctype: str


@dataclass(frozen=True)
class Ask:
    """What is asked for ahead of time: a tensor, its kernel parameter, where in it and how many elements, in C."""

    name: str
    ctype: str
    parameter: str
    place: str
    count: str


@dataclass(frozen=True)
class Sum:
    """A row reduction or a column sum: its IR name, its place among its kind, its IR equation."""

    name: str
    index: int
    note: str


@dataclass(frozen=True)
class Fold:
    """The row reductions of one kind that end a phase: what combines them, its neutral element, their arrays.

    sums    what chunks add up
    named   what results are
    part    how they are folded: a template
    of      of the two folds of a spread, sums of segments and then of squares, the name of what is summed
    keeps   the distances that are squared stay in registers
    tells   with these the blocks of a cluster are told which row comes next
    """

    op: str
    absent: str
    chunks: str
    results: str
    sums: tuple[Sum, ...]
    named: tuple[Sum, ...]
    part: str = ROW_SUMS
    of: str = ""
    keeps: bool = False
    tells: bool = False

    @property
    def lines(self) -> tuple[str, ...]:
        """The statements that take the reductions out of the array of results."""
        named = (Statement(f"const real {s.name} = {self.results}[{s.index}];", s.note) for s in self.named)
        return tuple(s.line for s in aligned(named))

    @property
    def streamed(self) -> Streamed:
        """How it is folded if rows are read a segment at a time."""
        return STREAMED[self.part]

    @property
    def meets(self) -> bool:
        """True if blocks that share a row send each other what they have."""
        return self.part != SEGMENT_SUMS


@dataclass(frozen=True)
class Phase:
    """What happens between two row reductions: elementwise statements, then folds, stores, per-row statements.

    columns      [D] inputs that are loaded in this phase
    centres      values of which this phase needs the means of segments
    tiles        [M, D] inputs that the statements need
    after        what can be computed once the folds are there
    row_outputs  [M] results to be stored then
    refills      its folds show that a stage has been read: the next row may go there
    """

    number: int
    columns: tuple[Tensor, ...]
    tiles: tuple[Tensor, ...]
    statements: tuple[Statement, ...]
    folds: tuple[Fold, ...]
    accumulators: tuple[Sum, ...]
    outputs: tuple[Tensor, ...]
    after: tuple[Statement, ...]
    row_outputs: tuple[Tensor, ...]
    centres: tuple[str, ...] = ()
    refills: bool = False


@dataclass(frozen=True)
class Place:
    """Where a tensor's piece of a row lies in a stage: IR name, C type, and the byte it starts at.

    A stage is the shared memory of one row of one row group. A result may have the place of an input: a thread has
    read what it needs of the input there before it writes its own part of the result.
    """

    name: str
    ctype: str
    offset: int

    def __str__(self) -> str:
        return f"{self.name} at byte {self.offset}"

    @property
    def element(self) -> str:
        """The bytes of an element, in C."""
        return f"sizeof({self.ctype})"


@dataclass(frozen=True)
class Refill:
    """Which stage takes the next row, and which row that is.

    soon      the stage of this row, which all threads hold; else that of the row before
    stored    which is free only once its results have left
    claimed   the row is the next that nobody has; else one of the row group's own
    told      which row that is, the first block of a cluster says
    """

    soon: bool = False
    stored: bool = False
    claimed: bool = False
    told: bool = False

    @property
    def claimant(self) -> str:
        """Who claims rows, in C."""
        return "lane == 0 && cluster_rank() == 0" if self.told else "lane == 0"

    @property
    def why(self) -> str:
        """Why that stage is free."""
        if self.soon:
            return "The stage of this row is free: all threads hold it, as they have come to a barrier since."
        if self.stored:
            return "The stage of the row before is free once its results have left."
        return "The stage of the row before is free: all threads have read it, as they have come to a barrier since."

    @property
    def skips(self) -> str:
        """Who asks for nothing, in C: all threads but one; that one for the first row, and where none is left."""
        return " || ".join(["lane != 0", *["first == begin"] * (not self.soon), *["ended"] * self.claimed])

    @property
    def asks(self) -> str:
        """The call that asks for the row, in C."""
        stage, ahead = ("stage", "STAGES") if self.soon else ("stage == 0 ? STAGES - 1 : stage - 1", "(STAGES - 1)")
        return f"bring_next({stage})" if self.claimed else f"fetch({stage}, first + {ahead} * step)"


@dataclass(frozen=True)
class Constant:
    """A ``constexpr int`` of a kernel: a decision, and what it decides."""

    name: str
    value: int
    note: str


def declared(constants: Iterable[Constant]) -> tuple[str, ...]:
    """The declarations of constants, their values and notes in columns."""
    listed = tuple(constants)
    name = max((len(c.name) for c in listed), default=0)
    value = max((len(str(c.value)) for c in listed), default=0)
    return tuple(f"constexpr int {c.name:<{name}} = {f'{c.value};':<{value + 1}}  // {c.note}" for c in listed)
