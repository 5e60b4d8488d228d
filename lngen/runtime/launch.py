"""A plan on a GPU: its cubin loaded once per device, its arguments packed once per call."""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any

from lngen.errors import MissingError
from lngen.lower import Kernel, Plan
from lngen.toolchain import Binary


def driver() -> Any:
    """CuPy's binding of the CUDA driver; MissingError without it."""
    try:
        from cupy_backends.cuda.api import driver as module
    except ImportError as e:
        raise MissingError('Launching a kernel needs CuPy; install it with: pip install "lngen[cuda13]".') from e
    return module


def device_count() -> int:
    """GPUs that CuPy can use, 0 if there is no CuPy or no driver."""
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # no CuPy, no driver and no device are all "none"
        return 0


def device_arch(device: int) -> str:
    """The arch of a device, ``sm_90``; MissingError if there is no GPU."""
    if device_count() <= device:
        raise MissingError(
            f"GPU {device} is expected, but {device_count()} are found; NumPy arrays run the interpreter instead."
        )
    import cupy

    return f"sm_{cupy.cuda.Device(device).compute_capability}"


class Launcher:
    """The kernels of a plan, loaded on one device."""

    def __init__(self, plan: Plan, binary: Binary, device: int) -> None:
        import cupy

        self.plan = plan
        with cupy.cuda.Device(device):
            cupy.cuda.runtime.free(0)  # makes the device's context current in this thread
            self._module = cupy.cuda.function.Module()
            self._module.load(binary.image)
            self._kernels = [_Packed(k, self._module.get_function(k.name), plan) for k in plan.kernels]

    def __call__(self, rows: int, pointers: dict[str, int], strides: dict[str, int], stream: int) -> None:
        """Launch every kernel on ``stream``; pointers by tensor and workspace name, strides in elements."""
        for kernel in self._kernels:
            kernel(rows, [rows if k == 0 else pointers[n] if k == 1 else strides[n] for k, n in kernel.slots], stream)


class _Packed:
    """One kernel with an argument block that is filled and handed to the driver."""

    def __init__(self, kernel: Kernel, function: Any, plan: Plan) -> None:
        self.slots = [({"rows": 0, "stride": 2}.get(a.kind, 1), a.tensor) for a in kernel.arguments]
        self.function = function
        self._kernel, self._block = kernel, kernel.block
        self._format = struct.Struct(f"{len(kernel.arguments)}q")
        self._launch = driver().launchKernel
        self._local = threading.local()  # two threads may launch at once, each from a block of its own

    def __call__(self, rows: int, values: list[int], stream: int) -> None:
        if rows == 0 and not self._kernel.always:
            return
        block, table = self._arguments()
        self._format.pack_into(block, 0, *values)
        x, y = self._kernel.grid
        self._launch(self.function.ptr, x(rows), y(rows) or 1, 1, self._block, 1, 1, 0, stream, table, 0)

    def _arguments(self) -> tuple[Any, int]:
        try:
            return self._local.block, self._local.address
        except AttributeError:
            block = ctypes.create_string_buffer(self._format.size)
            base = ctypes.addressof(block)
            table = (ctypes.c_void_p * (self._format.size // 8))(*range(base, base + self._format.size, 8))
            self._local.block, self._local.table, self._local.address = block, table, ctypes.addressof(table)
            return block, self._local.address
