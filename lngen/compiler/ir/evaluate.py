"""A graph evaluated in real numbers: every value with the error bound of its rounded evaluation; see ``ir.real``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lngen.compiler.ir.axes import WIDE, Axis, D, Lengths
from lngen.compiler.ir.numerics import columns_of
from lngen.compiler.ir.ops import OPS
from lngen.compiler.ir.places import unequal
from lngen.compiler.ir.real import Array, Real, Setting
from lngen.compiler.ir.types import Graph, Value, segment_of


def evaluate(
    graph: Graph, inputs: Mapping[str, Array], errors: Mapping[str, Array] | None = None, *, wide: bool = False
) -> dict[str, Real]:
    """Every result of ``graph`` by name, in the shape of its axes, for inputs by name.

    ``errors``: elementwise errors of inputs; inputs that are not named are exact. ``wide``: the error bound is that of
    an evaluation in float64 that rounds to no other dtype, as here; else that of the graph's own dtypes.
    """
    given: dict[Axis, int] = {}
    values: dict[Value, Real] = {}
    for p in graph.params:
        given |= dict(zip(p.type.axes, inputs[p.name].shape, strict=True))
    sizes = Lengths(given, segment_of(graph, given.get(D, 1)))
    for p in graph.params:
        value = _spread(p, inputs[p.name])
        error = _spread(p, errors[p.name]) if errors and p.name in errors else np.zeros_like(value)
        values[p] = Real(value, error)
    setting = Setting(sizes, wide)
    with np.errstate(all="ignore"):
        for eqn in graph.eqns:
            args = [values[a] for a in eqn.args]
            for n, place, axis, wanted in unequal(eqn):
                positions = sizes.positions(wanted, axis)
                args[n] = Real(*(np.take(x, positions, axis=place) for x in (args[n].value, args[n].error)))
            values[eqn.out] = OPS[eqn.op].real(tuple(args), eqn, setting)
    return {r.name: Real(_gather(r, values[r].value, sizes), _gather(r, values[r].error, sizes)) for r in graph.results}


def _spread(value: Value, array: Array) -> Array:
    return array.astype(np.float64)[tuple(slice(None) if value.type.along(a) else None for a in WIDE)]


def _gather(value: Value, array: Array, sizes: Lengths) -> Array:
    axes = [value.type.along(a) for a in WIDE]
    full = np.broadcast_to(array, [sizes[a] if a else 1 for a in axes])
    found = np.array(full[tuple(slice(None) if a else 0 for a in axes)], order="C")
    return columns_of(found) if value.type.by_columns else found
