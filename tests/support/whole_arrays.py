"""The interpreter without blocks of rows: each equation on whole arrays, in order. It says what blocks must give."""

from collections.abc import Mapping

import numpy as np

from lngen.compiler.interpret import gathered, sizes_of, spread, value_of
from lngen.compiler.ir import Eqn, Graph, unequal
from lngen.compiler.ir.numerics import Array


def computed(graph: Graph, inputs: Mapping[str, Array]) -> list[tuple[Eqn, tuple[Array, ...], Array]]:
    """The equations of a graph, each with its operands and its value."""
    size, done = sizes_of(graph, inputs), list[tuple[Eqn, tuple[Array, ...], Array]]()
    known = {p: spread(p, inputs[p.name]) for p in graph.params}
    with np.errstate(all="ignore"):
        for eqn in graph.eqns:
            args = [known[a] for a in eqn.args]
            for n, place, axis, wanted in unequal(eqn):
                args[n] = np.take(args[n], size.positions(wanted, axis), axis=place)
            known[eqn.out] = value_of(eqn, tuple(args), size)
            done.append((eqn, tuple(args), known[eqn.out]))
    return done


def by_whole_arrays(graph: Graph, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Every result by name, as of ``interpret``."""
    size = sizes_of(graph, inputs)
    known = {p: spread(p, inputs[p.name]) for p in graph.params}
    known |= {eqn.out: value for eqn, _, value in computed(graph, inputs)}
    return {r.name: gathered(r, known[r], size) for r in graph.results}
