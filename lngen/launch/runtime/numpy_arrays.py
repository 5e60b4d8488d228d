"""NumPy arrays: the interpreter runs on them, or they are copied to a GPU, computed there and copied back."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from lngen.compiler.compile import KernelSet
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import DType, Graph, M, Value, bits_of, is_of_set, values_of
from lngen.compiler.ir.numerics import FROM_NUMPY, NUMPY_DTYPE, Array
from lngen.errors import ArrayError
from lngen.files import load_cupy
from lngen.launch.array_call import ArrayCall
from lngen.launch.array_rules import Placed, Sets, Span, are_bytes, check_layout, replaced
from lngen.launch.runtime.launcher import Launcher, device_arch
from lngen.launch.signature import Tensor

NO_NUMBERS: Mapping[str, Array] = MappingProxyType({})

# ---- on the interpreter ----


def run_on_host(
    call: ArrayCall, graph: Graph, arrays: Sequence[Any], given: Sequence[Any], eps: float | None
) -> tuple[tuple[Array, ...], tuple[str, ...]]:
    """Results of the interpreter, new where none is ``given``, and the names of the inputs that they overwrite.

    Arrays are checked like those of a GPU, and nothing is written before all are checked.
    """
    tensors, d, count = call.tensors, call.d, len(call.inputs)
    like = tensors[call.leader].name
    numpy = [_as_numpy(t, a, like) for t, a in zip(tensors, (*arrays, *given), strict=True)]
    rows = call.lead([() if a is None else a.shape for a in numpy])
    sets = Sets.among([(t, a.shape) for t, a in zip(tensors, numpy, strict=True) if a is not None], rows, d)
    for tensor, array in zip(tensors, numpy, strict=True):
        if array is not None:
            check_layout(tensor, (array.dtype, array.shape, (), 0), FROM_NUMPY.get(array.dtype), rows, d, 0)
    for tensor, array in zip(call.outputs, numpy[count:], strict=True):
        if array is not None:
            _check_result(tensor, array)
    written = any(a is not None for a in given)
    taken = replaced(tensors, [_placed(a) for a in numpy], count, added=call.added) if written else ()
    flat = {
        t.name: a.reshape(t.shape(math.prod(rows), d, sets.number if sets else 0)) if not t.by_position else a
        for t, a in zip(tensors, numpy[:count], strict=False)
        if a is not None
    }
    results = interpret(graph, {**flat, **({} if eps is None else values_of(graph, eps))})
    shaped = [results[t.name].reshape(t.shape(rows, d, sets.lead if sets else 0)) for t in call.outputs]
    for target, result in zip(numpy[count:], shaped, strict=True):
        if target is not None:
            target[...] = result
    return tuple(r if t is None else t for t, r in zip(given, shaped, strict=True)), taken


def check_positive(names: Collection[str], tensors: Sequence[Tensor], arrays: Sequence[Any]) -> None:
    """ArrayError for one of these inputs of one number, such as a scale, that is not above 0; a GPU's is not read."""
    for tensor, array in zip(tensors, arrays, strict=True):
        if tensor.name in names and isinstance(array, np.ndarray) and array.size == 1 and not array.item() > 0:
            raise ArrayError(f"'{tensor.name}' is expected to be a number above 0, got {array.item()}.")


def check_classes(classes: Mapping[str, int], d: int, tensors: Sequence[Tensor], arrays: Sequence[Any]) -> None:
    """ArrayError for a class that is none of 0 to d - 1, and not the number of those that are ignored, by name."""
    for tensor, array in zip(tensors, arrays, strict=True):
        ignored = classes.get(tensor.name)
        if ignored is None or not isinstance(array, np.ndarray) or array.dtype.kind != "i":
            continue
        wrong = array[((array < 0) | (array >= d)) & (array != ignored)]
        if wrong.size:
            raise ArrayError(
                f"'{tensor.name}' is expected to have classes from 0 to {d - 1}, or ignore_index={ignored}, got "
                f"{wrong[0]}."
            )


def _placed(array: Array | None) -> Placed:
    return None if array is None else (array.ctypes.data, Span.of(array.shape, array.strides, array.itemsize))


def _as_numpy(tensor: Tensor, array: Any, like: str) -> Array | None:
    """A plain array on the same memory, also for a memmap; of bytes the floats that they are. None stays None."""
    if isinstance(array, np.ma.MaskedArray):
        raise ArrayError(f"'{tensor.name}' is a masked array, and its mask would be lost; pass array.filled().")
    if array is not None and not isinstance(array, np.ndarray):
        raise ArrayError(
            f"'{tensor.name}' is expected to be a NumPy array like '{like}', got "
            f"{type(array).__module__}.{type(array).__name__}."
        )
    if array is not None and are_bytes(tensor, array.dtype):
        return np.asarray(array).view(NUMPY_DTYPE[DType(tensor.dtype)])
    return None if array is None else np.asarray(array)


def _check_result(tensor: Tensor, array: Array) -> None:
    """ArrayError if a NumPy array cannot be written to, element by element."""
    if not array.flags.writeable:
        raise ArrayError(f"'{tensor.name}' is written to, but is read-only; pass an array that may be changed.")
    reach = array.itemsize
    for stride, n in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < reach and array.size:
            raise ArrayError(
                f"'{tensor.name}' is written to, but its elements share memory or interleave: strides "
                f"{array.strides} in bytes for shape {array.shape}; pass a contiguous array."
            )
        reach += (n - 1) * stride


# ---- on a GPU ----


def run_numpy(
    kernels: KernelSet, inputs: Mapping[str, Array], device: int = 0, overlap: bool = False
) -> dict[str, Array]:
    """Every result of ``kernels`` by name, for inputs as ``interpret`` takes them; waits for the GPU.

    ``overlap`` as in ``Launcher``. MissingError without a GPU or CuPy.
    """
    launcher = Launcher(kernels.plan, kernels.cubin(device_arch(device)).image, device, overlap)
    rows = next(len(inputs[v.name]) for v in kernels.plan.inputs if M in v.type.axes)
    return launch_numpy(launcher, rows, inputs)


def launch_numpy(
    launcher: Launcher, rows: int, inputs: Mapping[str, Array], poison: int | None = None
) -> dict[str, Array]:
    """As ``run_numpy``, with loaded kernels; ``poison`` as in ``launch_raw``."""
    cupy = load_cupy()
    with cupy.cuda.Device(launcher.device):
        plan = launcher.plan
        given = {v.name: cupy.asarray(raw(inputs[v.name])) for v in plan.inputs}
        results = launch_raw(launcher, rows, given, poison, {v.name: inputs[v.name] for v in plan.by_value})
        stream = cupy.cuda.get_current_stream()  # the copy to the host waits for this stream
        return {
            v.name: results[v.name].get(stream=stream).view(NUMPY_DTYPE[v.type.dtype]) for v in launcher.plan.outputs
        }


def launch_raw(
    launcher: Launcher,
    rows: int,
    inputs: Mapping[str, Any],
    poison: int | None = None,
    values: Mapping[str, Array] = NO_NUMBERS,
) -> dict[str, Any]:
    """The results as new CuPy arrays of unsigned integers, on the current device and stream; it does not wait.

    ``values`` are passed by value.
    ``poison`` is a byte that fills results and workspace before the launch; None: they are not filled.
    """
    cupy = load_cupy()
    plan = launcher.plan
    d, sets = plan.spec.d, next((len(inputs[v.name]) for v in plan.inputs if is_of_set(v)), 0)
    inner = max(rows // sets, 1) if sets else 1
    shapes = {v.name: (sets, d) if is_of_set(v) else v.type.shape(rows, d) for v in plan.outputs}
    results = {v.name: cupy.empty(shapes[v.name], f"u{v.type.dtype.size}") for v in plan.outputs}
    workspace = cupy.empty(max(1, plan.workspace_bytes(rows, inner)), cupy.uint8)
    if poison is not None:
        for a in (workspace, *results.values()):
            a.fill(int.from_bytes([poison] * a.itemsize, "little"))
    pointers = {name: a.data.ptr for name, a in (*inputs.items(), *results.items())}
    launcher(
        rows,
        pointers,
        launcher.contiguous(rows),
        workspace.data.ptr,
        cupy.cuda.get_current_stream().ptr,
        inner,
        values={n: bits_of(a) for n, a in values.items()},
    )
    return results


def host_copy(value: Value, address: int, d: int, device: int) -> Array:
    """A copy of a contiguous array without rows at ``address`` on ``device``; waits for the GPU."""
    cupy = load_cupy()
    copy = np.empty(value.type.shape((), d), NUMPY_DTYPE[value.type.dtype])
    with cupy.cuda.Device(device) as on:
        on.synchronize()
        cupy.cuda.runtime.memcpy(copy.ctypes.data, address, copy.nbytes, cupy.cuda.runtime.memcpyDeviceToHost)
    return copy


def raw(a: Array) -> Array:
    """The array as contiguous unsigned integers, so that CuPy need not know its dtype."""
    return np.asarray(a, order="C").view(f"u{a.dtype.itemsize}")
