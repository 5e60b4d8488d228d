"""NumPy arrays on a GPU: copied there, computed, copied back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lngen.compile import KernelSet
from lngen.ir import Axis, Value
from lngen.ir.numerics import NUMPY_DTYPE, Array
from lngen.runtime.launch import Launcher, device_arch


def run_numpy(
    kernels: KernelSet, inputs: Mapping[str, Array], device: int = 0, overlap: bool = False
) -> dict[str, Array]:
    """Every result of ``kernels`` by name, for inputs as ``interpret`` takes them; waits for the GPU.

    ``overlap`` as in ``Launcher``. MissingError without a GPU or CuPy.
    """
    launcher = Launcher(kernels.plan, kernels.cubin(device_arch(device)).image, device, overlap)
    rows = next(len(inputs[v.name]) for v in kernels.plan.inputs if Axis.M in v.type.axes)
    return launch_numpy(launcher, rows, inputs)


def launch_numpy(
    launcher: Launcher, rows: int, inputs: Mapping[str, Array], poison: int | None = None
) -> dict[str, Array]:
    """The same with loaded kernels; ``poison`` as in ``launch_raw``."""
    import cupy

    with cupy.cuda.Device(launcher.device):
        results = launch_raw(
            launcher, rows, {v.name: cupy.asarray(raw(inputs[v.name])) for v in launcher.plan.inputs}, poison
        )
        stream = cupy.cuda.get_current_stream()  # the copy to the host waits for this stream
        return {
            v.name: results[v.name].get(stream=stream).view(NUMPY_DTYPE[v.type.dtype]) for v in launcher.plan.outputs
        }


def launch_raw(launcher: Launcher, rows: int, inputs: Mapping[str, Any], poison: int | None = None) -> dict[str, Any]:
    """The results as new CuPy arrays of unsigned integers, on the current device and stream; does not wait.

    ``poison`` is the byte that fills results and workspace before the launch, if given.
    """
    import cupy

    plan = launcher.plan
    results = {v.name: cupy.empty(v.type.shape(rows, plan.spec.d), f"u{v.type.dtype.size}") for v in plan.outputs}
    workspace = cupy.empty(max(1, plan.workspace_bytes(rows)), cupy.uint8)
    if poison is not None:
        for a in (workspace, *results.values()):
            a.fill(int.from_bytes([poison] * a.itemsize, "little"))
    pointers = {name: a.data.ptr for name, a in (*inputs.items(), *results.items())}
    strides = dict.fromkeys(pointers, plan.spec.d)
    launcher(rows, pointers, strides, workspace.data.ptr, cupy.cuda.get_current_stream().ptr)
    return results


def host_copy(value: Value, address: int, d: int, device: int) -> Array:
    """A copy of a contiguous array without rows at ``address`` on ``device``; waits for the GPU."""
    import cupy

    copy = np.empty(value.type.shape((), d), NUMPY_DTYPE[value.type.dtype])
    with cupy.cuda.Device(device) as on:
        on.synchronize()
        cupy.cuda.runtime.memcpy(copy.ctypes.data, address, copy.nbytes, cupy.cuda.runtime.memcpyDeviceToHost)
    return copy


def raw(a: Array) -> Array:
    """The array as contiguous unsigned integers, so that CuPy need not know its dtype."""
    return np.asarray(a, order="C").view(f"u{a.dtype.itemsize}")
