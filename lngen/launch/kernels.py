"""Kernel sets on a GPU: loaded once per device, arguments laid out once per shape, a workspace for each stream.

A kernel set is described by data: the entry that a manifest has of it (``lngen help manifest``).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from struct import Struct
from types import MappingProxyType
from typing import Any
from weakref import WeakValueDictionary

from ..errors import LngenError
from ..rules import MOST_BLOCKS, ROW_KINDS, SETS, Distance, Extent, Stretch, buffer_elements, laid_out, row_argument
from .arrays import Library
from .driver import (
    CLUSTER_DIMENSION,
    COOPERATIVE,
    PER_THREAD_STREAM,
    PROGRAMMATIC_STREAM_SERIALIZATION,
    CapturedGraph,
    Launch,
    Module,
    OtherContextError,
    allow_cluster,
    allow_shared,
    capture_of,
    current_context,
    gpu,
    on,
    registers,
    resident_blocks,
    virtual_arch,
    zero,
)
from .early import OverlappingLaunch, kernel_sets

Described = Mapping[str, Any]  # a kernel set, or a part of it, as a manifest has it
NO_BITS: Mapping[str, int] = MappingProxyType({})


class Loaded:
    """A kernel set, loaded on one device.

    described  the kernel set
    image      a cubin or fatbin that fits the device, or PTX
    overlap    a call may start while earlier work on the stream drains. Outside a capture this costs time behind work
               that does not trigger it (lngen/docs/performance.md). The kernels of one call overlap anyway.
    requested  from registers per thread, in launch order: bytes of dynamic shared memory for each kernel. Without it
               they are what the kernels use at least.
    """

    def __init__(
        self,
        described: Described,
        image: bytes,
        device: int,
        overlap: bool = False,
        requested: Callable[[Sequence[int]], Sequence[int]] | None = None,
    ) -> None:
        self.described, self.device, self.overlap = described, device, overlap
        self.tensors = tuple(t["name"] for t in described["tensors"])
        self.kernels: Sequence[Described] = described["kernels"]
        self.gpu = gpu(device)
        needed = int(described["programmatic_stream_serialization"]["minimum_arch"][3:])
        with on(self.gpu.context):
            self._module = Module(image, described["name"])
            self.functions = [self._module.function(k["name"]) for k in self.kernels]
            self.registers = [registers(f) for f in self.functions]
            least = [k["dynamic_shared_bytes"] for k in self.kernels]
            self.shared = [*requested(self.registers)] if requested else least
            for kernel, function, shared in zip(self.kernels, self.functions, self.shared):
                allow_shared(function, shared)
                allow_cluster(function, kernel["cluster"])
            # Kernels wait for the previous one, so they may be launched early; see templates/include/lngen/launch.cuh.
            # Those from the PTX of an older arch do not.
            here = 10 * self.gpu.capability[0] + self.gpu.capability[1]
            self.dependent = here >= needed and (virtual_arch(self.functions[0]) or here) >= needed
        if self.dependent:
            kernel_sets.update(dict.fromkeys(self.functions, self))

    def fits(self) -> bool:
        """True if all blocks of each cooperative kernel can run at the same time, with any number of rows."""
        with on(self.gpu.context):
            return all(
                Extent.of(kernel["grid"]["x"])(2**62)
                <= self.gpu.multiprocessors * resident_blocks(function, kernel["block"], shared)
                for kernel, function, shared in zip(self.kernels, self.functions, self.shared)
                if kernel["cooperative"]
            )

    def bind(self, rows: int, strides: Mapping[str, Distance], inner: int = 1) -> Bound:
        """The launch for ``rows`` rows at the given distances, in elements by tensor name.

        strides  of rows; and of columns, but in a new array, where zeros are written behind the rows
        inner    of rows at two distances, the number of rows that are side by side

        LngenError for too many rows.
        """
        return Bound(self, rows, strides, inner)

    def contiguous(self, rows: int) -> dict[str, Distance]:
        """The distances of rows, and of columns, in contiguous arrays that are given."""
        tensors, d = self.described["tensors"], self.described["spec"]["d"]
        of_sets: dict[str, Distance] = {t["name"]: (d, 0) for t in tensors if t["shape"][:1] == [SETS]}
        of_tables = {t["name"]: int(t["shape"][1]) for t in tensors if t["strides"][:1] == ["table_stride"]}
        return {t["name"]: rows if t["axes"][1:] == ["M"] else d for t in tensors} | of_sets | of_tables

    def __call__(
        self,
        rows: int,
        pointers: Mapping[str, int],
        strides: Mapping[str, Distance],
        workspace: int,
        stream: int,
        inner: int = 1,
        values: Mapping[str, int] = NO_BITS,
    ) -> None:
        """Bind and launch once; pointers by tensor name, and the bits of the numbers that are passed by value."""
        bound = self.bind(rows, strides, inner)
        bound.give(values)
        bound.prepare(workspace, stream)
        bound([pointers[name] for name in self.tensors], workspace, stream)


def elements_of(buffer: Described, rows: int, inner: int) -> int:
    """The elements of a buffer for so many rows, ``inner`` of them in a set."""
    stretch = Stretch(**buffer["stretch"]) if "stretch" in buffer else None
    return buffer_elements(buffer["fixed"], buffer["per_row"], buffer.get("per_stretch", 0), stretch, rows, inner)


class Bound:
    """Kernels with all arguments but pointers. One thread at a time may call it.

    The arguments of all kernels stand in one ``block``, 8 bytes each, the pointers of the tensors first: ``pack``
    writes those in one go. Each kernel has a table of the addresses of its own, which the driver reads.
    """

    def __init__(self, loaded: Loaded, rows: int, strides: Mapping[str, Distance], inner: int) -> None:
        described = loaded.described
        self.name: str = described["name"]
        self.reads_again = f"form={described['schedule']['form']}" if described["in_place"]["reads_again"] else ""
        self._loaded = loaded  # the module must not be unloaded while its functions are used
        self._context = loaded.gpu.context
        buffers = described["workspace"]["buffers"]
        sizes = {b["name"]: elements_of(b, rows, inner) * b["element_bytes"] for b in buffers}
        self._offsets, self.workspace_bytes = laid_out(sizes.items())
        zeroed = [b["name"] for b in buffers if b["zeroed"]]
        self.zeroed = tuple((self._offsets[name], sizes[name]) for name in zeroed)
        places = [place for place, k in enumerate(loaded.kernels) if rows or k["launch_for_no_rows"]]
        listed = [(place, a) for place in places for a in loaded.kernels[place]["arguments"]]
        self.block = (ctypes.c_longlong * (len(loaded.tensors) + len(listed)))()
        self.pack = Struct(f"{len(loaded.tensors)}q").pack_into
        self._workspace = 0
        self.buffers: list[tuple[int, int]] = []  # slots, and offsets in the workspace
        self._given: list[tuple[int, str]] = []
        slots: dict[int, list[int]] = {place: [] for place in places}
        for slot, (place, a) in enumerate(listed, len(loaded.tensors)):
            slots[place].append(self._slot(slot, a, rows, strides, inner))
        self.launches = [self._launch(place, rows, slots[place]) for place in places]

    def _slot(self, slot: int, a: Described, rows: int, strides: Mapping[str, Distance], inner: int) -> int:
        """The place of an argument in the block: ``slot``, or that of a tensor's pointer."""
        kind, tensor = a["kind"], a["tensor"]
        if kind in ROW_KINDS:
            self.block[slot] = row_argument(kind, rows, inner, strides.get(tensor, 0))
        elif kind == "workspace":
            self.buffers.append((slot, self._offsets[tensor]))
        elif kind == "value":
            self._given.append((slot, a["number"]))
            self.block[slot] = -1  # NaN, until a number is given
        else:
            return self._loaded.tensors.index(tensor)
        return slot

    def _launch(self, place: int, rows: int, slots: Sequence[int]) -> Launch:
        """The launch of a kernel by its number."""
        loaded, kernel, base = self._loaded, self._loaded.kernels[place], ctypes.addressof(self.block)
        table = (ctypes.c_void_p * len(slots))(*[base + 8 * slot for slot in slots])
        attributes = {COOPERATIVE: 1} if kernel["cooperative"] else {}
        if kernel["cluster"] > 1:
            attributes[CLUSTER_DIMENSION] = kernel["cluster"]
        if loaded.dependent and (place > 0 or loaded.overlap):
            attributes[PROGRAMMATIC_STREAM_SERIALIZATION] = 1
        grid = Extent.of(kernel["grid"]["x"])(rows), Extent.of(kernel["grid"]["y"])(rows)
        if max(grid) > MOST_BLOCKS:
            raise LngenError(
                f"'{self.name}' is expected to be launched with at most {MOST_BLOCKS} blocks, but {rows} rows take "
                f"{max(grid)}; call it for fewer rows at a time."
            )
        function, shared = loaded.functions[place], loaded.shared[place]
        kind = OverlappingLaunch if loaded.dependent and loaded.overlap and place == 0 else Launch
        return kind(function, grid, kernel["block"], shared, attributes, table, kernel["name"])

    def __call__(self, pointers: Sequence[int], workspace: int, stream: int) -> None:
        """Launch on ``stream``: pointers of the inputs, then of the outputs; ``workspace`` of workspace_bytes.

        ``prepare`` must have been called once for the workspace.
        """
        try:
            self.run(pointers, workspace, stream)
        except OtherContextError:  # so the first kernel was not launched; asking before every launch would take longer
            if current_context() == self._context:
                raise
            with on(self._context):
                self.run(pointers, workspace, stream)

    def run(self, pointers: Sequence[int], workspace: int, stream: int) -> None:
        """The same in a thread whose context is that of the kernels."""
        self.pack(self.block, 0, *pointers)
        self.place(workspace)
        for launch in self.launches:
            launch(stream)

    def place(self, workspace: int) -> None:
        """The workspace of the next launches."""
        if workspace != self._workspace:
            self._workspace = workspace
            for slot, offset in self.buffers:
                self.block[slot] = workspace + offset

    def give(self, values: Mapping[str, int]) -> None:
        """The bits of the numbers that the next launches pass by value, by name."""
        for slot, name in self._given:
            self.block[slot] = values[name]

    def prepare(self, workspace: int, stream: int) -> None:
        """Zero the buffers of a new workspace that must be zero."""
        with on(self._context):
            for offset, size in self.zeroed:
                zero(workspace + offset, size, stream)


# ---- workspaces: memory that the kernels of a call share, one for each plan on each stream ----


class Workspace:
    """Memory that grows; only the holder of ``lock`` may ask for it and launch with it.

    A stream runs launches in order. A programmatic launch also waits for the end of the previous kernel before it
    writes to memory. So calls on one stream can share a workspace, provided that no other kernel runs between those of
    a call: the lock ensures that.
    """

    __slots__ = ("__weakref__", "address", "arrays", "lock", "size")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.address = self.size = 0
        self.arrays: list[Any] = []  # the last is in use; what still runs may use the others

    def fit(self, library: Library, device: int, stream: int, bound: Bound) -> int:
        """The address of a workspace that is large enough for ``bound``, and prepared for it."""
        if self.size < bound.workspace_bytes:
            size = max(bound.workspace_bytes, 2 * self.size)
            array = library.maker((-(-size // 8),), "f64", device)()
            (address,), _ = library.describe([array])
            bound.prepare(address, stream)
            self.arrays.append(array)
            self.address, self.size = address, size
        return self.address


# The workspaces of captured CUDA graphs, whoever made them: a graph may outlive its norm.
_of_graphs: dict[CapturedGraph, Workspace] = {}
_capturing = threading.Lock()


class Workspaces:
    """The workspaces of a spec's plans."""

    def __init__(self) -> None:
        self._held: dict[Hashable, Workspace] = {}
        self._captured: WeakValueDictionary[Hashable, Workspace] = WeakValueDictionary()
        self._local = threading.local()

    def of(self, device: int, stream: int, plan: str) -> Workspace:
        """The workspace of the plan called ``plan`` on ``stream``, a pointer.

        Each capture has its own workspace: its graph may run on any stream, beside other work, and the workspace is
        zeroed when the graph runs, not during the capture. The handle of the per-thread default stream means another
        stream in every thread.
        """
        key = device, stream, plan
        if capture := capture_of(stream):
            return self._of_capture((*key, capture), stream)
        held = self._held
        if stream == PER_THREAD_STREAM:
            held = self._local.__dict__.setdefault("held", {})
        return held.get(key) or held.setdefault(key, Workspace())

    def _of_capture(self, key: Hashable, stream: int) -> Workspace:
        """The workspace of a capture; the first capture after the end of its graph frees it."""
        with _capturing:
            found = self._captured.get(key)
            if found is None:
                for graph in [graph for graph in _of_graphs if graph.ended()]:
                    del _of_graphs[graph]
                found = self._captured[key] = _of_graphs[CapturedGraph(stream)] = Workspace()
            return found
