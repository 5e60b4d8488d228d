"""A plan on NumPy: its kernels in launch order, on memory that remembers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from lngen.emit import emit
from lngen.errors import PtxError
from lngen.ir import D, M, Value
from lngen.ir.numerics import NUMPY_DTYPE, Array
from lngen.lower import Kernel, Plan
from lngen.ptx.batch import Launch
from lngen.ptx.compiler import compile_entry
from lngen.ptx.kernel import place_globals, run_blocks
from lngen.ptx.memory import Buffer, GlobalMemory
from lngen.ptx.parser import Module, parse
from lngen.ptx.report import Outcome, Reporter, Stop, Traffic
from lngen.ptx.values import UNSIGNED
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
) -> Outcome:
    """Results, findings and traffic of one call of ``plan`` with those inputs, by name.

    ``source`` (CUDA) or ``ptx`` replace what the plan emits; ``rows`` what the inputs say. ``strides``: elements
    from row to row of an [M, D] tensor, default D; ``offset``: elements by which every [M, D] pointer is shifted from
    an aligned address. ``order`` is the seed of the order in which blocks run, 0 as they are numbered; ``grid`` gives
    another grid, (x, y) of a kernel and the rows. ``stop``: end at the first finding. ``times``: how many calls, one
    after another on the same workspace; the results, which each call has to write, are those of the last.
    """
    text = source if source is not None else emit(plan)
    module = parse(ptx if ptx is not None else compile_ptx(text, arch, name=f"{plan.name}.cu", lines=True))
    run = _Run(plan, inputs, rows, dict(strides or {}), offset, Reporter(text, stop), module)
    try:
        with np.errstate(all="ignore"):
            for _ in range(times):
                run.forget_results()
                run.launch(module, order, grid)
                run.look_for_gaps()
    except Stop:
        pass
    return Outcome(run.results(), tuple(run.reporter.findings), run.traffic)


class _Run:
    """The memory of one call, and its kernels' launches."""

    def __init__(
        self,
        plan: Plan,
        inputs: Mapping[str, Array],
        rows: int | None,
        strides: dict[str, int],
        offset: int,
        reporter: Reporter,
        module: Module,
    ) -> None:
        self.plan, self.reporter, self.traffic = plan, reporter, Traffic()
        self.rows = rows if rows is not None else _rows(plan, inputs)
        self.memory = GlobalMemory()
        self.globals = place_globals(self.memory, module)
        self.strides, self.offset = strides, offset
        self.inputs = {v.name: self._place(v, "input") for v in plan.inputs}
        self.outputs = {v.name: self._place(v, "output") for v in plan.outputs}
        for v in plan.inputs:
            self._fill(v, inputs[v.name])
        self.workspace = {}
        for b in plan.workspace:
            size = (b.fixed + b.per_row * self.rows) * b.dtype.size
            held = self.memory.add(Buffer(b.name, "workspace", size, b.dtype.size))
            if b.zeroed:
                held.zero()
            self.workspace[b.name] = held

    def _stride(self, v: Value) -> int:
        return self.strides.get(v.name, self.plan.spec.d)

    def _place(self, v: Value, role: str) -> Buffer:
        s, d = v.type.dtype.size, self.plan.spec.d
        if v.type.axes == (M, D):
            pitch = self._stride(v)
            size = ((self.rows - 1) * pitch + d) * s if self.rows else 0
            return self.memory.add(Buffer(v.name, role, size, s, pitch * s, d * s, self.offset * s))
        count = int(np.prod(v.type.shape(self.rows, d), dtype=np.int64))
        return self.memory.add(Buffer(v.name, role, count * s, s))

    def _view(self, v: Value, data: Array) -> Array:
        """The elements of a tensor in the bytes of its buffer (or of its shadow)."""
        buffer = {**self.inputs, **self.outputs}[v.name]
        shape = v.type.shape(self.rows, self.plan.spec.d)
        elements = data[buffer.shift : buffer.shift + buffer.size].view(UNSIGNED[v.type.dtype.size])
        if v.type.axes != (M, D) or not self.rows:
            return elements.reshape(shape)
        step = elements.itemsize
        return np.lib.stride_tricks.as_strided(elements, shape, (self._stride(v) * step, step))

    def _fill(self, v: Value, array: Array) -> None:
        whole = np.ascontiguousarray(array[: self.rows] if M in v.type.axes else array)
        self._view(v, self.inputs[v.name].data)[...] = whole.view(UNSIGNED[v.type.dtype.size]).reshape(whole.shape)

    def results(self) -> dict[str, Array]:
        """The outputs as they are in memory."""
        return {
            v.name: np.array(self._view(v, self.outputs[v.name].data)).view(NUMPY_DTYPE[v.type.dtype])
            for v in self.plan.outputs
        }

    def forget_results(self) -> None:
        """What an earlier call has left in the outputs."""
        for buffer in self.outputs.values():
            buffer.forget()

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
            )  # fmt: skip
            run_blocks(shared, order)

    def _arguments(self, kernel: Kernel) -> list[int]:
        tensors = {**self.inputs, **self.outputs}
        values = []
        for a in kernel.arguments:
            match a.kind:
                case "rows":
                    values.append(self.rows)
                case "stride":
                    values.append(self.strides.get(a.tensor, self.plan.spec.d))
                case "workspace":
                    values.append(self.workspace[a.tensor].start)
                case _:
                    values.append(tensors[a.tensor].start)
        return values

    def look_for_gaps(self) -> None:
        """Findings for output elements that no kernel wrote."""
        for v in self.plan.outputs:
            buffer = self.outputs[v.name]
            assert buffer.written is not None
            view = self._view(v, buffer.written)
            missing = np.argwhere(view != int.from_bytes(b"\x01" * view.itemsize, "little"))
            if len(missing):
                where = ", ".join(map(str, missing[0].tolist()))
                text = f"'{v.name}[{where}]' is an output that no kernel writes, like {len(missing) - 1} others."
                self.reporter.add("never-written", text, key=v.name)


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
