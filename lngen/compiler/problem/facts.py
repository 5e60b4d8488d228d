"""The facts about a graph that a schedule has to fit: lengths, dtypes, the order of its sums, the phases of a row."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NoReturn

from lngen.compiler.ir import (
    FOLDS,
    ORDERS,
    SUMS,
    WIDE,
    Axis,
    D,
    DType,
    Eqn,
    Graph,
    M,
    Value,
    derived_axes,
    is_block_fold,
    is_column_fold,
    is_join,
    is_number_fold,
    is_of_columns,
    is_of_halves,
    is_of_set,
    is_of_table,
    is_over_heads,
    is_over_sets,
    is_segment_size,
    is_segment_sum,
    is_set_fold,
    print_eqn,
    sets_of,
)
from lngen.compiler.ir.places import Folds, depths, downstream, folds, operand_depth
from lngen.compiler.passes import ColumnOrder, RowOrder, SetOrder, orders, rule_of, suited_cluster
from lngen.compiler.problem.maxima import of_maxima_alone
from lngen.dtypes import READ, WRITTEN
from lngen.errors import LowerError
from lngen.rules import Stretch

WARP = 32  # threads
CHUNK_BYTES = 16  # the widest load of a thread
MOST_PARTS = 32  # numbers of a block of features that a thread reads from shared memory into registers
MAX_STATIC = 48 * 1024  # bytes of static shared memory of a block


@dataclass(frozen=True)
class Problem:
    """Row length ``d`` in elements, its segments and chunks, the layout of its sums, and its tensors.

    chunk                       elements of a thread vector
    run                         consecutive elements of a chunk
    groups, blocks              row groups of a block, and blocks, that the order of column sums assumes
    real_size                   bytes of a sum
    segment_interleave          partial sums over the segments of a row
    interleave                  partial sums over the blocks that share the rows
    cluster                     blocks that are suited to hold the column sums of a row
    input_sizes, output_sizes   bytes per element of each [M, D] tensor; of inputs only those that an equation uses
    column_sizes                bytes per element of each [D] input, or one of the columns that repeat along a row
    row_sums                    the most numbers that the threads of a row reduce at the end of one phase
    exchanged_sums              the most numbers of a segment that the blocks of a row exchange there
    segment_values              sums of single segments, which multipass kernels have in shared memory
    column_sums                 sums and maxima over the rows of each column
    phases                      number of phases of a row
    operations                  equations per element of a row, without those that only maxima over all rows need
    live                        computed [M, D] values that a later phase uses, at most
    feature_blocks              features of a block, for each axis of blocks, and of a head that is rotated
    block_folds                 sums and maxima over blocks of features
    turned_sizes                bytes per element of each rotation of heads by halves
    strides                     distances between the rows of an [M, D] tensor, 1 or 2
    stretch                     how the rows of a set are cut, of sums over the rows of sets
    set_sizes                   bytes per element of each [N, D] input, N being sets of rows
    halved                      features of each head if a thread may have a run of each half of it, or 0
    takes                       whether an element of a row is taken by its index, as by a loss of class indices
    """

    d: int
    chunk: int
    run: int
    segment: int
    segment_interleave: int
    groups: int
    blocks: int
    interleave: int
    cluster: int
    real_size: int
    input_sizes: tuple[int, ...]
    output_sizes: tuple[int, ...]
    column_sizes: tuple[int, ...]
    row_sums: int
    exchanged_sums: int
    segment_values: int
    column_sums: int
    phases: int
    operations: int = 0
    live: int = 0
    feature_blocks: tuple[int, ...] = ()
    block_folds: int = 0
    turned_sizes: tuple[int, ...] = ()
    strides: int = 1
    stretch: Stretch | None = None
    set_sizes: tuple[int, ...] = ()
    halved: int = 0
    takes: bool = False

    @cached_property
    def element(self) -> int:
        """Bytes of the smallest element of the [M, D] inputs; 4 without such inputs."""
        return min(self.input_sizes, default=4)

    @cached_property
    def kept_sizes(self) -> tuple[int, ...]:
        """Bytes per element of each input that a kernel may read ahead of its use: [D], and those of a set of rows.

        From row to row [D] inputs stay in registers. Those of a set do where a block with column sums takes its rows
        one after the other, and else are read with each row.
        """
        return (*self.column_sizes, *(self.set_sizes if self.stretch or not self.column_sums else ()))

    @cached_property
    def chunks(self) -> int:
        """Chunks per row; the last one may be partial."""
        return -(-self.d // self.chunk)

    @cached_property
    def segments(self) -> int:
        """Segments per row."""
        return -(-self.d // self.segment)

    @cached_property
    def segment_chunks(self) -> int:
        """Chunks per segment; the last segment may be shorter."""
        return self.segment // self.chunk

    def lanes(self, features: int) -> int:
        """Neighbouring threads that fold a block of so many features, or what they have of it.

        Blocks and segments are whole multiples of what they have, so each begins at the first of them.
        """
        return math.gcd(features // self.chunk, self.segment_chunks, WARP)

    @cached_property
    def block_lanes(self) -> int:
        """Neighbouring threads that fold the largest block of features together."""
        return max(map(self.lanes, self.feature_blocks), default=1)

    @cached_property
    def blocks_meet(self) -> bool:
        """True if neighbouring threads do not have whole blocks: then what each has meets in shared memory.

        A block lies across two segments, or it has not a power of two of vectors, or more than a warp has.
        """
        return any(self.lanes(n) * self.chunk < n for n in self.feature_blocks)

    @cached_property
    def block_numbers(self) -> int:
        """Sums and maxima of the vectors of a row that meet in shared memory."""
        return self.block_folds * self.segments * self.segment_chunks * self.blocks_meet

    @cached_property
    def met_elements(self) -> int:
        """Elements of a row that meet there for each rotation by halves."""
        return self.segments * self.segment * self.blocks_meet


def problem(graph: Graph, d: int, strides: int = 1) -> Problem:
    """The facts about ``graph`` for rows of ``d`` elements, at one distance or two."""
    refuse_axes(graph)
    _check_dtypes(graph)
    version = str(dict(graph.attrs).get("order", ORDERS[0]))
    row, column = _orders(graph, d, version)
    apart = of_maxima_alone(graph)
    ends = _ends(graph, apart)
    sums = [e for e in graph.eqns if e.op in FOLDS]
    used = {a for e in graph.eqns for a in e.args}
    found = Problem(
        d=d,
        chunk=row.chunk,
        run=row.run,
        segment=row.segment,
        segment_interleave=row.interleave,
        groups=column.groups,
        blocks=column.blocks,
        interleave=column.interleave,
        cluster=suited_cluster(graph, d, rule_of(version)),
        real_size=max((e.out.type.dtype.size for e in sums), default=DType.F32.size),
        input_sizes=tuple(p.type.dtype.size for p in graph.params if p.type.axes == WIDE and p in used),
        output_sizes=tuple(r.type.dtype.size for r in graph.results if r.type.axes == WIDE),
        column_sizes=tuple(p.type.dtype.size for p in filter(is_of_columns, graph.params)),
        row_sums=max((len(f.reductions) for f in ends), default=0),
        exchanged_sums=max((len(f.exchanged) for f in ends), default=0),
        segment_values=sum(is_segment_sum(e) for e in graph.eqns),
        column_sums=sum(map(is_column_fold, graph.eqns)),
        phases=len(ends) + 1,
        operations=sum(map(_of_elements, set(graph.eqns) - apart)),
        live=_live(graph),
        feature_blocks=tuple(
            dict.fromkeys(
                (
                    *(int(a.number) for a in derived_axes(graph) if a.base is D and a.by == "/"),
                    *(e.int_attr("head") for e in graph.eqns if e.op == "rotate"),
                )
            )
        ),
        block_folds=sum(map(is_block_fold, graph.eqns)),
        turned_sizes=tuple(e.out.type.dtype.size for e in filter(is_of_halves, graph.eqns)),
        strides=strides,
        stretch=_stretch(graph),
        set_sizes=tuple(p.type.dtype.size for p in graph.params if is_of_set(p)),
        takes=any(e.op == "take" and e.args[0].type.axes == WIDE for e in graph.eqns),
    )
    found = _in_one_segment(found)
    _check_blocks(graph, found)
    return replace(found, halved=_halved(graph, found))


def _in_one_segment(p: Problem) -> Problem:
    """Rows of whole blocks, if no sum of a row has segments and blocks lie across two of these."""
    one = replace(p, segment=p.chunks * p.chunk)
    return one if p.row_sums == 0 and p.blocks_meet and not one.blocks_meet else p


def _halved(graph: Graph, p: Problem) -> int:
    """The features of each head, if all folds of a row are of heads alike, and rotations by halves turn whole ones."""
    head = p.feature_blocks[0] if len(p.feature_blocks) == 1 and p.row_sums == 0 and not p.blocks_meet else 0
    whole = all(e.attr("width") == e.attr("head") for e in filter(is_of_halves, graph.eqns))
    return head if whole and p.run == p.chunk and head > p.chunk and p.d % p.segment == 0 else 0


def _of_elements(eqn: Eqn) -> bool:
    """True for an equation once per element of a row."""
    return eqn.op != "take" and WIDE in (eqn.out.type.axes, *(a.type.axes for a in eqn.args))


def _ends(graph: Graph, apart: set[Eqn]) -> tuple[Folds, ...]:
    """The ends of phases, without the reductions ``apart``."""

    def kept(eqns: tuple[Eqn, ...]) -> tuple[Eqn, ...]:
        return tuple(e for e in eqns if e not in apart)

    found = (replace(f, reductions=kept(f.reductions), exchanged=kept(f.exchanged)) for f in folds(graph))
    return tuple(f for f in found if f != Folds())


def refuse_axes(graph: Graph) -> None:
    """LowerError for values and reductions that no kernel has yet.

    Of the axes that a graph derives, kernels have blocks of features, of values that they compute, and columns that
    repeat along a row, of values without rows, and of inputs by row or by position; and one axis of sets of rows, of
    values with features.
    """
    outer, sets = {*graph.params, *(r for r in graph.results if M not in r.type.axes)}, sets_of(graph)
    for value in graph.values().values():
        for axis in value.type.axes:
            blocks = axis.base is D and axis.by == "/" and value not in outer
            given = value in graph.params and is_of_table(value)
            computed = value not in outer and is_of_table(value) and M in value.type.axes
            repeats = (axis.period > 0 and is_of_columns(value)) or given or computed
            if axis.is_declared and not (blocks or repeats) and not (axis is sets and D in value.type.axes):
                of = f"'{value}: {value.type}' varies along {axis.declaration}"
                _refuse(graph, f"{of}; lngen has no kernel for such values")
    for eqn in graph.eqns:
        derived = [a for _, a in eqn.attrs if isinstance(a, Axis) and a.is_declared]
        known = is_block_fold(eqn) or is_set_fold(eqn) or (is_over_sets(eqn) and D in eqn.out.type.axes)
        known = known or is_over_heads(eqn) or eqn.op == "iota"
        if eqn.op in FOLDS and derived and not known:
            _refuse(graph, f"'{eqn.op}' of '{eqn.out}' has no kernel")
        if eqn.op == "rotate" and M not in eqn.out.type.axes:
            _refuse(graph, f"'rotate' of '{eqn.out}', which has no rows, has no kernel")
    _refuse_sets(graph)


def _refuse_sets(graph: Graph) -> None:
    """LowerError for two ways of sweeping rows, and for results of sets that no sum over rows computes."""
    folds = [e for e in graph.eqns if is_column_fold(e)]
    of_sets = [e for e in folds if is_set_fold(e)]
    other = next((e for e in folds if of_sets and not is_set_fold(e)), None)
    if other is not None:
        raise LowerError(
            f"graph @{graph.name}: '{of_sets[0].out}' adds the rows of a set, and '{other.out}' all rows; that takes "
            "two graphs: differentiate by the inputs of each alone (wrt=)."
        )
    summed = downstream(graph.eqns, [e.out for e in of_sets])
    for result in graph.results:
        beside = of_sets and M not in result.type.axes  # one kernel computes all such results
        if result not in summed and (beside or is_of_set(result)):
            of = "" if is_of_set(result) else " beside sums of sets"
            _refuse(graph, f"the result '{result}'{of} is no sum over rows of sets; lngen has no kernel for it")


def _refuse(graph: Graph, what: str) -> NoReturn:
    raise LowerError(f"graph @{graph.name}: {what} yet; `lngen check --on interpreter` checks its mathematics.")


def _check_blocks(graph: Graph, p: Problem) -> None:
    """LowerError for blocks of features that the threads of a row cannot fold."""
    for axis in (a for a in derived_axes(graph) if a.base is D):
        assert isinstance(axis.number, int)
        if axis.period and (axis.period % p.chunk or p.run != p.chunk):
            raise LowerError(
                f"graph @{graph.name}: a thread has vectors of {p.chunk} features, so columns that repeat are expected "
                f"to be whole vectors; got {axis.declaration}."
            )
        most = p.lanes(axis.number) * MOST_PARTS
        if not axis.period and (axis.number % p.chunk or axis.number > most * p.chunk or p.run != p.chunk):
            raise LowerError(
                f"graph @{graph.name}: a thread adds vectors of {p.chunk} features, so a block is expected to be 1 to "
                f"{most} whole vectors; got {axis.declaration}."
            )
    for eqn in (e for e in graph.eqns if e.op == "rotate"):
        _check_rotation(graph, eqn, p)
    least = (p.block_numbers + p.segment_values * p.segments) * p.real_size  # bytes, of form multipass
    if p.blocks_meet and least > MAX_STATIC:
        raise LowerError(
            f"graph @{graph.name}: no warp has whole blocks of a segment of {p.segment} features, so the numbers of "
            f"vectors meet in shared memory, in at most {MAX_STATIC} bytes; got {p.block_folds} x {p.chunks} numbers, "
            f"{least} bytes; take fewer sums and maxima over blocks, or shorter rows."
        )


def _check_rotation(graph: Graph, eqn: Eqn, p: Problem) -> None:
    """LowerError for heads, or for halves, that are not whole vectors."""
    head, width = eqn.int_attr("head"), eqn.int_attr("width")
    if head % p.chunk or p.run != p.chunk:
        raise LowerError(
            f"graph @{graph.name}: a thread has vectors of {p.chunk} features, so a rotated head is expected to be "
            f"whole vectors; got head={head}."
        )
    if is_of_halves(eqn) and width % (2 * p.chunk):
        raise LowerError(
            f"graph @{graph.name}: a thread has vectors of {p.chunk} features, so half of a rotated width is expected "
            f"to be whole vectors; got a width of {width}."
        )


def _check_dtypes(graph: Graph) -> None:
    """LowerError for a parameter or a value of a dtype that no kernel reads, or writes."""
    for eqn in graph.eqns:
        if eqn.op == "take" and eqn.args[0] not in graph.params:
            raise LowerError(f"graph @{graph.name}: take is of an input, got '{eqn.args[0]}'; take it of its inputs.")
        if eqn.op == "gather" and not {*eqn.args} <= {*graph.params}:
            raise LowerError(f"graph @{graph.name}: gather is of inputs, got '{eqn.args[0]}' and '{eqn.args[1]}'.")
    for table in {e.args[0] for e in graph.eqns if e.op == "gather"}:
        if len({e.args[1] for e in graph.eqns if e.args[:1] == (table,)}) > 1:
            raise LowerError(
                f"graph @{graph.name}: rows of '{table}' are gathered by two inputs; pass the table twice."
            )
    known = dict.fromkeys(graph.params, (READ, "read"))
    places = {e.out for e in graph.eqns if e.op == "iota" and e.axis.root is D}  # which no kernel stores
    places |= {e.out for e in graph.eqns if e.out.type.dtype is DType.I32 and e.op == "cast"}
    known |= dict.fromkeys((*(e.out for e in graph.eqns if e.out not in places), *graph.results), (WRITTEN, "write"))
    for v, (dtypes, how) in known.items():
        if v.type.dtype not in dtypes:
            raise LowerError(
                f"graph @{graph.name}: '{v}: {v.type}' has no kernel yet; kernels {how} {', '.join(dtypes)}."
            )


def _live(graph: Graph) -> int:
    """Computed [M, D] values that a later phase uses, at most; inputs are not counted.

    The compiler keeps some elements of most values and computes the others anew. The factors of sums of segments count
    twice, because kernels keep all their elements. An absolute value is part of the instruction that uses it.
    """
    levels = depths(graph)
    made = {e.out: operand_depth(e, levels) for e in graph.eqns}
    last: dict[Value, int] = {}
    for eqn in graph.eqns:
        for value in eqn.args:
            last[value] = max(last.get(value, 0), made[eqn.out])
    wide = [e.out for e in graph.eqns if e.out.type.axes == WIDE and e.op != "abs"]
    kept = {a for e in graph.eqns if e.op == "reduce_dot" and is_segment_sum(e) for a in e.args}

    def left(end: int) -> int:
        return sum(1 + (v in kept) for v in wide if made[v] <= end < last.get(v, 0))

    return max(map(left, {*made.values()}), default=0)


def _orders(graph: Graph, d: int, version: str) -> tuple[RowOrder, ColumnOrder]:
    """The orders in the attributes of the graph's sums; the rule's order where no sum has an attribute.

    A sum to a number has its own, and so has one of a block of features.
    """
    row, column = orders(graph, d, order=version)
    ordered = [e for e in graph.eqns if (e.op in SUMS or is_segment_size(e)) and not _has_own_order(e)]
    rows = [(e, _row_numbers(e, d)) for e in ordered if not is_column_fold(e)]
    columns = [(e, _column_numbers(e)) for e in ordered if e.op in SUMS and is_column_fold(e)]
    row = replace(row, **_agreed(graph, D, rows))
    for eqn, numbers in rows:
        if "chunk" in numbers:
            _check_cut(graph, eqn, row)
    agreed = _agreed(graph, M, columns)
    return row, replace(column, **{f.name: agreed[f.name] for f in fields(ColumnOrder) if f.name in agreed})


def _has_own_order(eqn: Eqn) -> bool:
    return is_number_fold(eqn) or is_block_fold(eqn) or is_over_sets(eqn) or is_over_heads(eqn)


def _column_numbers(eqn: Eqn) -> dict[str, int]:
    """The order of a sum over rows, or over the rows of sets, in the attributes of its equation."""
    order = SetOrder if is_set_fold(eqn) else ColumnOrder
    return {f.name: _numbers(eqn).get(f.name, 1) for f in fields(order)}


def _stretch(graph: Graph) -> Stretch | None:
    """How the sums over the rows of sets cut a set; None without such a sum."""
    folds = [e for e in graph.eqns if is_set_fold(e)]
    if not folds:
        return None
    of = _numbers(folds[0])
    return Stretch(of.get("stretch", 1), of.get("least", 1), of.get("long", 1), of.get("groups", 1))


def _numbers(eqn: Eqn) -> dict[str, int]:
    return {key: value for key, value in eqn.attrs if isinstance(value, int)}


def _row_numbers(eqn: Eqn, d: int) -> dict[str, int]:
    """The order of sums along D in the attributes of an equation; one segment has no partial sums."""
    given = _numbers(eqn)
    chunk, segment = given.get("chunk", 1), given.get("segment", d)
    cut = {"chunk": chunk, "run": given.get("run", chunk), "segment": segment}
    if is_segment_sum(eqn) or is_segment_size(eqn):
        return cut if is_segment_sum(eqn) else {"segment": segment}
    joined = {"interleave": given.get("interleave", 1)}
    if is_join(eqn):
        return joined
    return cut | joined if d > segment else cut


def _agreed(graph: Graph, axis: Axis, spelt: list[tuple[Eqn, dict[str, int]]]) -> dict[str, int]:
    """The numbers that all equations have in common; LowerError if two equations differ."""
    first: dict[str, tuple[Eqn, int]] = {}
    for eqn, numbers in spelt:
        for key, value in numbers.items():
            other, wanted = first.setdefault(key, (eqn, value))
            if value != wanted:
                raise LowerError(
                    f"graph @{graph.name}: the sums over {axis} of one kernel have one order, but '{other.out}' and "
                    f"'{eqn.out}' have different attributes:\n    {print_eqn(other)}\n    {print_eqn(eqn)}"
                )
    return {key: value for key, (_, value) in first.items()}


def _check_cut(graph: Graph, eqn: Eqn, row: RowOrder) -> None:
    """LowerError for segments and chunks that no kernel can load."""
    element = min((p.type.dtype.size for p in graph.params if p.type.axes == WIDE), default=4)
    widest = CHUNK_BYTES // element
    if row.run > widest or row.run & (row.run - 1) or row.segment % row.chunk:
        raise LowerError(
            f"graph @{graph.name}: consecutive elements of a chunk are expected to be a power of two up to {widest}, "
            f"and a segment whole chunks, got {row.run} and {row.segment / row.chunk:g} chunks.\n    {print_eqn(eqn)}"
        )
