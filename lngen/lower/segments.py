"""Values over the segments of a row: their C expressions in loops over vectors and in sums over segments.

The sums of a block's segments are in an array, ``x_sums_own_``. Where the blocks of a cluster share a row,
``x_sums_all_1_`` gives the sum of any segment of the row after the exchange that follows phase 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lngen.ir import SEGMENT_SUMS, D, Eqn, Graph, S, Value, ctype
from lngen.lower.c_names import c_name
from lngen.lower.inputs import Inputs, note
from lngen.lower.parts import Join, Statement
from lngen.passes import upstream

FEW = 2  # rounds of interleaved partial sums at a time where their terms are computed: more need more registers


def over_segments(graph: Graph) -> tuple[Eqn, ...]:
    """The equations that compute a number for each segment from other such numbers."""
    return tuple(e for e in graph.eqns if S in e.out.type.axes and e.op not in SEGMENT_SUMS)


def sums(graph: Graph) -> tuple[Value, ...]:
    """The sums of segments."""
    return tuple(e.out for e in graph.eqns if e.op in SEGMENT_SUMS)


def squared(graph: Graph, eqns: Iterable[Eqn]) -> tuple[Value, ...]:
    """The values whose products are summed over segments, without inputs."""
    factors = dict.fromkeys(a for e in eqns if e.op == "segment_dot" for a in e.args)
    return tuple(a for a in factors if D in a.type.axes and a not in graph.params)


def of_vector(graph: Graph, needed: set[Value], inputs: Inputs) -> tuple[Inputs, tuple[Statement, ...]]:
    """The C expressions of values over segments in a loop, and the statements per vector that compute them."""
    computed = [e for e in over_segments(graph) if e.out in needed]
    own = {v: f"{v.name}_own_[s_]" for v in sums(graph) if v in needed}
    if not computed and not own:
        return inputs, ()
    spelled = replace(inputs, element={**inputs.element, **own})
    first = Statement("const int s_ = v_ / Row::PER_SEGMENT;")
    return spelled, (first, *_statements(computed, spelled, "Row::rank() * Row::SEGMENTS + s_"))


def joined(graph: Graph, eqn: Eqn, inputs: Inputs, place: str) -> Join:
    """A sum over the segments of a row; ``place``: the C text after the name of a sum of segments."""
    needed = upstream(over_segments(graph), eqn.args)
    spelled = replace(inputs, element={**inputs.element, **{v: f"{v.name}{place}" for v in sums(graph)}})
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
