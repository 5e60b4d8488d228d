"""The kernel that processes rows: the policies for its schedule, and the places of its inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lngen.devices import default_device
from lngen.ir import WIDE, D, DType, Graph, M, Value, ctype
from lngen.lower.c_names import c_name
from lngen.lower.inputs import Inputs
from lngen.lower.parts import Phase, Place, Sum, Tensor
from lngen.lower.phases import Accumulate, Style
from lngen.lower.policies import flush, leading_dimension, objects, policies, unit
from lngen.lower.stages import places
from lngen.schedule import (
    STAGED,
    Problem,
    Schedule,
    exchanged_values,
    partial_values,
    stay_packed,
    vectors_per_thread,
)

SIZES = {ctype(t): t.size for t in DType}  # bytes

# Blocks per multiprocessor that prefetch rows if they are not persistent: about those that are resident together on the
# default device, which the text assumes for every arch. A later block would only prefetch what it loads at once.
PREFETCHING_BLOCKS = 4

UNITS_IN_REGISTERS = 16  # a thread holds at most so many, one for each row group whose column sums it reduces


@dataclass(frozen=True)
class RowKernel:
    """The properties of a row kernel on which its text depends.

    places, results   the places of inputs, and of results that are stored by TMA, in a stage
    cached            when cached [D] inputs are loaded into registers: first, late (after the loads of the first rows),
                      with the row, or not at all ("")
    widened           the cached [D] inputs are f16, and are widened once
    flush             how column sums are stored: by each thread, through shared memory "in turn" or in the former
                      "ring" of stages, or not at all ("")
    row_inputs_ahead  the [M] inputs of the next row are loaded during a row
    """

    schedule: Schedule
    problem: Problem
    policies: tuple[str, ...]
    objects: tuple[str, ...]
    places: tuple[Place, ...] = ()
    results: tuple[Place, ...] = ()
    cached: str = ""
    widened: bool = False
    flush: str = ""
    row_inputs_ahead: bool = False

    @property
    def staged(self) -> bool:
        """True if rows come through shared memory."""
        return self.schedule.form in STAGED

    @property
    def persistent(self) -> bool:
        """True if blocks are persistent."""
        return self.staged or (self.schedule.form == "registers" and self.problem.column_sums > 0)

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
    def prefetch_blocks(self) -> int:
        """The number of blocks that prefetch rows; 0 for all of them."""
        return 0 if self.persistent else PREFETCHING_BLOCKS * default_device().multiprocessors

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
        return f"stream_.live() && Row::thread() == 0{first}"

    @property
    def unit(self) -> int:
        """Column sums that are moved together."""
        return unit(self.problem)

    def sums_offset(self, column_sum: Sum) -> int:
        """Where a column sum begins in the shared memory of all column sums, in numbers."""
        return column_sum.index * partial_values(self.schedule, self.problem) // self.problem.column_sums

    @property
    def partial_row_offset(self) -> str:
        """C++: the offset of the block's row of partial sums."""
        return f"static_cast<long long>(Row::grid_index()) * {leading_dimension(self.problem)}"

    def store_partial(self, column_sum: Sum) -> str:
        """C++: the device function that tree-reduces the row groups of a block, with its template arguments."""
        arguments = f"{column_sum.functor}, Row, {self.unit}, {self.evict_last}"
        if self._few_row_groups:
            return f"store_partial<{arguments}>"
        return f"store_partial_of_many<{arguments}, /* row groups at a time */ {UNITS_IN_REGISTERS}>"

    @property
    def _few_row_groups(self) -> bool:
        """True if a thread holds a unit of each row group in registers."""
        return self.schedule.rows_per_block <= UNITS_IN_REGISTERS

    def cached_load(self, tensor: Tensor) -> str:
        """The load policy of cached [D] inputs."""
        return f"EarlyLoad{min(16, self.schedule.vec * SIZES[tensor.ctype])}"

    def first_row_load(self, tensor: Tensor) -> str:
        """The load policy of the first row's [M] inputs. In clusters it is faster if the compiler places the load."""
        return "ReadOnlyLoad" if self.exchange else f"EarlyLoad{SIZES[tensor.ctype]}"

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

    @property
    def store(self) -> str:
        """The store policy of a result's vectors in global memory."""
        return "GlobalStore" if self.schedule.cluster > 1 else "PlainStore"

    def misalignment_term(self, place: Place) -> str:
        """C++: what is added to the start of a place for the start of an unaligned row; empty for aligned rows."""
        if self.schedule.form != "tma_unaligned":
            return ""
        row = "stream_.row" if self.schedule.dynamic else "stream_.valid(stream_.row)"
        return f" + misalignment({place.name}_ptr_ + {row} * {place.name}_stride_)"


def row_kernel(graph: Graph, outputs: tuple[Value, ...], s: Schedule, p: Problem) -> RowKernel:
    """The policies of a kernel; ``p`` has the column sums that this kernel adds to."""
    row_inputs_ahead = s.form in STAGED and not s.dynamic and any(v.type.axes == (M,) for v in graph.params)
    inputs, results = places(graph, outputs, s, p)
    return RowKernel(
        schedule=s,
        problem=p,
        policies=policies(s, p),
        objects=objects(s, p, partial_values(s, p) if flush(s, p) == "in turn" else 0),
        places=inputs,
        results=results,
        cached=_cached(s, p),
        widened=_widened(graph, s, p),
        flush=flush(s, p),
        row_inputs_ahead=row_inputs_ahead,
    )


def _cached(s: Schedule, p: Problem) -> str:
    """When cached [D] inputs are loaded.

    A forward row needs them at its end, so they may be loaded after the first rows. Inputs that are widened before the
    row loop are awaited there, and therefore come first. With a dynamic scheduler a late load costs time.
    """
    if not s.cached_weights:
        return ""
    if s.form == "registers":
        return "row"
    late = not s.dynamic and not p.column_sums and all(size >= p.real_size for size in p.column_sizes)
    return "late" if late else "first"


def _widened(graph: Graph, s: Schedule, p: Problem) -> bool:
    """True if the cached [D] inputs are f16, and are widened once.

    The compiler would widen them in every row, at half the rate of other instructions. Inputs that have to be kept
    packed are not widened once.
    """
    columns = {v for v in graph.params if v.type.axes == (D,)}
    halves = {v for v in columns if v.type.dtype is DType.F16}
    casts = all(e.op == "cast" and e.out.type.dtype is DType.F32 for e in graph.eqns if not halves.isdisjoint(e.args))
    staged = s.form in STAGED and s.cached_weights
    return staged and bool(halves) and columns == halves and casts and not stay_packed(s, p)


def row_style(graph: Graph, row: RowKernel) -> Style:
    """The way in which the loops of the kernel read inputs, reduce and accumulate."""
    s, p = row.schedule, row.problem
    element, vector = dict[Value, str](), dict[Value, str]()
    for v in graph.params:
        if D in v.type.axes:
            element[v], load = _access(v, row)
            vector |= {v: load} if load else {}
    at_use = s.form == "registers" and p.column_sums > 0
    widened = frozenset(v for v in graph.params if v.type.axes == (D,)) if row.widened else frozenset()
    return Style(
        inputs=Inputs(element, vector, widened, at_use),
        call=_call(row),
        segment_call=_segment_call(row),
        segment_array="__shared__ {real} {array}[Row::SEGMENTS];"
        if s.form == "multipass"
        else "{real} {array}[Row::SEGMENTS];",
        term="if (Row::holds(v_, i_)) " if p.d % p.chunk else "",
        accumulate=Accumulate("if (stream_.live()) ", "{0}_sums_[v_][i_]"),
        last=s.tma_store,
        cluster=s.cluster > 1,
        keeps=s.form == "registers" or s.row_in_registers,
        keeps_long=s.form != "multipass",
    )


def _access(v: Value, row: RowKernel) -> tuple[str, str]:
    """C++: the element ``i_`` of an [M, D] or [D] input, and the statement that makes its vector, if one is needed."""
    s, name = row.schedule, c_name(v)
    if v.type.axes == WIDE and (s.form == "registers" or s.row_in_registers):
        return f"{v.name}_row_[v_][i_]", ""
    if v.type.axes == WIDE or not s.cached_weights:
        return f"{name}[i_]", f"const auto {name} = {_read(v, row)};"
    if stay_packed(s, row.problem) and v.type.dtype.size < 4:  # two to a register
        return f"{name}[i_]", f"const auto {name} = packed({v.name}_cached_[v_]);"
    return f"{v.name}_{'wide' if row.widened else 'cached'}_[v_][i_]", ""


def _read(v: Value, row: RowKernel) -> str:
    """C++: a vector of an input that is not in registers."""
    if v.type.axes == WIDE and row.staged:
        return f"load<Row, PlainLoad>({v.name}_shared_, v_)"
    offset = f" + stream_.row * {v.name}_stride_" if v.type.axes == WIDE else ""
    path = row.load if v.type.axes == WIDE else row.column_load
    return f"load<Row, {path}>({v.name}_ptr_{offset}, v_)"


def _call(row: RowKernel) -> str:
    """The device function of row reductions, up to the terms; fields in braces are filled by the reduction."""
    s, p = row.schedule, row.problem
    if s.cluster > 1:
        return "cluster_sums<{op}, Row, {interleave}>({array}, reduce_, exchange_, "
    if p.segments == 1:
        return "row_sums<{op}, Row>({array}, reduce_, "
    function = "multipass_sums" if s.form == "multipass" else "joined_sums"
    return f"{function}<{{op}}, Row, {{interleave}}>({{array}}, reduce_, "


def _segment_call(row: RowKernel) -> str:
    """The device function of the sums of segments, up to the terms."""
    if row.schedule.form == "multipass":
        return "multipass_segment_sums<Add<{real}>, Row>({array}, reduce_, "
    return "segment_sums<Add<{real}>, Row, 1>({array}, reduce_, "


def releasing(phases: tuple[Phase, ...], row: RowKernel) -> tuple[Phase, ...]:
    """The phases; the one whose reductions imply that all threads have read the row releases the stage.

    Where the blocks of a cluster broadcast the next row, it is the first phase in which they exchange numbers.
    """
    broadcast = row.schedule.broadcast
    number = next((n for n, p in enumerate(phases) if (p.exchanged or p.whole_rows if broadcast else p.reduces)), None)
    if not row.staged or number is None:
        return phases
    releases = replace(phases[number], releases=True, broadcast=broadcast)
    return *phases[:number], releases, *phases[number + 1 :]
