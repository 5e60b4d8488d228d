"""NumPy arrays through a GPU: copied there, computed, copied back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lngen.ir import Axis
from lngen.ir.numerics import NUMPY_DTYPE, Array
from lngen.lower import Plan
from lngen.runtime.choose import compile_plan
from lngen.runtime.launch import Launcher, device_arch


def run_numpy(plan: Plan, inputs: Mapping[str, Array], device: int = 0) -> dict[str, Array]:
    """Every result of ``plan`` by name, for inputs as ``interpret`` takes them; waits for the GPU.

    MissingError without a GPU or CuPy. Bytes travel, so no dtype has to be one CuPy knows.
    """
    launcher = Launcher(plan, compile_plan(plan, device_arch(device)), device)
    import cupy

    rows = next(len(inputs[v.name]) for v in plan.inputs if Axis.M in v.type.axes)
    lengths = {Axis.M: rows, Axis.D: plan.spec.d}
    shapes = {v.name: [lengths[a] for a in v.type.axes] for v in plan.outputs}
    with cupy.cuda.Device(device):
        stream = cupy.cuda.get_current_stream()
        arrays = {
            v.name: cupy.asarray(np.ascontiguousarray(inputs[v.name]).reshape(-1).view(np.uint8)) for v in plan.inputs
        }
        for v in plan.outputs:
            size = int(np.prod(shapes[v.name], dtype=np.int64)) * v.type.dtype.size
            arrays[v.name] = cupy.empty(size, cupy.uint8)
        workspace = cupy.empty(max(1, plan.workspace_bytes(rows)), cupy.uint8)
        pointers = {name: a.data.ptr for name, a in arrays.items()}
        strides = dict.fromkeys(pointers, plan.spec.d)
        launcher(rows, pointers, strides, workspace.data.ptr, stream.ptr)
        # The copy to the host waits for the stream.
        raw = {v.name: arrays[v.name].get(stream=stream) for v in plan.outputs}
    return {v.name: raw[v.name].view(NUMPY_DTYPE[v.type.dtype]).reshape(shapes[v.name]) for v in plan.outputs}
