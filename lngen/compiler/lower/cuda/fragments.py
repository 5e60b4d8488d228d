"""What the text of a kernel is made of: names in C++, statements, loops, reductions and phases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lngen.compiler.headers import HEADER_OF
from lngen.compiler.ir import Value

# ---- names ----


# Keywords and alternative tokens of C++20; macros of the compilers and of the headers they always include; names that
# CUDA declares and statements use; the names of a kernel's own types.
_CPP = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class co_await
co_return co_yield compl concept const const_cast consteval constexpr constinit continue decltype default delete do
double dynamic_cast else enum explicit export extern false float for friend goto if inline int long mutable namespace
new noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast requires return
short signed sizeof static static_assert static_cast struct switch template this thread_local throw true try typedef
typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
assert errno linux stderr stdin stdout typeof unix va_arg va_copy va_end va_start
threadIdx blockIdx blockDim gridDim warpSize fmaf sqrtf sqrt fabsf fabs rintf rint
Row Reduce Exchange Stream Finish lngen
"""


# The names that values may not have in a kernel.
TAKEN = frozenset(_CPP.split()) | HEADER_OF.keys()


def c_name(value: Value) -> str:
    """The C identifier of ``value``."""
    return f"{value.name}_value_" if value.name in TAKEN else value.name


# ---- what the text of a kernel is made of ----


@dataclass(frozen=True)
class Statement:
    """A line of C and its IR equation."""

    text: str
    note: str = ""

    @property
    def line(self) -> str:
        """The text with its note."""
        return f"{self.text}  // {self.note}" if self.note else self.text


@dataclass(frozen=True)
class Tensor:
    """An input or output of a kernel: its IR name, its C type, and its C name.

    ``in_pairs``: the elements of a vector are converted two at a time, when it is stored. ``period``: the elements of
    an input that repeat along a row; 0 if it has one for each column. ``each``: the neighbours that share one.
    ``index``: of a table, the input that says which of its rows a row has.
    """

    name: str
    ctype: str
    cname: str
    in_pairs: bool = False
    period: int = 0
    each: int = 1
    index: str = ""

    @property
    def columns(self) -> str:
        """C++: where the columns of an input without rows begin."""
        return self.columns_from(f"{self.name}_ptr_")

    def of_row(self, row: str) -> str:
        """C++: where the columns of a row begin, of an input that has some for each row, or of a table."""
        return self.columns_from(f"row_of_table({self.name}_ptr_, {self.index or row}, {self.name}_stride_)")

    def columns_from(self, begin: str) -> str:
        """C++: columns that begin there, which may repeat along a row."""
        pairs = f", /* each */ {self.each}" if self.each > 1 else ""
        return f"repeated</* columns */ {self.period}{pairs}>({begin})" if self.period else begin


@dataclass(frozen=True)
class Sum:
    """A reduction: its IR name, its C name, its index among its kind, its IR equation, Add or Max, and the C type.

    ``why``: what a reader of its accumulator would ask; empty for most. ``halves``: the C type of elements of 16 bits
    that a thread takes two at a time; empty for none.
    """

    name: str
    cname: str
    index: int
    note: str
    op: str = "Add"
    real: str = "float"
    why: str = ""
    halves: str = ""

    @property
    def functor(self) -> str:
        """The operation in C."""
        return f"MaxOfPairs<{self.halves}>" if self.halves else f"{self.op}<{self.real}>"

    def begin_of_block(self, chunks: int) -> str:
        """C++: the declaration of a number for each chunk that a thread has of a block of features."""
        neutral = ", ".join([f"{self.functor}::neutral()"] * chunks)
        return f"{self.real} {self.name}_block_[{chunks}] = {{{neutral}}};"

    def fold_of_block(self, lanes: int, chunks: int) -> str:
        """C++: the statement that folds the numbers of neighbouring threads."""
        return (
            f"reduce_{'lanes' if chunks == 1 else 'halves'}<{self.functor}, /* lanes */ {lanes}>({self.name}_block_);"
        )

    @property
    def partials(self) -> str:
        """The partial sums in the workspace."""
        return f"{self.name}_partials_"

    @property
    def accumulator(self) -> str:
        """What the terms of a reduction are added to."""
        return f"{self.name}_acc_"

    @property
    def of_vectors(self) -> str:
        """The shared memory in which the numbers of the vectors of a row meet, of a reduction over blocks."""
        return f"{self.name}_vectors_"


def parameters(sums: Iterable[Sum]) -> str:
    """The accumulators of reductions, as parameters."""
    return ", ".join(f"{f'Two<{s.halves}>' if s.halves else s.real}& {s.accumulator}" for s in sums)


@dataclass(frozen=True)
class BlocksText:
    """Reductions over blocks of features: statements before a loop over the elements of a vector, in it, behind it."""

    before: tuple[Statement, ...]
    element: tuple[Statement, ...]
    after: tuple[Statement, ...]


@dataclass(frozen=True)
class LoopText:
    """A loop over the vectors of a thread: ``vector`` statements once per vector, ``element`` ones once per element.

    Between them are reductions over blocks of features; ``after``: the statements behind the elements of a vector.

    ``inputs``: the IR names of the [M, D] and [D] inputs that it reads. ``meeting``: the loops before it, behind each
    of which the threads of a row meet.
    """

    vector: tuple[Statement, ...]
    element: tuple[Statement, ...]
    inputs: tuple[str, ...]
    blocks: tuple[BlocksText, ...] = ()
    after: tuple[Statement, ...] = ()
    meeting: tuple[LoopText, ...] = ()

    @property
    def lines(self) -> tuple[Statement, ...]:
        """All statements, of a thread that has one element."""
        return *self.vector, *self.element

    @property
    def every(self) -> tuple[Statement, ...]:
        """The statements of vectors, blocks and elements."""
        parts = (s for block in self.blocks for s in (*block.before, *block.element, *block.after))
        return *self.vector, *parts, *self.element, *self.after


@dataclass(frozen=True)
class Join:
    """A sum over the segments of a row: the number ``result``, from the ``value`` of each segment ``s_``.

    ``statements`` compute the operands of the value; ``interleave`` partial sums; ``unroll`` rounds of them at a time.
    """

    result: Statement
    statements: tuple[Statement, ...]
    value: str
    interleave: int
    unroll: int


@dataclass(frozen=True)
class Reduce:
    """Reductions of one kind over the held axis, which end a phase.

    op           Add or Max
    call         the device function and its arguments before the terms
    layout       the layout of a vector of features that one block reduces; empty for other reductions
    results      what the device function fills: numbers of the row, or an array of those of its segments
    declaration  of the results
    sums         the reductions
    loop         adds the terms of a vector to the accumulators
    whole_row    the results are those of the row, not of its segments
    kept         values that the loop leaves in registers
    """

    op: str
    call: str
    layout: str
    results: str
    declaration: str
    sums: tuple[Sum, ...]
    loop: LoopText
    whole_row: bool = True
    kept: tuple[Tensor, ...] = ()

    @property
    def accumulators(self) -> str:
        """The parameters of the function that adds the terms of a vector."""
        return parameters(self.sums)


@dataclass(frozen=True)
class PhaseText:
    """The part of a kernel between two row reductions.

    loop         adds to column sums and computes the results that the phase stores
    outputs      [M, D] results stored, and ``of_blocks`` results with a number per block
    accumulators column sums added to
    maxima       maxima over all rows taken into
    reduces      the reductions that end the phase
    exchanged    the sums of segments that the blocks of a cluster then exchange, by name
    after        the statements and the sums over segments that depend on the reductions
    row_outputs  [M] results stored after the reductions; ``alone``: statements before, of the thread that stores them
    releases     the reductions imply that every thread has read the row: its stage is refilled
    broadcast    the exchange of the blocks of a cluster also broadcasts the row for that stage
    kept         stored results that the loop leaves in registers
    """

    number: int
    loop: LoopText | None
    outputs: tuple[Tensor, ...]
    accumulators: tuple[Sum, ...]
    reduces: tuple[Reduce, ...]
    after: tuple[Statement | Join, ...]
    row_outputs: tuple[Tensor, ...]
    alone: tuple[Statement, ...] = ()
    exchanged: tuple[str, ...] = ()
    of_blocks: tuple[Tensor, ...] = ()
    releases: bool = False
    broadcast: bool = False
    kept: tuple[Tensor, ...] = ()
    maxima: tuple[Sum, ...] = ()

    @property
    def loops(self) -> tuple[LoopText, ...]:
        """The loops over the vectors of a row, in order."""
        loops = (*self.storing, *(r.loop for r in self.reduces))
        return tuple(each for loop in loops for each in (*loop.meeting, loop))

    @property
    def storing(self) -> tuple[LoopText, ...]:
        """The loop that stores results and adds to column sums, if the phase has one."""
        return () if self.loop is None else (self.loop,)

    @property
    def whole_rows(self) -> bool:
        """True if a reduction gives results of whole rows, which the blocks of a cluster exchange."""
        return any(r.whole_row for r in self.reduces)

    @property
    def title(self) -> str:
        """The results of the phase in words."""
        sums = [s.name for r in self.reduces for s in r.sums]
        added = {op: [s.name for s in self.accumulators if s.op == op] for op in ("Add", "Max")}
        parts = {
            "column sums": added["Add"],
            "column maxima": added["Max"],
            "maxima over rows": [s.name for s in self.maxima],
            "reduce": sums,
            "store": [t.name for t in (*self.outputs, *self.of_blocks)],
        }
        return "; ".join(f"{what}: {', '.join(names)}" for what, names in parts.items() if names) or "per-row results"
