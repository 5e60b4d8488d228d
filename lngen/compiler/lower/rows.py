"""The kernel that processes rows: what it caches, prefetches and keeps, and the places of its inputs in a stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lngen.compiler.devices import default_device
from lngen.compiler.ir import WIDE, DType, Graph, M, Value, ctype, is_block_fold, is_of_columns, is_of_halves, is_of_set
from lngen.compiler.lower.cuda.fragments import PhaseText, Tensor
from lngen.compiler.lower.cuda.row_text import Place, RowKernel
from lngen.compiler.lower.cuda.spelling import address_of_set, named, tables, tensors
from lngen.compiler.lower.nest import Style
from lngen.compiler.problem import STAGED, Problem, Schedule
from lngen.compiler.problem.footprint import are_alike, is_exact, partial_values, stage_share, stay_packed

# Blocks per multiprocessor that prefetch rows if they are not persistent: about those that are resident together on the
# default device, which the text assumes for every arch. A later block would only prefetch what it loads at once.
PREFETCHING_BLOCKS = 4


def template_of(row: RowKernel) -> str:
    """The template of a kernel that processes rows: its form, or that of a persistent grid with rows in registers."""
    return "persistent" if row.persistent and not row.staged else row.schedule.form


def row_kernel(graph: Graph, outputs: tuple[Value, ...], s: Schedule, p: Problem) -> RowKernel:
    """The decisions of a kernel; ``p`` has the column sums that this kernel adds to."""
    inputs, results = _places(graph, outputs, s, p)
    row_inputs, wide = (tensors(v for v in graph.params if v.type.axes == axes) for axes in ((M,), WIDE))
    columns = tensors(filter(is_of_columns, graph.params))
    staged, flush = s.form in STAGED, _flush(s, p)
    row = RowKernel(
        schedule=s,
        problem=p,
        exact=is_exact(s, p),
        places=inputs,
        results=results,
        cached=_cached(s, p),
        columns=columns,
        sets=tensors(filter(is_of_set, graph.params)) if s.cached_weights and p.stretch and p.column_sums else (),
        widened=columns if _widened(graph, s, p) else (),
        ahead=row_inputs if staged and not s.dynamic else (),
        at_start=row_inputs if s.dynamic else (),
        in_registers=wide if s.row_in_registers else (),
        flush=flush,
        shared=partial_values(s, p) if flush == "in turn" else 0,
        met=named(e for e in graph.eqns if is_block_fold(e)) if p.blocks_meet else (),
        turned=tuple(filter(is_of_halves, graph.eqns)) if p.blocks_meet else (),
    )
    prefetching = 0 if row.persistent else PREFETCHING_BLOCKS * default_device().multiprocessors
    return replace(row, prefetch_blocks=prefetching, once=(*_angles(graph, row), *_of_the_set(graph, row)))


def _angles(graph: Graph, row: RowKernel) -> Iterator[tuple[Tensor, str]]:
    """The tables of which a thread reads the columns once a row.

    Only rows in stages have a wait that loads can precede; in other forms the compiler reads alike columns once.
    """
    found = tables(graph).values()
    if row.staged and all(are_alike(row.schedule, row.problem, table.period) for table in found):
        yield from ((table, table.of_row(row.own_row)) for table in found)


def _of_the_set(graph: Graph, row: RowKernel) -> Iterator[tuple[Tensor, str]]:
    """The cached inputs of sets, of a kernel that takes rows of many sets."""
    if row.schedule.cached_weights and not row.problem.column_sums:
        yield from ((t, address_of_set(t.name)) for t in tensors(filter(is_of_set, graph.params)))


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
    columns = {*filter(is_of_columns, graph.params)}
    halves = {v for v in columns if v.type.dtype is DType.F16}
    casts = all(e.op == "cast" and e.out.type.dtype is DType.F32 for e in graph.eqns if not halves.isdisjoint(e.args))
    staged = s.form in STAGED and s.cached_weights
    return staged and bool(halves) and columns == halves and casts and not stay_packed(s, p)


def row_style(row: RowKernel) -> Style:
    """What the loops of the kernel leave in registers, and where they store results."""
    s = row.schedule
    return Style(
        stores="last" if s.tma_store else "soon",
        keeps=s.form == "registers" or s.row_in_registers,
        keeps_long=s.form != "multipass",
        meets=row.problem.blocks_meet,
        vectors=True,
    )


def releasing(phases: tuple[PhaseText, ...], row: RowKernel) -> tuple[PhaseText, ...]:
    """The phases; the one whose reductions imply that all threads have read the row releases the stage.

    Where the blocks of a cluster broadcast the next row, it is the first phase in which they exchange numbers.
    """
    broadcast = row.schedule.broadcast
    number = next((n for n, p in enumerate(phases) if (p.exchanged or p.whole_rows if broadcast else p.reduces)), None)
    if not row.staged or number is None:
        return phases
    releases = replace(phases[number], releases=True, broadcast=broadcast)
    return *phases[:number], releases, *phases[number + 1 :]


def _flush(s: Schedule, p: Problem) -> str:
    """How column sums are stored."""
    if not p.column_sums:
        return ""
    if s.form in STAGED:
        return "ring"
    return "in turn" if partial_values(s, p) else "threads"


def _places(
    graph: Graph, outputs: tuple[Value, ...], s: Schedule, p: Problem
) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """The places of the [M, D] inputs, and of the results that are stored by TMA, in a stage.

    A result takes the place of an input of its size, as long as there is one.
    """
    if s.form not in STAGED:
        return (), ()
    inputs = [v for v in graph.params if v.type.axes == WIDE]
    results = [v for v in outputs if v.type.axes == WIDE and s.tma_store]
    free, offset, at = list(inputs), 0, dict[Value, int]()
    for v in (*inputs, *results):
        size = v.type.dtype.size
        shares = v in results and s.form != "tma_unaligned"  # an unaligned result may have another misalignment
        same = next((u for u in free if u.type.dtype.size == size), None) if shares else None
        if same is not None:
            free.remove(same)
            at[v] = at[same]
        else:
            at[v] = offset
            offset += stage_share(size, s, p)

    def listed(values: list[Value]) -> tuple[Place, ...]:
        return tuple(Place(v.name, ctype(v.type.dtype), at[v]) for v in values)

    return listed(inputs), listed(results)
