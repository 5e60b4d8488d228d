"""A plan executed on NumPy: its kernels in launch order, on memory that records accesses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

import numpy as np

from lngen.emit import emit
from lngen.errors import PtxError
from lngen.ir import M
from lngen.ir.numerics import Array
from lngen.lower import Kernel, Plan
from lngen.ptx.batch import MOST, Launch
from lngen.ptx.compiler import compile_entry
from lngen.ptx.kernel import entry_of, place_globals, run_blocks
from lngen.ptx.memory import Buffer, GlobalMemory
from lngen.ptx.parser import Module, parse
from lngen.ptx.report import Outcome, Reporter, Stop, Traffic
from lngen.ptx.tensors import Tensors
from lngen.schedule import OVERLAP_ARCH, capability
from lngen.toolchain import compile_ptx

Grid = Callable[[Kernel, int], tuple[int, int]]


def run_plan(
    plan: Plan,
    inputs: Mapping[str, Array],
    *,
    source: str | None = None,
    ptx: str | None = None,
    arch: str = "sm_90",
    rows: int | None = None,
    strides: Mapping[str, int] | None = None,
    offset: int = 0,
    order: int = 0,
    grid: Grid | None = None,
    stop: bool = False,
    times: int = 1,
    alias: Mapping[str, tuple[str, int]] | None = None,
    most: int = MOST,
) -> Outcome:
    """Results, findings and traffic of one call of ``plan`` with the given inputs, by name.

    ``source`` (CUDA) or ``ptx`` replaces the emitted text; ``rows`` replaces the number of rows of the inputs.
    ``strides``: elements from row to row of an [M, D] tensor, default D; ``offset``: elements by which every [M, D]
    pointer is shifted from an aligned address. ``order`` is the seed of the order in which blocks run, 0 the order of
    their numbers; ``grid`` gives another grid: (x, y) of a kernel and the rows. ``stop``: end at the first finding.
    ``times``: the number of calls, one after another on the same workspace; the results, which each call has to write,
    are those of the last. ``alias``: tensors in the memory of another, each with the other's name and the number of
    its elements before them: ``{"y": ("x", 0)}`` writes y over x. Elements of such an output that are never written
    cause no finding; only the results show them. ``most``: segments of straight code that a batch of blocks runs before
    its kernel counts as one that does not end, which is a finding; ``Traffic.segments`` has the number of a run.
    From sm_90 on every launch is programmatic: the kernel may start before the previous one has ended, and has to wait
    for it.
    """
    text = source if source is not None else emit(plan)
    module = parse(ptx if ptx is not None else compile_ptx(text, arch, name=f"{plan.name}.cu", lines=True))
    rows = rows if rows is not None else _rows(plan, inputs)
    memory = GlobalMemory()
    tensors = Tensors(plan, inputs, rows, strides or {}, offset, alias or {}, memory)
    run = _Run(plan, rows, tensors, memory, Reporter(text, stop), module, most)
    with suppress(Stop), np.errstate(all="ignore"):
        for _ in range(times):
            tensors.begin()
            run.launch(module, order, grid)
            run.look_for_gaps()
    return Outcome(tensors.results(), tuple(run.reporter.findings), run.traffic)


class _Run:
    """The memory of one call, and the launches of its kernels."""

    def __init__(
        self,
        plan: Plan,
        rows: int,
        tensors: Tensors,
        memory: GlobalMemory,
        reporter: Reporter,
        module: Module,
        most: int,
    ) -> None:
        self.plan, self.rows, self.tensors, self.memory, self.most = plan, rows, tensors, memory, most
        self.reporter, self.traffic = reporter, Traffic()
        self.globals = place_globals(memory, module)
        self.workspace = {}
        for b in plan.workspace:
            size = (b.fixed + b.per_row * self.rows) * b.dtype.size
            held = self.memory.add(Buffer(b.name, "workspace", size, b.dtype.size))
            if b.zeroed:
                held.zero()
            self.workspace[b.name] = held

    def launch(self, module: Module, order: int, grid: Grid | None) -> None:
        """Every kernel of the plan that this number of rows needs."""
        for kernel in self.plan.kernels:
            if not self.rows and not kernel.always:
                continue
            entry = entry_of(module, kernel.name)
            program = compile_entry(entry, tuple(self.globals.items()))
            if len(entry.params) != len(kernel.arguments):
                raise PtxError(f"'{kernel.name}' has {len(entry.params)} parameters, the plan {len(kernel.arguments)}.")
            names = [name for name, _ in entry.params]
            arguments = dict(zip(names, self._arguments(kernel), strict=True))
            x, y = grid(kernel, self.rows) if grid else (kernel.grid[0](self.rows), kernel.grid[1](self.rows))
            self.traffic.open(kernel.name)
            shared = Launch(
                kernel.name, program, arguments, (x, y), kernel.block, self.memory, self.reporter, self.traffic,
                dynamic=getattr(kernel, "dynamic", 0), cluster=_cluster(kernel),
                programmatic=capability(module.target) >= OVERLAP_ARCH, most=self.most,
            )  # fmt: skip
            run_blocks(shared, order)

    def _arguments(self, kernel: Kernel) -> list[int]:
        values = []
        for a in kernel.arguments:
            match a.kind:
                case "rows":
                    values.append(self.rows)
                case "stride":
                    values.append(self.tensors.stride(a.tensor))
                case "workspace":
                    values.append(self.workspace[a.tensor].start)
                case _:
                    values.append(self.tensors.start(a.tensor))
        return values

    def look_for_gaps(self) -> None:
        """Findings for output elements that no kernel wrote."""
        for name, missing in self.tensors.gaps():
            where = ", ".join(map(str, missing[0].tolist()))
            text = f"'{name}[{where}]' is an output element that no kernel writes; so are {len(missing) - 1} others."
            self.reporter.add("never-written", text, key=name)


def _cluster(kernel: Kernel) -> tuple[int, ...]:
    """The cluster shape of the launch, empty for a launch of single blocks."""
    found = getattr(kernel, "cluster", ())
    shape = (found,) if isinstance(found, int) else tuple(found)
    return shape if max(shape, default=1) > 1 else ()


def _rows(plan: Plan, inputs: Mapping[str, Array]) -> int:
    for v in plan.inputs:
        if v.type.axes and v.type.axes[0] is M:
            return int(inputs[v.name].shape[0])
    return 0
