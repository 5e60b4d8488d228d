"""Rows at two distances, for checks of kernels with strides=2: no two tensors lie alike, and gaps follow all rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lngen.check.inputs import POISON
from lngen.ir import WIDE, Value, bits_of
from lngen.ir.numerics import NUMPY_DTYPE, Array
from lngen.launch.kernels import Distance
from lngen.lower import Plan
from lngen.runtime.launcher import Launcher
from lngen.runtime.numpy_arrays import raw

INNER = 3  # rows before the outer distance: 133 rows leave one over, and one row is fewer


def distances(plan: Plan) -> tuple[dict[str, Distance], int]:
    """The distances of the [M, D] tensors by name, and the number of inner rows; none for a plan with strides=1."""
    if plan.spec.strides == 1:
        return {}, 1
    wide = [v for v in (*plan.inputs, *plan.outputs) if v.type.axes == WIDE]
    unit = max((plan.alignment(v) // v.type.dtype.size for v in wide), default=1)
    found: dict[str, Distance] = {}
    for n, v in enumerate(wide, 1):
        near = (-(-plan.spec.d // unit) + n) * unit
        found[v.name] = (INNER * near + n * unit, near)
    return found, INNER


def places(distance: Distance, rows: int, d: int) -> Array:
    """[rows, D]: where each element is behind the first."""
    outer, near = distance if isinstance(distance, tuple) else (INNER * distance, distance)
    row = np.arange(rows)
    return (row // INNER * outer + row % INNER * near)[:, None] + np.arange(d)


def spread(a: Array | None, at: Array, size: int) -> Array:
    """The memory of a tensor with elements of ``size`` bytes: poison, with the elements of ``a`` at their places."""
    memory = poisoned((int(at.max(initial=-1)) + 1 + at.shape[1],), size)
    if a is not None:
        memory[at] = raw(a)
    return memory


def poisoned(shape: tuple[int, ...], size: int) -> Array:
    """Elements of ``size`` bytes that no kernel computes."""
    return np.full(shape, int.from_bytes([POISON] * size, "little"), f"u{size}")


def touched(memory: Array, at: Array) -> int:
    """The number of elements between and behind the rows that were written to."""
    between = np.ones(memory.shape, np.bool_)
    between[at] = False
    return int((memory != poisoned(memory.shape, memory.itemsize))[between].sum())


def launch(launcher: Launcher, rows: int, inputs: Mapping[str, Array]) -> tuple[dict[str, Array], list[str]]:
    """The results of one launch on a GPU, and a complaint for each tensor of which more than its rows changed."""
    import cupy

    plan = launcher.plan
    d, (found, inner) = plan.spec.d, distances(plan)
    at = {name: places(distance, rows, d) for name, distance in found.items()}

    def memory(v: Value) -> Array:
        a, size = inputs.get(v.name), v.type.dtype.size
        if v.name in at:
            return spread(a, at[v.name], size)
        return poisoned(v.type.shape(rows, d), size) if a is None else raw(a)

    with cupy.cuda.Device(launcher.device):
        arrays = {v.name: cupy.asarray(memory(v)) for v in (*plan.inputs, *plan.outputs)}
        workspace = cupy.full(max(1, plan.workspace_bytes(rows)), POISON, cupy.uint8)
        stream, pointers = cupy.cuda.get_current_stream(), {name: a.data.ptr for name, a in arrays.items()}
        values = {v.name: bits_of(inputs[v.name]) for v in plan.by_value}
        launcher(rows, pointers, found, workspace.data.ptr, stream.ptr, inner, values)
        after = {name: a.get(stream=stream) for name, a in arrays.items()}
    results = {v.name: after[v.name][at[v.name]] if v.name in at else after[v.name] for v in plan.outputs}
    counts = {name: touched(after[name], at[name]) for name in at}
    complaints = [f"{name}: {count} elements between rows are written to" for name, count in counts.items() if count]
    return {v.name: results[v.name].view(NUMPY_DTYPE[v.type.dtype]) for v in plan.outputs}, complaints
