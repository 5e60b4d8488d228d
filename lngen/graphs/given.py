"""What a graph that is given as it stands fixes: its dtypes, the roles of its results."""

from __future__ import annotations

from lngen.errors import SpecError
from lngen.ir import SUMS, WIDE, D, DType, Graph, Value
from lngen.ir.type_rules import ORDER
from lngen.passes.edit import downstream


def declared(graph: Graph) -> tuple[DType, DType, DType]:
    """The dtypes that a spec of the graph has: of inputs with rows and features, of other inputs, of outputs."""
    wide = next((p.type.dtype for p in graph.params if p.type.axes == WIDE), DType.F32)
    weight = next((p.type.dtype for p in graph.params if p.type.axes != WIDE), wide)
    return wide, weight, next((r.type.dtype for r in graph.results if D in r.type.axes), wide)


def statistics_of(graph: Graph) -> tuple[str, ...]:
    """The results that lack D and that another result is computed from: what backward may take from forward."""
    return tuple(r.name for r in graph.results if D not in r.type.axes and _is_used(graph, r))


def _is_used(graph: Graph, value: Value) -> bool:
    return not downstream(graph.eqns, [value]).isdisjoint(r for r in graph.results if r != value)


def check_forward(graph: Graph) -> None:
    """SpecError if the order of a sum is fixed already: lngen fixes it, for one D."""
    for eqn in graph.eqns:
        found = [key for key, _ in eqn.attrs if key in ORDER]
        if eqn.op in SUMS and found:
            raise SpecError(
                f"graph @{graph.name}: the sum '{eqn.out}' is expected without an order, got {', '.join(found)}; lngen "
                "show SPEC --stage graph --after build prints a graph before its sums are ordered."
            )
