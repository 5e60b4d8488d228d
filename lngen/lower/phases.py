"""Sort a kernel's equations into phases: what can only be computed after which row sums.

Two rules. A value's *depth* is the number of row sums below it, so it cannot be computed before that phase.
An elementwise value is computed again in every phase that needs it, so that between two phases nothing
lives in registers but the inputs and one number per sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lngen.ir import OF_SEGMENTS, OPS, WIDE, D, Eqn, Graph, M, Value, is_row_fold, print_eqn
from lngen.ir.ops import ctype, literal
from lngen.lower.parts import Fold, Phase, Spell, Statement, Sum, Tensor, aligned
from lngen.lower.segments import begins, distances, ends, kept_distance, squared, whole
from lngen.passes.edit import upstream
from lngen.schedule import Folds, depths, folds, operand_depth

# Reductions of a kind are folded together: what combines two of them, their ops, and the names of their arrays.
FOLDED = {"Add": (("reduce_sum", "reduce_dot"), "chunks", "sums"), "Max": (("reduce_max",), "chunk_maxima", "maxima")}


def statement(eqn: Eqn, spell: Spell) -> Statement:
    """The C line of one equation: its IR name, its op's CUDA meaning, its IR text as note."""
    meaning = OPS[eqn.op].cuda
    assert meaning is not None, f"'{eqn.op}' is lowered by the pass '{OPS[eqn.op].lowered_by}', which has not run"
    text = meaning(tuple(spell(a) for a in eqn.args), eqn)
    return Statement(f"const {ctype(eqn.out.type.dtype)} {eqn.out.name} = {text};", print_eqn(eqn))


def speller(tile: str, graph: Graph, column: str = "{0}[i]", known: tuple[Value, ...] = ()) -> Spell:
    """How a value is spelled in C: [M, D] and [D] inputs by their array element, everything else by its name.

    ``tile``, ``column``: the element of an [M, D] and of a [D] input; ``known``: [D] inputs that are numbers here.
    """
    inputs = {p for p in graph.params if D in p.type.axes and p not in known}

    def spell(v: Value) -> str:
        return (tile if M in v.type.axes else column).format(v.name) if v in inputs else v.name

    return spell


def uniform(graph: Graph, spell: Spell) -> tuple[Statement, ...]:
    """Statements on values of no axes, once per thread."""
    return aligned(statement(e, spell) for e in graph.eqns if not e.out.type.axes)


@dataclass(frozen=True)
class Style:
    """How one kind of kernel spells inputs, guards row sums past a row's end, adds to column sums and stores.

    ``guard``: when a chunk takes a term; ``accumulate``: when a column sum does, and the place of it. ``late``: column
    sums are added to in the last phase that loads what they need anyway. ``last``: results are stored in the last phase
    that loads anything, as they lie where inputs lay. ``keeps``: distances from segments' means stay in registers.
    """

    spell: Spell
    guard: str
    accumulate: tuple[str, str]
    store: str
    late: bool = False
    last: bool = False
    keeps: bool = False


def phases(graph: Graph, sums: tuple[Eqn, ...], outputs: tuple[Value, ...], style: Style) -> tuple[Phase, ...]:
    """The phases of ``graph``: the operands of the column sums ``sums`` are accumulated, ``outputs`` stored."""
    levels = depths(graph)
    style = replace(style, keeps=style.keeps and bool(distances(graph)))
    count = 1 + max((*(levels[v] for v in outputs), *(operand_depth(e, levels) for e in sums)), default=0)
    stored = {v: levels[v] for v in outputs if D in v.type.axes}
    if style.last:
        added = (*sums, *filter(is_row_fold, graph.eqns))
        reads = max([*stored.values(), *(operand_depth(e, levels) + (e.op == "reduce_spread") for e in added)])
        stored = dict.fromkeys(stored, reads)
    where = {e: _latest(graph, e, levels, stored) if style.late else operand_depth(e, levels) for e in sums}
    every = (_phase(graph, n, levels, where, stored, outputs, style) for n in range(count))
    return tuple(p for p in every if p.folds or p.accumulators or p.outputs or p.row_outputs)


def _phase(
    graph: Graph,
    number: int,
    levels: dict[Value, int],
    where: dict[Eqn, int],
    stored: dict[Value, int],
    outputs: tuple[Value, ...],
    style: Style,
) -> Phase:
    here = next(iter(folds(graph)[number : number + 1]), Folds())
    column_sums = [e for e, n in where.items() if n == number]
    wide = [v for v, n in stored.items() if n == number]
    kept = distances(graph) if style.keeps else set()
    wanted = [*(a for e in (*here.plain, *here.begun, *here.ended, *column_sums) for a in e.args), *wide]
    needed = _needed(graph, kept, wanted)
    computed = [e for e in graph.eqns if D in e.out.type.axes and e.out in needed]
    after = [e for e in graph.eqns if e.out.type.axes == (M,) and not is_row_fold(e) and levels[e.out] == number + 1]
    rows = [v for v in outputs if v.type.axes == (M,) and max(levels[v] - 1, 0) == number]
    return Phase(
        number=number,
        columns=tuple(tensor(p) for p in graph.params if p in needed and p.type.axes == (D,)),
        tiles=tuple(tensor(p) for p in graph.params if p in needed and p.type.axes == (M, D)),
        statements=aligned(
            (
                *(kept_distance(e) if e.out in kept else statement(e, style.spell) for e in computed),
                *(whole(e, style.guard, style.spell) for e in here.begun),
                *(s for e in here.ended for s in squared(e, style.guard, style.spell, style.keeps)),
                *(_take(e, style, style.guard, "{0}_chunk") for e in here.plain),
                *(_take(e, style, *style.accumulate) for e in column_sums),
                *(Statement(style.store.format(v.name, style.spell(v)), "") for v in wide),
            )
        ),
        folds=(
            *(begins(e, style.keeps) for e in here.begun),
            *_folds(number, here.plain),
            *(ends(e, graph) for e in here.ended),
        ),
        accumulators=tuple(Sum(e.out.name, n, print_eqn(e)) for n, e in enumerate(column_sums)),
        outputs=tuple(map(tensor, wide)),
        after=aligned(statement(e, style.spell) for e in after),
        row_outputs=tuple(map(tensor, rows)),
        centres=tuple(dict.fromkeys(e.args[0].name for e in (*here.ended, *computed) if e.op in OF_SEGMENTS)),
    )


def _needed(graph: Graph, kept: set[Value], wanted: list[Value]) -> set[Value]:
    """What ``wanted`` is computed from in a phase; what is ``kept``, and means of segments, are there."""
    there = kept | {e.out for e in graph.eqns if e.op == "segment_mean"}
    elementwise = (replace(e, args=()) if e.out in there else e for e in graph.eqns if D in e.out.type.axes)
    return upstream(elementwise, wanted)


def _latest(graph: Graph, eqn: Eqn, levels: dict[Value, int], stored: dict[Value, int]) -> int:
    """The last phase that loads all [M, D] inputs behind a column sum's operand, or the first that can add to it."""
    elementwise = [e for e in graph.eqns if D in e.out.type.axes]
    own = _tiles(graph, upstream(elementwise, eqn.args))
    found = [n for v, n in stored.items() if own <= _tiles(graph, upstream(elementwise, [v]))]
    return max([operand_depth(eqn, levels), *found])


def _tiles(graph: Graph, values: set[Value]) -> set[Value]:
    return {p for p in graph.params if p in values and p.type.axes == WIDE}


def before(graph: Graph, spell: Spell) -> tuple[Statement, ...]:
    """Per-row statements that need no row sum."""
    levels = depths(graph)
    return aligned(statement(e, spell) for e in graph.eqns if e.out.type.axes == (M,) and levels[e.out] == 0)


def tensor(value: Value) -> Tensor:
    """A value as a kernel sees it."""
    return Tensor(value.name, ctype(value.type.dtype))


def _take(eqn: Eqn, style: Style, when: str, place: str) -> Statement:
    """A term taken into the sum or maximum that is at ``place``."""
    into = place.format(eqn.out.name)
    first, *times = map(style.spell, eqn.args)
    if eqn.op == "reduce_max":
        taken = f"maximum({into}, {first})"
    else:
        taken = f"fmaf({first}, {times[0]}, {into})" if times else f"{into} + {first}"
    return Statement(f"{when}{into} = {taken};", print_eqn(eqn))


def _folds(number: int, reductions: tuple[Eqn, ...]) -> Iterator[Fold]:
    """The reductions of a phase, by kind."""
    for how, (ops, chunks, results) in FOLDED.items():
        eqns = [e for e in reductions if e.op in ops]
        if eqns:
            absent = "ABSENT" if how == "Add" else literal(-math.inf, eqns[0].out.type.dtype)
            sums = tuple(Sum(e.out.name, n, print_eqn(e)) for n, e in enumerate(eqns))
            yield Fold(how, absent, f"{chunks}_{number}", f"{results}_{number}", sums, sums)
