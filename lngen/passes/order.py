"""Give every sum its order, as attributes: from here on a graph fixes every bit of its results."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lngen.ir import Axis, D, Eqn, Graph

CHUNK_BYTES = 16
SEGMENT_BYTES = 32 * 1024


@dataclass(frozen=True)
class ColumnOrder:
    """The attributes of a sum over rows."""

    groups: int
    blocks: int
    strands: int


def order_sums(graph: Graph, d: int) -> Graph:
    """Write the canonical order of each sum into it (DESIGN, one meaning).

    before:  %mean_sum = reduce_sum %x32 {axis=D}
             %dbeta32  = reduce_sum %dy32 {axis=M}
    after:   %mean_sum = reduce_sum %x32 {axis=D, chunk=8, segment=16384}
             %dbeta32  = reduce_sum %dy32 {axis=M, blocks=132, groups=2, strands=16}

    The numbers are a function of D and of the narrowest [M, D] input's dtype alone: the same on every GPU.
    """
    size = element_size(graph)
    row = {"chunk": CHUNK_BYTES // size, "segment": SEGMENT_BYTES // size}
    column = vars(column_order(d, size))

    def ordered(eqn: Eqn) -> Eqn:
        if eqn.op != "reduce_sum":
            return eqn
        order = row if eqn.attr("axis") is D else column
        return replace(eqn, attrs=tuple(sorted({**order, **dict(eqn.attrs)}.items())))

    return replace(graph, eqns=tuple(map(ordered, graph.eqns)))


def element_size(graph: Graph) -> int:
    """Bytes per element of the narrowest [M, D] input; it sets how many elements 16 bytes are."""
    wide = [p.type.dtype.size for p in graph.params if p.type.axes == (Axis.M, Axis.D)]
    return min(wide, default=4)


def column_order(d: int, size: int) -> ColumnOrder:
    """How many row groups and blocks share the rows, for rows of ``d`` elements of ``size`` bytes.

    A block of ``groups`` rows side by side holds about 8192 column sums (4096 of 8 bytes), which fit the
    registers and, for folding the groups, 32 KiB of shared memory. ``blocks`` is 132, one per
    multiprocessor of the GPUs this was measured on; for wide rows it shrinks so that the partial sums
    stay below 2 M elements.
    """
    held = 4096 if size == 8 else 8192
    groups = 1
    while groups < 128 and 2 * groups * max(d, 64) <= held:
        groups *= 2
    blocks = 132
    while blocks > 4 and blocks * d > 132 * 16384:
        blocks = {132: 64}.get(blocks, blocks // 2)
    return ColumnOrder(groups, blocks, strands=16 if blocks >= 64 else 4)
