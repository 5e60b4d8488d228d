"""The tensors of a plan in global memory: a buffer for each, or one for several that share memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from lngen.errors import PtxError
from lngen.ir import D, M, Value
from lngen.ir.numerics import NUMPY_DTYPE, Array
from lngen.lower import Plan
from lngen.ptx.memory import Buffer, GlobalMemory
from lngen.ptx.values import UNSIGNED

WRITTEN = {n: int.from_bytes(b"\x01" * n, "little") for n in UNSIGNED}  # the shadow of an element of n bytes


@dataclass(frozen=True)
class Place:
    """The position of a tensor: its first element is ``begin`` bytes after the first of a buffer."""

    buffer: Buffer
    begin: int

    @property
    def start(self) -> int:
        """Address of the first element."""
        return self.buffer.start + self.begin


class Tensors:
    """Inputs and outputs of a call by name; ``strides``, ``offset`` and ``alias`` as in ``run_plan``."""

    def __init__(
        self,
        plan: Plan,
        inputs: Mapping[str, Array],
        rows: int,
        strides: Mapping[str, int],
        offset: int,
        alias: Mapping[str, tuple[str, int]],
        memory: GlobalMemory,
    ) -> None:
        self.plan, self.inputs, self.rows = plan, inputs, rows
        self.strides, self.offset = strides, offset
        self.places = dict(self._placed(alias, memory))

    def start(self, name: str) -> int:
        """The address of a tensor."""
        return self.places[name].start

    def stride(self, name: str) -> int:
        """Elements from row to row."""
        return self.strides.get(name, self.plan.spec.d)

    def begin(self) -> None:
        """Starts a call: inputs have their given values, outputs hold nothing of an earlier call."""
        for v in self.plan.outputs:
            self.places[v.name].buffer.forget()
        for v in self.plan.inputs:
            self._fill(v)

    def results(self) -> dict[str, Array]:
        """The contents of the outputs."""
        return {
            v.name: np.array(self._view(v, self.places[v.name].buffer.data)).view(NUMPY_DTYPE[v.type.dtype])
            for v in self.plan.outputs
        }

    def gaps(self) -> Iterator[tuple[str, Array]]:
        """Outputs with elements that nothing wrote, and the indices of these elements."""
        for v in self.plan.outputs:
            written = self.places[v.name].buffer.written
            assert written is not None
            missing = np.argwhere(self._view(v, written) != WRITTEN[v.type.dtype.size])
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
            yield from ((v.name, Place(buffer, begin)) for v, begin in moved)

    def _buffer(self, group: list[tuple[Value, int]]) -> Buffer:
        """A buffer for tensors at the given offsets; bytes between rows belong to it unless all strides agree."""
        name = "=".join(v.name for v, _ in group)
        role = "output" if any(v in self.plan.outputs for v, _ in group) else "input"
        size = max(begin + self._size(v) for v, begin in group)
        item = min(v.type.dtype.size for v, _ in group)
        if any(v.type.axes != (M, D) for v, _ in group):
            return Buffer(name, role, size, item)
        layouts = {(begin, self.stride(v.name) * v.type.dtype.size, v.type.dtype.size) for v, begin in group}
        _, pitch, width = layouts.pop()
        return Buffer(name, role, size, item, 0 if layouts else pitch, self.plan.spec.d * width, self.offset * item)

    def _size(self, v: Value) -> int:
        s, d = v.type.dtype.size, self.plan.spec.d
        if v.type.axes == (M, D):
            return ((self.rows - 1) * self.stride(v.name) + d) * s if self.rows else 0
        return int(np.prod(v.type.shape(self.rows, d), dtype=np.int64)) * s

    def _view(self, v: Value, data: Array) -> Array:
        """The elements of a tensor in the bytes of its buffer (or of the shadow of the buffer)."""
        place, shape = self.places[v.name], v.type.shape(self.rows, self.plan.spec.d)
        first = place.buffer.shift + place.begin
        elements = data[first : first + self._size(v)].view(UNSIGNED[v.type.dtype.size])
        if v.type.axes != (M, D) or not self.rows:
            return elements.reshape(shape)
        step = elements.itemsize
        return np.lib.stride_tricks.as_strided(elements, shape, (self.stride(v.name) * step, step))

    def _fill(self, v: Value) -> None:
        array, buffer = self.inputs[v.name], self.places[v.name].buffer
        whole = np.ascontiguousarray(array[: self.rows] if M in v.type.axes else array)
        self._view(v, buffer.data)[...] = whole.view(UNSIGNED[v.type.dtype.size]).reshape(whole.shape)
        if buffer.written is not None:
            self._view(v, buffer.written)[...] = WRITTEN[v.type.dtype.size]
