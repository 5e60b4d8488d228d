"""Take the variance of long rows from sums that the parts of a row have each for itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from lngen.ir import Builder, D, Eqn, Graph, M, Value, is_row_fold, is_sum
from lngen.passes.clean import dce
from lngen.passes.edit import downstream
from lngen.passes.order import orders

# Segments of a row: fewer are no trouble to meet over twice; the sums of more are too many to keep.
FEWEST, MOST = 3, 64


@dataclass(frozen=True)
class _Centred:
    """x - mean(x), and the mean."""

    x: Value
    mean: Value


def place_spread(graph: Graph, d: int) -> Graph:
    """Measure rows of ``d`` elements, if they have many segments, from the means of those first (f32 only).

    before:  %xc      = sub %x, %mean                    after:  %var_sum = reduce_spread %x {axis=D}
             %var_sum = reduce_dot %xc, %xc {axis=D}

    before:  %rstd    = div %one, sqrt(var + eps)
             %xhat    = mul %xc, %rstd                   after:  %centre = segment_mean %x {axis=D}
                                                                 %far    = sub %x, %centre
                                                                 %off    = sub %centre, %mean
                                                                 %shift  = mul %off, %rstd
                                                                 %xhat   = fma %far, %rstd, %shift

    The blocks that share a long row then meet once over it, not for its sum first and for the squares after that, and
    what a block has measured by then is what it goes on with. Where something else is summed that depends on the mean,
    but not on the variance, they would meet for it anyway. A backward's elements stay measured from the mean: its sums
    over rows may be taken by blocks that have but a few columns. So do elements whose scale may be infinite (eps = 0),
    because the two parts of the distance, both times infinity, may cancel to NaN.
    """
    row, _ = orders(graph, d)
    if not FEWEST <= -(-d // row.segment) <= MOST:
        return graph
    producer, found = graph.producers(), _centred(graph, d)
    spread = {e.out: c for e in graph.eqns if (c := _squared(e, found)) and not _meets_between(graph, e, c.x)}
    moved = spread and not any(is_sum(e, M) for e in graph.eqns)
    b = Builder(graph.name, params=graph.params, taken=graph.values())
    for eqn in graph.eqns:
        scaled = _scaled(eqn, found, producer, spread) if moved else None
        if eqn.out in spread:
            b.eqns.append(Eqn(eqn.out, "reduce_spread", (spread[eqn.out].x,), eqn.attrs))
        elif scaled and scaled[0] in spread.values():
            b.eqns.append(_from_segments(b, eqn.out, *scaled))
        else:
            b.eqns.append(eqn)
    return dce(b.build(*graph.results, stage="place_spread"))


def _centred(graph: Graph, d: int) -> dict[Value, _Centred]:
    """Every x - mean(x) over D."""
    producer, found = graph.producers(), {}
    for eqn in graph.eqns:
        if eqn.op == "sub" and _is_mean(producer.get(eqn.args[1]), eqn.args[0], producer, d):
            found[eqn.out] = _Centred(*eqn.args)
    return found


def _is_mean(eqn: Eqn | None, x: Value, producer: dict[Value, Eqn], d: int) -> bool:
    """True for the sum of x over D, divided by ``d``."""
    if eqn is None or eqn.op != "div":
        return False
    total, count = (producer.get(a) for a in eqn.args)
    if total is None or count is None or count.op != "const" or count.value != d:
        return False
    return total.op == "reduce_sum" and total.attr("axis") is D and total.args == (x,)


def _squared(eqn: Eqn, found: dict[Value, _Centred]) -> _Centred | None:
    """What a sum over D of squares squares, if that is measured from a mean."""
    squares = eqn.op == "reduce_dot" and eqn.attr("axis") is D and eqn.args[0] == eqn.args[1]
    return found.get(eqn.args[0]) if squares else None


def _scaled(
    eqn: Eqn, found: dict[Value, _Centred], producer: dict[Value, Eqn], spread: Collection[Value]
) -> tuple[_Centred, Value] | None:
    """What is measured from a mean, and the number of the row, always finite, that multiplies it."""
    if eqn.op == "mul":
        for value, scale in (eqn.args, eqn.args[::-1]):
            if value in found and _is_reciprocal_std(scale, producer, spread):
                return found[value], scale
    return None


def _is_reciprocal_std(v: Value, producer: dict[Value, Eqn], spread: Collection[Value]) -> bool:
    """True for c / sqrt(s / n + eps), where ``spread`` has s and c, n and eps are above zero: it is always finite."""

    def operands(value: Value | None, op: str, count: int) -> Sequence[Value | None]:
        eqn = producer.get(value) if value is not None else None
        return eqn.args if eqn is not None and eqn.op == op else [None] * count

    def above_zero(value: Value | None) -> bool:
        eqn = producer.get(value) if value is not None else None
        return eqn is not None and eqn.op == "const" and bool(0 < np.float32(eqn.value) < np.inf)

    factor, root = operands(v, "div", 2)
    (raised,) = operands(root, "sqrt", 1)
    var, eps = operands(raised, "add", 2)
    if above_zero(var):
        var, eps = eps, var
    total, count = operands(var, "div", 2)
    return total in spread and all(map(above_zero, (factor, eps, count)))


def _meets_between(graph: Graph, spread: Eqn, x: Value) -> bool:
    """True if a row is reduced by something that the sum of x moves and the spread of x does not."""
    sums = [e.out for e in graph.eqns if e.op == "reduce_sum" and e.attr("axis") is D and e.args == (x,)]
    moved, later = downstream(graph.eqns, sums), downstream(graph.eqns, [spread.out])
    between = [e for e in graph.eqns if is_row_fold(e) and e != spread and e.out not in sums]
    return any(e.out in moved and e.out not in later for e in between)


def _from_segments(b: Builder, out: Value, centred: _Centred, scale: Value) -> Eqn:
    """A scaled distance from the mean: that from the segment's mean scaled, and the rest of the way."""
    centre = b.segment_mean("centre", centred.x, axis=D)
    far, off = b.sub("far", centred.x, centre), b.sub("off", centre, centred.mean)
    return Eqn(out, "fma", (far, scale, b.mul("shift", off, scale)))
