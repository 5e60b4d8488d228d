"""Inputs of graphs with sets of rows: so many sets of so many rows."""

from typing import Any

import numpy as np

from lngen.compiler.interpret import interpret
from lngen.compiler.ir import D, Graph, Lengths, M, Value, sets_of, values_of
from lngen.compiler.ir.numerics import stored
from lngen.compiler.passes.instance import drawn
from lngen.compiler.spec import Spec

Array = Any


def set_inputs(spec: Spec, per_set: int, sets: int, seed: int = 0) -> dict[str, Array]:
    """The spec's inputs by name; those that a backward takes from forward are computed by forward."""
    rng, axis = np.random.default_rng([seed, per_set, sets, spec.d]), sets_of(spec.forward())
    sizes = Lengths({M: per_set * sets, D: spec.d, **({axis: sets} if axis else {})})

    def draw(p: Value) -> Array:
        return stored(drawn(rng, p, sizes, None, 0.5), p.type.dtype)

    forward: Graph = spec.with_direction("fwd").graph()
    known = {p.name: draw(p) for p in forward.tensors} | values_of(forward, spec.eps_or_default)
    if spec.direction == "bwd":
        known |= interpret(forward, known)
        known |= {p.name: draw(p) for p in spec.graph().params if p.name not in known}
    return {p.name: known[p.name] for p in spec.graph().params}
