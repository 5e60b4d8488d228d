"""Give every sum its order, as attributes: from here on a graph fixes every bit of its results."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lngen.ir import Axis, D, Eqn, Graph

CHUNK_BYTES = 16
SEGMENT_BYTES = 16 * 1024

# Column sums, of 4 and of 8 bytes, that a block holds well in registers: of several row groups, and of a single row. The
# pieces of longer rows are short: with several rows side by side, few clusters leave few partial rows behind.
HELD, HELD_ROW, HELD_PIECE, LEAST_CLUSTER = {4: 12288, 8: 6144}, {4: 7168, 8: 3584}, {4: 8192, 8: 4096}, 4

# How many blocks, or clusters of 2, 4, 8, ... blocks where a row's sums are more than one can hold, share the rows:
# about as many as an H200's 132 multiprocessors run at a time. Of these numbers 126 serves memory best where rows are
# long, by 2 % for large arrays; powers of two divide most numbers of rows, which counts where they are short.
OWNERS, SHORT_OWNERS, SHORT_GROUPS = (126, 66, 30, 15, 7, 4), 128, 8


@dataclass(frozen=True)
class RowOrder:
    """The attributes of a sum over features."""

    chunk: int
    segment: int


@dataclass(frozen=True)
class ColumnOrder:
    """The attributes of a sum over rows."""

    groups: int
    blocks: int
    strands: int


def order_sums(graph: Graph, d: int, blocks: int | None = None) -> Graph:
    """Write the canonical order of each sum into it (DESIGN, one meaning).

    before:  %mean_sum = reduce_sum %x32 {axis=D}
             %dbeta32  = reduce_sum %dy32 {axis=M}
    after:   %mean_sum = reduce_sum %x32 {axis=D, chunk=8, segment=4096}
             %dbeta32  = reduce_sum %dy32 {axis=M, blocks=126, groups=2, strands=16}

    The numbers are a function of D, of the narrowest [M, D] input's dtype and of that of the sums alone: the same on
    every GPU, unless ``blocks`` says how many blocks share the rows.
    """
    size = element_size(graph)
    row, column = vars(row_order(d, size)), vars(column_order(d, sum_size(graph), blocks))

    def ordered(eqn: Eqn) -> Eqn:
        if eqn.op != "reduce_sum":
            return eqn
        order = row if eqn.attr("axis") is D else column
        return replace(eqn, attrs=tuple(sorted({**order, **dict(eqn.attrs)}.items())))

    return replace(graph, eqns=tuple(map(ordered, graph.eqns)))


def element_size(graph: Graph) -> int:
    """Bytes per element of the narrowest [M, D] input; it sets how many elements 16 bytes are."""
    wide = [p.type.dtype.size for p in graph.params if p.type.axes == (Axis.M, Axis.D)]
    return min(wide, default=4)


def sum_size(graph: Graph) -> int:
    """Bytes per element of the widest operand of a sum over rows."""
    sums = (e for e in graph.eqns if e.op == "reduce_sum" and e.attr("axis") is Axis.M)
    return max((e.args[0].type.dtype.size for e in sums), default=4)


def row_order(d: int, size: int) -> RowOrder:
    """How a row of ``d`` elements of ``size`` bytes is cut: chunks of 16 bytes, equal segments of at most 16 KiB.

    The number of segments is a power of two in rows of up to 8 MiB, so that the blocks of a cluster share them evenly,
    and enough for the cluster that holds the column sums, which are of 8 bytes if the elements are.
    """
    chunk = CHUNK_BYTES // size
    segments = max(_doublings(-(-d * size // SEGMENT_BYTES)), sharers(d, size))
    return RowOrder(chunk, -(-d // (segments * chunk)) * chunk)


def column_order(d: int, size: int = 4, blocks: int | None = None) -> ColumnOrder:
    """How many row groups and blocks share the rows, for ``d`` columns whose sums have ``size`` bytes.

    A block of ``groups`` rows side by side holds at most 12288 column sums (6144 of 8 bytes), which fit the
    registers and, for folding the groups, the shared memory; a row of more than 7168 (3584) is for a cluster.
    """
    cluster, groups = sharers(d, size), 1
    while groups < 128 and 2 * groups * max(-(-d // cluster), 64) <= HELD[max(size, 4)]:
        groups *= 2
    if blocks is None:
        doublings = cluster.bit_length() - 1
        blocks = SHORT_OWNERS if groups >= SHORT_GROUPS else OWNERS[min(doublings, len(OWNERS) - 1)]
    return ColumnOrder(groups, blocks, strands=16 if blocks >= 64 else 4)


def sharers(d: int, size: int = 4) -> int:
    """Blocks, a power of two, that hold ``d`` column sums of ``size`` bytes well."""
    import os
    if "OLD" in os.environ and os.environ["OLD"] == "1":
        return _doublings(-(-d // HELD_PIECE[max(size, 4)]))
    if d <= HELD_ROW[max(size, 4)]:
        return 1
    return max(LEAST_CLUSTER, _doublings(-(-d // HELD_PIECE[max(size, 4)])))


def _doublings(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()
