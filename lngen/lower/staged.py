"""Rows that come through shared memory: where tensors lie in a stage, and the partials of such a kernel."""

from __future__ import annotations

from dataclasses import replace

from lngen.ir import WIDE, D, DType, Graph, Value
from lngen.ir.ops import ctype
from lngen.lower.parts import Phase, Place, Refill
from lngen.lower.pieces import COPIED, HELD_COLUMNS, LOADED, PACKED, WIDENED, files, in_pieces
from lngen.lower.plan import Kernel, Sections
from lngen.schedule import (
    Problem,
    Schedule,
    dynamic_shared,
    met_numbers,
    stage_share,
    stay_packed,
)


def staged(kernel: Kernel, graph: Graph, outputs: tuple[Value, ...], s: Schedule, p: Problem) -> Kernel:
    """A row kernel under a staged schedule: its shared memory, its clusters, its partials."""
    inputs, results = places(graph, outputs, s, p)
    kernel = in_pieces(kernel, s, p)
    return replace(
        kernel,
        phases=_refilling(kernel.phases, s.told),
        dynamic=dynamic_shared(s, p),
        places=inputs,
        results=results,
        refill=Refill(s.soon, s.bulk_store or s.form == "ragged", s.claim, s.told),
        sections=sections(kernel, graph, s, p),
    )


def places(
    graph: Graph, outputs: tuple[Value, ...], s: Schedule, p: Problem
) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """Where the [M, D] inputs, and the results that leave in bulk, lie in a stage.

    A result takes the place of an input of its size, as long as there is one.
    """
    inputs = [v for v in graph.params if v.type.axes == WIDE]
    results = [v for v in outputs if v.type.axes == WIDE and s.bulk_store]
    free, offset, at = list(inputs), 0, dict[Value, int]()
    for v in (*inputs, *results):
        size = v.type.dtype.size
        shares = v in results and s.form != "ragged"  # a ragged row may begin elsewhere in its 16 bytes
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


def sections(kernel: Kernel, graph: Graph, s: Schedule, p: Problem) -> Sections:
    """The partials of a staged kernel."""
    meets, ragged, numbers = met_numbers(s, p) > 0, s.form == "ragged", bool(kernel.row_inputs) and not s.claim
    widened, later = _widened(graph, s, p), _needed_later(s, p)
    ready = ["_setup_cluster", "_ready_cluster"] if meets else ["_ready_block"]
    setup = {
        "async": [],
        "bulk": ["_setup_bulk", *ready, "_piece"],
        "ragged": ["_setup_bulk", *ready],
    }
    claims = ["_claim", "_bring_told" if s.told else "_bring_claimed"] * s.claim
    refill = [*claims, "_refill"]
    copies = {
        "async": ["_copy_async"],
        "bulk": ["_copy_bulk", *["_store_bulk"] * s.bulk_store, *refill],
        "ragged": ["_copy_ragged", "_store_ragged", *refill],
    }
    columns = [HELD_COLUMNS] * s.keep
    tiles, store = ("_load_ragged", "_store_ragged_stage") if ragged else ("_load_stage", "_store_stage")
    begins = [
        ("_ragged_row", ragged),
        ("_hold_row", s.hold),
        ("_refill_at_once", not kernel.phases[0].folds),
    ]
    ends = [
        ("_end_stores", s.bulk_store),
        ("_end_groups", p.column_sums > 0),
        ("_one_launch", s.one_launch),
    ]
    return Sections(
        setup=files(*setup[s.form]),
        held=(
            *files(*["_first_numbers"] * numbers),
            *columns * (not later),
            *files(*["_held_sums"] * bool(p.column_sums)),
        ),
        copies=files(*copies[s.form]),
        begun=(
            *columns * later,
            *files(*["_widened_columns"] * widened),
            *files(*["_seen_numbers", *["_seen_columns"] * s.keep, "_seen"] * numbers),
        ),
        row_begin=files(*(name for name, there in begins if there)),
        tiles=f"{tiles}.cuh.jinja",
        load=files("_load_held" if s.hold else tiles),
        columns=(WIDENED if widened else PACKED if stay_packed(s, p) else COPIED) if s.keep else LOADED,
        store=f"{store}.cuh.jinja" if s.bulk_store else "_store_results.cuh.jinja",
        row_end=files(*["_end_row"] * s.bulk_store),
        end=files(*(name for name, there in ends if there)),
    )


def _needed_later(s: Schedule, p: Problem) -> bool:
    """True if the [D] inputs that are kept may come behind the first rows.

    They are needed at the end of a forward's row. What is widened before the rows is waited for there, and so comes
    first; claimed rows lose by it (h200-tried.txt, 45).
    """
    return s.keep and not s.claim and not p.column_sums and all(size >= p.real_size for size in p.column_sizes)


def _widened(graph: Graph, s: Schedule, p: Problem) -> bool:
    """True if the [D] inputs that are kept are f16, and are widened once.

    Left to the compiler, they are widened in every row, at half the speed of other instructions. If they all must stay
    narrow, they do.
    """
    columns = {v for v in graph.params if v.type.axes == (D,)}
    halves = {v for v in columns if v.type.dtype is DType.F16}
    casts = all(e.op == "cast" and e.out.type.dtype is DType.F32 for e in graph.eqns if not halves.isdisjoint(e.args))
    known = all(v.type.dtype in (DType.F16, DType.F32) for v in columns)
    return s.keep and bool(halves) and casts and known and not stay_packed(s, p)


def _refilling(phases: tuple[Phase, ...], told: bool) -> tuple[Phase, ...]:
    """The first folds of a row meet all its threads, which have read it by then: a stage is free.

    Blocks that are told which row comes next are told with the first for which they meet; with the last of those, as
    there are places for two meetings.
    """
    if not phases[0].folds:
        return phases
    number = next(n for n, phase in enumerate(phases) if not told or any(f.meets for f in phase.folds))
    *folds, last = phases[number].folds
    refilling = replace(phases[number], folds=(*folds, replace(last, tells=told)), refills=True)
    return *phases[:number], refilling, *phases[number + 1 :]
