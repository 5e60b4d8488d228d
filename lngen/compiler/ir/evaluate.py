"""A graph evaluated in real numbers: every value with the error bound of its rounded evaluation; see ``ir.real``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lngen.compiler.ir.ops import OPS
from lngen.compiler.ir.real import Array, Real, Setting
from lngen.compiler.ir.types import WIDE, Axis, D, Graph, Value, has_segments, indexed_by_elements, segment_of


def evaluate(
    graph: Graph, inputs: Mapping[str, Array], errors: Mapping[str, Array] | None = None, *, wide: bool = False
) -> dict[str, Real]:
    """Every result of ``graph`` by name, in the shape of its axes, for inputs by name.

    ``errors``: elementwise errors of inputs; inputs that are not named are exact. ``wide``: the error bound is that of
    an evaluation in float64 that rounds to no other dtype, as here; else that of the graph's own dtypes.
    """
    sizes: dict[Axis, int] = {}
    values: dict[Value, Real] = {}
    for p in graph.params:
        sizes |= dict(zip(p.type.axes, inputs[p.name].shape, strict=True))
    for p in graph.params:
        value = _spread(p, inputs[p.name])
        error = _spread(p, errors[p.name]) if errors and p.name in errors else np.zeros_like(value)
        values[p] = Real(value, error)
    segment, setting = segment_of(graph, sizes.get(D, 1)), Setting(sizes, wide)
    segmented = has_segments(graph)
    with np.errstate(all="ignore"):
        for eqn in graph.eqns:
            meaning = OPS[eqn.op].real
            assert meaning is not None, f"{eqn.op} is made of the bits of f32"
            args = tuple([values[a] for a in eqn.args])
            if segmented:
                met = zip(args, indexed_by_elements(eqn), strict=True)
                args = tuple(_of_elements(a, sizes[D], segment) if along_d else a for a, along_d in met)
            values[eqn.out] = meaning(args, eqn, setting)
    return {r.name: Real(_gather(r, values[r].value, sizes), _gather(r, values[r].error, sizes)) for r in graph.results}


def _spread(value: Value, array: Array) -> Array:
    return array.astype(np.float64)[tuple(slice(None) if a in value.type.axes else None for a in WIDE)]


def _of_elements(number: Real, d: int, segment: int) -> Real:
    """Repeats the number of each segment for its elements."""
    value, error = (
        np.repeat(np.broadcast_to(n, number.value.shape), segment, axis=1)[:, :d] for n in (number.value, number.error)
    )
    return Real(value, error)


def _gather(value: Value, array: Array, sizes: Mapping[Axis, int]) -> Array:
    full = np.broadcast_to(array, [sizes[a] if a in value.type.axes else 1 for a in WIDE])
    return np.array(full[tuple(slice(None) if a in value.type.axes else 0 for a in WIDE)], order="C")
