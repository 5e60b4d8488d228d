"""A plan executed on NumPy: its tensors, and its kernels in launch order, on memory that records accesses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from lngen.compiler.devices import capability
from lngen.compiler.emit import emit
from lngen.compiler.ir import WIDE, M, Value, bits_of, is_of_set, is_of_table
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array
from lngen.compiler.lower import Argument, Kernel, Plan
from lngen.compiler.problem import OVERLAP_ARCH
from lngen.compiler.toolchain import compile_ptx
from lngen.errors import PtxError
from lngen.proof.ptx.batch import MOST, Launch
from lngen.proof.ptx.compiler import compile_entry
from lngen.proof.ptx.launch import entry_of, place_globals, run_blocks
from lngen.proof.ptx.memory import Allocation, GlobalMemory, Rows
from lngen.proof.ptx.outcome import Outcome, Reporter, Stop, Traffic
from lngen.proof.ptx.parser import Entry, parse
from lngen.proof.ptx.program import UNSIGNED
from lngen.rules import Distance, row_argument

Grid = Callable[[Kernel, int], tuple[int, int]]


def run_plan(
    plan: Plan,
    inputs: Mapping[str, Array],
    *,
    source: str | None = None,
    ptx: str | None = None,
    arch: str = "sm_90",
    rows: int | None = None,
    strides: Mapping[str, Distance] | None = None,
    inner: int = 1,
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
    ``strides``: elements from row to row of an [M, D] tensor, default D; or, with strides=2, a pair: from the first of
    ``inner`` rows to that of the next ``inner``, and from row to row; those of a set are inner rows. Of columns,
    elements from one to the next in a given array; by default it is a new one, the base of the result. ``offset``:
    elements by which all pointers to rows, or columns, are shifted from an aligned address. ``order`` is the seed of
    the order in which blocks run, 0 that of their numbers; ``grid`` gives another grid: (x, y) of a kernel and the
    rows. ``stop``: end at the first finding. ``times``: the number of calls, one after another on the same workspace;
    the results, which each call has to write, are those of the last. ``alias``: tensors in the memory of another, each
    with the other's name and the number of its elements before them: ``{"y": ("x", 0)}`` writes y over x. Elements of
    such an output that are never written cause no finding; only the results show them. ``most``: segments of code
    (``Traffic.segments`` of a run) that a batch of blocks runs before its kernel counts as one that does not end. From
    sm_90 on every launch is programmatic: a kernel may start before the one before has ended, and has to wait.
    """
    text = source if source is not None else emit(plan)
    module = parse(ptx if ptx is not None else compile_ptx(text, arch, name=f"{plan.name}.cu", lines=True))
    rows, inner = _lengths(plan, inputs, rows, inner)
    memory, reporter, traffic = GlobalMemory(), Reporter(text, stop, module.headers), Traffic()
    variables = place_globals(memory, module)  # first: with any number of rows a kernel is the same program
    tensors = Tensors(plan, inputs, rows, strides or {}, inner, offset, alias or {}, memory)
    workspace = _workspace(plan, rows, inner, memory)

    def launch(kernel: Kernel) -> Launch:
        entry = entry_of(module, kernel.name)
        x, y = grid(kernel, rows) if grid else (kernel.grid[0](rows), kernel.grid[1](rows))
        return Launch(
            kernel.name, compile_entry(entry, tuple(variables.items())),
            _arguments(entry, kernel, rows, tensors, workspace),
            (x, y), kernel.block, memory, reporter, traffic,
            dynamic=kernel.dynamic, cluster=(kernel.cluster,) if kernel.cluster > 1 else (),
            programmatic=capability(module.target) >= OVERLAP_ARCH, most=most,
        )  # fmt: skip

    with suppress(Stop), np.errstate(all="ignore"):
        for _ in range(times):
            tensors.begin()
            for kernel in plan.kernels:
                if rows or kernel.always:
                    run_blocks(launch(kernel), order)
            _report_gaps(tensors, reporter)
    return Outcome(tensors.results(), tuple(reporter.findings), traffic)


def _rows(plan: Plan, inputs: Mapping[str, Array]) -> int:
    for v in plan.inputs:
        if v.type.axes and v.type.axes[0] is M:
            return int(inputs[v.name].shape[0])
    return 0


def _lengths(plan: Plan, inputs: Mapping[str, Array], rows: int | None, inner: int) -> tuple[int, int]:
    """Rows, and those that are inner ones; of sets an input says how many there are."""
    rows = _rows(plan, inputs) if rows is None else rows
    sets = next((len(inputs[v.name]) for v in plan.inputs if is_of_set(v)), 0)
    return rows, max(rows // sets, 1) if sets else inner


def _workspace(plan: Plan, rows: int, inner: int, memory: GlobalMemory) -> dict[str, Allocation]:
    """The buffers of the workspace, which all calls share."""
    held = {}
    for b in plan.workspace:
        size = b.elements(rows, inner) * b.dtype.size
        held[b.name] = memory.add(Allocation(b.name, "workspace", size, b.dtype.size))
        if b.zeroed:
            held[b.name].zero()
    return held


def _arguments(
    entry: Entry, kernel: Kernel, rows: int, tensors: Tensors, workspace: Mapping[str, Allocation]
) -> dict[str, int]:
    """The bits of the arguments of a launch by the names of the parameters."""
    if len(entry.params) != len(kernel.arguments):
        raise PtxError(f"'{kernel.name}' has {len(entry.params)} parameters, the plan {len(kernel.arguments)}.")
    values = (_argument(a, rows, tensors, workspace) for a in kernel.arguments)
    return dict(zip((name for name, _ in entry.params), values, strict=True))


def _argument(a: Argument, rows: int, tensors: Tensors, workspace: Mapping[str, Allocation]) -> int:
    """The bits of an argument of a launch."""
    match a.kind:
        case "workspace":
            return workspace[a.tensor].start
        case "value":
            return bits_of(tensors.inputs[a.tensor])
        case "input" | "output":
            return tensors.places[a.tensor].start
        case _:
            return row_argument(a.kind, rows, tensors.inner, tensors.distances.get(a.tensor, 0))


def _report_gaps(tensors: Tensors, reporter: Reporter) -> None:
    """Findings for output elements that no kernel wrote."""
    for name, missing in tensors.gaps():
        where = ", ".join(map(str, missing[0].tolist()))
        text = f"'{name}[{where}]' is an output element that no kernel writes; so are {len(missing) - 1} others."
        reporter.add("never-written", text, key=name)


WRITTEN = {n: int.from_bytes(b"\x01" * n, "little") for n in UNSIGNED}  # the shadow of an element of n bytes


def _is_strided(v: Value) -> bool:
    """True for a tensor whose rows, or those of its sets, a caller places."""
    return v.type.axes == WIDE or is_of_set(v) or is_of_table(v)


@dataclass(frozen=True)
class Place:
    """The position of a tensor: its first element is ``begin`` bytes after the first of a buffer."""

    buffer: Allocation
    begin: int

    @property
    def start(self) -> int:
        """Address of the first element."""
        return self.buffer.start + self.begin


class Tensors:
    """Inputs and outputs of a call by name; ``strides``, ``inner``, ``offset`` and ``alias`` as in ``run_plan``."""

    def __init__(
        self,
        plan: Plan,
        inputs: Mapping[str, Array],
        rows: int,
        strides: Mapping[str, Distance],
        inner: int,
        offset: int,
        alias: Mapping[str, tuple[str, int]],
        memory: GlobalMemory,
    ) -> None:
        self.plan, self.inputs, self.rows = plan, inputs, rows
        self.inner, self.offset = inner, offset
        values = (*plan.inputs, *plan.outputs)
        known: dict[str, Distance] = {v.name: plan.spec.d for v in values if v.type.axes == WIDE}
        known |= {v.name: (plan.spec.d, 0) for v in values if is_of_set(v)}
        known |= {v.name: inputs[v.name].shape[1] for v in plan.inputs if is_of_table(v)}
        self.distances = {**known, **strides}
        self.places = dict(self._placed(alias, memory))

    def rows_of(self, v: Value) -> Rows | None:
        """Where the rows, columns or sets of a tensor begin after its first element, in bytes; None without distances.

        The columns of a new tensor have what is behind the rows.
        """
        size, distance = v.type.dtype.size, self.distances.get(v.name, 0)
        if v.type.by_columns:
            step, used = (row_argument(kind, self.rows, 1, distance) for kind in ("column_stride", "padded"))
            return Rows(self._shape(v)[0], used * size, (step * size,))
        if not _is_strided(v) or not self.rows:
            return None
        if is_of_table(v):
            assert isinstance(distance, int)
            count, width = self._shape(v)
            return Rows(count, width * size, (size * distance,))
        if is_of_set(v):
            assert isinstance(distance, tuple)
            return Rows(self.rows // self.inner, self.plan.spec.d * size, (size * distance[0],))
        pitches = tuple(size * n for n in reversed(distance)) if isinstance(distance, tuple) else (size * distance,)
        return Rows(self.rows, self.plan.spec.d * size, pitches, self.inner)

    def begin(self) -> None:
        """Starts a call: inputs have their given values, outputs hold nothing of an earlier call."""
        for v in self.plan.outputs:
            self.places[v.name].buffer.forget()
        for v in self.plan.inputs:
            self._fill(v)

    def results(self) -> dict[str, Array]:
        """The contents of the outputs."""
        found = {}
        for v in self.plan.outputs:
            elements, at = self._elements(v, self.places[v.name].buffer.data)
            bits = np.array(elements[at])[:, : self.rows] if v.type.by_columns else np.array(elements[at])
            found[v.name] = bits.view(NUMPY_DTYPE[v.type.dtype])
        return found

    def gaps(self) -> Iterator[tuple[str, Array]]:
        """Outputs with elements that nothing wrote, and the indices of these elements."""
        for v in self.plan.outputs:
            written = self.places[v.name].buffer.written
            assert written is not None
            elements, at = self._elements(v, written)
            missing = np.argwhere(elements[at] != WRITTEN[v.type.dtype.size])
            if len(missing):
                yield v.name, missing

    def _placed(self, alias: Mapping[str, tuple[str, int]], memory: GlobalMemory) -> Iterator[tuple[str, Place]]:
        known = {v.name: v for v in (*self.plan.inputs, *self.plan.outputs)}
        shared = {name: [(v, 0)] for name, v in known.items() if name not in alias}
        for name, (host, shift) in alias.items():
            if name not in known or host not in shared:
                free = ", ".join(shared)
                raise PtxError(f"alias: a tensor over one of {free} is expected, got '{name}' over '{host}'.")
            shared[host].append((known[name], shift * known[host].type.dtype.size))
        for group in shared.values():
            low = min(begin for _, begin in group)
            moved = [(v, begin - low) for v, begin in group]
            buffer = memory.add(self._buffer(moved))
            buffer.edges = self._edges(moved, buffer.shift)
            yield from ((v.name, Place(buffer, begin)) for v, begin in moved)

    def _buffer(self, group: list[tuple[Value, int]]) -> Allocation:
        """A buffer for tensors at the given offsets; bytes between rows belong to it unless all strides agree."""
        name = "=".join(v.name for v, _ in group)
        role = "output" if any(v in self.plan.outputs for v, _ in group) else "input"
        size = max(begin + self._size(v) for v, begin in group)
        item = min(v.type.dtype.size for v, _ in group)
        if not all(_is_strided(v) or v.type.by_columns for v, _ in group):
            return Allocation(name, role, size, item)
        first, _ = group[0]
        layouts = {(begin, self.distances.get(v.name, 0), v.type.dtype.size) for v, begin in group}
        return Allocation(
            name, role, size, item, self.rows_of(first) if len(layouts) == 1 else None, self.offset * item
        )

    def _edges(self, group: list[tuple[Value, int]], shift: int) -> Array:
        """Where what blocks copy of rows begins and ends in a buffer, if rows begin anywhere."""
        schedule, problem = self.plan.schedule, self.plan.problem
        blocks, found = max(schedule.cluster, 1), [np.zeros(0, np.int64)]
        edges = np.minimum(np.arange(blocks + 1) * (problem.segments // blocks * problem.segment), problem.d)
        for v, begin in group if schedule.form == "tma_unaligned" else ():
            rows = self.rows_of(v) if v.type.axes == WIDE and v in self.plan.inputs else None
            if rows is not None:
                found.append((rows.starts[:, None] + edges * v.type.dtype.size + (begin + shift)).reshape(-1))
        return np.unique(np.concatenate(found))

    def _shape(self, v: Value) -> tuple[int, ...]:
        if is_of_set(v):
            return self.rows // self.inner, self.plan.spec.d
        if is_of_table(v) and v.type.axes[0] is not M:
            return self.inputs[v.name].shape
        return v.type.shape(self.rows, self.plan.spec.d)

    def _size(self, v: Value) -> int:
        if rows := self.rows_of(v):
            return int(rows.ordered[-1]) + rows.used
        return int(np.prod(self._shape(v), dtype=np.int64)) * v.type.dtype.size

    def _elements(self, v: Value, data: Array) -> tuple[Array, Any]:
        """An array on the bytes of a tensor's buffer (or of the buffer's shadow), and where the elements are in it."""
        place, shape = self.places[v.name], self._shape(v)
        first = place.buffer.shift + place.begin
        elements = data[first : first + self._size(v)].view(UNSIGNED[v.type.dtype.size])
        rows, width = self.rows_of(v), elements.itemsize
        if rows is None:
            return elements.reshape(shape), ...
        if (v.type.axes == WIDE or is_of_table(v)) and len(rows.pitches) == 1:
            return np.lib.stride_tricks.as_strided(elements, shape, (rows.pitches[0], width)), ...
        return elements, rows.starts[:, None] // width + np.arange(rows.used // width)

    def _fill(self, v: Value) -> None:
        array, buffer = self.inputs[v.name], self.places[v.name].buffer
        whole = np.ascontiguousarray(array[: self.rows] if M in v.type.axes else array)
        elements, at = self._elements(v, buffer.data)
        elements[at] = whole.view(UNSIGNED[v.type.dtype.size]).reshape(whole.shape)
        if buffer.written is not None:
            elements, at = self._elements(v, buffer.written)
            elements[at] = WRITTEN[v.type.dtype.size]
