"""The facts about a graph that a schedule has to fit: lengths, dtypes, sums, phases."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lngen.ir import REDUCTIONS, WIDE, D, DType, Eqn, Graph, M, Value, is_row_fold, is_sum
from lngen.passes.order import ColumnOrder, orders, sharers


@dataclass(frozen=True)
class Problem:
    """Row length ``d`` in elements, cut into segments of chunks; how its sums are shared; what passes through.

    run                         elements of a chunk that lie side by side
    cluster                     blocks that hold the column sums of a row well
    input_sizes, output_sizes   bytes per element of each [M, D] tensor; of inputs that an equation uses
    column_sizes                of each [D] input
    row_sums                    the most sums and maxima that end one phase
    phases                      how many phases the rows go through
    """

    d: int
    chunk: int
    run: int
    segment: int
    groups: int
    blocks: int
    strands: int
    cluster: int
    real_size: int
    input_sizes: tuple[int, ...]
    output_sizes: tuple[int, ...]
    column_sizes: tuple[int, ...]
    row_sums: int
    column_sums: int
    phases: int

    @property
    def element(self) -> int:
        """Bytes of the shortest element of the [M, D] inputs; of none, 4."""
        return min(self.input_sizes, default=4)

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
        """Chunks per segment, the last segment perhaps shorter."""
        return self.segment // self.chunk


def problem(graph: Graph, d: int) -> Problem:
    """The facts about ``graph`` for rows of ``d`` elements."""
    row, column = orders(graph, d)
    column = _written(graph) or column
    levels = depths(graph)
    row_sums = [operand_depth(e, levels) for e in graph.eqns if is_row_fold(e)]
    sums = [e for e in graph.eqns if e.op in REDUCTIONS]
    used = {a for e in graph.eqns for a in e.args}
    return Problem(
        d=d,
        chunk=row.chunk,
        run=row.run,
        segment=row.segment,
        groups=column.groups,
        blocks=column.blocks,
        strands=column.strands,
        cluster=sharers(graph, d),
        real_size=max((e.out.type.dtype.size for e in sums), default=DType.F32.size),
        input_sizes=tuple(p.type.dtype.size for p in graph.params if p.type.axes == WIDE and p in used),
        output_sizes=tuple(r.type.dtype.size for r in graph.results if r.type.axes == WIDE),
        column_sizes=tuple(p.type.dtype.size for p in graph.params if p.type.axes == (D,)),
        row_sums=max((row_sums.count(n) for n in row_sums), default=0),
        column_sums=sum(is_sum(e, M) for e in graph.eqns),
        phases=1 + max(row_sums, default=-1) + 1,
    )


def _written(graph: Graph) -> ColumnOrder | None:
    """The order that the graph's column sums have."""
    for eqn in graph.eqns:
        if is_sum(eqn, M) and "blocks" in dict(eqn.attrs):
            return ColumnOrder(**{f.name: eqn.int_attr(f.name) for f in fields(ColumnOrder)})
    return None


def depths(graph: Graph) -> dict[Value, int]:
    """For each value how many row sums and maxima must be finished one after the other before it: its phase."""
    levels = dict.fromkeys(graph.params, 0)
    for eqn in graph.eqns:
        levels[eqn.out] = operand_depth(eqn, levels) + is_row_fold(eqn)
    return levels


def operand_depth(eqn: Eqn, levels: dict[Value, int]) -> int:
    """The depth that all operands of ``eqn`` are at: the phase that can compute it, or add it up."""
    return max((levels[a] for a in eqn.args), default=0)
