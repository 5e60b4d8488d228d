"""The interpreter: the meaning of a graph, in NumPy. Its results are, by definition, correct to the bit.

NaN and infinity go where IEEE 754 sends them. An operation on a NaN gives a NaN; so do inf - inf, 0 * inf, 0 / 0 and
the root of a negative number. Nothing is flushed or clamped. Which NaN (sign, payload) is not defined: all NaNs count
as one value wherever bits are compared.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lngen.compiler.ir import (
    OPS,
    WIDE,
    Attr,
    Axis,
    D,
    Eqn,
    Graph,
    Lengths,
    Ops,
    Value,
    derived_axes,
    segment_of,
    unequal,
)
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array
from lngen.errors import ArrayError


def interpret(graph: Graph, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Every result of ``graph`` by name, for inputs by name.

    An array has one dimension per axis of its parameter, [M, D], [M], [D] or [], and its exact dtype
    (bfloat16 is ml_dtypes.bfloat16); otherwise ArrayError.
    """
    size = _sizes(graph, inputs)
    env: dict[Value, Array] = {p: _spread(p, inputs[p.name]) for p in graph.params}
    with np.errstate(all="ignore"):
        for eqn in graph.eqns:
            args = [env[a] for a in eqn.args]
            for n, place, axis, wanted in unequal(eqn):
                args[n] = np.take(args[n], size.positions(wanted, axis), axis=place)
            env[eqn.out] = value_of(eqn, tuple(args), size)
    return {r.name: _gather(r, env[r], size) for r in graph.results}


def _sizes(graph: Graph, inputs: Mapping[str, Array]) -> Lengths:
    size: dict[Axis, int] = {}
    for p in graph.params:
        if p.name not in inputs:
            raise ArrayError(f"graph @{graph.name} expects an input '{p.name}: {p.type}', which is missing.")
        array = inputs[p.name]
        if array.dtype != NUMPY_DTYPE[p.type.dtype]:
            raise ArrayError(f"'{p.name}' is expected to be {NUMPY_DTYPE[p.type.dtype]}, got {array.dtype}.")
        if array.ndim != len(p.type.axes):
            raise ArrayError(f"'{p.name}' is expected to have shape {list(map(str, p.type.axes))}, got {array.shape}.")
        for axis, n in zip(p.type.axes, array.shape, strict=True):
            if size.setdefault(axis, n) != n:
                raise ArrayError(f"'{p.name}' has {n} elements along {axis}; another input has {size[axis]}.")
    for r in graph.results:
        for axis in r.type.axes:
            if axis not in size and (axis.base is None or axis.base not in size):
                raise ArrayError(f"graph @{graph.name}: no input says how long {axis} is, which '{r.name}' needs.")
    return _divided(graph, Lengths(size, segment_of(graph, size.get(D, 1))))


def _divided(graph: Graph, size: Lengths) -> Lengths:
    """The lengths; ArrayError if a derived axis does not divide its base, or has another length than the graph says."""
    for axis in derived_axes(graph):
        assert axis.base is not None
        if axis.base not in size:
            continue
        whole = size[axis.base]
        try:
            said = Lengths({axis.base: whole, **({axis: size[axis]} if isinstance(axis.number, str) else {})})[axis]
        except ValueError as e:
            raise ArrayError(f"graph @{graph.name}: {e}.") from e
        if size[axis] != said:
            raise ArrayError(
                f"graph @{graph.name}: {axis.declaration} has {said} elements, got an array of {size[axis]}."
            )
        if said and whole % said:
            raise ArrayError(
                f"graph @{graph.name}: {axis.declaration} has {said} elements, which do not divide {whole}."
            )
    return size


def _spread(value: Value, array: Array) -> Array:
    """The array with size 1 along the axes that its value lacks."""
    return array[tuple(slice(None) if value.type.along(a) else None for a in WIDE)]


def _gather(value: Value, array: Array, size: Lengths) -> Array:
    """The array without the axes its value lacks."""
    axes = [value.type.along(a) for a in WIDE]
    full = np.broadcast_to(array, [size[a] if a else 1 for a in axes])
    return np.array(full[tuple(slice(None) if a else 0 for a in axes)], order="C")


def value_of(eqn: Eqn, args: tuple[Array, ...], size: Lengths) -> Array:
    """The value, for operands that have size 1 along the axes they lack."""
    op = OPS[eqn.op]
    if op.numpy:
        return op.numpy(args, eqn, size, None)
    assert op.expand, eqn.op
    evaluator = _Evaluator(dict(zip(eqn.args, args, strict=True)), size)
    return evaluator.known[op.expand(evaluator, eqn)]


class _Evaluator(Ops):
    """Computes each equation as it is written."""

    def __init__(self, known: dict[Value, Array], size: Lengths) -> None:
        self.known, self._sizes = known, size

    def emit(self, op: str, name: str, args: tuple[Value, ...], **attrs: Attr) -> Value:
        """A value of its own, computed."""
        listed = tuple(sorted(attrs.items()))
        out = Value(f"{name}_{len(self.known)}", OPS[op].typ(tuple(a.type for a in args), listed))
        self.known[out] = value_of(Eqn(out, op, args, listed), tuple(self.known[a] for a in args), self._sizes)
        return out
