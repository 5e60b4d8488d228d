"""NumPy arrays on the interpreter: checked like a GPU's arrays, and results are written only after all checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lngen.errors import ArrayError
from lngen.interpret import interpret
from lngen.ir import Graph, Value
from lngen.ir.numerics import Array
from lngen.runtime.arrays import FROM_NUMPY
from lngen.runtime.overlap import check_result, replaced
from lngen.runtime.shapes import check_layout, leading


def run_on_host(
    graph: Graph, d: int, leader: int, arrays: Sequence[Any], given: Sequence[Any]
) -> tuple[tuple[Array, ...], tuple[str, ...]]:
    """Results, new where none is ``given``, and the inputs that they overwrite; ``leader`` gives the rows."""
    values = (*graph.params, *graph.results)
    like = values[leader].name
    numpy = [_as_numpy(v, a, like) for v, a in zip(values, (*arrays, *given), strict=True)]
    first = numpy[leader]
    assert first is not None
    rows = leading(values[leader], first.shape, d)
    for value, array in zip(values, numpy, strict=True):
        if array is not None:
            check_layout(value, (array.dtype, array.shape, (), 0), FROM_NUMPY.get(array.dtype), rows, d, 0)
    count = len(graph.params)
    for value, array in zip(graph.results, numpy[count:], strict=True):
        if array is not None:
            check_result(value, array)
    taken = replaced(values, numpy, count)
    flat = {
        v.name: a.reshape(v.type.shape(math.prod(rows), d))
        for v, a in zip(values, numpy[:count], strict=False)
        if a is not None
    }
    results = interpret(graph, flat)
    shaped = [results[v.name].reshape(v.type.shape(rows, d)) for v in graph.results]
    for target, result in zip(given, shaped, strict=True):
        if target is not None:
            target[...] = result
    return tuple(r if t is None else t for t, r in zip(given, shaped, strict=True)), taken


def _as_numpy(value: Value, array: Any, like: str) -> Array | None:
    """A plain array on the same memory, also for a memmap; None stays None."""
    if isinstance(array, np.ma.MaskedArray):
        raise ArrayError(f"'{value.name}' is a masked array, and its mask would be lost; pass array.filled().")
    if array is not None and not isinstance(array, np.ndarray):
        raise ArrayError(
            f"'{value.name}' is expected to be a NumPy array like '{like}', got "
            f"{type(array).__module__}.{type(array).__name__}."
        )
    return None if array is None else np.asarray(array)
