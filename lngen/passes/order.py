"""Give every sum its order, as attributes: from here on a graph fixes every bit of its results."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lngen.ir import ORDERED, WIDE, D, Eqn, Graph, M, Value, is_row_fold, is_sum
from lngen.passes.edit import downstream

CHUNK_BYTES = 16
SEGMENT_BYTES = 16 * 1024

# Column sums, of 4 and of 8 bytes, that a block holds well in registers: of several row groups; of a few long rows,
# where more of them left no room for the rows; of one.
HELD, HELD_LONG, HELD_PIECE = {4: 12288, 8: 6144}, {4: 10240, 8: 5120}, {4: 8192, 8: 4096}

# Bytes of a tensor that a block works on side by side: of more than that too few stages fit its shared memory.
SIDE_BYTES = 24 * 1024

# Longer rows that blocks meet over once are better shared by clusters of so many: with short pieces of several rows
# side by side, few clusters leave few partial rows behind. So are rows of more bytes than a block works on. Still
# longer ones are better shared by larger clusters, by bytes of an element, and of four the longest by the largest. Of
# two, some that are shorter are better shared by two blocks: the longest of which one would hold the sums of two
# rows side by side, of whole chunks, without which there are no clusters.
LONG_ROW, LONG_CLUSTER = {4: 7168, 8: 3584}, 4
PAIR_ROW, PAIR_CLUSTER = 4096, 2
LONGER_ROW, LONGER_CLUSTER = {2: 10240, 4: 12288}, 8
LONGEST_ROW, LONGEST_CLUSTER = {4: 32768}, 16

# Of two bytes an element, rows of whole chunks between these lengths are better shared by so many blocks, each with so
# many pieces side by side: there is work for almost all of a group's threads.
THREE = 3
SIDE_BY_SIDE = (
    (5121, 6144, 2, THREE),
    (7169, 8191, 2, THREE),
    (12288, 12288, 4, THREE),
    (12289, 13311, 8, 8),
    (13312, 13824, 4, 4),
    (13825, 16383, 4, THREE),
)

# How many blocks, or clusters of 2, 4, 8, ... blocks where a row's sums are more than one can hold, share the rows:
# about as many as an H200's 132 multiprocessors run at a time. Of these numbers 126 serves memory best where rows are
# long, by 2 % for large arrays; powers of two divide most numbers of rows, which counts where they are short.
OWNERS, SHORT_OWNERS, SHORT_GROUPS = (126, 66, 30, 15, 7, 4), 128, 8


@dataclass(frozen=True)
class RowOrder:
    """The attributes of a sum over features: ``run`` elements of a chunk lie side by side."""

    chunk: int
    run: int
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

    The numbers are a function of the graph, D and the dtypes alone: the same on every GPU, unless ``blocks`` says how
    many blocks share the rows.
    """
    row, column = map(vars, orders(graph, d, blocks))
    if row["run"] == row["chunk"]:  # all of a chunk side by side
        row = {name: n for name, n in row.items() if name != "run"}

    def ordered(eqn: Eqn) -> Eqn:
        if eqn.op not in ORDERED:
            return eqn
        order = row if eqn.attr("axis") is D else column
        return replace(eqn, attrs=tuple(sorted({**order, **dict(eqn.attrs)}.items())))

    return replace(graph, eqns=tuple(map(ordered, graph.eqns)))


def element_size(graph: Graph) -> int:
    """Bytes per element of the narrowest [M, D] input; it sets how many elements 16 bytes are."""
    wide = [p.type.dtype.size for p in graph.params if p.type.axes == WIDE]
    return min(wide, default=4)


def sum_size(graph: Graph) -> int:
    """Bytes of the widest sum over rows, per column."""
    return max((e.out.type.dtype.size for e in graph.eqns if is_sum(e, M)), default=4)


def orders(graph: Graph, d: int, blocks: int | None = None) -> tuple[RowOrder, ColumnOrder]:
    """The orders of the sums over features and over rows of ``graph``; ``blocks`` share the rows if they are given."""
    cluster = sharers(graph, d)
    element = element_size(graph)
    return row_order(d, element, cluster), column_order(d, sum_size(graph), cluster, blocks, element)


def row_order(d: int, size: int, cluster: int = 1) -> RowOrder:
    """How a row of ``d`` elements of ``size`` bytes is cut: chunks of 16 bytes, equal segments of at most 16 KiB.

    Rows that are not whole chunks begin anywhere: what lies side by side in a chunk, a run, are only as many elements
    as every row can be cut into, and threads side by side have runs side by side.

    The number of segments is a power of two in rows of up to 8 MiB, so that the ``cluster`` blocks that hold its column
    sums share them evenly.
    """
    chunk = run = CHUNK_BYTES // size
    while d % run:
        run //= 2
    segments = max(_doublings(-(-d * size // SEGMENT_BYTES)), cluster)
    return RowOrder(chunk, run, -(-d // (segments * chunk)) * chunk)


def column_order(d: int, size: int = 4, cluster: int = 1, blocks: int | None = None, element: int = 2) -> ColumnOrder:
    """How many row groups and blocks share the rows, for ``d`` columns whose sums have ``size`` bytes.

    A block of ``groups`` pieces of rows side by side holds at most 12288 column sums (6144 of 8 bytes), which fit the
    registers and, for folding the groups, the shared memory; of a few long rows at most 10240. The pieces have at most
    24 KiB, at ``element`` bytes an element. Of some lengths it is known how many are best (``SIDE_BY_SIDE``).
    """
    piece, groups = -(-d // cluster), 1
    together, most = max(piece, 64), SIDE_BYTES // element
    while groups < 128 and 2 * groups * together <= min(_held(2 * groups, cluster, max(size, 4)), most):
        groups *= 2
    groups = _side_by_side(d, element, size).get(cluster, groups)
    if blocks is None:
        doublings = cluster.bit_length() - 1
        short = groups >= SHORT_GROUPS and cluster == 1
        blocks = SHORT_OWNERS if short else OWNERS[min(doublings, len(OWNERS) - 1)]
    return ColumnOrder(groups, blocks, strands=16 if blocks >= 64 else 4)


def _held(groups: int, cluster: int, size: int) -> int:
    """How many sums of ``size`` bytes a block holds at most of so many pieces of rows."""
    return (HELD if groups >= SHORT_GROUPS or cluster > 1 else HELD_LONG)[size]


def sharers(graph: Graph, d: int) -> int:
    """Blocks, a power of two, that together hold the column sums of ``graph`` well."""
    size, element, least = max(sum_size(graph), 4), element_size(graph), 1
    together = _side_by_side(d, element, size)
    if _meets_once(graph) and together:
        least = max(together)
    elif _meets_once(graph) and (d > LONG_ROW[size] or d * element > SIDE_BYTES):
        least = _cluster_of_long(d, element)
    elif _meets_once(graph) and _is_for_pairs(d, element, size):
        least = PAIR_CLUSTER
    return max(least, _doublings(-(-d // HELD_PIECE[size])))


def _cluster_of_long(d: int, element: int) -> int:
    """How many blocks share long rows of ``d`` elements of ``element`` bytes."""
    if d > LONGEST_ROW.get(element, d):
        return LONGEST_CLUSTER
    return LONGER_CLUSTER if d > LONGER_ROW.get(element, d) else LONG_CLUSTER


def _side_by_side(d: int, element: int, size: int) -> dict[int, int]:
    """How many blocks share rows of ``d`` elements best, and how many pieces each has side by side, where known."""
    if (element, size) != (2, 4) or d % (CHUNK_BYTES // element):
        return {}
    return {cluster: groups for least, most, cluster, groups in SIDE_BY_SIDE if least <= d <= most}


def _is_for_pairs(d: int, element: int, size: int) -> bool:
    """True if rows of ``d`` elements of ``element`` bytes, whose sums have ``size``, are shared by two blocks."""
    return (element, size) == (2, 4) and d % (CHUNK_BYTES // element) == 0 and PAIR_ROW < d <= HELD_LONG[size] // 2


def _meets_once(graph: Graph) -> bool:
    """True if there are sums over rows, and every one over features is of a backward's cotangents.

    A statistic that is computed again keeps the order, and so the bits, that it has in the forward.
    """
    if not any(is_sum(e, M) for e in graph.eqns):
        return False
    moved = _moved_by_cotangents(graph)
    return all(e.out in moved for e in graph.eqns if is_row_fold(e))


def _moved_by_cotangents(graph: Graph) -> set[Value]:
    """What depends on a backward's cotangents: its first parameters, as few of them as it is linear in together.

    Then every result depends on them, if on anything, and nothing that does not is added to what does. A graph that is
    not linear in any is taken as if it were in the first.
    """
    varying = downstream(graph.eqns, graph.params)
    for count in range(1, len(graph.params) + 1):
        moved = downstream(graph.eqns, graph.params[:count])
        if varying.isdisjoint({*graph.results} - moved) and not any(_adds_unmoved(e, moved) for e in graph.eqns):
            return moved
    return downstream(graph.eqns, graph.params[:1])


def _adds_unmoved(eqn: Eqn, moved: set[Value]) -> bool:
    """True for a sum or a difference of two of which one is among ``moved``."""
    if eqn.op not in ("add", "sub", "fma"):
        return False
    *first, last = eqn.args
    return moved.isdisjoint(first) is (last in moved)


def _doublings(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()
