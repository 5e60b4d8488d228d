"""The kernel that reduces vectors to numbers: one block, which reads the vectors that earlier kernels have stored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lngen.compiler.ir import SUMS, Axis, D, Eqn, Graph, M, Value, ctype, is_number_fold, print_eqn
from lngen.compiler.ir.places import operand_depth, upstream
from lngen.compiler.lower.parts import Inputs, Statement, Sum, Tensor, c_name, declared, parameters
from lngen.compiler.lower.phases import functor, named, tensor, term
from lngen.errors import LowerError

THREADS = 512
TOGETHER = 4  # reductions that read their vectors in one loop: in f64 their shared memory is 32 KiB
WARP = 32


@dataclass(frozen=True)
class Elements:
    """What a loop over vectors does with the elements ``at_``: the vectors that it loads, and its statements."""

    loads: tuple[Tensor, ...]
    statements: tuple[Statement, ...]


@dataclass(frozen=True)
class VectorReduce:
    """Reductions of vectors of one axis in one order.

    call      the device function and its arguments before the terms
    layout    the layout of [D] vectors that are added like a row of features; empty for the order of rows
    sums      the reductions
    """

    call: str
    layout: str
    sums: tuple[Sum, ...]
    loop: Elements

    @property
    def names(self) -> tuple[str, ...]:
        """The reductions by name."""
        return tuple(s.name for s in self.sums)

    @property
    def accumulators(self) -> str:
        """The parameters of the function that adds an element."""
        return parameters(self.sums)

    @property
    def declaration(self) -> str:
        """The declaration of the results."""
        return declared(self.sums)[0]

    @property
    def results(self) -> str:
        """The names of the results."""
        return declared(self.sums)[1]


@dataclass(frozen=True)
class NumberPhase:
    """Reductions that wait for no other of the phase, and the statements of no axes that follow from them."""

    reduces: tuple[VectorReduce, ...]
    after: tuple[Statement, ...]


@dataclass(frozen=True)
class NumberKernel:
    """The text of the kernel of numbers.

    shared   numbers of shared memory
    phases   the reductions
    stored   the [] results
    columns  the statements for each element of the [D] results; None without any
    """

    shared: int
    phases: tuple[NumberPhase, ...]
    stored: tuple[Tensor, ...]
    columns: Elements | None


def number_kernel(graph: Graph, d: int) -> NumberKernel:
    """The phases of ``graph``, whose parameters are [M], [D] and []; LowerError for an order that it cannot take."""
    levels = dict.fromkeys(graph.params, 0)
    for eqn in graph.eqns:
        levels[eqn.out] = operand_depth(eqn, levels) + is_number_fold(eqn)
    phases = tuple(_phase(graph, n, levels, d) for n in range(max(levels.values(), default=0)))
    wide = [r for r in graph.results if r.type.axes == (D,)]
    most = max((len(r.names) for p in phases for r in p.reduces), default=0)
    return NumberKernel(
        shared=2 * most * THREADS,
        phases=phases,
        stored=tuple(tensor(r) for r in graph.results if not r.type.axes),
        columns=_elements(graph, D, wide, [Statement(f"{r.name}_ptr_[at_] = {c_name(r)};") for r in wide])
        if wide
        else None,
    )


def _phase(graph: Graph, number: int, levels: dict[Value, int], d: int) -> NumberPhase:
    alike: dict[tuple[object, ...], list[Eqn]] = {}
    for eqn in graph.eqns:
        if is_number_fold(eqn) and operand_depth(eqn, levels) == number:
            order = tuple(a for a in eqn.attrs if eqn.op in SUMS)
            alike.setdefault((functor(eqn), eqn.axis, order), []).append(eqn)
    parts = [eqns[n : n + TOGETHER] for eqns in alike.values() for n in range(0, len(eqns), TOGETHER)]
    after = [e for e in graph.eqns if not e.out.type.axes and not is_number_fold(e) and levels[e.out] == number + 1]
    return NumberPhase(
        reduces=tuple(_reduce(graph, eqns, d) for eqns in parts),
        after=tuple(map(Inputs({}).statement, after)),
    )


def _reduce(graph: Graph, eqns: list[Eqn], d: int) -> VectorReduce:
    call, layout = _order(graph, eqns[0], d)
    terms = [term(e, Inputs({}), "", "{0}_acc_") for e in eqns]
    loop = _elements(graph, eqns[0].axis, [a for e in eqns for a in e.args], terms)
    return VectorReduce(call, layout, tuple(named(e, n) for n, e in enumerate(eqns)), loop)


def _elements(graph: Graph, axis: Axis, wanted: Iterable[Value], ends: Iterable[Statement]) -> Elements:
    computed = [e for e in graph.eqns if e.out.type.axes == (axis,)]
    needed = upstream(computed, wanted)
    return Elements(
        loads=tuple(tensor(p) for p in graph.params if p in needed and p.type.axes == (axis,)),
        statements=(*(Inputs({}).statement(e) for e in computed if e.out in needed), *ends),
    )


def _order(graph: Graph, eqn: Eqn, d: int) -> tuple[str, str]:
    """The device function that reduces in the order of the attributes, and the layout of the vector for it.

    A maximum is the same in every order.
    """
    given = {key: value for key, value in eqn.attrs if isinstance(value, int)}
    interleave, op = given.get("interleave", 1), f"{functor(eqn)}<{ctype(eqn.out.type.dtype)}>"
    if eqn.op in SUMS and eqn.axis is D:
        chunk, segment = given.get("chunk", 1), given.get("segment", d)
        if segment % chunk or interleave > WARP or interleave & (interleave - 1):
            raise LowerError(
                f"graph @{graph.name}: a segment is expected to be whole chunks, and interleave a power of two up to "
                f"{WARP}, got {segment / chunk:g} chunks and {interleave}.\n    {print_eqn(eqn)}"
            )
        layout = f"/* D */ {d}, /* segment */ {segment}, /* vector */ {chunk}, /* run */ {given.get('run', chunk)}"
        call = f"multipass_sums<{op}, Row, /* interleave */ {interleave}>(reduce_,"
        return call, f"PartialRowLayout<Block</* threads */ {THREADS}, /* rows */ 1>, {layout}, /* access */ 1>"
    groups, blocks = given.get("groups", 1), given.get("blocks", 1)
    if eqn.op not in SUMS:
        groups, blocks, interleave = 1, THREADS, THREADS
    if max(groups, interleave) > THREADS:
        raise LowerError(
            f"graph @{graph.name}: the sum of an [M] value has up to {THREADS} groups, and up to {THREADS} interleaved "
            f"partial sums, got {groups} and {interleave}.\n    {print_eqn(eqn)}"
        )
    order = f"/* groups */ {groups}, /* blocks */ {blocks}, /* interleave */ {interleave}, /* threads */ {THREADS}"
    return f"vector_sums<{op}, {order}>(numbers_, {'rows_' if eqn.axis is M else d}, ", ""
