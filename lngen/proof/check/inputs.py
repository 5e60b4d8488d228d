"""Random inputs for checks, the comparison of bits, and memory in which rows lie at two distances.

Inputs are drawn as those of ``lngen.compiler.passes.instance``, for any number of rows, and rounded to their dtypes.

For kernels with strides=2 no two tensors lie alike, and gaps follow all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lngen.compiler.interpret import interpret
from lngen.compiler.ir import WIDE, Axis, Lengths, Value, bits_of, is_of_set, values_of
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array, stored
from lngen.compiler.lower import Plan
from lngen.compiler.passes.instance import NAMED, drawn, indexed, lengths
from lngen.compiler.spec import Spec
from lngen.files import load_cupy
from lngen.launch.runtime.launcher import Launcher
from lngen.launch.runtime.numpy_arrays import raw
from lngen.rules import Distance

POISON = 0xFE  # a byte pattern no kernel computes, so that an element never written is detected


def forward_inputs(
    spec: Spec, rows: int, seed: int = 0, mean: float = 0.5, eps: float | None = None, sets: int | None = None
) -> dict[str, Array]:
    """The forward graph's inputs by name; ``eps`` is what a call with ``eps=run`` gives, None for the default.

    Where a graph derives axes from M there are the next ``rows`` that these divide; ``sets`` as of ``lengths``.
    """
    forward, eps = spec.forward(), spec.eps_or_default if eps is None else eps
    rng, sizes = np.random.default_rng([seed, rows, spec.d]), lengths(forward, rows, spec.d, sets)
    positive = spec.positive_inputs()
    of = indexed(forward)
    found = {p.name: draw(rng, p, sizes, mean, of=of.get(p), positive=p.name in positive) for p in forward.tensors}
    return found | values_of(forward, eps)


def random_inputs(
    spec: Spec, rows: int, seed: int = 0, mean: float = 0.5, eps: float | None = None, sets: int | None = None
) -> dict[str, Array]:
    """The spec's inputs by name; those that backward takes from forward are computed by it. The rest is as above."""
    inputs = forward_inputs(spec, rows, seed, mean, eps, sets)
    if spec.direction == "bwd":
        inputs |= interpret(spec.with_direction("fwd").graph(), inputs)
    rng = np.random.default_rng([seed + 1, rows, spec.d])
    params, sizes = spec.graph().params, lengths(spec.forward(), rows, spec.d, sets)
    positive = spec.positive_inputs()
    drawn = {p.name: draw(rng, p, sizes, 0.3, positive=p.name in positive) for p in params if p.name not in inputs}
    return {p.name: (inputs | drawn)[p.name] for p in params}


def draw(
    rng: np.random.Generator,
    value: Value,
    sizes: Lengths,
    mean: float,
    std: float = 1.0,
    *,
    of: Axis | None = None,
    positive: bool = False,
) -> Array:
    """Numbers as ``drawn`` draws them, in the value's dtype."""
    return stored(drawn(rng, value, sizes, of, mean, std, positive=positive), value.type.dtype)


def same_bits(a: Array, b: Array) -> Array:
    """Elementwise: equal bits, or both NaN (all NaNs count as equal)."""
    kind = f"u{a.dtype.itemsize}"
    with np.errstate(invalid="ignore"):
        return np.asarray((a.view(kind) == b.view(kind)) | ((a != a) & (b != b)))


def differing(got: Array, want: Array) -> int:
    """The number of elements whose bits differ; all NaNs count as equal."""
    return int((~same_bits(got, want)).sum())


def differing_rows(value: Value, got: Any, want: Any, block: int, rows: int) -> int:
    """How many of the numbers of ``rows`` rows differ from those of a block of rows, repeated."""
    if value.type.by_columns:
        got, want = got.T, want.T
    return sum(int((got[s : s + block] != want[: min(block, rows - s)]).sum()) for s in range(0, rows, block))


def mismatches(got: Mapping[str, Array], want: Mapping[str, Array]) -> list[str]:
    """The results whose bits differ, and the number of elements of each."""
    wrong = {n: differing(got[n], want[n]) for n in want}
    return [f"{n}: {count} of {want[n].size} differ" for n, count in wrong.items() if count]


# ---- rows at two distances ----

INNER = NAMED  # rows before the outer distance: 133 rows leave one over, and one row is fewer


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
    for n, v in enumerate(filter(is_of_set, (*plan.inputs, *plan.outputs)), 1):
        found[v.name] = ((-(-plan.spec.d // unit) + n) * unit, 0)
    return found, INNER


def places(distance: Distance, rows: int, d: int) -> Array:
    """[rows, D]: where each element is behind the first."""
    outer, near = distance if isinstance(distance, tuple) else (INNER * distance, distance)
    row = np.arange(rows)
    return (row // INNER * outer + row % INNER * near)[:, None] + np.arange(d)


def set_places(distance: Distance, sets: int, d: int) -> Array:
    """[sets, D]: where each element of a tensor of sets is behind the first."""
    assert isinstance(distance, tuple)
    return (np.arange(sets) * distance[0])[:, None] + np.arange(d)


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


def launch_apart(launcher: Launcher, rows: int, inputs: Mapping[str, Array]) -> tuple[dict[str, Array], list[str]]:
    """The results of one launch on a GPU, and a complaint for each tensor of which more than its rows changed."""
    cupy = load_cupy()
    plan = launcher.plan
    d, (found, inner) = plan.spec.d, distances(plan)
    of_sets = {v.name for v in (*plan.inputs, *plan.outputs) if is_of_set(v)}
    at = {
        name: set_places(distance, rows // inner, d) if name in of_sets else places(distance, rows, d)
        for name, distance in found.items()
    }

    def memory(v: Value) -> Array:
        a, size = inputs.get(v.name), v.type.dtype.size
        if v.name in at:
            return spread(a, at[v.name], size)
        return poisoned(v.type.shape(rows, d), size) if a is None else raw(a)

    with cupy.cuda.Device(launcher.device):
        arrays = {v.name: cupy.asarray(memory(v)) for v in (*plan.inputs, *plan.outputs)}
        workspace = cupy.full(max(1, plan.workspace_bytes(rows, inner)), POISON, cupy.uint8)
        stream, pointers = cupy.cuda.get_current_stream(), {name: a.data.ptr for name, a in arrays.items()}
        values = {v.name: bits_of(inputs[v.name]) for v in plan.by_value}
        strides = {**launcher.contiguous(rows), **found}
        launcher(rows, pointers, strides, workspace.data.ptr, stream.ptr, inner, values)
        after = {name: a.get(stream=stream) for name, a in arrays.items()}
    results = {v.name: after[v.name][at[v.name]] if v.name in at else after[v.name] for v in plan.outputs}
    counts = {name: touched(after[name], at[name]) for name in at}
    complaints = [f"{name}: {count} elements between rows are written to" for name, count in counts.items() if count]
    return {v.name: results[v.name].view(NUMPY_DTYPE[v.type.dtype]) for v in plan.outputs}, complaints
