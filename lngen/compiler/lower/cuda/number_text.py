"""The kernel that reduces vectors to numbers: one block, which reads the vectors that earlier kernels have stored."""

from __future__ import annotations

from collections.abc import Sequence

from lngen.compiler.ir import SUMS, D, Eqn, Graph, M, ctype, print_eqn
from lngen.compiler.lower.cuda.fragments import PhaseText, c_name
from lngen.compiler.lower.cuda.spelling import Inputs, Spelling, functor, taken
from lngen.compiler.lower.nest import Style
from lngen.errors import LowerError

THREADS = 512
TOGETHER = 4  # reductions that read their vectors in one loop: in f64 their shared memory is 32 KiB
WARP = 32


def alike(folds: Sequence[Eqn]) -> list[list[Eqn]]:
    """The reductions of vectors of one axis in one order, a few at a time."""
    groups: dict[tuple[object, ...], list[Eqn]] = {}
    for eqn in folds:
        order = tuple(a for a in eqn.attrs if eqn.op in SUMS)
        groups.setdefault((functor(eqn), eqn.axis, order), []).append(eqn)
    return [eqns[n : n + TOGETHER] for eqns in groups.values() for n in range(0, len(eqns), TOGETHER)]


STYLE = Style(held=frozenset({M, D}), together=alike, stores="end")


def shared_numbers(phases: Sequence[PhaseText]) -> int:
    """Numbers of shared memory."""
    return 2 * THREADS * max((len(r.sums) for p in phases for r in p.reduces), default=0)


def number_spelling(graph: Graph, d: int) -> Spelling:
    """A vector is read by element; LowerError for an order of sums that one block cannot take."""
    loads = {
        p: f"const {ctype(p.type.dtype)} {c_name(p)} = load_scalar<L2Load>({p.name}_ptr_ + at_);"
        for p in graph.params
        if p.type.axes
    }
    return Spelling(
        inputs=Inputs({}, loads, place="static_cast<int>(at_)", taken=lambda v, at: taken(f"{v.name}_ptr_", at, d)),
        store="{}_ptr_[at_]",
        call=lambda eqns, _: _order(graph, eqns[0], d)[0],
        layout=lambda eqns: _order(graph, eqns[0], d)[1],
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
