"""The facts about a graph that a schedule has to fit: lengths, dtypes, sums, phases."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lngen.ir import REDUCTIONS, WIDE, D, DType, Eqn, Graph, M, Value, is_row_fold, is_sum, spread_sums
from lngen.passes.order import ColumnOrder, orders, sharers

SPREAD_MET = 2  # numbers of a segment that blocks send each other for a spread


@dataclass(frozen=True)
class Problem:
    """Row length ``d`` in elements, cut into segments of chunks; how its sums are shared; what passes through.

    run                         elements of a chunk that lie side by side
    cluster                     blocks that hold the column sums of a row well
    input_sizes, output_sizes   bytes per element of each [M, D] tensor; of inputs that an equation uses
    column_sizes                of each [D] input
    row_sums                    the most numbers that the threads of a row fold at the end of one phase
    met_sums                    the most of a segment that the blocks of a row leave each other there
    spreads                     sums of squares of distances from the mean, taken by segments
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
    met_sums: int
    spreads: int
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
    ends = folds(graph)
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
        row_sums=max((f.folded for f in ends), default=0),
        met_sums=max((f.met for f in ends), default=0),
        spreads=sum(e.op == "reduce_spread" for e in graph.eqns),
        column_sums=sum(is_sum(e, M) for e in graph.eqns),
        phases=len(ends) + 1,
    )


def _written(graph: Graph) -> ColumnOrder | None:
    """The order that the graph's column sums have."""
    for eqn in graph.eqns:
        if is_sum(eqn, M) and "blocks" in dict(eqn.attrs):
            return ColumnOrder(**{f.name: eqn.int_attr(f.name) for f in fields(ColumnOrder)})
    return None


@dataclass(frozen=True)
class Folds:
    """The reductions over D that end a phase.

    A spread ends two: first with sums of segments, which stay with their blocks, then with those of squares, and the
    sums go with them. The sum of what it is a spread of is in it.
    """

    begun: tuple[Eqn, ...] = ()
    ended: tuple[Eqn, ...] = ()
    plain: tuple[Eqn, ...] = ()

    @property
    def folded(self) -> int:
        """Numbers that the threads of a row fold."""
        return len(self.begun) + len(self.ended) + len(self.plain)

    @property
    def met(self) -> int:
        """Numbers of each segment that the blocks of a row send each other."""
        return SPREAD_MET * len(self.ended) + len(self.plain)


def folds(graph: Graph) -> tuple[Folds, ...]:
    """The reductions over D, phase by phase."""
    levels, joined = depths(graph), spread_sums(graph)
    at = {e: operand_depth(e, levels) for e in graph.eqns if is_row_fold(e) and e.out not in joined}
    spreads = {e: n for e, n in at.items() if e.op == "reduce_spread"}
    count = max([n + (e in spreads) for e, n in at.items()], default=-1) + 1

    def phase(number: int) -> Folds:
        begun = tuple(e for e, n in spreads.items() if n == number)
        ended = tuple(e for e, n in spreads.items() if n + 1 == number)
        return Folds(begun, ended, tuple(e for e, n in at.items() if n == number and e not in spreads))

    return tuple(map(phase, range(count)))


def depths(graph: Graph) -> dict[Value, int]:
    """For each value how many row sums and maxima must be finished one after the other before it: its phase."""
    levels, joined = dict.fromkeys(graph.params, 0), spread_sums(graph)
    for eqn in graph.eqns:
        twice, once = eqn.op == "reduce_spread" or eqn.out in joined, is_row_fold(eqn) or eqn.op == "segment_mean"
        levels[eqn.out] = operand_depth(eqn, levels) + (2 if twice else once)
    return levels


def operand_depth(eqn: Eqn, levels: dict[Value, int]) -> int:
    """The depth that all operands of ``eqn`` are at: the phase that can compute it, or add it up."""
    return max((levels[a] for a in eqn.args), default=0)
