"""The nest of a kernel: every equation at the loop that has its axes, behind the reductions that it waits for.

A kernel's threads share the elements of the axes that it holds: D in rows, columns and the finish, or the axis of a
vector in numbers. A value with a held axis is an element, computed again in every loop that needs it. One over the
segments of a row is computed for each vector of a thread, one with rows once a row, one without axes once a launch. A
reduction over a held axis ends a phase: what depends on it waits until all threads have met. A reduction over rows adds
the terms of a row to what a thread keeps; a later kernel completes it. From one phase to the next, registers hold the
inputs, one number per reduction, and the few elements that are long to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from lngen.compiler.ir import (
    SUMS,
    WIDE,
    Axis,
    D,
    Eqn,
    Graph,
    Value,
    is_block_fold,
    is_join,
    is_number_fold,
    is_of_halves,
    is_over_segments,
    is_row_fold,
    is_segment_sum,
)
from lngen.compiler.ir.places import depths, operand_depth, segment_sums_of, upstream
from lngen.compiler.lower.kept import kept_by

# ---- what a nest is ----


@dataclass(frozen=True)
class Blocks:
    """Reductions over blocks of features, for each vector of a thread.

    element   the equations of their operands, once per element
    folds     the reductions
    after     the equations over blocks that follow from them
    turned    the rotations, whose elements come from others of the vector, or of other threads
    """

    element: tuple[Eqn, ...]
    folds: tuple[Eqn, ...]
    after: tuple[Eqn, ...]
    turned: tuple[Eqn, ...] = ()

    @property
    def shared(self) -> tuple[Eqn, ...]:
        """The equations that need what other threads have."""
        return (*self.folds, *filter(is_of_halves, self.turned))


@dataclass(frozen=True)
class Loop:
    """A loop over the held axis.

    inputs     the inputs of which it reads elements
    segments   the sums of segments that it reads, and ``vector`` the equations over segments, once per vector
    meeting    the loops before it, whose terms are reductions over blocks, and rotations, that threads then complete
    blocks     the reductions over blocks of features, before the elements that use them
    element    the equations, once per element
    terms      the reductions to which it adds terms; their results are complete behind it, or partial
    stores     the results that it stores, and ``of_blocks`` those with a number per block
    ready      the elements that earlier loops have left in registers, and ``keep`` those that it leaves there
    """

    inputs: tuple[Value, ...]
    segments: tuple[Value, ...]
    vector: tuple[Eqn, ...]
    element: tuple[Eqn, ...]
    meeting: tuple[Loop, ...] = ()
    blocks: tuple[Blocks, ...] = ()
    terms: tuple[Eqn, ...] = ()
    stores: tuple[Value, ...] = ()
    of_blocks: tuple[Value, ...] = ()
    ready: frozenset[Value] = frozenset()
    keep: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Phase:
    """The part of a nest between two reductions over the held axis.

    loop    stores results and adds the terms of partial reductions; None without any
    folds   the loops whose reductions end the phase
    after   the equations that follow from them
    stores  the results without a held axis that are stored behind them, and ``alone`` the equations that nothing but
            these needs, for the thread that stores them
    """

    number: int
    loop: Loop | None
    folds: tuple[Loop, ...]
    after: tuple[Eqn, ...]
    stores: tuple[Value, ...]
    alone: tuple[Eqn, ...] = ()

    @property
    def loops(self) -> tuple[Loop, ...]:
        """All loops, in order."""
        return self.folds if self.loop is None else (self.loop, *self.folds)


@dataclass(frozen=True)
class Nest:
    """The equations of a kernel: ``launch`` once a thread, ``row`` once a row before the phases, and the phases."""

    launch: tuple[Eqn, ...] = ()
    row: tuple[Eqn, ...] = ()
    phases: tuple[Phase, ...] = ()


def by_kind(folds: Sequence[Eqn]) -> list[list[Eqn]]:
    """The reductions of a row that share a loop: the sums of segments are alone, then all sums, then all maxima."""
    alone, whole = [[e] for e in folds if is_segment_sum(e)], [e for e in folds if not is_segment_sum(e)]
    return [*alone, *([e for e in whole if e.op in ops] for ops in (SUMS, ("reduce_max",)))]


@dataclass(frozen=True)
class Style:
    """How one kind of kernel forms its phases.

    held          the axes that its threads share
    together      the reductions of a phase, in groups that share a loop
    stores        results are stored as soon as they can be; or "last", in the last loop that reads inputs, because they
                  take the place of inputs; or at the "end"
    keeps         the factors of sums of squares of segments are kept in registers
    keeps_long    elements that are long to compute are kept in registers, and 16-bit results that later loops read
    meets         what threads share of blocks of features has loops of its own, behind each of which they meet
    vectors       threads have vectors of features, each in one block: values over blocks are computed once for each
    """

    held: frozenset[Axis] = frozenset({D})
    together: Callable[[Sequence[Eqn]], Iterable[Sequence[Eqn]]] = by_kind
    stores: Literal["soon", "last", "end"] = "soon"
    keeps: bool = False
    keeps_long: bool = False
    meets: bool = False
    vectors: bool = False


# ---- the placement ----


def nest(graph: Graph, results: Iterable[Value], partial: Sequence[Eqn] = (), style: Style | None = None) -> Nest:
    """The nest that stores ``results`` and adds the terms of the reductions ``partial`` of ``graph``."""
    work = _Work(graph, tuple(results), tuple(partial), style or Style())
    return work.nest()


@dataclass(frozen=True)
class _Work:
    graph: Graph
    results: tuple[Value, ...]
    partial: tuple[Eqn, ...]
    style: Style

    def nest(self) -> Nest:
        outer = [e for e in self._of_all if self.depth[e.out] == 0]
        phases = tuple(self._phase(n) for n in range(self.count))
        return Nest(
            launch=tuple(e for e in outer if not e.out.type.axes),
            row=tuple(e for e in outer if e.out.type.axes),
            phases=tuple(p for p in phases if p.loops or p.stores),
        )

    # ---- where a value is computed, and when ----

    def is_element(self, value: Value) -> bool:
        derived = D in self.style.held and any(a.base is D and a.is_declared for a in value.type.axes)
        return not self.style.held.isdisjoint(value.type.axes) or (derived and not self.is_of_block(value))

    def is_of_block(self, value: Value) -> bool:
        return self.style.vectors and is_over_blocks(value)

    def is_outer(self, value: Value) -> bool:
        return not self.is_element(value) and not is_over_segments(value) and not self.is_of_block(value)

    def ends_phase(self, eqn: Eqn) -> bool:
        return is_row_fold(eqn) or is_number_fold(eqn)

    @cached_property
    def depth(self) -> Mapping[Value, int]:
        return depths(self.graph)

    @cached_property
    def elements(self) -> tuple[Eqn, ...]:
        return tuple(e for e in self.graph.eqns if self.is_element(e.out))

    @cached_property
    def count(self) -> int:
        ends = (*(self.depth[v] for v in self.results), *(operand_depth(e, self.depth) for e in self.partial))
        return 1 + max(ends, default=0)

    @cached_property
    def of_elements(self) -> tuple[Eqn, ...]:
        """The partial reductions whose terms are elements; a kernel takes those that are rows at the end of a row."""
        return tuple(e for e in self.partial if any(map(self.is_element, e.args)))

    @cached_property
    def stored(self) -> Mapping[Value, int]:
        """The phase that stores each result that is an element, or a number per block."""
        soon = {v: self.depth[v] for v in self.results if not self.is_outer(v)}
        if self.style.stores == "end":
            return dict.fromkeys(soon, self.count - 1)
        if self.style.stores == "last":
            reading = (*self.of_elements, *filter(self.ends_phase, self.graph.eqns))
            return dict.fromkeys(soon, max([*soon.values(), *(operand_depth(e, self.depth) for e in reading)]))
        return soon

    @cached_property
    def added(self) -> Mapping[Eqn, int]:
        """The phase that adds the terms of each partial reduction."""
        return {e: self._latest(e) for e in self.of_elements}

    def _latest(self, eqn: Eqn) -> int:
        """The last phase whose results need all [M, D] inputs of the terms, or the first possible."""
        own = self._tiles(eqn.args)
        found = [n for v, n in self.stored.items() if own <= self._tiles([v])]
        return max([operand_depth(eqn, self.depth), *found])

    def _tiles(self, values: Iterable[Value]) -> set[Value]:
        needed = upstream(self.elements, values)
        return {p for p in self.graph.params if p in needed and p.type.axes == WIDE}

    # ---- outside of loops ----

    @cached_property
    def outside(self) -> tuple[Eqn, ...]:
        return tuple(e for e in self.graph.eqns if self.is_outer(e.out) and not self.ends_phase(e))

    @cached_property
    def _of_all(self) -> tuple[Eqn, ...]:
        """The equations outside of loops that all threads compute."""
        return tuple(e for e in self.outside if e not in self.alone)

    @cached_property
    def stored_outside(self) -> Mapping[Value, int]:
        """The phase behind which each result without a held axis is stored."""
        last = self.count - 1 if self.style.stores == "end" else None
        return {v: max(self.depth[v] - 1, 0) if last is None else last for v in self.results if self.is_outer(v)}

    @cached_property
    def alone(self) -> Mapping[Eqn, int]:
        """The equations of a row that the results stored behind one phase need, and nothing else, with that phase.

        What is read from memory or from other threads is read by all threads, as early as it can be.
        """
        reads = [e for e in self.graph.eqns if not self.is_outer(e.out) or self.ends_phase(e) or is_join(e)]
        reads += [e for e in self.graph.eqns if e.op == "take"]
        of_all = upstream(self.graph.eqns, [*(e.out for e in reads), *(a for e in self.partial for a in e.args)])
        needed: dict[Value, set[int]] = {}
        for value, number in self.stored_outside.items():
            for one in upstream(self.graph.eqns, [value]):
                needed.setdefault(one, set()).add(number)
        rows = [e for e in self.outside if e.out.type.axes and e.out not in of_all and len(needed.get(e.out, ())) == 1]
        return {e: min(needed[e.out]) for e in rows}

    # ---- a phase ----

    def wanted(self, number: int) -> tuple[Value, ...]:
        """What the loop of a phase computes, before the reductions that end the phase."""
        operands = (a for e, n in self.added.items() if n == number for a in e.args)
        return (*operands, *(v for v, n in self.stored.items() if n == number))

    def folds(self, number: int) -> tuple[Eqn, ...]:
        """The reductions that end a phase."""
        return tuple(e for e in self.graph.eqns if self.ends_phase(e) and operand_depth(e, self.depth) == number)

    def _phase(self, number: int) -> Phase:
        wanted, rounded = self.wanted(number), self.rounded(number)
        return Phase(
            number=number,
            loop=self._loop(
                wanted,
                self.ready(number),
                rounded,
                terms=tuple(e for e, n in self.added.items() if n == number),
                stores=tuple(v for v, n in self.stored.items() if n == number),
            )
            if wanted
            else None,
            folds=tuple(self._folds(number)),
            after=tuple(e for e in self._of_all if self.depth[e.out] == number + 1),
            stores=tuple(v for v, n in self.stored_outside.items() if n == number),
            alone=tuple(e for e, n in self.alone.items() if n == number),
        )

    def _folds(self, number: int) -> Iterable[Loop]:
        ready = self.ready(number) | {*self.rounded(number)}
        for eqns in filter(None, self.style.together(self.folds(number))):
            operands = tuple(a for e in eqns for a in e.args)
            if is_segment_sum(eqns[0]):
                able = squared(self.graph, eqns) if self.style.keeps else ()
            else:
                computed = upstream(self.graph.eqns, operands)
                able = tuple(v for v in self.kept.get(number, ()) if v in computed)
            keep = tuple(v for v in able if v not in ready)
            yield self._loop(operands, ready, keep, terms=tuple(eqns))
            ready |= {*keep}

    def _loop(
        self,
        wanted: tuple[Value, ...],
        ready: frozenset[Value],
        keep: tuple[Value, ...],
        terms: tuple[Eqn, ...],
        stores: tuple[Value, ...] = (),
    ) -> Loop:
        """A loop, behind one for each stage of what it uses that threads share, if they meet."""
        loop = self._alone(wanted, ready, keep, terms, stores)
        stages = [part.shared for part in loop.blocks if part.shared and self.style.meets]
        meeting = (self._alone(tuple(a for e in shared for a in e.args), ready, (), shared) for shared in stages)
        return replace(loop, meeting=tuple(meeting))

    def _alone(
        self,
        wanted: tuple[Value, ...],
        ready: frozenset[Value],
        keep: tuple[Value, ...],
        terms: tuple[Eqn, ...],
        stores: tuple[Value, ...] = (),
    ) -> Loop:
        eqns, params = self.graph.eqns, self.graph.params
        inside = [e for e in eqns if (self.is_element(e.out) and e.out not in ready) or self.is_of_vector(e)]
        needed = upstream(inside, wanted)
        used = [e for e in inside if e.out in needed]
        elements = [e for e in used if self.is_element(e.out) and e.op != "rotate"]
        read = {*wanted, *(a for e in used for a in elements_read(e))}
        final = upstream(elements, wanted)
        return Loop(
            inputs=tuple(p for p in params if p in read and self.is_element(p)),
            segments=tuple(e.out for e in eqns if is_segment_sum(e) and e.out in needed),
            vector=tuple(e for e in used if computes_segments(e)),
            blocks=tuple(
                _blocks(
                    [e for e in used if self.is_of_block(e.out) or e.op == "rotate"], used, elements, self.style.meets
                )
            ),
            element=tuple(e for e in elements if e.out in final),
            terms=terms,
            stores=tuple(v for v in stores if self.is_element(v)),
            of_blocks=tuple(v for v in stores if not self.is_element(v)),
            ready=ready,
            keep=keep,
        )

    def is_of_vector(self, eqn: Eqn) -> bool:
        """True for an equation once per vector of a thread: over segments, or over blocks."""
        return computes_segments(eqn) or self.is_of_block(eqn.out)

    # ---- what stays in registers ----

    @property
    def numbers(self) -> range:
        """The phases with loops that store or add."""
        return range(1 + max([*self.added.values(), *self.stored.values()], default=0))

    @cached_property
    def kept(self) -> Mapping[int, tuple[Value, ...]]:
        """The elements that the reductions of rows leave in registers, by phase."""
        if not self.style.keeps_long:
            return {}
        folds = {n: [e for e in self.folds(n) if not is_segment_sum(e)] for n in self.numbers}
        needed = {n: [*self.wanted(n), *(a for e in self.folds(n) for a in e.args)] for n in self.numbers}
        return kept_by({n: [a for e in eqns for a in e.args] for n, eqns in folds.items()}, needed, self.elements)

    def rounded(self, number: int) -> tuple[Value, ...]:
        """The 16-bit results that a phase stores and later loops read: they stay in registers.

        Otherwise the compiler rounds a result again in every loop, and keeps its operands, which take more registers.
        """
        short = [v for v, n in self.stored.items() if n == number and v.type.dtype.size == 2 and self.style.keeps_long]
        if not short:
            return ()
        later = {v for n in self.numbers if n > number for v in self.wanted(n)}
        later |= {a for n in self.numbers if n >= number for e in self.folds(n) for a in e.args}
        needed = upstream(self.elements, later)
        return tuple(v for v in short if v in needed)

    def ready(self, number: int) -> frozenset[Value]:
        """The elements that earlier phases have left in registers."""
        earlier = [e for e in self.graph.eqns if self.depth[e.out] <= number and self.style.keeps]
        left = (v for n in range(number) for v in (*self.rounded(n), *self.kept.get(n, ())))
        return frozenset([*squared(self.graph, earlier), *left])


# ---- values over blocks of features, and over the segments of a row ----


def is_over_blocks(value: Value) -> bool:
    """True for a value with a number for each block of features that a graph derives."""
    return any(a.base is D and a.is_declared and a.by == "/" for a in value.type.axes)


def elements_read(eqn: Eqn) -> tuple[Value, ...]:
    """The operands whose elements a loop reads; ``take`` reads its input from memory, by the index."""
    return eqn.args[1:] if eqn.op == "take" else eqn.args


def _waits(eqn: Eqn) -> bool:
    """True for an equation whose value waits for all elements of a vector."""
    return is_block_fold(eqn) or eqn.op == "rotate"


def _blocks(over: Sequence[Eqn], used: Sequence[Eqn], elements: Sequence[Eqn], meet: bool) -> Iterable[Blocks]:
    """The equations ``over`` blocks and the rotations, in the order in which they wait for each other.

    ``meet``: what threads share they have computed before.
    """
    stage: dict[Value, int] = {}
    for eqn in used:
        stage[eqn.out] = max((stage.get(a, 0) for a in eqn.args), default=0) + _waits(eqn)
    for number in range(max((stage[e.out] for e in over), default=-1) + 1):
        folds = [e for e in over if is_block_fold(e) and stage[e.out] == number]
        turned = tuple(e for e in over if e.op == "rotate" and stage[e.out] == number)
        own = [e for e in turned if not is_of_halves(e)] if meet else [*turned, *folds]
        needed = upstream(elements, [a for e in own for a in e.args])
        yield Blocks(
            element=tuple(e for e in elements if e.out in needed),
            folds=tuple(folds),
            after=tuple(e for e in over if not _waits(e) and stage[e.out] == number),
            turned=turned,
        )


def computes_segments(eqn: Eqn) -> bool:
    """True for an equation that computes a number for each segment from other such numbers."""
    return is_over_segments(eqn.out) and not is_segment_sum(eqn)


def squared(graph: Graph, eqns: Iterable[Eqn]) -> tuple[Value, ...]:
    """The elements, without inputs, whose products are summed over segments."""
    factors = dict.fromkeys(a for e in eqns if e.op == "reduce_dot" and is_segment_sum(e) for a in e.args)
    return tuple(a for a in factors if D in a.type.axes and a not in graph.params)


def joined_from(graph: Graph, eqn: Eqn) -> tuple[Eqn, ...]:
    """The equations over segments that the sum over segments ``eqn`` needs."""
    over = [e for e in graph.eqns if computes_segments(e)]
    needed = upstream(over, eqn.args)
    return tuple(e for e in over if e.out in needed)


def exchanged_in(graph: Graph, found: Phase) -> tuple[Value, ...]:
    """The sums of segments that all blocks of a row need for the sums over segments that follow a phase."""
    return tuple(e.out for e in segment_sums_of(graph, [e for e in found.after if is_join(e)]))
