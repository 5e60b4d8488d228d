"""The places of the tensors of a row in a pipeline stage."""

from __future__ import annotations

from lngen.ir import WIDE, Graph, Value, ctype
from lngen.lower.parts import Place
from lngen.problem import STAGED, Problem, Schedule
from lngen.problem.footprint import stage_share


def places(
    graph: Graph, outputs: tuple[Value, ...], s: Schedule, p: Problem
) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """The places of the [M, D] inputs, and of the results that are stored by TMA, in a stage.

    A result takes the place of an input of its size, as long as there is one.
    """
    if s.form not in STAGED:
        return (), ()
    inputs = [v for v in graph.params if v.type.axes == WIDE]
    results = [v for v in outputs if v.type.axes == WIDE and s.tma_store]
    free, offset, at = list(inputs), 0, dict[Value, int]()
    for v in (*inputs, *results):
        size = v.type.dtype.size
        shares = v in results and s.form != "tma_unaligned"  # an unaligned result may have another misalignment
        same = next((u for u in free if u.type.dtype.size == size), None) if shares else None
        if same is not None:
            free.remove(same)
            at[v] = at[same]
        else:
            at[v] = offset
            offset += stage_share(size, s, p)

    def listed(values: list[Value]) -> tuple[Place, ...]:
        return tuple(Place(v.name, ctype(v.type.dtype), at[v]) for v in values)

    return listed(inputs), listed(results)
