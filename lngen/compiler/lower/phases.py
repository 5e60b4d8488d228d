"""Sort a kernel's equations into phases, by the row reductions that must precede them.

Two rules. A value's *depth* is the number of row reductions that it depends on: no phase before that depth can compute
it. An elementwise value is computed again in every loop that needs it. Between two phases registers hold only the
inputs, one number per reduction, and the few values that are long to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from lngen.compiler.ir import (
    F32,
    SEGMENT_SUMS,
    SUMS,
    WIDE,
    D,
    Eqn,
    Graph,
    M,
    S,
    Value,
    ctype,
    is_number_fold,
    is_row_fold,
    is_sum,
)
from lngen.compiler.ir.places import depths, downstream, operand_depth, segment_sums_of, upstream
from lngen.compiler.lower.parts import Inputs, Join, Loop, Phase, Reduce, Statement, Sum, Tensor, c_name, declared, note

# ---- values over the segments of a row ----


FEW = 2  # rounds of interleaved partial sums at a time where their terms are computed: more need more registers


def over_segments(graph: Graph) -> tuple[Eqn, ...]:
    """The equations that compute a number for each segment from other such numbers."""
    return tuple(e for e in graph.eqns if S in e.out.type.axes and e.op not in SEGMENT_SUMS)


def segment_sums(graph: Graph) -> tuple[Value, ...]:
    """The sums of segments."""
    return tuple(e.out for e in graph.eqns if e.op in SEGMENT_SUMS)


def squared(graph: Graph, eqns: Iterable[Eqn]) -> tuple[Value, ...]:
    """The values whose products are summed over segments, without inputs."""
    factors = dict.fromkeys(a for e in eqns if e.op == "segment_dot" for a in e.args)
    return tuple(a for a in factors if D in a.type.axes and a not in graph.params)


def spelled_segments(graph: Graph, needed: set[Value], inputs: Inputs) -> tuple[Inputs, tuple[Statement, ...]]:
    """The C expressions of values over segments in a loop, and the statements per vector that compute them."""
    computed = [e for e in over_segments(graph) if e.out in needed]
    own = {v: f"{v.name}_own_[s_]" for v in segment_sums(graph) if v in needed}
    if not computed and not own:
        return inputs, ()
    spelled = replace(inputs, element={**inputs.element, **own})
    first = Statement("const int s_ = v_ / Row::PER_SEGMENT;")
    return spelled, (first, *_statements(computed, spelled, "Row::rank() * Row::SEGMENTS + s_"))


def joined(graph: Graph, eqn: Eqn, inputs: Inputs, place: str) -> Join:
    """A sum over the segments of a row; ``place``: the C text after the name of a sum of segments."""
    needed = upstream(over_segments(graph), eqn.args)
    spelled = replace(inputs, element={**inputs.element, **{v: f"{v.name}{place}" for v in segment_sums(graph)}})
    computed = [e for e in over_segments(graph) if e.out in needed]
    return Join(
        result=Statement(f"const {ctype(eqn.out.type.dtype)} {c_name(eqn.out)}", note(eqn)),
        statements=_statements(computed, spelled, "s_"),
        value=spelled.spell(eqn.args[0]),
        interleave=eqn.int_attr("interleave") if "interleave" in dict(eqn.attrs) else 1,
        unroll=FEW if computed else 0,
    )


def _statements(eqns: Iterable[Eqn], inputs: Inputs, segment: str) -> tuple[Statement, ...]:
    return tuple(_sized(e, segment) if e.op == "segment_size" else inputs.statement(e) for e in eqns)


def _sized(eqn: Eqn, segment: str) -> Statement:
    """The elements of a segment, the last of which may be shorter."""
    real = ctype(eqn.out.type.dtype)
    text = f"const {real} {c_name(eqn.out)} = static_cast<{real}>(segment_size<Row>({segment}));"
    return Statement(text, note(eqn))


# ---- values that stay in registers from one loop to a later one ----


LONG = 16  # equations per element that are not worth a register: a function has more, the arithmetic of a norm has less
MOST_KEPT = 2  # values at a time, each of which takes a register per element


Kept = Mapping[int, tuple[Value, ...]]


def kept_by(here: Mapping[int, Iterable[Value]], later: Mapping[int, Iterable[Value]], graph: Graph) -> Kept:
    """For each phase, the values that its reductions compute and leave in registers.

    ``here``: the operands of the reductions that end each phase. ``later``: all that the loops of a phase need. A value
    is kept if later phases would otherwise compute at least LONG equations again, the one first that saves most.
    """
    found: dict[int, tuple[Value, ...]] = {}
    for number in sorted(here):
        wanted = [v for n, values in later.items() if n > number for v in values]
        earlier = [v for values in found.values() for v in values]
        found[number] = tuple(_worth(graph, list(here[number]), wanted, earlier))
    return found


def _worth(graph: Graph, here: Sequence[Value], later: Sequence[Value], kept: Sequence[Value]) -> list[Value]:
    found: list[Value] = []
    computed = _in_loop(graph, here, kept)
    while len(found) < MOST_KEPT:
        saves = _saves(_elementwise(graph, [*kept, *found]), later, {*computed})
        values = [v for v in computed if v in saves and v.type.axes == WIDE and v.type.dtype is F32]
        best = max(values, key=saves.__getitem__, default=None)
        if best is None or saves[best] < LONG:
            break
        found.append(best)
    return found


def _in_loop(graph: Graph, wanted: Iterable[Value], kept: Iterable[Value]) -> list[Value]:
    """The values that a loop computes for each element, in their order."""
    wide = _elementwise(graph, kept)
    needed = upstream(wide, wanted)
    return [e.out for e in wide if e.out in needed]


def _saves(eqns: Sequence[Eqn], wanted: Iterable[Value], counted: Collection[Value]) -> dict[Value, int]:
    """How many of the values ``counted`` need not be computed for ``wanted`` if one of ``eqns`` is given, by its value.

    They are those that are used through that value alone: its subtree in the tree of immediate dominators, from results
    to operands. Cooper, Harvey and Kennedy, A simple, fast dominance algorithm, 2001; one pass, as there are no cycles.
    """
    through: dict[Value, Value | None] = dict.fromkeys(wanted)  # the value through which all uses go; None for results
    depth, order = dict[Value | None, int]({None: 0}), list[Value]()
    for eqn in reversed(eqns):
        if eqn.out not in through:
            continue
        depth[eqn.out] = depth[through[eqn.out]] + 1
        order.append(eqn.out)
        for a in eqn.args:
            one: Value | None = eqn.out
            other = through.get(a, one)
            while one is not other:
                if depth[one] < depth[other]:
                    one, other = other, one
                assert one is not None
                one = through[one]
            through[a] = one
    saves = {v: int(v in counted) for v in order}
    for v in reversed(order):
        parent = through[v]
        if parent is not None:
            saves[parent] += saves[v]
    return {v: n for v, n in saves.items() if v in counted}


def _elementwise(graph: Graph, kept: Iterable[Value]) -> list[Eqn]:
    held = {*kept}
    return [e for e in graph.eqns if D in e.out.type.axes and e.out not in held]


# ---- phases ----


# Reductions of a kind are computed together: the device functor and its ops.
KINDS = {"Add": SUMS, "Max": ("reduce_max",)}


class Accumulate(NamedTuple):
    """C++ for a term of a column sum: the condition before it, and the sum to which it is added."""

    guard: str = ""
    target: str = ""


@dataclass(frozen=True)
class Style:
    """The way in which one kind of kernel forms its loops.

    inputs         the C expressions of inputs
    call           the device function of row reductions and its arguments before the terms
    segment_call   the same for the sums of segments, and ``segment_array``, the declaration of the array that it fills
    term           the condition before a term that may lie past the end of a row
    accumulate     how terms are added to column sums
    together       column sums are accumulated in the last loop that reads their operands
    last           results are stored in the last loop that reads inputs, because they take the place of inputs
    cluster        the blocks of a cluster share a row
    keeps          the factors of sums of squares of segments are kept in registers
    keeps_long     values that are long to compute are kept in registers
    """

    inputs: Inputs
    call: str = ""
    segment_call: str = ""
    segment_array: str = ""
    term: str = ""
    accumulate: Accumulate = field(default_factory=Accumulate)
    together: bool = True
    last: bool = False
    cluster: bool = False
    keeps: bool = False
    keeps_long: bool = False


def phases(graph: Graph, sums: tuple[Eqn, ...], outputs: tuple[Value, ...], style: Style) -> tuple[Phase, ...]:
    """The phases of ``graph``: the operands of the column sums ``sums`` are accumulated, ``outputs`` stored."""
    levels = depths(graph)
    stored = {v: levels[v] for v in outputs if D in v.type.axes}
    reductions = tuple(filter(is_row_fold, graph.eqns))
    count = 1 + max((*(levels[v] for v in outputs), *(operand_depth(e, levels) for e in sums)), default=0)
    if style.last:
        reads = max([*stored.values(), *(operand_depth(e, levels) for e in (*sums, *reductions))])
        stored = dict.fromkeys(stored, reads)
    added = {e: _latest(graph, e, levels, stored) if style.together else operand_depth(e, levels) for e in sums}
    work = _Work(graph, levels, added, stored, outputs, style)
    every = [_phase(work, n) for n in range(count)]
    return tuple(p for p in every if p.loop or p.reduces or p.row_outputs)


@dataclass(frozen=True)
class _Work:
    """What the phases of one kernel compute: ``added`` and ``stored`` give the phase of each column sum and result."""

    graph: Graph
    levels: Mapping[Value, int]
    added: dict[Eqn, int]
    stored: dict[Value, int]
    outputs: tuple[Value, ...]
    style: Style

    def wanted(self, number: int) -> tuple[Value, ...]:
        """What the loop of a phase computes, before the reductions that end the phase."""
        operands = (a for e, n in self.added.items() if n == number for a in e.args)
        return (*operands, *(v for v, n in self.stored.items() if n == number))

    def reductions(self, number: int) -> tuple[Eqn, ...]:
        """The reductions that end a phase."""
        return tuple(e for e in self.graph.eqns if is_row_fold(e) and operand_depth(e, self.levels) == number)

    @property
    def numbers(self) -> range:
        """The phases with loops over the row."""
        return range(1 + max([*self.added.values(), *self.stored.values()], default=0))

    @cached_property
    def kept(self) -> Kept:
        """The values that the reductions of rows leave in registers, by phase."""
        if not self.style.keeps_long:
            return {}
        folds = {n: [e for e in self.reductions(n) if e.op not in SEGMENT_SUMS] for n in self.numbers}
        needed = {n: [*self.wanted(n), *(a for e in self.reductions(n) for a in e.args)] for n in self.numbers}
        return kept_by({n: [a for e in eqns for a in e.args] for n, eqns in folds.items()}, needed, self.graph)

    def rounded(self, number: int) -> tuple[Value, ...]:
        """The 16-bit results that a phase stores and later loops read: they stay in registers.

        Otherwise the compiler rounds a result again in every loop, and keeps its operands, which take more registers.
        """
        of_rows = [e for e in self.graph.eqns if D in e.out.type.axes]
        later = {v for n in self.numbers if n > number for v in self.wanted(n)}
        later |= {a for n in self.numbers if n >= number for e in self.reductions(n) for a in e.args}
        short = [v for v, n in self.stored.items() if n == number and v.type.dtype.size == 2 and self.style.keeps_long]
        return tuple(v for v in short if v in upstream(of_rows, later))

    def held(self, number: int) -> frozenset[Value]:
        """The values that earlier phases have left in registers."""
        earlier = [e for e in self.graph.eqns if self.levels[e.out] <= number and self.style.keeps]
        left = (v for n in range(number) for v in (*self.rounded(n), *self.kept.get(n, ())))
        return frozenset([*squared(self.graph, earlier), *left])


def _phase(work: _Work, number: int) -> Phase:
    graph, levels, style = work.graph, work.levels, work.style
    column_sums = [e for e, n in work.added.items() if n == number]
    wide = [v for v, n in work.stored.items() if n == number]
    after = [e for e in graph.eqns if e.out.type.axes == (M,) and not is_row_fold(e) and levels[e.out] == number + 1]
    rows = [v for v in work.outputs if v.type.axes == (M,) and max(levels[v] - 1, 0) == number]
    exchanged = segment_sums_of(graph, [e for e in after if is_sum(e, S)])

    def ends(inputs: Inputs) -> list[Statement]:
        terms = [term(e, inputs, style.accumulate.guard, style.accumulate.target) for e in column_sums]
        return [*terms, *(Statement(f"{v.name}_out_[i_] = {inputs.spell(v)};") for v in wide)]

    wanted, rounded = work.wanted(number), work.rounded(number)
    return Phase(
        number=number,
        loop=_loop(graph, wanted, ends, style.inputs, work.held(number), rounded) if wanted else None,
        outputs=tuple(map(tensor, wide)),
        accumulators=tuple(named(e, n) for n, e in enumerate(column_sums)),
        reduces=tuple(_reduces(work, number)),
        after=tuple(_after(graph, e, number, style) for e in after),
        row_outputs=tuple(map(tensor, rows)),
        exchanged=tuple(e.out.name for e in exchanged if style.cluster),
        kept=tuple(map(tensor, rounded)),
    )


def _after(graph: Graph, eqn: Eqn, number: int, style: Style) -> Statement | Join:
    if is_sum(eqn, S):
        return joined(graph, eqn, style.inputs, f"_all_{number}_(s_)" if style.cluster else "_own_[s_]")
    return style.inputs.statement(eqn)


def _reduces(work: _Work, number: int) -> Iterable[Reduce]:
    """The reductions of a phase: those of a row by kind, the sums of its segments one by one."""
    graph, style, reductions = work.graph, work.style, work.reductions(number)
    kept = work.held(number) | {*work.rounded(number)}
    for eqn in reductions:
        if eqn.op in SEGMENT_SUMS:
            total, array = named(eqn, 0), f"{eqn.out.name}_own_"
            keep = [v for v in squared(graph, [eqn]) if style.keeps and v not in kept]
            yield Reduce(
                op="Add",
                call=style.segment_call.format(op=total.functor),
                declaration=style.segment_array.format(real=total.real, array=array),
                results=array,
                sums=(total,),
                loop=_terms(graph, [eqn], style, kept, keep),
                whole_row=False,
                kept=tuple(map(tensor, keep)),
            )
            kept |= {*keep}
    for op, ops in KINDS.items():
        eqns = [e for e in reductions if e.op in ops]
        if eqns:
            sums = tuple(named(e, n) for n, e in enumerate(eqns))
            interleave = dict(eqns[0].attrs).get("interleave", 1)
            computed = upstream(graph.eqns, [a for e in eqns for a in e.args])
            keep = [v for v in work.kept.get(number, ()) if v in computed and v not in kept]
            declaration, results = declared(sums)
            yield Reduce(
                op=op,
                call=style.call.format(op=sums[0].functor, interleave=interleave),
                declaration=declaration,
                results=results,
                sums=sums,
                loop=_terms(graph, eqns, style, kept, keep),
                whole_row=True,
                kept=tuple(map(tensor, keep)),
            )
            kept |= {*keep}


def _terms(graph: Graph, eqns: list[Eqn], style: Style, kept: frozenset[Value], keep: Sequence[Value]) -> Loop:
    """The loop that adds the terms of reductions to their accumulators."""

    def ends(inputs: Inputs) -> list[Statement]:
        return [term(e, inputs, style.term, "{0}_acc_") for e in eqns]

    return _loop(graph, tuple(a for e in eqns for a in e.args), ends, style.inputs, kept, keep)


def _loop(
    graph: Graph,
    wanted: tuple[Value, ...],
    ends: Callable[[Inputs], list[Statement]],
    inputs: Inputs,
    kept: frozenset[Value],
    keep: Sequence[Value] = (),
) -> Loop:
    """The loop that computes ``wanted`` and ends with the statements ``ends``.

    ``kept``: values in registers from an earlier loop. ``keep``: values to keep in registers from here on.
    """
    wide = [e for e in graph.eqns if D in e.out.type.axes and e.out not in kept]
    elementwise = {*wide, *over_segments(graph)}
    needed = upstream([e for e in graph.eqns if e in elementwise], list(wanted))
    read = [p for p in graph.params if p in needed and D in p.type.axes]
    held = {v: f"{v.name}_row_[v_][i_]" for v in kept}
    spelled, of_segments = spelled_segments(graph, needed, replace(inputs, element={**inputs.element, **held}))
    statements = [s for e in wide if e.out in needed for s in _computed(e, spelled, keep)]
    return Loop(
        vector=(*(Statement(inputs.vector[p]) for p in read if p in inputs.vector), *of_segments),
        element=(*statements, *ends(spelled)),
        inputs=tuple(p.name for p in read),
    )


def _computed(eqn: Eqn, inputs: Inputs, keep: Sequence[Value]) -> tuple[Statement, ...]:
    """The statement of an equation, and the one that keeps its value, which the compiler would rather recompute."""
    name = c_name(eqn.out)
    value = name if eqn.out.type.dtype.size == 2 else f"materialised({name})"
    keeps = [Statement(f"{eqn.out.name}_row_[v_][i_] = {value};")] if eqn.out in keep else []
    return inputs.statement(eqn), *keeps


def _latest(graph: Graph, eqn: Eqn, levels: Mapping[Value, int], stored: dict[Value, int]) -> int:
    """The last phase whose results need all [M, D] inputs of a column sum's operand, or the first possible."""
    elementwise = [e for e in graph.eqns if D in e.out.type.axes]
    own = _tiles(graph, upstream(elementwise, eqn.args))
    found = [n for v, n in stored.items() if own <= _tiles(graph, upstream(elementwise, [v]))]
    return max([operand_depth(eqn, levels), *found])


def _tiles(graph: Graph, values: set[Value]) -> set[Value]:
    return {p for p in graph.params if p in values and p.type.axes == WIDE}


def uniform(graph: Graph, inputs: Inputs) -> tuple[Statement, ...]:
    """Statements on values of no axes that depend on no reduction, once per thread."""
    late = downstream(graph.eqns, [e.out for e in graph.eqns if is_number_fold(e)])
    return tuple(inputs.statement(e) for e in graph.eqns if not e.out.type.axes and e.out not in late)


def before(graph: Graph, inputs: Inputs) -> tuple[Statement, ...]:
    """Per-row statements that need no row reduction."""
    levels = depths(graph)
    return tuple(inputs.statement(e) for e in graph.eqns if e.out.type.axes == (M,) and levels[e.out] == 0)


def tensor(value: Value) -> Tensor:
    """The tensor of a value."""
    return Tensor(value.name, ctype(value.type.dtype), c_name(value))


def named(eqn: Eqn, index: int) -> Sum:
    """The sum of a reduction."""
    return Sum(eqn.out.name, c_name(eqn.out), index, note(eqn), functor(eqn), ctype(eqn.out.type.dtype))


def functor(eqn: Eqn) -> str:
    """The device functor of a reduction."""
    return next(op for op, ops in KINDS.items() if eqn.op in (*ops, *SEGMENT_SUMS))


def term(eqn: Eqn, inputs: Inputs, when: str, place: str) -> Statement:
    """A term added to the sum, or taken into the maximum, at ``place``."""
    into = place.format(eqn.out.name)
    first, *times = map(inputs.spell, eqn.args)
    if eqn.op == "reduce_max":
        taken = f"maximum({into}, {first})"
    else:
        taken = f"fmaf({first}, {times[0]}, {into})" if times else f"{into} + {first}"
    return Statement(f"{when}{into} = {taken};", note(eqn))
