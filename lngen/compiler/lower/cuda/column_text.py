"""Column sums: the kernel that only adds columns, and the finish of partial sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lngen.compiler.ir import D, Graph, Value, is_of_columns
from lngen.compiler.lower.cuda.fragments import Statement, Sum, Tensor, c_name
from lngen.compiler.lower.cuda.spelling import Inputs, Spelling


@dataclass(frozen=True)
class ColumnKernel:
    """Of a kernel that only adds columns.

    groups         row groups of a block
    row_step       the distance from a row of a group to its next
    unroll         rows of a group that are loaded at a time
    leading        leading dimension of its partial sums, in numbers
    stored_bytes   bytes of these that a thread stores at a time
    types          the layout of columns over threads, and how sets of rows are cut
    """

    groups: int
    row_step: int
    unroll: int
    leading: int
    stored_bytes: int
    types: tuple[str, ...]

    @property
    def evict_last(self) -> str:
        """The store policy of partial sums."""
        return f"EvictLastStore{self.stored_bytes}"


@dataclass(frozen=True)
class Finish:
    """The end of column sums: the totals of the partial sums, and the results computed from them.

    scalars, uniform     inputs and statements without axes that only the finish needs
    leading              leading dimension of the rows of partial sums, in numbers
    partials             rows of partial sums at most
    rows_per_block       rows that are side by side in a row of partial sums
    rows_per_term        rows of partial sums that are tree-reduced to one term
    interleave           interleaved partial sums of a column
    columns              columns that a block completes at a time
    columns_per_thread   columns that a thread adds side by side
    batch                terms of a column sum, or of a column maximum, that a thread loads at a time
    shares               what shared memory of the rows the finish uses: stages, sums, or none ("")
    """

    d: int
    accumulators: tuple[Sum, ...]
    statements: tuple[Statement, ...]
    leading: int
    partials: int
    rows_per_block: int
    rows_per_term: int
    interleave: int
    columns: int
    columns_per_thread: int
    batch: int
    scalars: tuple[Tensor, ...] = ()
    uniform: tuple[Statement, ...] = ()
    shares: str = ""

    @property
    def shared(self) -> int:
        """Numbers of shared memory for the interleaved sums."""
        return len(self.accumulators) * self.interleave * self.columns

    @property
    def policy(self) -> str:
        """C++: the type that says how partial sums are added."""
        fields = {
            "D": self.d,
            "leading": self.leading,
            "interleave": self.interleave,
            "columns": self.columns,
            "columns per thread": self.columns_per_thread,
            "batch": self.batch,
            "rows per term": self.rows_per_term,
        }
        return f"ColumnFinish<{', '.join(f'/* {name} */ {value}' for name, value in fields.items())}>"

    @property
    def shared_memory(self) -> str:
        """C++: the declaration of the shared memory for the interleaved sums."""
        real = self.accumulators[0].real
        if self.shares:
            of_rows = f"reinterpret_cast<{real}*>(ring_)" if self.shares == "stages" else "sums_buffer_"
            return f"{real}* totals_ = {of_rows};"
        return f"__shared__ __align__(16) {real} totals_[{self.shared}];"

    def totals_of(self, sums: Sequence[Sum]) -> str:
        """C++: where the interleaved sums of some of the accumulators begin."""
        offset = sums[0].index * self.interleave * self.columns
        return f"totals_ + /* {sums[0].real}s */ {offset}" if offset else "totals_"


@dataclass(frozen=True)
class SetFinish:
    """The end of column sums by sets of rows: the totals of each set, or of all sets, and their results.

    cut           C++: how a set is cut into stretches, of which each has a row of partial sums
    leading       leading dimension of these, in numbers
    interleave    interleaved partial sums of a column, where they are many
    threads       with the same columns of a set
    lanes         threads of a block with different ones
    each          neighbouring columns of a thread
    handed        the totals of sets in the workspace
    terms         of a sum over all sets, or heads: what each adds
    heads         their number; 0 for sets, whose number follows from the rows
    shared        numbers of shared memory
    """

    accumulators: tuple[Sum, ...]
    statements: tuple[Statement, ...]
    interleave: int
    cut: str = ""
    leading: int = 0
    handed: tuple[str, ...] = ()
    terms: tuple[Statement, ...] = ()
    heads: int = 0
    threads: int = 1
    lanes: int = 0
    each: int = 1
    shared: int = 0

    @property
    def numbers(self) -> int:
        """Numbers of shared memory for a sum."""
        return self.shared // len(self.accumulators)

    @property
    def policy(self) -> str:
        """C++: the type that says how the partial sums of a set are added."""
        names = ("leading", "interleave", "threads", "lanes", "each")
        fields = {name: getattr(self, name) for name in names}
        return f"SetFinish<{', '.join(f'/* {name} */ {value}' for name, value in fields.items())}>"

    @property
    def count(self) -> str:
        """C++: how many sets, or heads, are added."""
        return f"/* heads */ {self.heads}" if self.heads else "rows_ / inner_"


def set_spelling(values: Iterable[Value]) -> Spelling:
    """A thread has one column of a set: of the [N, D] and [D] inputs ``values``, from memory, and of each result."""
    place = "{0}_ptr_[set_ * {0}_outer_ + col_]"
    known = {v: f"{v.name}_ptr_[{_column(v)}]" if is_of_columns(v) else place.format(v.name) for v in values}
    inputs = Inputs({v: text for v, text in known.items() if v.type.axes}, place="col_")
    return Spelling(inputs, store=place, partial="{}_strands_[s_]")


def head_spelling(values: Iterable[Value], columns: int) -> Spelling:
    """A thread has one column of a head of ``columns``: of the [D] and [E] inputs ``values``, from memory."""
    place = f"(static_cast<int>(set_) * /* columns */ {columns} + col_)"
    known = {v: f"{v.name}_ptr_[{place if v.type.along(D) is D else 'col_'}]" for v in values if v.type.axes}
    return Spelling(Inputs(known, place=place), partial="{}_strands_[s_]")


def column_sum_spelling(graph: Graph, lanes: Callable[[int], int]) -> Spelling:
    """A thread has a vector of columns, and adds terms to the sums of its elements; ``lanes`` as of a ``Spelling``."""
    elements = {v: f"{c_name(v)}[i_]" for v in graph.params if v.type.along(D)}
    inputs = Inputs(
        elements,
        place="Row::column(/* vector */ 0, i_)",
        of_vector="Row::column(/* vector */ 0, 0)",
        number="/* vector */ 0",
    )
    return Spelling(inputs, partial="{}_sums_[i_]", lanes=lanes)


def _column(value: Value) -> str:
    return f"col_ % {value.type.axes[0].period}" if value.type.axes[0].period else "col_"


def column_spelling(values: Iterable[Value]) -> Spelling:
    """A thread has one column of each of the [D] inputs ``values``, from memory, and of each result."""
    inputs = Inputs({v: f"{v.name}_ptr_[{_column(v)}]" for v in values if is_of_columns(v)}, place="col_")
    return Spelling(inputs, store="{}_ptr_[col_]")
