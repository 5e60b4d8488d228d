"""The interpreter: the meaning of a graph, in NumPy. Its results are, by definition, correct to the bit.

NaN and infinity go where IEEE 754 sends them. An operation on a NaN gives a NaN; so do inf - inf, 0 * inf, 0 / 0 and
the root of a negative number. Nothing is flushed or clamped. Which NaN (sign, payload) is not defined: all NaNs count
as one value wherever bits are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
    M,
    Ops,
    Type,
    Value,
    derived_axes,
    segment_of,
)
from lngen.compiler.ir.meanings import Fold, fold_of_rows
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array, Scratch, columns_of
from lngen.compiler.ir.places import once
from lngen.compiler.ir.row_loops import RowLoop, Step, numbers, row_loops
from lngen.errors import ArrayError

# Elements of an array for a block of rows: so few that a dozen arrays stay in cache, so many that NumPy's own time of a
# call is little.
BLOCK = 1 << 17
MOST_SHAPES = 64  # of which a graph keeps the lengths
_buffers = Scratch()


def interpret(graph: Graph, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Every result of ``graph`` by name, for inputs by name.

    An array has one dimension per axis of its parameter, [M, D], [M], [D] or [], and its exact dtype
    (bfloat16 is ml_dtypes.bfloat16); otherwise ArrayError.
    """
    size, number = sizes_of(graph, inputs), numbers(graph)
    known: list[Any] = [spread(p, inputs[p.name]) for p in graph.params]
    known += [None] * len(graph.eqns)
    with np.errstate(all="ignore"):
        for loop in row_loops(graph):
            for step in loop.before:
                known[step.out] = value_of(step.eqn, operands(step, known, size), size)
            if loop.rows:
                _run(loop, known, size)
    own = {n for loop in row_loops(graph) for n in loop.kept}
    found = [(r, known[number[r]], number[r] in own) for r in graph.results]
    return {r.name: _narrow(r, array) if is_own else gathered(r, array, size) for r, array, is_own in found}


def _run(loop: RowLoop, known: list[Any], size: Lengths) -> None:
    """Computes a loop over blocks of rows: the values that it keeps, and its sums and maxima over all rows."""
    rows = min(max(BLOCK // max(size.get(D, 1), 1), 1), size[M])
    kept = {n: np.empty(_shape(t, size, size[M]), NUMPY_DTYPE[t.dtype]) for n, t in loop.kept.items()}
    folds = {n: fold_of_rows(e, size[M]) for n, e in loop.folds.items()}
    buffers = _buffers.arrays(*((_shape(t, size, rows), NUMPY_DTYPE[t.dtype]) for t in loop.buffers))
    for first in range(0, size[M], rows) if rows else (0,):  # one empty block of no rows
        block = range(first, min(first + rows, size[M]))
        _run_block(loop, [*known], Lengths(size, size.segment, block), kept, folds, [b[: len(block)] for b in buffers])
    for n, array in kept.items():
        known[n] = array
    for n, fold in folds.items():
        known[n] = fold.total()[None, :]


def _run_block(
    loop: RowLoop,
    known: list[Any],
    size: Lengths,
    kept: Mapping[int, Array],
    folds: Mapping[int, Fold],
    buffers: Sequence[Array],
) -> None:
    """Computes the rows that ``size`` says."""
    assert size.rows is not None
    part = slice(size.rows.start, size.rows.stop)
    for n in loop.read:
        known[n] = known[n][part]
    for step in loop.rows:
        args = operands(step, known, size)
        if step.buffer is not None:
            known[step.out] = value_of(step.eqn, args, size, buffers[step.buffer])
        elif step.out in folds:
            folds[step.out].add(*args)
        else:
            out = kept[step.out][part]
            known[step.out] = value_of(step.eqn, args, size, out)
            if known[step.out] is not out:
                out[...] = known[step.out]


def _shape(typ: Type, size: Lengths, rows: int) -> tuple[int, int]:
    """The shape of an array with so many rows, of size 1 along D if its type lacks it."""
    d = typ.along(D)
    return rows, 1 if d is None else size[d]


def operands(step: Step, known: Sequence[Array], size: Lengths) -> tuple[Array, ...]:
    """The operands of an equation, each along the axes that it works along."""
    args = [known[a] for a in step.args]
    for n, place, axis, wanted in step.unequal:
        args[n] = np.take(args[n], size.positions(wanted, axis), axis=place)
    return tuple(args)


# ---- arrays and their lengths ----


def sizes_of(graph: Graph, inputs: Mapping[str, Array]) -> Lengths:
    """The length of every axis; ArrayError as ``interpret``. A graph keeps what it has found for some shapes."""
    kept, arrays = _kept_sizes(graph), [inputs.get(p.name) for p in graph.params]
    shapes = tuple([None if a is None else (a.shape, a.dtype) for a in arrays])
    if shapes not in kept:
        if len(kept) == MOST_SHAPES:
            kept.clear()
        kept[shapes] = _sizes(graph, inputs)
    return kept[shapes]


@once
def _kept_sizes(graph: Graph) -> dict[tuple[object, ...], Lengths]:
    return {}


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
    for axis in (a for a in derived_axes(graph) if not a.of_table):
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


def spread(value: Value, array: Array) -> Array:
    """The array with size 1 along the axes that its value lacks."""
    return array[tuple(slice(None) if value.type.along(a) else None for a in WIDE)]


def gathered(value: Value, array: Array, size: Lengths) -> Array:
    """A copy with the axes of its value alone."""
    full = np.broadcast_to(array, [1 if (a := value.type.along(root)) is None else size[a] for root in WIDE])
    return np.array(_narrow(value, full), order="C")


def _narrow(value: Value, array: Array) -> Array:
    """The array as it is stored: without the axes that its value lacks, or by columns."""
    found = array[tuple(0 if value.type.along(root) is None else slice(None) for root in WIDE)]
    return columns_of(found) if value.type.by_columns else found


# ---- one equation ----


def value_of(eqn: Eqn, args: tuple[Array, ...], size: Lengths, out: Array | None = None) -> Array:
    """The value, for operands that have size 1 along the axes they lack: in ``out``, or in an array of its own."""
    op = OPS[eqn.op]
    if op.numpy:
        return op.numpy(args, eqn, size, out)
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
