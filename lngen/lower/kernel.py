"""A kernel of a plan: its launch rule, and the parts of its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lngen.lower.numbers import NumberKernel
from lngen.lower.parts import Argument, Phase, Statement, Sum, Tensor
from lngen.lower.rows import RowKernel


@dataclass(frozen=True)
class Extent:
    """A grid dimension in blocks: ``fixed``, or by rows.

    With rows there are n = ceil(rows / ``per``) blocks or clusters, at most ``limit``, of ``times`` blocks each; the
    extent is at least ``least`` blocks.
    """

    fixed: int = 1
    per: int | None = None
    limit: int | None = None
    times: int = 1
    least: int = 0

    def __call__(self, rows: int) -> int:
        """Blocks for that many rows."""
        if self.per is None:
            return self.fixed
        needed = -(-rows // self.per)
        blocks = self.times * (needed if self.limit is None else min(self.limit, needed))
        return max(self.least, blocks)

    def __str__(self) -> str:
        if self.per is None:
            return str(self.fixed)
        needed = "rows" if self.per == 1 else f"ceil(rows / {self.per})"
        blocks = needed if self.limit is None else f"min({self.limit}, {needed})"
        blocks = blocks if self.times == 1 else f"{self.times} * {blocks}"
        return f"max({self.least}, {blocks})" if self.least else blocks


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
    totals               the shared memory of the rows that the finish uses; its own if empty
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
    totals: str = ""

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
        if self.totals:
            of_rows = self.totals if self.totals != "ring_" else f"reinterpret_cast<{real}*>(ring_)"
            return f"{real}* totals_ = {of_rows};"
        return f"__shared__ __align__(16) {real} totals_[{self.shared}];"

    def totals_of(self, sums: Sequence[Sum]) -> str:
        """C++: where the interleaved sums of some of the accumulators begin."""
        offset = sums[0].index * self.interleave * self.columns
        return f"totals_ + {offset}" if offset else "totals_"


@dataclass(frozen=True)
class Kernel:
    """One ``__global__`` function, its launch rule, and the parts of its text.

    The launch: ``grid`` blocks of ``block`` threads, clusters of ``cluster`` blocks, ``dynamic`` bytes of shared memory
    besides the static ones; ``cooperative`` if its blocks wait for each other; ``always`` if it also has work without
    rows. ``blocks_per_sm``: the number of blocks for which the compiler limits registers.

    The text:

    uniform, per_row           statements once per thread, and once per row before the phases
    wide_inputs, columns       the [M, D] and [D] inputs
    row_inputs, scalars        the [M] and [] inputs
    accumulators               the column sums it adds to
    row                        the policies of a kernel that processes rows
    finish                     the completion of column sums, if it is part of this kernel
    numbers                    the reductions of vectors of a kernel without rows
    statements                 those of a kernel without rows
    groups, row_step, unroll   of a kernel that only adds columns: row groups of a block, the distance from a row of a
                               group to its next, and how many of them are loaded at a time
    leading, evict_last        leading dimension of its partial sums, in numbers, and their store policy
    """

    name: str
    template: str
    arguments: tuple[Argument, ...]
    phases: tuple[Phase, ...]
    grid: tuple[Extent, Extent]
    block: int
    d: int
    blocks_per_sm: int = 1
    policies: tuple[str, ...] = ()
    uniform: tuple[Statement, ...] = ()
    per_row: tuple[Statement, ...] = ()
    wide_inputs: tuple[Tensor, ...] = ()
    columns: tuple[Tensor, ...] = ()
    row_inputs: tuple[Tensor, ...] = ()
    scalars: tuple[Tensor, ...] = ()
    accumulators: tuple[Sum, ...] = ()
    statements: tuple[Statement, ...] = ()
    dynamic: int = 0
    cluster: int = 1
    cooperative: bool = False
    always: bool = False
    row: RowKernel | None = None
    finish: Finish | None = None
    numbers: NumberKernel | None = None
    groups: int = 1
    row_step: int = 0
    unroll: int = 0
    leading: int = 0
    evict_last: str = ""

    @property
    def role(self) -> str:
        """The end of its name: rows, columns, finish, elementwise, numbers."""
        return self.name.rpartition("__")[2]

    def launch_rule(self) -> str:
        """Grid, block and further properties as text."""
        x, y = self.grid
        grid = str(x) if str(y) == "1" else f"{x} x {y}"
        clusters = f", clusters of {self.cluster}" if self.cluster > 1 else ""
        dynamic = f", {self.dynamic} bytes of dynamic shared memory" if self.dynamic else ""
        cooperative = ", cooperative" if self.cooperative else ""
        when = "" if self.always else "; no launch for rows = 0"
        return f"grid {grid}, block {self.block}{clusters}{dynamic}{cooperative}{when}"
