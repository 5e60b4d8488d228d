"""The plan: every decision is made; a template only lays it out."""

from __future__ import annotations

from dataclasses import dataclass, field

from lngen.ir import WIDE, DType, Graph, Value
from lngen.lower.kernel import Kernel
from lngen.lower.show import kernel_lines
from lngen.problem import Problem, Schedule
from lngen.problem.footprint import BULK
from lngen.spec import Spec


@dataclass(frozen=True)
class Buffer:
    """A part of the workspace: ``fixed`` elements, or ``per_row`` for each row.

    ``zeroed``: it holds counters of 32 or 64 bits, all zero before the first launch that uses it; every launch
    leaves them ready for the next.
    """

    name: str
    dtype: DType
    fixed: int = 0
    per_row: int = 0
    zeroed: bool = False

    @property
    def element(self) -> str:
        """The type of an element: a dtype, or u32 and u64."""
        return f"u{8 * self.dtype.size}" if self.zeroed else str(self.dtype)

    def __str__(self) -> str:
        size = f"{self.per_row} * rows" if self.per_row else str(self.fixed)
        return f"{self.name}: {self.element}[{size}]{', zero before the first call' if self.zeroed else ''}"

    def bytes(self, rows: int) -> int:
        """The size, rounded up so that the next buffer is aligned to 256 bytes."""
        return -(-(self.fixed + self.per_row * rows) * self.dtype.size // 256) * 256


@dataclass(frozen=True)
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
        return self.graph.params

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The tensors that a caller gets."""
        return self.graph.results

    def workspace_bytes(self, rows: int) -> int:
        """Bytes of workspace that a call with that many rows needs."""
        return sum(b.bytes(rows) for b in self.workspace)

    def workspace_offsets(self, rows: int) -> dict[str, int]:
        """The offset of each buffer in the workspace, in bytes."""
        offsets, start = {}, 0
        for buffer in self.workspace:
            offsets[buffer.name] = start
            start += buffer.bytes(rows)
        return offsets

    def alignment(self, value: Value) -> int:
        """The required alignment of a tensor's base pointer, in bytes."""
        bulk = self.schedule.form in ("tma", "tma_unaligned") and (value in self.inputs or self.schedule.tma_store)
        if bulk and value.type.axes == WIDE:
            return BULK
        together = self.schedule.vec if value.type.axes else 1
        return min(together * value.type.dtype.size, BULK)

    @property
    def in_place(self) -> bool:
        """True if an [M, D] result may overwrite an [M, D] input exactly: none is read after one is stored."""
        if self.schedule.form != "multipass":
            return True  # each number of a row is read once, before any of that row is stored
        loops = [(phase.outputs, loop) for kernel in self.kernels for phase in kernel.phases for loop in phase.loops]
        first = next((n for n, (outputs, _) in enumerate(loops) if outputs), len(loops))
        wide = {v.name for v in self.inputs if v.type.axes == WIDE}
        return not any(wide & set(loop.inputs) for _, loop in loops[first + 1 :])

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
            *(f"  output    {v}: {v.type}, aligned to {self.alignment(v)} bytes" for v in self.outputs),
        ]
        lines += [f"  workspace {b}" for b in self.workspace]
        for kernel in self.kernels:
            lines += ["", *kernel_lines(kernel)]
        return "\n".join(lines) + "\n"
