"""A plan on NumPy: its kernels in launch order, on memory that remembers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from lngen.emit import emit
from lngen.errors import PtxError
from lngen.ir import M
from lngen.ir.numerics import Array
from lngen.lower import Kernel, Plan
from lngen.ptx.batch import Launch
from lngen.ptx.compiler import compile_entry
from lngen.ptx.kernel import place_globals, run_blocks
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
) -> Outcome:
    """Results, findings and traffic of one call of ``plan`` with those inputs, by name.

    ``source`` (CUDA) or ``ptx`` replace what the plan emits; ``rows`` what the inputs say. ``strides``: elements
    from row to row of an [M, D] tensor, default D; ``offset``: elements by which every [M, D] pointer is shifted from
    an aligned address. ``order`` is the seed of the order in which blocks run, 0 as they are numbered; ``grid`` gives
    another grid, (x, y) of a kernel and the rows. ``stop``: end at the first finding. ``times``: how many calls, one
    after another on the same workspace; the results, which each call has to write, are those of the last. ``alias``:
    tensors that lie in another's memory, each with that one's name and how many of its elements come before them:
    ``{"y": ("x", 0)}`` writes y over x. What of an output over an input is not written, only the results can show.
    From sm_90 on every launch is programmatic: the kernel may begin before the one ahead of it has ended, and has to
    wait for it.
    """
    text = source if source is not None else emit(plan)
    module = parse(ptx if ptx is not None else compile_ptx(text, arch, name=f"{plan.name}.cu", lines=True))
    rows = rows if rows is not None else _rows(plan, inputs)
    memory = GlobalMemory()
    tensors = Tensors(plan, inputs, rows, strides or {}, offset, alias or {}, memory)
    run = _Run(plan, rows, tensors, memory, Reporter(text, stop), module)
    try:
        with np.errstate(all="ignore"):
            for _ in range(times):
                tensors.begin()
                run.launch(module, order, grid)
                run.look_for_gaps()
    except Stop:
        pass
    return Outcome(tensors.results(), tuple(run.reporter.findings), run.traffic)


class _Run:
    """The memory of one call, and its kernels' launches."""

    def __init__(
        self, plan: Plan, rows: int, tensors: Tensors, memory: GlobalMemory, reporter: Reporter, module: Module
    ) -> None:
        self.plan, self.rows, self.tensors, self.memory = plan, rows, tensors, memory
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
        """Every kernel of the plan that this many rows need."""
        for kernel in self.plan.kernels:
            if not self.rows and not kernel.always:
                continue
            if kernel.name not in module.entries:
                found = ", ".join(module.entries)
                raise PtxError(f"The kernel '{kernel.name}' is expected in the PTX, which has {found}.")
            entry = module.entries[kernel.name]
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
                programmatic=capability(module.target) >= OVERLAP_ARCH,
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
            text = f"'{name}[{where}]' is an output that no kernel writes, like {len(missing) - 1} others."
            self.reporter.add("never-written", text, key=name)


def _cluster(kernel: Kernel) -> tuple[int, ...]:
    """The clusters that the launch asks for, none if it asks for single blocks."""
    found = getattr(kernel, "cluster", ())
    shape = (found,) if isinstance(found, int) else tuple(found)
    return shape if max(shape, default=1) > 1 else ()


def _rows(plan: Plan, inputs: Mapping[str, Array]) -> int:
    for v in plan.inputs:
        if v.type.axes and v.type.axes[0] is M:
            return int(inputs[v.name].shape[0])
    return 0
