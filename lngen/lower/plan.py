"""The plan: every decision made, nothing left for a template but layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from lngen.ir import DType, Graph, Value
from lngen.ir.ops import ctype as ctype
from lngen.schedule import Schedule
from lngen.spec import Spec


@dataclass(frozen=True)
class Extent:
    """A grid dimension in blocks: ``fixed``, or by rows.

    Each ``per`` rows have an owner, of which there are at most ``limit``; an owner is ``times`` blocks; the blocks are
    filled up to a multiple of ``multiple`` and to ``least``.
    """

    fixed: int = 1
    per: int | None = None
    limit: int | None = None
    times: int = 1
    multiple: int = 1
    least: int = 0

    def __call__(self, rows: int) -> int:
        """Blocks for that many rows."""
        if self.per is None:
            return self.fixed
        owners = -(-rows // self.per)
        blocks = self.times * (owners if self.limit is None else min(self.limit, owners))
        return max(self.least, -(-blocks // self.multiple) * self.multiple)

    def __str__(self) -> str:
        if self.per is None:
            return str(self.fixed)
        owners = "rows" if self.per == 1 else f"ceil(rows / {self.per})"
        blocks = owners if self.limit is None else f"min({self.limit}, {owners})"
        blocks = blocks if self.times == 1 else f"{self.times} * {blocks}"
        blocks = blocks if self.multiple == 1 else f"{self.multiple} * ceil({blocks} / {self.multiple})"
        return f"max({self.least}, {blocks})" if self.least else blocks


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
class Sum:
    """A row reduction or a column sum: its IR name, its place among its kind, its IR equation."""

    name: str
    index: int
    note: str


@dataclass(frozen=True)
class Fold:
    """The row reductions of one kind that end a phase: what combines them, its neutral element, their arrays."""

    op: str
    absent: str
    chunks: str
    results: str
    sums: tuple[Sum, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """The statements that take the reductions out of the array of results."""
        named = (Statement(f"const real {s.name} = {self.results}[{s.index}];", s.note) for s in self.sums)
        return tuple(s.line for s in aligned(named))


@dataclass(frozen=True)
class Phase:
    """What happens between two row reductions: elementwise statements, then folds, stores, per-row statements."""

    number: int
    columns: tuple[Tensor, ...]
    tiles: tuple[Tensor, ...]
    statements: tuple[Statement, ...]
    folds: tuple[Fold, ...]
    accumulators: tuple[Sum, ...]
    outputs: tuple[Tensor, ...]
    after: tuple[Statement, ...]
    row_outputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Place:
    """Where in a stage a tensor lies: its IR name, C type and byte."""

    name: str
    ctype: str
    offset: int


@dataclass(frozen=True)
class Constant:
    """A ``constexpr int`` of a kernel."""

    name: str
    value: int
    note: str

    @property
    def line(self) -> str:
        """Its declaration."""
        return f"constexpr int {self.name:<13} = {f'{self.value};':<6} // {self.note}"


@dataclass(frozen=True)
class Finish:
    """How column sums are completed in the row kernel: the totals, and what is computed from them."""

    accumulators: tuple[Sum, ...]
    phases: tuple[Phase, ...]


@dataclass(frozen=True)
class Kernel:
    """One ``__global__`` function, its launch rule, and the text its template lays out."""

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
    copy: str = ""
    places: tuple[Place, ...] = ()
    results: tuple[Place, ...] = ()
    barriers: bool = False
    exchanged: int = 0
    folds_blocks: bool = False
    finish: Finish | None = None
    always: bool = False

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

    ``zeroed``: all bytes are zero before the first launch that uses it; every launch leaves it fit for the next.
    """

    name: str
    dtype: DType
    fixed: int = 0
    per_row: int = 0
    zeroed: bool = False

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
        return min(self.schedule.vec * value.type.dtype.size, 16)

    def __str__(self) -> str:
        from lngen.lower.show import show_plan

        return show_plan(self)
