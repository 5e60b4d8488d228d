"""Rows measured from the means of their segments: what a spread adds to, and what stays of it in registers.

The names in C are those of the value x that is measured: ``x_centre``, of each segment what it is measured from;
``x_far``, an element's distance from that; ``x_far_kept``, those that stay.
"""

from __future__ import annotations

from lngen.ir import Eqn, Graph, Value, print_eqn, spread_sums
from lngen.ir.ops import ctype
from lngen.lower.parts import ROW_SPREAD, SEGMENT_SUMS, Fold, Spell, Statement, Sum


def distances(graph: Graph) -> set[Value]:
    """Every x minus the mean of its segment: what a spread squares."""
    centres = {e.out: e.args[0] for e in graph.eqns if e.op == "segment_mean"}
    return {e.out for e in graph.eqns if e.op == "sub" and centres.get(e.args[1]) == e.args[0]}


def kept_distance(eqn: Eqn) -> Statement:
    """Such a distance, as it was kept."""
    text = f"const {ctype(eqn.out.type.dtype)} {eqn.out.name} = {eqn.args[0].name}_far_kept[k][i];"
    return Statement(text, print_eqn(eqn))


def whole(spread: Eqn, guard: str, spell: Spell) -> Statement:
    """An element added to the sum of its segment."""
    x = spread.args[0]
    into = f"{x.name}_whole_chunk"
    return Statement(f"{guard}{into} = {into} + {spell(x)};", print_eqn(spread))


def squared(spread: Eqn, guard: str, spell: Spell, keeps: bool) -> tuple[Statement, ...]:
    """An element's distance from what its segment is measured from, which may stay, and its square added up."""
    x, into = spread.args[0], f"{spread.out.name}_chunk"
    far, real = f"{x.name}_far", ctype(spread.out.type.dtype)
    return (
        Statement(f"const {real} {far} = {spell(x)} - {x.name}_centre[k / SEGMENT_SLOTS];", ""),
        *[Statement(f"{far}_kept[k][i] = stay({far});", "")] * keeps,
        Statement(f"{guard}{into} = fmaf({far}, {far}, {into});", print_eqn(spread)),
    )


def begins(spread: Eqn, keeps: bool) -> Fold:
    """The first fold of a spread: the sums of segments, which stay with the blocks that have them."""
    x = spread.args[0].name
    sums = (Sum(f"{x}_whole", 0, print_eqn(spread)),)
    return Fold("Add", "ABSENT", f"{x}_whole", f"{x}_segments", sums, (), SEGMENT_SUMS, of=x, keeps=keeps)


def ends(spread: Eqn, graph: Graph) -> Fold:
    """The second: the squares of distances. By now what was summed first has its sum, too."""
    name, x, joined = spread.out.name, spread.args[0].name, spread_sums(graph)
    sums = (Sum(e.out.name, 0, print_eqn(e)) for e in graph.eqns if joined.get(e.out) == spread.out)
    square = Sum(name, 0, print_eqn(spread))
    named = (*sums, Sum(name, 1, square.note))
    return Fold("Add", "ABSENT", f"{name}_squares", f"{name}_moments", (square,), named, ROW_SPREAD, of=x)
