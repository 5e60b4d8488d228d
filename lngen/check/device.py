"""Launch on a GPU and compare every bit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from lngen.check.inputs import POISON, poisoned, same_bits
from lngen.check.result import Result
from lngen.ir.numerics import Array
from lngen.lower import Plan
from lngen.runtime.launch import Launcher
from lngen.toolchain import Binary


def bits(plan: Plan, binary: Binary, rows: int, inputs: Mapping[str, Array], want: Mapping[str, Array]) -> Result:
    """One launch on poisoned outputs and workspace against the interpreter's results."""
    got = launch(plan, binary, rows, inputs)
    wrong = {n: int((~same_bits(got[n], want[n])).sum()) for n in want}
    total = sum(a.size for a in want.values())
    parts = [f"{n}: {count} of {want[n].size} differ" for n, count in wrong.items() if count]
    detail = "; ".join(parts) or f"{total} numbers equal"
    return Result(str(plan.spec), str(plan.schedule), rows, "bits", not parts, detail)


def launch(plan: Plan, binary: Binary, rows: int, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The plan's results for host arrays, from the current GPU."""
    import cupy

    device = {n: cupy.asarray(np.ascontiguousarray(a).view(np.uint8).reshape(-1)) for n, a in inputs.items()}
    host = poisoned(plan.graph, rows, plan.spec.d)
    device |= {n: cupy.asarray(a.view(np.uint8).reshape(-1)) for n, a in host.items()}
    workspace = cupy.full(max(1, plan.workspace_bytes(rows)), POISON, cupy.uint8)
    pointers = {n: a.data.ptr for n, a in device.items()}
    strides = dict.fromkeys((v.name for v in (*plan.inputs, *plan.outputs)), plan.spec.d)
    stream = cupy.cuda.get_current_stream()
    _launcher(plan, binary.image)(rows, pointers, strides, workspace.data.ptr, stream.ptr)
    return {n: device[n].get(stream=stream).view(a.dtype).reshape(a.shape) for n, a in host.items()}


@lru_cache(maxsize=8)
def _launcher(plan: Plan, image: bytes) -> Launcher:
    return Launcher(plan, Binary(arch="", image=image, log="", resources={}), 0)
