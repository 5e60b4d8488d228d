"""The plan: every decision made, nothing left for a template but layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lngen.ir import WIDE, DType, Graph, Value
from lngen.lower.parts import Argument, Ask, Constant, Phase, Place, Refill, Statement, Sum, Tensor, declared
from lngen.schedule import BULK, Schedule
from lngen.spec import Spec


@dataclass(frozen=True)
class Extent:
    """A grid dimension in blocks: ``fixed``, or by rows.

    Each ``per`` rows have an owner, of which there are at most ``limit``; an owner is ``times`` blocks; there are at
    least ``least`` blocks.
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
        owners = -(-rows // self.per)
        blocks = self.times * (owners if self.limit is None else min(self.limit, owners))
        return max(self.least, blocks)

    def __str__(self) -> str:
        if self.per is None:
            return str(self.fixed)
        owners = "rows" if self.per == 1 else f"ceil(rows / {self.per})"
        blocks = owners if self.limit is None else f"min({self.limit}, {owners})"
        blocks = blocks if self.times == 1 else f"{self.times} * {blocks}"
        return f"max({self.least}, {blocks})" if self.least else blocks


@dataclass(frozen=True)
class Finish:
    """How column sums are completed behind a grid barrier: the totals, and what is computed from them.

    ``scalars``, ``uniform``: what only this needs of inputs and statements without axes.
    """

    accumulators: tuple[Sum, ...]
    phases: tuple[Phase, ...]
    scalars: tuple[Tensor, ...] = ()
    uniform: tuple[Statement, ...] = ()


@dataclass(frozen=True)
class Sections:
    """The partials that row kernels differ in, each where its template lays it out.

    setup      before results of an earlier kernel are read: barriers in shared memory, the length of a block's piece
    held       after that: what stays in registers from row to row
    copies     how rows come to shared memory, and results leave from there
    begun      once the first rows are on their way: what is not needed at once, what need not be waited for later
    row_begin  once a row is there
    tiles      how [M, D] inputs are read where they were copied to
    load       how a phase gets its [M, D] inputs, if it does not have them
    columns    how a phase gets its [D] inputs
    store      where a phase puts its results
    row_end    after the last phase of a row
    end        after the last row: partial sums, and what completes them
    """

    setup: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    begun: tuple[str, ...] = ()
    row_begin: tuple[str, ...] = ()
    tiles: str = ""
    load: tuple[str, ...] = ()
    columns: str = "_load_columns.cuh.jinja"
    store: str = "_store_results.cuh.jinja"
    row_end: tuple[str, ...] = ()
    end: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[str]:
        """Every partial, in the order of the text."""
        yield from (*self.setup, *self.held, *self.copies, *self.begun, *self.row_begin)
        yield from (*filter(None, (self.tiles,)), *self.load, self.columns, self.store)
        yield from (*self.row_end, *self.end)


@dataclass(frozen=True)
class Kernel:
    """One ``__global__`` function, its launch rule, and the text its template lays out.

    What is launched: ``grid`` blocks of ``block`` threads, ``cluster`` blocks to a cluster, with ``dynamic`` bytes of
    shared memory besides the static ones; ``cooperative`` if its blocks wait for each other; ``always`` if it has
    work without rows, too. ``resident``: blocks per multiprocessor the compiler makes room for.

    What is laid out:

    uniform, per_row           statements once a thread, and once a row before the phases
    tiles, columns             the [M, D] and [D] inputs
    row_inputs, scalars        the [M] and [] inputs
    accumulators               the column sums it adds to
    most                       row sums that are folded together at most
    shared                     numbers of static shared memory for folding
    places, results            where inputs, and results that leave in bulk, lie in a stage
    refill                     which stage takes the next row
    exchanged                  numbers that the blocks of a cluster leave each other for a row
    sections                   the partials in which row kernels differ
    finish, totals             column sums completed in the same launch, and the shared memory for it

    And in C: ``owner``, a block's or cluster's place among those that share the rows; ``first_column``, where a
    block's piece of a row starts, and ``start``, the name of that; ``length``, its elements; ``bound``, the columns
    loads and stores look out for; ``writer``, true for the one thread that stores the numbers of a row; ``out``, what
    the name of a result gets for the chunk it is stored from.
    """

    name: str
    template: str
    arguments: tuple[Argument, ...]
    constants: tuple[Constant, ...]
    phases: tuple[Phase, ...]
    grid: tuple[Extent, Extent]
    block: int
    resident: int
    real: str
    absent: str
    uniform: tuple[Statement, ...] = ()
    per_row: tuple[Statement, ...] = ()
    tiles: tuple[Tensor, ...] = ()
    columns: tuple[Tensor, ...] = ()
    row_inputs: tuple[Tensor, ...] = ()
    scalars: tuple[Tensor, ...] = ()
    accumulators: tuple[Sum, ...] = ()
    most: int = 1
    shared: int = 1
    dynamic: int = 0
    cluster: int = 1
    cooperative: bool = False
    always: bool = False
    places: tuple[Place, ...] = ()
    results: tuple[Place, ...] = ()
    refill: Refill = field(default=Refill())
    exchanged: int = 0
    sections: Sections = field(default=Sections())
    finish: Finish | None = None
    totals: str = "scratch"
    owner: str = "blockIdx.x"
    first_column: str = "0"
    start: str = "0"
    length: str = "D"
    bound: str = "D"
    writer: str = "live && lane == 0"
    out: str = "out"

    @property
    def declarations(self) -> tuple[str, ...]:
        """The lines that declare its constants."""
        return declared(self.constants)

    @property
    def first_row(self) -> tuple[Ask, ...]:
        """The row, and the numbers of it, that a row group begins with."""
        row, start = "begin + group", self._start
        return (
            *(self._ask(t, f" + ({row}) * {t.name}_stride{start}", self.length) for t in self.tiles),
            *(self._ask(t, f" + {row}", "1") for t in self.row_inputs),
        )

    @property
    def first_columns(self) -> tuple[Ask, ...]:
        """The [D] inputs, or a block's piece of them."""
        return tuple(self._ask(t, self._start, self.length) for t in self.columns)

    @property
    def _start(self) -> str:
        return "" if self.start == "0" else f" + {self.start}"

    def _ask(self, tensor: Tensor, behind: str, count: str) -> Ask:
        number = [a.name for a in self.arguments].index(f"{tensor.name}_ptr")
        return Ask(tensor.name, tensor.ctype, f"{self.name}_param_{number}", f"{tensor.name}_there{behind}", count)

    def launch_rule(self) -> str:
        """Grid, block and the rest as text."""
        x, y = self.grid
        grid = str(x) if str(y) == "1" else f"{x} x {y}"
        clusters = f", clusters of {self.cluster}" if self.cluster > 1 else ""
        dynamic = f", {self.dynamic} bytes of dynamic shared memory" if self.dynamic else ""
        cooperative = ", cooperative" if self.cooperative else ""
        when = "" if self.always else "; no launch for rows = 0"
        return f"grid {grid}, block {self.block}{clusters}{dynamic}{cooperative}{when}"


@dataclass(frozen=True)
class Buffer:
    """A piece of the workspace: ``fixed`` elements, or ``per_row`` for each row.

    ``zeroed``: it holds counters, of 32 or 64 bits, all zero before the first launch that uses it; every launch leaves
    them fit for the next.
    """

    name: str
    dtype: DType
    fixed: int = 0
    per_row: int = 0
    zeroed: bool = False

    @property
    def element(self) -> str:
        """What it holds: a dtype, or u32 and u64."""
        return f"u{8 * self.dtype.size}" if self.zeroed else str(self.dtype)

    def bytes(self, rows: int) -> int:
        """Its size, rounded up so that the next buffer is aligned to 256 bytes."""
        return -(-(self.fixed + self.per_row * rows) * self.dtype.size // 256) * 256


@dataclass(frozen=True)
class Plan:
    """Spec and schedule, decided: the kernels of one call, in launch order, and what they share."""

    spec: Spec
    schedule: Schedule
    graph: Graph
    kernels: tuple[Kernel, ...]
    workspace: tuple[Buffer, ...] = field(default=())

    @property
    def name(self) -> str:
        """Spells the spec and the schedule; the file name and the stem of the entry names."""
        return f"{self.spec.slug}__{self.schedule.slug}"

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The tensors a caller passes."""
        return self.graph.params

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The tensors a caller gets."""
        return self.graph.results

    def workspace_bytes(self, rows: int) -> int:
        """Bytes of workspace a call with that many rows needs."""
        return sum(b.bytes(rows) for b in self.workspace)

    def workspace_offsets(self, rows: int) -> dict[str, int]:
        """Where each buffer starts in the workspace, in bytes."""
        offsets, start = {}, 0
        for buffer in self.workspace:
            offsets[buffer.name] = start
            start += buffer.bytes(rows)
        return offsets

    def alignment(self, value: Value) -> int:
        """Bytes that a tensor's base pointer must be a multiple of."""
        bulk = self.schedule.form in ("bulk", "ragged") and (value in self.inputs or self.schedule.bulk_store)
        if bulk and value.type.axes == WIDE:
            return BULK
        return min(self.schedule.vec * value.type.dtype.size, BULK)

    @property
    def in_place(self) -> bool:
        """True if an [M, D] result may take the exact place of an [M, D] input: none is read after one is stored."""
        if self.schedule.form != "stream":
            return True  # each number of a row is read once, before any of that row is stored
        phases = [phase for kernel in self.kernels for phase in kernel.phases]
        first = next((n for n, phase in enumerate(phases) if phase.outputs), len(phases))
        return not any(phase.tiles for phase in phases[first + 1 :])

    @property
    def contiguous(self) -> bool:
        """True if the rows of its [M, D] tensors have to lie one behind the other."""
        return self.schedule.form == "ragged"

    def __str__(self) -> str:
        from lngen.lower.show import show_plan

        return show_plan(self)
