"""The order of every sum, as attributes: with it a graph fixes every bit.

The numbers of a version of the rule are in ``order_v1.toml``; ``Rule`` holds them, read once and checked.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lngen.compiler.ir import (
    ORDERS,
    SUMS,
    WIDE,
    D,
    DType,
    Eqn,
    Graph,
    M,
    Value,
    is_column_fold,
    is_join,
    is_number_fold,
    is_over_heads,
    is_over_sets,
    is_row_fold,
    is_segment_size,
    is_segment_sum,
    is_set_fold,
)
from lngen.compiler.ir.places import downstream
from lngen.dtypes import FLOATS

BySize = Mapping[int, int]


@dataclass(frozen=True)
class Measured:
    """Rows of ``first`` to ``last`` elements are shared by ``cluster`` blocks with ``groups`` rows side by side."""

    first: int
    last: int
    cluster: int
    groups: int


@dataclass(frozen=True)
class Clusters:
    """Rows longer than a number of elements, by bytes of a sum or of an element, are shared by ``cluster`` blocks."""

    longer_than: BySize
    cluster: int


@dataclass(frozen=True)
class Rule:
    """The numbers of one version; the file gives the meaning and the reason of each."""

    chunk_bytes: int
    segment_bytes: int
    segment_interleave: int
    centred_least: int
    centred_most: int
    held_groups: BySize
    held_few_groups: BySize
    held_one_row: BySize
    sums_together: int
    tile_bytes: int
    most_groups: int
    least_columns: int
    many_groups: int
    blocks: BySize
    blocks_of_short_rows: int
    stretch: int
    stretch_least: int
    stretch_long: int
    stretch_columns: int
    stretch_groups: int
    many_blocks: int
    interleave_many: int
    interleave_few: int
    pair_longer_than: int
    pair_cluster: int
    long_row: Clusters
    longer_row: Clusters
    longest_row: Clusters
    measured: tuple[Measured, ...]


@cache
def rule_of(order: str) -> Rule:
    """The rule of a version; the file is part of the package, so an error in it is a defect: ValueError."""
    data = tomllib.loads(Path(__file__).with_name(f"order_{order}.toml").read_text(encoding="utf-8"))
    if data.pop("order", None) != order or order not in ORDERS:
        raise ValueError(f'order_{order}.toml is expected to say order = "{order}".')
    return _rule(data)


def _rule(data: dict[str, Any]) -> Rule:
    whole: dict[str, Any] = {
        key: _whole(data, key, "is")
        for key, entry in data.items()
        if "is" in entry and key not in ("many_blocks", "stretch")
    }
    by_size: dict[str, Any] = {key: _table(data, key, "by_size") for key, entry in data.items() if "by_size" in entry}
    longer: dict[str, Any] = {
        key: Clusters(_table(data, key, "longer_than"), _whole(data, key, "cluster"))
        for key in ("long_row", "longer_row", "longest_row")
    }
    return Rule(
        **whole,
        **by_size,
        **longer,
        centred_least=_whole(data, "centred_segments", "least"),
        centred_most=_whole(data, "centred_segments", "most"),
        blocks=_table(data, "blocks", "by_cluster"),
        stretch=_whole(data, "stretch", "is"),
        stretch_least=_whole(data, "stretch", "least"),
        stretch_long=_whole(data, "stretch", "long"),
        stretch_columns=_whole(data, "stretch", "columns"),
        stretch_groups=_whole(data, "stretch", "groups"),
        many_blocks=_whole(data, "many_blocks", "is"),
        interleave_many=_whole(data, "many_blocks", "interleave"),
        interleave_few=_whole(data, "many_blocks", "fewer"),
        pair_longer_than=_whole(data, "pair", "longer_than"),
        pair_cluster=_whole(data, "pair", "cluster"),
        measured=tuple(_entry(entry) for entry in data["measured"]),
    )


def _entry(entry: dict[str, Any]) -> Measured:
    named = {"measured": entry}
    return Measured(*(_whole(named, "measured", key) for key in ("first", "last", "cluster", "groups")))


def _whole(data: Mapping[str, Any], entry: str, key: str) -> int:
    """A whole number from 1 in an entry that has a reason."""
    value, why = data[entry][key], data[entry].get("why")
    if not isinstance(value, int) or value < 1 or not isinstance(why, str):
        raise ValueError(f"'{entry}' is expected to have a whole number '{key}' from 1 and a 'why', got {data[entry]}.")
    return value


def _table(data: Mapping[str, Any], entry: str, key: str) -> BySize:
    table = {"why": data[entry].get("why"), **data[entry][key]}
    return {int(size): _whole({entry: table}, entry, size) for size in data[entry][key]}


@dataclass(frozen=True)
class RowOrder:
    """The attributes of a sum over features: ``run`` elements of a chunk are consecutive.

    The sums of segments are added in ``interleave`` partial sums.
    """

    chunk: int
    run: int
    segment: int
    interleave: int

    def attrs(self, d: int) -> dict[str, int]:
        """The attributes in the text of a sum over rows of ``d`` elements, without those that are implied."""
        return self.of_segment() | ({"interleave": self.interleave} if d > self.segment else {})

    def of_segment(self) -> dict[str, int]:
        """The attributes in the text of sums of segments."""
        return {"chunk": self.chunk, "segment": self.segment} | ({"run": self.run} if self.run != self.chunk else {})


@dataclass(frozen=True)
class ColumnOrder:
    """The attributes of a sum over rows."""

    groups: int
    blocks: int
    interleave: int


@dataclass(frozen=True)
class SetOrder:
    """The attributes of a sum over the rows of each set; see ``lngen.compiler.ir.sums.set_sum``."""

    groups: int
    interleave: int
    stretch: int
    least: int
    long: int


def order_sums(
    graph: Graph, d: int, blocks: int | None = None, order: str = ORDERS[0], stretch: int | None = None
) -> Graph:
    """Write the order of each sum into it, and the version of the rule into the graph (lngen help numerics).

    before:  %mean_sum = reduce_sum %x32 {axis=D}
             %dbeta32  = reduce_sum %dy32 {axis=M}
    after:   %mean_sum = reduce_sum %x32 {axis=D, chunk=8, segment=4096}
             %dbeta32  = reduce_sum %dy32 {axis=M, blocks=126, groups=2, interleave=16}

    The numbers are a function of the graph, D and the dtypes alone: the same on every GPU, unless ``blocks`` gives the
    number of blocks that share the rows, or ``stretch`` that of the rows of a set that one partial sum has. The sum of
    a [D] value has the order of a row of f32, the sum of an [M] value that of a column.
    """
    row, column = orders(graph, d, blocks, order)
    vector, of_set = row_order(rule_of(order), d, DType.F32.size), set_order(rule_of(order), d, column, stretch)
    over_sets = ColumnOrder(1, of_set.interleave, of_set.interleave)

    def ordered(eqn: Eqn) -> Eqn:
        own = is_over_sets(eqn) or is_over_heads(eqn)
        rows = of_set if is_set_fold(eqn) else over_sets if own else column
        spelt = _order_of(eqn, vector if is_number_fold(eqn) else row, rows, d)
        return replace(eqn, attrs=tuple(sorted({**spelt, **dict(eqn.attrs)}.items())))

    eqns = tuple(ordered(e) if e.op in SUMS or is_segment_size(e) else e for e in graph.eqns)
    return replace(graph, eqns=eqns, attrs=tuple(sorted({**dict(graph.attrs), "order": order}.items())))


def _order_of(eqn: Eqn, row: RowOrder, column: ColumnOrder | SetOrder, d: int) -> dict[str, int]:
    """The attributes of an equation that define its order."""
    if is_segment_sum(eqn):
        return row.of_segment()
    if is_segment_size(eqn):
        return {"segment": row.segment}
    if is_join(eqn):
        return {"interleave": row.interleave}
    if eqn.axis.root is M or is_over_heads(eqn):
        return vars(column)
    if eqn.axis is D and eqn.to is None:
        return row.attrs(d)
    return {"chunk": row.run} if eqn.axis is D and eqn.to is not None and eqn.to.by == "/" else {}


def element_size(graph: Graph) -> int:
    """Bytes per element of the narrowest [M, D] input, which determines the number of elements in 16 bytes.

    Dtypes that no kernel writes count where there are no others, as two bytes at least: a mask changes no order.
    """
    wide = [p.type.dtype for p in graph.params if p.type.axes == WIDE]
    sizes = [t.size for t in wide if t in FLOATS] or [max(t.size, 2) for t in wide]
    return min(sizes, default=4)


def sum_size(graph: Graph) -> int:
    """Bytes of the widest sum or maximum over rows, per column."""
    return max((e.out.type.dtype.size for e in graph.eqns if is_column_fold(e)), default=4)


def orders(graph: Graph, d: int, blocks: int | None = None, order: str = ORDERS[0]) -> tuple[RowOrder, ColumnOrder]:
    """The orders of the sums over features and over rows of ``graph``; ``blocks`` share the rows if they are given."""
    rule, element = rule_of(order), element_size(graph)
    cluster = suited_cluster(graph, d, rule)
    sums = sum(is_column_fold(e) for e in graph.eqns)
    columns = column_order(rule, d, sum_size(graph), cluster, blocks, element, sums)
    return row_order(rule, d, element, cluster), columns


def row_order(rule: Rule, d: int, size: int, cluster: int = 1) -> RowOrder:
    """The segments of a row of ``d`` elements of ``size`` bytes: chunks of 16 bytes, equal segments of at most 16 KiB.

    Rows that are not whole chunks may start at any alignment. So their chunks consist of runs of consecutive elements,
    as long as every row can be divided into. Neighbouring threads have neighbouring runs.

    The number of segments is a power of two in rows of up to 8 MiB, so that the ``cluster`` blocks that hold the column
    sums share the segments evenly.
    """
    chunk = run = rule.chunk_bytes // size
    while d % run:
        run //= 2
    segments = max(_doublings(-(-d * size // rule.segment_bytes)), cluster)
    return RowOrder(chunk, run, -(-d // (segments * chunk)) * chunk, rule.segment_interleave)


def column_order(
    rule: Rule, d: int, size: int = 4, cluster: int = 1, blocks: int | None = None, element: int = 2, sums: int = 1
) -> ColumnOrder:
    """The number of row groups and blocks that share the rows, for ``d`` columns with ``sums`` of ``size`` bytes each.

    A block of ``groups`` rows, or cluster tiles, side by side holds at most as many column sums as fit the registers
    and, while the groups are reduced, the shared memory. The rows have at most ``tile_bytes``, at ``element`` bytes an
    element. For some lengths the best number is measured.
    """
    tile, groups = -(-d // cluster), 1
    columns, most = max(tile, rule.least_columns), rule.tile_bytes // element
    while groups < rule.most_groups and 2 * groups * columns <= min(_held(rule, 2 * groups, cluster, size), most):
        groups *= 2
    groups = next((m.groups for m in _measured(rule, d, element, size) if m.cluster == cluster), groups)
    if blocks is None:
        short = groups >= rule.many_groups and cluster == 1
        blocks = rule.blocks_of_short_rows if short else rule.blocks[min(cluster, max(rule.blocks))]
    groups = max(1, groups // max(1, sums // rule.sums_together))
    many = blocks >= rule.many_blocks
    return ColumnOrder(groups, blocks, rule.interleave_many if many else rule.interleave_few)


def set_order(rule: Rule, d: int, column: ColumnOrder, stretch: int | None = None) -> SetOrder:
    """The order of sums over the rows of sets: longer stretches of short rows, and few groups of others."""
    times = _doublings(-(-rule.stretch_columns // d))
    rows, least = (times * rule.stretch, times * rule.stretch_least) if stretch is None else (stretch, stretch)
    groups = min(column.groups, rule.stretch_groups) if d > rule.stretch_columns else column.groups
    return SetOrder(groups, rule.interleave_many, rows, least, rule.stretch_long)


def _held(rule: Rule, groups: int, cluster: int, size: int) -> int:
    """The most sums of ``size`` bytes that a block holds, with that many rows, or cluster tiles, side by side."""
    several = groups >= rule.many_groups or cluster > 1
    return (rule.held_groups if several else rule.held_few_groups)[max(size, 4)]


def suited_cluster(graph: Graph, d: int, rule: Rule) -> int:
    """The number of blocks, a power of two, that are suited to hold the column sums of ``graph`` together."""
    size, element, least = max(sum_size(graph), 4), element_size(graph), 1
    measured = _measured(rule, d, element, size)
    if not _exchanges_once(graph):
        pass
    elif measured:
        least = measured[0].cluster
    elif d > rule.long_row.longer_than[size] or d * element > rule.tile_bytes:
        least = _cluster_of_long(rule, d, element)
    elif _is_for_pairs(rule, d, element, size):
        least = rule.pair_cluster
    return max(least, _doublings(-(-d // rule.held_one_row[size])))


def _cluster_of_long(rule: Rule, d: int, element: int) -> int:
    """The number of blocks that share long rows of ``d`` elements of ``element`` bytes."""
    longer = (c for c in (rule.longest_row, rule.longer_row) if d > c.longer_than.get(element, d))
    return next(longer, rule.long_row).cluster


def _measured(rule: Rule, d: int, element: int, size: int) -> list[Measured]:
    """The measured entries for rows of ``d`` elements of ``element`` bytes, whose sums have ``size``."""
    whole = _is_packed(element, size) and d % (rule.chunk_bytes // element) == 0
    return [m for m in rule.measured if whole and m.first <= d <= m.last]


def _is_for_pairs(rule: Rule, d: int, element: int, size: int) -> bool:
    """True if rows of ``d`` elements of ``element`` bytes, whose sums have ``size``, are shared by two blocks."""
    whole = _is_packed(element, size) and d % (rule.chunk_bytes // element) == 0
    return whole and rule.pair_longer_than < d <= rule.held_few_groups[size] // 2


def _is_packed(element: int, size: int) -> bool:
    """True for elements of two bytes with sums of four, to which the measured lengths apply."""
    return (element, size) == (2, 4)


def _exchanges_once(graph: Graph) -> bool:
    """True if there are column sums, and every sum over features depends on a backward's cotangents.

    A recomputed statistic keeps the order, and therefore the bits, that it has in the forward.
    """
    if not any(map(is_column_fold, graph.eqns)):
        return False
    moved = _moved_by_cotangents(graph)
    return all(e.out in moved for e in graph.eqns if is_row_fold(e))


def _moved_by_cotangents(graph: Graph) -> set[Value]:
    """The values that depend on a backward's cotangents.

    A backward is linear in its cotangents, which are its first parameters: the shortest such prefix in which it is
    linear. Then every result that depends on a parameter depends on them. No sum adds a value that depends on them to
    one that does not. A graph that is linear in none is taken as linear in the first.
    """
    params = graph.tensors  # a number that is passed by value is a constant here
    varying = downstream(graph.eqns, params)
    for count in range(1, len(params) + 1):
        moved = downstream(graph.eqns, params[:count])
        if varying.isdisjoint({*graph.results} - moved) and not any(_adds_unmoved(e, moved) for e in graph.eqns):
            return moved
    return downstream(graph.eqns, params[:1])


def _adds_unmoved(eqn: Eqn, moved: set[Value]) -> bool:
    """True for a sum or a difference of two values of which exactly one is among ``moved``."""
    if eqn.op not in ("add", "sub", "fma"):
        return False
    *first, last = eqn.args
    return moved.isdisjoint(first) is (last in moved)


def _doublings(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()
