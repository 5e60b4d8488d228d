"""The facts about a graph that a schedule has to fit: lengths, dtypes, sums, phases."""

from __future__ import annotations

from dataclasses import dataclass

from lngen.ir import Axis, D, DType, Eqn, Graph, M, Value
from lngen.passes.order import column_order, element_size

WIDE = (Axis.M, Axis.D)


@dataclass(frozen=True)
class Problem:
    """Row length ``d`` in elements, cut into chunks and segments; what a thread has to hold."""

    d: int
    chunk: int
    segment: int
    groups: int
    blocks: int
    real_size: int
    input_sizes: tuple[int, ...]
    row_sums: int
    column_sums: int

    @property
    def chunks(self) -> int:
        """Chunks per row, the last one perhaps partial."""
        return -(-self.d // self.chunk)

    @property
    def segments(self) -> int:
        """Segments per row."""
        return -(-self.d // self.segment)

    @property
    def segment_chunks(self) -> int:
        """Chunks in the longest segment."""
        return min(self.chunks, self.segment // self.chunk)


def problem(graph: Graph, d: int) -> Problem:
    """The facts about ``graph`` for rows of ``d`` elements."""
    size = element_size(graph)
    order = column_order(d, size)
    levels = depths(graph)
    row_sums = [levels[e.args[0]] for e in graph.eqns if is_row_fold(e)]
    sums = [e for e in graph.eqns if e.op in ("reduce_sum", "reduce_max")]
    return Problem(
        d=d,
        chunk=16 // size,
        segment=32 * 1024 // size,
        groups=order.groups,
        blocks=order.blocks,
        real_size=max((e.out.type.dtype.size for e in sums), default=DType.F32.size),
        input_sizes=tuple(p.type.dtype.size for p in graph.params if p.type.axes == WIDE),
        row_sums=max((row_sums.count(n) for n in row_sums), default=0),
        column_sums=sum(is_sum(e, M) for e in graph.eqns),
    )


def is_sum(eqn: Eqn, axis: Axis) -> bool:
    """True for a sum over ``axis``."""
    return eqn.op == "reduce_sum" and eqn.attr("axis") is axis


def is_row_fold(eqn: Eqn) -> bool:
    """True for a sum or a maximum over D: what ends a phase."""
    return is_sum(eqn, D) or eqn.op == "reduce_max"


def depths(graph: Graph) -> dict[Value, int]:
    """For each value how many row sums and maxima must be finished one after the other before it: its phase."""
    levels = dict.fromkeys(graph.params, 0)
    for eqn in graph.eqns:
        levels[eqn.out] = max((levels[a] for a in eqn.args), default=0) + is_row_fold(eqn)
    return levels
