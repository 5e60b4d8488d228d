"""A plan on a GPU: the cubin is loaded once per device, arguments are laid out once per shape."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

from lngen.devices import Device, live_device
from lngen.errors import MissingError
from lngen.lower import Kernel, Plan, requested_shared
from lngen.runtime.driver import (
    CLUSTER_DIMENSION,
    COOPERATIVE,
    PROGRAMMATIC_STREAM_SERIALIZATION,
    Launch,
    allow_cluster,
    allow_shared,
    registers,
)


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
    overlap  a call may start while earlier work on the stream drains, which costs time where that work does not trigger
             it (lngen/docs/performance.md); the kernels of one call overlap anyway
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
            # Kernels wait for the previous one, so they may be launched early; see templates/device/launch.cuh.
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
        self, rows: int, pointers: Mapping[str, int], strides: Mapping[str, int], workspace: int, stream: int
    ) -> None:
        """Bind and launch once; pointers by tensor name."""
        bound = self.bind(rows, strides)
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
        for position, a in enumerate(kernel.arguments):
            match a.kind:
                case "rows":
                    self.values[position] = rows
                case "stride":
                    self.values[position] = strides[a.tensor]
                case "workspace":
                    self.buffers.append((position, offsets[a.tensor]))
                case _:
                    self.tensors.append((position, tensors.index(a.tensor)))
