"""The plan: every decision is made; a template only lays it out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from lngen.compiler.ir import WIDE, ByValue, DType, Graph, M, Value, is_of_columns, is_of_set, is_of_table, preformatted
from lngen.compiler.lower.arguments import Argument
from lngen.compiler.lower.cuda.column_text import ColumnKernel, Finish, SetFinish
from lngen.compiler.lower.cuda.fragments import Join, PhaseText, Statement, Sum, Tensor
from lngen.compiler.lower.cuda.maxima_text import Maxima
from lngen.compiler.lower.cuda.row_text import Place, RowKernel
from lngen.compiler.lower.cuda.spelling import address, address_of_set, declaration, tensors
from lngen.compiler.lower.nest import Nest
from lngen.compiler.problem import Problem, Schedule
from lngen.compiler.problem.footprint import BULK
from lngen.compiler.spec import Spec
from lngen.rules import RULES, Extent, Stretch, aligned, buffer_elements, laid_out

# ---- kernels ----


class Levels(NamedTuple):
    """Tensors by their axes: [M, D], [D] or [E], [M], none, those of sets of rows, and [M, E] or tables [P, E]."""

    element: tuple[Tensor, ...]
    column: tuple[Tensor, ...]
    row: tuple[Tensor, ...]
    launch: tuple[Tensor, ...]
    of_set: tuple[Tensor, ...]
    table: tuple[Tensor, ...] = ()


def by_level(values: Iterable[Value]) -> Levels:
    """The tensors of values, by level."""
    values = tuple(values)
    wide, rows, none = (tensors(v for v in values if v.type.axes == axes) for axes in (WIDE, (M,), ()))
    return Levels(wide, tensors(filter(is_of_columns, values)), rows, none, tensors(filter(is_of_set, values)))


@dataclass(frozen=True)
class Kernel:
    """One ``__global__`` function, its launch rule, and the parts of its text.

    The launch: ``grid`` blocks of ``block`` threads, clusters of ``cluster`` blocks, ``dynamic`` bytes of shared memory
    besides the static ones; ``cooperative`` if its blocks wait for each other; ``always`` if it also has work without
    rows. ``blocks_per_sm``: the number of blocks for which the compiler limits registers.

    The text:

    inputs                     the input tensors, by the level at which they are read
    nest                       the places of its equations
    uniform, per_row           statements once per thread, and once per row before the phases
    phases                     the text of the nest, phase by phase
    accumulators               the column sums it adds to
    row                        what a kernel that processes rows decides
    column                     the same of a kernel that only adds columns
    finish                     the completion of column sums, if it is part of this kernel
    maxima                     the maxima over all rows that it completes
    shared                     numbers of shared memory in which one block reduces vectors
    strides                    distances between the rows of an [M, D] tensor, 1 or 2; 1 without such tensors
    """

    name: str
    template: str
    arguments: tuple[Argument, ...]
    grid: tuple[Extent, Extent]
    block: int
    d: int
    inputs: Levels
    nest: Nest
    uniform: tuple[Statement, ...] = ()
    per_row: tuple[Statement, ...] = ()
    phases: tuple[PhaseText, ...] = ()
    blocks_per_sm: int = 1
    accumulators: tuple[Sum, ...] = ()
    dynamic: int = 0
    cluster: int = 1
    cooperative: bool = False
    always: bool = False
    row: RowKernel | None = None
    column: ColumnKernel | None = None
    finish: Finish | SetFinish | None = None
    maxima: Maxima | None = None
    shared: int = 0
    strides: int = 1

    @property
    def role(self) -> str:
        """The end of its name: rows, columns, finish, elementwise, numbers."""
        return self.name.rpartition("__")[2]

    @property
    def parameters(self) -> tuple[str, ...]:
        """C++: the declarations of its arguments."""
        return tuple(map(declaration, self.arguments))

    @property
    def policies(self) -> tuple[str, ...]:
        """C++: the types that its text begins with."""
        if self.row:
            return self.row.types(overtaken=self.takes_elements and self.stores_rows)
        return self.column.types if self.column else ()

    def address(self, tensor: Tensor | Place, row: str) -> str:
        """C++: the address of a row of an [M, D] tensor in global memory."""
        return address(tensor.name, row, self.strides)

    def address_of_set(self, tensor: Tensor) -> str:
        """C++: the address of the features of a row's set."""
        return address_of_set(tensor.name)

    @property
    def stores_rows(self) -> bool:
        """True if it has an [M, D] result."""
        return any(phase.outputs for phase in self.phases)

    @property
    def folds_blocks(self) -> bool:
        """True if lanes of a warp fold or turn blocks of features, so that all of them stay."""
        return any(
            part.folds or part.turned for phase in self.nest.phases for loop in phase.loops for part in loop.blocks
        )

    @property
    def takes_elements(self) -> bool:
        """True if it reads an element of a row of an [M, D] input by its index."""
        return any(e.op == "take" and e.args[0].type.axes == WIDE for e in self.nest.row)

    def launch_rule(self) -> str:
        """Grid, block and further properties as text; M is the number of rows, as in the graph."""
        x, y = self.grid
        grid = str(x) if str(y) == "1" else f"{x} x {y}"
        clusters = f", clusters of {self.cluster}" if self.cluster > 1 else ""
        dynamic = f", at least {self.dynamic} bytes of dynamic shared memory" if self.dynamic else ""
        cooperative = ", cooperative" if self.cooperative else ""
        when = "" if self.always else "; no launch for M = 0"
        return f"grid {grid}, block {self.block}{clusters}{dynamic}{cooperative}{when}"


# ---- plans ----


@dataclass(frozen=True)
class Buffer:
    """A part of the workspace: ``fixed`` elements, ``per_row`` for each row, or ``per_stretch`` of the rows of a set.

    ``zeroed``: it holds words of 32 or 64 bits, all zero before the first launch that uses it; every launch leaves
    them ready for the next.
    """

    name: str
    dtype: DType
    fixed: int = 0
    per_row: int = 0
    zeroed: bool = False
    per_stretch: int = 0
    stretch: Stretch | None = None

    @property
    def element(self) -> str:
        """The type of an element: a dtype, or u32 and u64."""
        return f"u{8 * self.dtype.size}" if self.zeroed else str(self.dtype)

    def __str__(self) -> str:
        size = str(self.fixed) if not self.per_row else "M" if self.per_row == 1 else f"{self.per_row} * M"
        size = f"{self.per_stretch} * stretches of M / n rows" if self.per_stretch else size
        return f"{self.name}: {self.element}[{size}]{', zero before the first call' if self.zeroed else ''}"

    def elements(self, rows: int, inner: int = 1) -> int:
        """How many there are for so many rows, ``inner`` of them in a set."""
        return buffer_elements(self.fixed, self.per_row, self.per_stretch, self.stretch, rows, inner)

    def bytes(self, rows: int, inner: int = 1) -> int:
        """The size, rounded up so that the next buffer is aligned."""
        return aligned(self.elements(rows, inner) * self.dtype.size)


@dataclass(frozen=True, repr=False)
class Plan:
    """Spec and schedule with all decisions: the kernels of one call, in launch order, and their workspace."""

    spec: Spec
    schedule: Schedule
    graph: Graph
    problem: Problem
    kernels: tuple[Kernel, ...]
    workspace: tuple[Buffer, ...] = field(default=())
    accumulator: DType = DType.F32  # the dtype in which sums are added

    @property
    def name(self) -> str:
        """The name of the spec and the schedule, as that of a file."""
        return f"{self.spec.file_slug}__{self.schedule.slug}"

    @property
    def stem(self) -> str:
        """The same as a C identifier: the namespace, and the stem of the entry names."""
        return f"{self.spec.slug}__{self.schedule.slug}"

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The tensors that a caller passes."""
        return self.graph.tensors

    @property
    def by_value(self) -> tuple[ByValue, ...]:
        """The numbers that a caller passes by value."""
        return self.graph.by_value

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The tensors that a caller gets."""
        return self.graph.results

    def workspace_bytes(self, rows: int, inner: int = 1) -> int:
        """Bytes of workspace that a call with that many rows needs, ``inner`` of them in a set."""
        return self._laid_out(rows, inner)[1]

    def workspace_offsets(self, rows: int, inner: int = 1) -> dict[str, int]:
        """The offset of each buffer in the workspace, in bytes."""
        return self._laid_out(rows, inner)[0]

    def _laid_out(self, rows: int, inner: int) -> tuple[dict[str, int], int]:
        return laid_out((b.name, b.bytes(rows, inner)) for b in self.workspace)

    def alignment(self, value: Value) -> int:
        """The required alignment of a tensor's base pointer, in bytes."""
        bulk = self.schedule.form in ("tma", "tma_unaligned") and (value in self.inputs or self.schedule.tma_store)
        if bulk and value.type.axes == WIDE:
            return BULK
        together = self.schedule.vec if value.type.axes else 1
        if is_of_table(value):
            together = max(1, together // value.type.axes[1].each)
        return min(together * value.type.dtype.size, BULK)

    @property
    def in_place(self) -> bool:
        """True if an [M, D] result may overwrite an [M, D] input exactly: none is read after one is stored."""
        if any(k.takes_elements and k.phases[0].number == 0 and k.phases[0].outputs for k in self.kernels):
            return False  # a thread may store what another one takes
        if self.schedule.form != "multipass":
            return True  # each number of a row is read once, before any of that row is stored
        loops = [(phase, loop) for kernel in self.kernels for phase in kernel.phases for loop in phase.loops]
        stores = (n for n, (phase, loop) in enumerate(loops) if phase.outputs and loop in phase.storing)
        wide = {v.name for v in self.inputs if v.type.axes == WIDE}
        return not any(wide & set(loop.inputs) for _, loop in loops[next(stores, len(loops)) + 1 :])

    @property
    def contiguous(self) -> bool:
        """True if the rows of its [M, D] tensors have to be contiguous, without gaps between rows."""
        return self.schedule.form == "tma_unaligned"

    def __str__(self) -> str:
        lines = [
            f"plan {self.name}",
            f"  spec      {self.spec}",
            f"  schedule  {self.schedule}",
            *(f"  input     {v}: {v.type}, aligned to {self.alignment(v)} bytes" for v in self.inputs),
            *(f"  by value  {v}: {v.type} = {RULES[v.rule].text}" for v in self.by_value),
            *(f"  output    {v}: {v.type}, aligned to {self.alignment(v)} bytes" for v in self.outputs),
        ]
        lines += [f"  workspace {b}" for b in self.workspace]
        for kernel in self.kernels:
            lines += ["", *kernel_lines(kernel)]
        return "\n".join(lines) + "\n"

    def __repr__(self) -> str:
        """One line; the text has all kernels."""
        return f"<Plan {self.spec}, {self.schedule}: {', '.join(k.role for k in self.kernels)}>"

    def _repr_html_(self) -> str:
        return preformatted(str(self))


# ---- a kernel as text, which a person reads before the CUDA ----


def kernel_lines(kernel: Kernel) -> list[str]:
    """The launch rule of a kernel, its policies and its phases, line by line."""
    lines = [
        f"kernel {kernel.name}",
        f"  template  {kernel.template}",
        f"  launch    {kernel.launch_rule()}",
        f"  arguments {', '.join(a.name for a in kernel.arguments)}",
        *(f"  policy    {policy.removeprefix('using ').removesuffix(';')}" for policy in kernel.policies),
    ]
    if kernel.row and kernel.row.places:
        lines.append(f"  stage     {', '.join(map(str, kernel.row.places))}")
    if kernel.row and kernel.row.results:
        lines.append(f"  leaving   {', '.join(map(str, kernel.row.results))}")
    if kernel.row and kernel.row.cached:
        lines.append(f"  cached    {', '.join(t.name for t in kernel.inputs.column)}")
    if kernel.dynamic and kernel.row:
        of = ["stages"] * kernel.row.staged + ["rotated heads"] * bool(kernel.row.turned)
        lines.append(f"  shared    {kernel.dynamic} bytes of {' and '.join(of)}")
    if kernel.uniform:
        lines.append("  once      " + " ".join(_defined(s) for s in kernel.uniform))
    if kernel.maxima:
        lines.append(f"  joined    {' '.join(t.name for t, _ in kernel.maxima.results)}")
    columns = [*kernel.finish.statements] if kernel.finish else []
    for phase in kernel.phases:
        if kernel.role in ("rows", "columns"):
            lines += _phase(phase)
        elif phase.reduces:
            lines.append(f"  reduce    {' '.join(s.name for r in phase.reduces for s in r.sums)}")
            lines += [f"  then      {_defined(s)}" for after in phase.after for s in _statements(after)]
            lines += [f"  alone     {_defined(s)}" for s in phase.alone]
        elif kernel.role == "elementwise":
            columns += [s for loop in phase.storing for s in loop.element]
    if columns:
        lines.append("  columns   " + " ".join(_defined(s) for s in columns if _defines(s)))
    return lines


def _phase(phase: PhaseText) -> list[str]:
    meeting = [first for loop in phase.loops for first in loop.meeting]
    parts = {
        "load": dict.fromkeys(name for loop in phase.loops for name in loop.inputs),
        "compute": dict.fromkeys(_defined(s) for loop in phase.loops for s in loop.every if s.note and _defines(s)),
        "meet": dict.fromkeys(s.note.split()[0][1:] for first in meeting for s in first.element if _adds(s)),
        "sum": [s.name for r in phase.reduces if r.op == "Add" for s in r.sums],
        "maximum": [s.name for r in phase.reduces if r.op == "Max" for s in r.sums],
        "exchange": phase.exchanged,
        "then": dict.fromkeys(_defined(s) for after in phase.after for s in _statements(after)),
        "alone": dict.fromkeys(map(_defined, phase.alone)),
        "accumulate": [a.name for a in phase.accumulators if a.op == "Add"],
        "column max": [a.name for a in phase.accumulators if a.op == "Max"],
        "over rows": [m.name for m in phase.maxima],
        "store": [o.name for o in (*phase.outputs, *phase.of_blocks, *phase.row_outputs)],
    }
    lines = [f"    {what:<10} {' '.join(names)}" for what, names in parts.items() if names]
    return [f"  phase {phase.number}", *lines]


def _statements(after: Statement | Join) -> tuple[Statement, ...]:
    return (*after.statements, after.result) if isinstance(after, Join) else (after,)


def _defines(statement: Statement) -> bool:
    return statement.text.startswith("const ")


def _adds(statement: Statement) -> bool:
    """True for a term of a reduction."""
    return bool(statement.note) and not _defines(statement)


def _defined(statement: Statement) -> str:
    """The name that a statement defines."""
    return statement.text.split(" = ")[0].split()[-1]
