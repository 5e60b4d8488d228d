"""A plan on a GPU: its cubin is loaded once per device, its arguments are laid out once per shape, and each stream
has a workspace for it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from weakref import WeakValueDictionary

from lngen.devices import Device, live_device
from lngen.errors import MissingError
from lngen.ir import DType, bits_of
from lngen.ir.numerics import Array
from lngen.lower import Kernel, Plan, requested_shared
from lngen.runtime.arrays import Library
from lngen.runtime.driver import (
    CLUSTER_DIMENSION,
    COOPERATIVE,
    PER_THREAD_STREAM,
    PROGRAMMATIC_STREAM_SERIALIZATION,
    CapturedGraph,
    Launch,
    allow_cluster,
    allow_shared,
    capture_of,
    registers,
)

NO_VALUES: Mapping[str, Array] = MappingProxyType({})


def device_count() -> int:
    """GPUs that CuPy can use, 0 if there is no CuPy or no driver."""
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # no CuPy, no driver and no device all mean 0
        return 0


def device_arch(device: int) -> str:
    """The arch of a device, ``sm_90``; MissingError if there is no such GPU."""
    if not 0 <= device < device_count():
        raise MissingError(
            f"GPU {device} is expected, but {device_count()} are found; NumPy arrays run the interpreter instead."
        )
    import cupy

    return f"sm_{cupy.cuda.Device(device).compute_capability}"


def device_name(device: int) -> str:
    """The name of a device, ``NVIDIA H200``; MissingError if there is no such GPU."""
    device_arch(device)
    import cupy

    return str(cupy.cuda.runtime.getDeviceProperties(device)["name"].decode())


def live_gpu(device: int) -> Device:
    """A device for the schedule model: its description, completed by the properties that it reports.

    MissingError if there is no such GPU.
    """
    device_arch(device)
    return _reported(device)


def _reported(device: int) -> Device:
    """As ``live_gpu``, of a device that exists."""
    import cupy

    arch = f"sm_{cupy.cuda.Device(device).compute_capability}"
    return live_device(arch, cupy.cuda.runtime.getDeviceProperties(device))


class Launcher:
    """The kernels of a plan, loaded on one device.

    image    a cubin for the arch of the device
    overlap  a call may start while earlier work on the stream drains. It costs time behind work that does not trigger
             it (lngen/docs/performance.md). The kernels of one call overlap anyway.
    """

    def __init__(self, plan: Plan, image: bytes, device: int, overlap: bool = False) -> None:
        import cupy

        self.plan, self.device, self.overlap = plan, device, overlap
        self.tensors = tuple(v.name for v in (*plan.inputs, *plan.outputs))
        with cupy.cuda.Device(device):
            cupy.cuda.runtime.setDevice(device)  # makes the device's context current in this thread
            self._module = cupy.cuda.function.Module()
            self._module.load(image)
            self._functions = [self._module.get_function(k.name) for k in plan.kernels]
            # Kernels wait for the previous one, so they may be launched early; see templates/include/lngen/launch.cuh.
            gpu = _reported(device)
            self.dependent = gpu.pdl
            used = {k.name: registers(f.ptr) for k, f in zip(plan.kernels, self._functions, strict=True)}
            self.shared = [*requested_shared(plan, used, gpu).values()]
            for kernel, function, shared in zip(plan.kernels, self._functions, self.shared, strict=True):
                allow_shared(function.ptr, shared)
                allow_cluster(function.ptr, kernel.cluster)

    def bind(self, rows: int, strides: Mapping[str, int]) -> Bound:
        """The launch for ``rows`` rows and the given row strides, in elements by tensor name."""
        return Bound(self, rows, strides, [f.ptr for f in self._functions])

    def __call__(
        self,
        rows: int,
        pointers: Mapping[str, int],
        strides: Mapping[str, int],
        workspace: int,
        stream: int,
        values: Mapping[str, Array] = NO_VALUES,
    ) -> None:
        """Bind and launch once; pointers by tensor name, and the numbers that are passed by value."""
        bound = self.bind(rows, strides)
        bound.give(values)
        bound.prepare(workspace, stream)
        bound([pointers[name] for name in self.tensors], workspace, stream)


class Bound:
    """Kernels with all arguments but pointers. One thread at a time may call it."""

    def __init__(self, launcher: Launcher, rows: int, strides: Mapping[str, int], functions: Sequence[int]) -> None:
        import cupy

        plan = launcher.plan
        self.name = plan.name
        self.reads_again = "" if plan.in_place else f"form={plan.schedule.form}"
        self._launcher = launcher  # the module must not be unloaded while its functions are used
        self._device, self._current = launcher.device, cupy.cuda.runtime.getDevice
        self._enter = cupy.cuda.Device(launcher.device)
        here = self._current()
        for device in (launcher.device, here):  # makes the device's context current in this thread
            cupy.cuda.runtime.setDevice(device)
        self.workspace_bytes = plan.workspace_bytes(rows)
        offsets = plan.workspace_offsets(rows)
        self.zeroed = tuple((offsets[b.name], b.bytes(rows)) for b in plan.workspace if b.zeroed)
        needed = [one for one in zip(plan.kernels, functions, launcher.shared, strict=True) if rows or one[0].always]
        self._kernels = [
            _Arguments(
                kernel,
                function,
                rows,
                launcher.tensors,
                strides,
                offsets,
                shared,
                dependent=launcher.dependent and (place > 0 or launcher.overlap),
            )
            for place, (kernel, function, shared) in enumerate(needed)
        ]

    def __call__(self, pointers: Sequence[int], workspace: int, stream: int) -> None:
        """Launch on ``stream``: pointers of the plan's inputs, then outputs; ``workspace`` of workspace_bytes.

        ``prepare`` must have been called once for the workspace.
        """
        if self._current() == self._device:
            self._run(pointers, workspace, stream)
        else:
            with self._enter:
                self._run(pointers, workspace, stream)

    def _run(self, pointers: Sequence[int], workspace: int, stream: int) -> None:
        for k in self._kernels:
            values = k.values
            for position, index in k.tensors:
                values[position] = pointers[index]
            for position, offset in k.buffers:
                values[position] = workspace + offset
            k.launch(stream)

    def give(self, values: Mapping[str, Array]) -> None:
        """The numbers that the next launches pass by value, by name, as ``values_of`` gives them."""
        for k in self._kernels:
            for position, name in k.given:
                k.values[position] = bits_of(values[name])

    def prepare(self, workspace: int, stream: int) -> None:
        """Zero the buffers of a new workspace that must be zero."""
        import cupy

        for offset, size in self.zeroed:
            with self._enter:
                cupy.cuda.runtime.memsetAsync(workspace + offset, 0, size, stream)


class _Arguments:
    """One kernel's argument block: 8 bytes per argument, and the table of their addresses that the driver reads."""

    def __init__(
        self,
        kernel: Kernel,
        function: int,
        rows: int,
        tensors: Sequence[str],
        strides: Mapping[str, int],
        offsets: Mapping[str, int],
        shared: int,
        dependent: bool,
    ) -> None:
        count = len(kernel.arguments)
        self.values = (ctypes.c_longlong * count)()
        base = ctypes.addressof(self.values)
        table = (ctypes.c_void_p * count)(*range(base, base + 8 * count, 8))
        attributes = {COOPERATIVE: 1} if kernel.cooperative else {}
        attributes |= {CLUSTER_DIMENSION: kernel.cluster} if kernel.cluster > 1 else {}
        attributes |= {PROGRAMMATIC_STREAM_SERIALIZATION: 1} if dependent else {}
        x, y = (extent(rows) for extent in kernel.grid)
        self.launch = Launch(function, (x, y), kernel.block, shared, attributes, table, kernel.name)
        self.tensors: list[tuple[int, int]] = []
        self.buffers: list[tuple[int, int]] = []
        self.given: list[tuple[int, str]] = []
        for position, a in enumerate(kernel.arguments):
            match a.kind:
                case "rows":
                    self.values[position] = rows
                case "stride":
                    self.values[position] = strides[a.tensor]
                case "workspace":
                    self.buffers.append((position, offsets[a.tensor]))
                case "value":
                    self.given.append((position, a.tensor))
                    self.values[position] = -1  # NaN, until a number is given
                case _:
                    self.tensors.append((position, tensors.index(a.tensor)))


# ---- workspaces: memory that the kernels of a call share, one for each plan on each stream ----


@dataclass(slots=True, weakref_slot=True)
class Workspace:
    """Memory that grows; only the holder of ``lock`` may ask for it and launch with it.

    A stream runs launches in order. A programmatic launch also waits for the end of the previous kernel before it
    writes to memory. So calls on one stream can share a workspace, provided that no other kernel runs between those of
    a call: the lock ensures that.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    address: int = 0
    size: int = 0
    arrays: list[Any] = field(default_factory=list)  # the last is in use; what still runs may use the others

    def fit(self, library: Library, device: int, stream: int, bound: Bound) -> int:
        """The address of a workspace that is large enough for ``bound``, and prepared for it."""
        if self.size < bound.workspace_bytes:
            size = max(bound.workspace_bytes, 2 * self.size)
            array = library.maker((-(-size // 8),), DType.F64, device)()
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
