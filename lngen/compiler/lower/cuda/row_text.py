"""The kernel that processes rows: its addresses, loads and stores, and the calls of its reductions."""

from __future__ import annotations

from dataclasses import dataclass

from lngen.compiler.ir import (
    WIDE,
    D,
    DType,
    Eqn,
    Graph,
    Value,
    ctype,
    is_of_columns,
    is_of_set,
    is_segment_sum,
)
from lngen.compiler.lower.cuda.fragments import Sum, Tensor, c_name
from lngen.compiler.lower.cuda.policies import row_objects, row_types
from lngen.compiler.lower.cuda.spelling import (
    Inputs,
    Spelling,
    address,
    address_of_set,
    of_elements,
    tables,
    taken,
    tensor,
)
from lngen.compiler.problem import STAGED, Problem, Schedule
from lngen.compiler.problem.footprint import (
    exchanged_values,
    leading_dimension,
    partial_values,
    stage_bytes,
    stay_packed,
    unit,
    vector_chunks,
    vectors_per_thread,
)

SIZES = {ctype(t): t.size for t in DType}  # bytes

UNITS_IN_REGISTERS = 16  # a thread holds at most so many, one for each row group whose column sums it reduces


@dataclass(frozen=True)
class Place:
    """The place of a tensor's part of a row in a stage: IR name, C type, and the byte at which it starts.

    A stage is the shared memory of one row of one row group. A result may have the place of an input: a thread reads
    its part of the input before it writes its part of the result.
    """

    name: str
    ctype: str
    offset: int

    def __str__(self) -> str:
        return f"{self.name} at byte {self.offset}"

    @property
    def element(self) -> str:
        """The bytes of an element, in C."""
        return f"sizeof({self.ctype})"

    @property
    def start(self) -> str:
        """Where the part begins in a stage, in C."""
        return f"stage_ + /* bytes */ {self.offset}" if self.offset else "stage_"


@dataclass(frozen=True)
class RowKernel:
    """The properties of a row kernel on which its text depends.

    exact             the vectors of all threads cover a row exactly
    places, results   the places of inputs, and of results that are stored by TMA, in a stage
    cached            when cached [D] inputs are loaded into registers: first, late (after the loads of the first rows),
                      with the row, or not at all ("")
    columns           the [D] inputs
    sets              the [N, D] inputs that stay in registers while the rows of a set are added
    widened           the cached [D] inputs that are f16, and are widened once
    ahead, at_start   the [M] inputs that are loaded one row ahead, and those that are loaded when the row is there
    in_registers      the [M, D] inputs that go from a stage to registers
    once              the inputs that a thread reads once a row, together with the row or before it waits for it, and
                      where their columns begin, in C++: cached [N, D] inputs, and those with columns that repeat along
                      a row, and some for each row, if all vectors of a thread have the same ones
    flush             how column sums are stored: by each thread, through shared memory "in turn" or in the former
                      "ring" of stages, or not at all ("")
    shared            numbers of shared memory for that, outside stages
    met               the reductions over blocks of features whose numbers of vectors meet in shared memory
    turned            the rotations of heads whose elements meet there
    prefetch_blocks   blocks that prefetch rows; 0 for all of them
    """

    schedule: Schedule
    problem: Problem
    exact: bool
    places: tuple[Place, ...] = ()
    results: tuple[Place, ...] = ()
    cached: str = ""
    columns: tuple[Tensor, ...] = ()
    sets: tuple[Tensor, ...] = ()
    widened: tuple[Tensor, ...] = ()
    ahead: tuple[Tensor, ...] = ()
    at_start: tuple[Tensor, ...] = ()
    in_registers: tuple[Tensor, ...] = ()
    once: tuple[tuple[Tensor, str], ...] = ()
    flush: str = ""
    shared: int = 0
    met: tuple[Sum, ...] = ()
    turned: tuple[Eqn, ...] = ()
    prefetch_blocks: int = 0

    def types(self, overtaken: bool) -> tuple[str, ...]:
        """C++: the types of its policies, see ``row_types``."""
        return row_types(self.schedule, self.problem, self.exact, overtaken)

    @property
    def objects(self) -> tuple[str, ...]:
        """C++: the objects of these, and their shared memory."""
        of_vectors, turned = (t.of_vectors for t in self.met), ((of_elements(e), e.out.type.dtype) for e in self.turned)
        return row_objects(self.schedule, self.problem, self.shared, of_vectors, turned)

    @property
    def staged(self) -> bool:
        """True if rows come through shared memory."""
        return self.schedule.form in STAGED

    @property
    def persistent(self) -> bool:
        """True if blocks are persistent."""
        return self.staged or (self.schedule.form == "registers" and self.problem.column_sums > 0)

    @property
    def by_stretches(self) -> bool:
        """True if a block takes stretches of the rows of sets, and stores a partial row for each."""
        return self.problem.stretch is not None and self.problem.column_sums > 0

    @property
    def first_row(self) -> str:
        """C++: the first row of a row group of a persistent grid, for the prefetch."""
        return (
            "stream_.first_row()"
            if self.by_stretches
            else ("static_cast<long long>(Row::grid_index()) * Row::ROWS + Row::group()")
        )

    @property
    def has_rows(self) -> str:
        """C++: true if a block of a persistent grid has rows."""
        return "stream_.block_first_row < rows_"

    @property
    def first_or_last(self) -> str:
        """C++: the first row of a row group, or the last row."""
        return "stream_.row_or_last(group_first_)"

    @property
    def next_row(self) -> str:
        """C++: the next row of a row group, or the last row; of a stretch."""
        return "stream_.following()" if self.by_stretches else "stream_.row_or_last(stream_.row + stream_.STEP)"

    @property
    def exchange(self) -> bool:
        """True if the blocks of a cluster exchange values."""
        return exchanged_values(self.schedule, self.problem) > 0

    @property
    def ready(self) -> str:
        """C++: the barrier after which every thread sees the initialised mbarriers; empty where none is needed yet."""
        if self.schedule.form not in ("tma", "tma_unaligned"):
            return ""  # clusters in form registers wait after the loads of their rows
        return "cluster_barrier();" if self.exchange else "__syncthreads();"

    @property
    def cached_first(self) -> tuple[Tensor, ...]:
        """The cached [D] inputs that are loaded before the first rows."""
        return self.columns if self.cached == "first" else ()

    @property
    def cached_late(self) -> tuple[Tensor, ...]:
        """Those that are loaded after the loads of the first rows."""
        return self.columns if self.cached == "late" else ()

    @property
    def cached_with_row(self) -> tuple[Tensor, ...]:
        """Those that are loaded with the one row of a row group."""
        return self.columns if self.cached == "row" else ()

    @property
    def preloaded(self) -> tuple[str, ...]:
        """C++: bits of every value that is loaded before the row loop and awaited there, by streams with a parity."""
        if not self.ahead or self.schedule.form == "cp_async":
            return ()
        weights = (*self.columns, *self.sets) if self.schedule.cached_weights else ()
        return (
            *(f"bits_of({t.name}_next_)" for t in self.ahead),
            *(f"vector_bits<Row>({t.name}_cached_)" for t in weights),
        )

    @property
    def bytes_per_column(self) -> str:
        """C++: bytes of all staged inputs in a column."""
        elements = " + ".join(place.element for place in self.places)
        return f"({elements})" if len(self.places) > 1 else elements

    @property
    def unroll(self) -> str:
        """C++: the operand of ``#pragma unroll`` for loops over the vectors of a thread; empty to unroll all.

        A thread that is told not to unroll the loop over its one vector may keep the vector in local memory.
        """
        several = self.problem.segments * vectors_per_thread(self.schedule, self.problem) > 1
        return " Row::PER_SEGMENT" if self.schedule.form == "multipass" and several else ""

    @property
    def releases_at_once(self) -> bool:
        """True if no row reduction implies that all threads have read a row."""
        return self.staged and self.problem.row_sums == 0

    @property
    def writer_condition(self) -> str:
        """C++: true in the one thread that stores the [M] results of a row."""
        first = " && Row::rank() == 0" if self.schedule.cluster > 1 else ""
        return f"stream_.has_row() && Row::thread() == 0{first}"

    @property
    def ring_bytes(self) -> int:
        """Bytes of the stages, behind which the column sums of a stretch are."""
        return self.schedule.stages * self.schedule.rows_per_block * stage_bytes(self.schedule, self.problem)

    @property
    def unit(self) -> int:
        """Column sums that are moved together."""
        return unit(self.problem)

    def shared_sums(self, column_sum: Sum) -> str:
        """C++: where a column sum begins in the shared memory of all column sums."""
        offset = column_sum.index * partial_values(self.schedule, self.problem) // self.problem.column_sums
        return f"sums_buffer_ + /* {column_sum.real}s */ {offset}" if offset else "sums_buffer_"

    def partials(self, column_sum: Sum) -> str:
        """C++: the block's row of partial sums of a column sum."""
        number = "stream_.at.number" if self.by_stretches else "static_cast<long long>(Row::grid_index())"
        offset = f"{number} * /* leading */ {leading_dimension(self.problem)}"
        return f"{column_sum.partials} + {offset}"

    def store_partial(self, column_sum: Sum) -> str:
        """C++: the device function that tree-reduces the row groups of a block, with its template arguments."""
        arguments = f"{column_sum.functor}, Row, /* unit */ {self.unit}, {self.evict_last}"
        if self._few_row_groups:
            return f"store_partial<{arguments}>"
        return f"store_partial_of_many<{arguments}, /* row groups at a time */ {UNITS_IN_REGISTERS}>"

    @property
    def _few_row_groups(self) -> bool:
        """True if a thread holds a unit of each row group in registers."""
        return self.schedule.rows_per_block <= UNITS_IN_REGISTERS

    def cached_load(self, tensor: Tensor) -> str:
        """The load policy of cached [D] inputs."""
        return f"UnmovedLoad{min(16, self.schedule.vec * SIZES[tensor.ctype])}"

    def first_row_load(self, tensor: Tensor) -> str:
        """The load policy of the first row's [M] inputs. In clusters it is faster if the compiler places the load."""
        return "ReadOnlyLoad" if self.exchange else f"UnmovedLoad{SIZES[tensor.ctype]}"

    @property
    def next_row_load(self) -> str:
        """The load policy of the next row's [M] inputs: issued in place, so that they arrive during the current row."""
        return "ReadOnlyLoad" if self.exchange else "PlainLoad"

    @property
    def evict_last(self) -> str:
        """The store policy of partial sums: ``unit`` together where a thread has that many neighbours, else one."""
        neighbours = self.problem.run if self.flush == "threads" else self.unit if self._few_row_groups else 1
        together = self.unit if neighbours >= self.unit else 1
        return f"EvictLastStore{together * self.problem.real_size}"

    @property
    def load(self) -> str:
        """The load policy of [M, D] inputs in global memory.

        RowLoad needs the addresses of Row::at, which take more registers than persistent kernels have left.
        """
        return "RowLoad" if self.schedule.form == "registers" and not self.persistent else "PlainLoad"

    @property
    def column_load(self) -> str:
        """The load policy of [D] inputs that are not in registers."""
        return "PlainLoad" if self.schedule.form == "multipass" else "ReadOnlyLoad"

    def store(self, tensor: Tensor) -> str:
        """C++: the statement that stores vector ``v_`` of a result: in its stage, or in global memory."""
        store, out = "store_pairs" if tensor.in_pairs else "store", f"v_, {tensor.name}_out_"
        if self.schedule.tma_store:
            return f"{store}<Row, PlainStore>({tensor.name}_shared_, {out});"
        policy = "GlobalStore" if self.schedule.cluster > 1 else "PlainStore"
        return f"if (stream_.has_row()) {store}<Row, {policy}>({self.address(tensor.name, 'stream_.row')}, {out});"

    def address(self, name: str, row: str) -> str:
        """C++: the address of a row of an [M, D] tensor in global memory."""
        return address(name, row, self.problem.strides)

    def in_stage(self, place: Place) -> str:
        """C++: column 0 of a tensor in the stage of the row; an unaligned row begins as far behind as it does there."""
        start = f"stream_.shared<{place.ctype}>(/* byte */ {place.offset})"
        if self.schedule.form != "tma_unaligned":
            return start
        first = " + Row::first_column()" if self.schedule.cluster > 1 else ""
        return f"{start} + misalignment({self.address(place.name, self.current_row)}{first})"

    @property
    def own_row(self) -> str:
        """C++: the row of a row group; past the last row, the last one."""
        if self.persistent:
            return self.current_row
        return "stream_.row" if self.schedule.form == "multipass" else "stream_.row_or_last()"

    @property
    def current_row(self) -> str:
        """C++: the row of a row group in a persistent grid; past the last row, the last one."""
        return "stream_.row" if self.schedule.dynamic else "stream_.row_or_last(stream_.row)"


def row_spelling(graph: Graph, row: RowKernel) -> Spelling:
    """The way in which the loops of the kernel read inputs, reduce and accumulate."""
    s, p = row.schedule, row.problem
    of_rows = {v: t.of_row(row.own_row) for v, t in tables(graph).items()}
    access = {v: _access(v, row, of_rows.get(v, "")) for v in graph.params if v.type.along(D)}
    element, vector = ({v: texts[n] for v, texts in access.items() if texts[n]} for n in range(2))
    at_use = s.form == "registers" and p.column_sums > 0
    widened = frozenset(filter(is_of_columns, graph.params)) if row.widened else frozenset()
    array = "{real} {array}[Row::SEGMENTS];"
    of_units = s.form == "tma_unaligned" and not s.row_in_registers
    return Spelling(
        inputs=Inputs(
            element,
            vector,
            widened,
            at_use,
            of_vector="Row::column(v_, 0)",
            taken=lambda v, at: _taken(v, at, row),
        ),
        when="if (Row::holds(v_, i_)) " if p.d % p.chunk else "",
        partial_when="if (stream_.has_row()) ",
        held_when=f"if (stream_.has_row(){'' if row.exact else ' && Row::holds(v_, i_)'}) ",
        call=lambda eqns, op: _call(row, eqns[0], op),
        in_pairs=of_units or (p.chunk % 2 == 0 and p.d % p.chunk == 0),
        of_units=of_units,
        array=f"__shared__ {array}" if s.form == "multipass" else array,
        cluster=s.cluster > 1,
        d=p.d,
        vector=p.chunk,
        lanes=p.lanes,
        chunks=vector_chunks(s, p),
        meets=p.blocks_meet,
    )


def _taken(v: Value, at: str, row: RowKernel) -> str:
    """C++: the element at an index of the row of an [M, D] input, or of a [D] input; 0 outside it."""
    begin = row.address(v.name, "stream_.row") if v.type.axes == WIDE else f"{v.name}_ptr_"
    return taken(begin, at, row.problem.d, "stream_.has_row()")


def _access(v: Value, row: RowKernel, of_row: str) -> tuple[str, str]:
    """C++: the element ``i_`` of an input along D, and the statement of its vector, if it needs one.

    ``of_row``: where a row of a table begins.
    """
    s, name = row.schedule, c_name(v)
    if v.type.axes == WIDE and (s.form == "registers" or s.row_in_registers):
        return f"{v.name}_row_[v_][i_]", ""
    if v.name in {t.name for t, _ in row.once}:
        if is_of_set(v) and v.type.dtype.size == 2:  # two to a register
            return f"{name}[i_]", f"const auto {name} = packed({v.name}_row_[v_]);"
        return f"{v.name}_row_[v_][i_]", ""
    if of_row:
        return f"{name}[i_]", f"const auto {name} = load<Row, ReadOnlyLoad>({of_row}, v_);"
    if v.type.axes == WIDE or (is_of_set(v) and not row.sets) or not s.cached_weights:
        return f"{name}[i_]", f"const auto {name} = {_read(v, row)};"
    if stay_packed(s, row.problem) and v.type.dtype.size == 2:  # two to a register
        return f"{name}[i_]", f"const auto {name} = packed({v.name}_cached_[v_]);"
    return f"{v.name}_{'wide' if row.widened and not is_of_set(v) else 'cached'}_[v_][i_]", ""


def _read(v: Value, row: RowKernel) -> str:
    """C++: a vector of an input that is not in registers."""
    if v.type.axes == WIDE and row.staged:
        return f"load<Row, PlainLoad>({v.name}_shared_, v_)"
    if v.type.axes == WIDE:
        return f"load<Row, {row.load}>({row.address(v.name, 'stream_.row')}, v_)"
    where = address_of_set(v.name) if is_of_set(v) else tensor(v).columns
    return f"load<Row, {row.column_load}>({where}, v_)"


def _call(row: RowKernel, eqn: Eqn, op: str) -> str:
    """The device function of a row reduction, or of the sums of segments, up to the terms."""
    s = row.schedule
    prefix = "multipass_" if s.form == "multipass" else ""
    if is_segment_sum(eqn):
        return f"{prefix}segment_sums<{op}, Row>(reduce_,"
    interleave = f"/* interleave */ {dict(eqn.attrs).get('interleave', 1)}"
    if s.cluster > 1:
        return f"cluster_sums<{op}, Row, {interleave}>(reduce_, exchange_,"
    if row.problem.segments == 1:
        return f"row_sums<{op}, Row>(reduce_,"
    return f"{prefix or 'joined_'}sums<{op}, Row, {interleave}>(reduce_,"
