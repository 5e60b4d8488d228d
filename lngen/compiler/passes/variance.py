"""The mean and the variance of rows in f32: sums over segments of long rows, and a mean that is corrected."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lngen.compiler.ir import (
    F32,
    ORDERS,
    Axis,
    Builder,
    ByValue,
    D,
    Eqn,
    Graph,
    Lengths,
    M,
    Value,
    is_column_fold,
    is_row_fold,
)
from lngen.compiler.ir.names import fresh
from lngen.compiler.ir.places import downstream
from lngen.compiler.ir.types import Attrs
from lngen.compiler.passes.edit import dce
from lngen.compiler.passes.order import orders, rule_of

ALONG_D = (("axis", D),)


@dataclass(frozen=True)
class Centred:
    """x - mean(x), the mean, and the sum from which the mean is computed: of a row, or of each of its blocks ``to``."""

    x: Value
    mean: Value
    total: Value
    to: Axis | None = None

    @property
    def attrs(self) -> Attrs:
        """Those of its sums."""
        return ALONG_D if self.to is None else (*ALONG_D, ("to", self.to))


@dataclass
class _Segments:
    """Values over the segments of a row: sums of x, lengths n, approximate means; distances from those means.

    ``rest`` are the sums of the distances, None if the mean needs no correction.
    """

    sums: Value
    n: Value
    centre: Value
    far: Value
    squares: Value
    rest: Value | None
    axis: Axis
    _off: Value | None = None

    def off(self, b: Builder, mean: Value) -> Value:
        """The distances from the mean of the row to those of its segments, computed at the first use."""
        if self._off is None:
            self._off = b.sub("off", self.centre, mean)
        return self._off


def place_spread(graph: Graph, d: int, order: str = ORDERS[0]) -> Graph:
    """Compute the variance of rows of ``d`` elements that have many segments from sums over each segment (f32 only).

    before:  %mean_sum = reduce_sum %x {axis=D}          after:  %x_sums    = reduce_sum %x {axis=D, to=S}
                                                                 %n         = size {axis=D, per=S}
                                                                 %n_inverse = div %one, %n
                                                                 %centre    = mul %x_sums, %n_inverse
                                                                 %far       = sub %x, %centre
                                                                 %squares   = reduce_dot %far, %far {axis=D, to=S}
                                                                 %mean_sum  = reduce_sum %x_sums {axis=S}
             %mean     = div %mean_sum, %d_size                  %mean      = div %mean_sum, %d_size
             %xc       = sub %x, %mean                           %off       = sub %centre, %mean
             %var_sum  = reduce_dot %xc, %xc {axis=D}            %n_off     = mul %n, %off
                                                                 %term      = fma %n_off, %off, %squares
                                                                 %var_sum   = reduce_sum %term {axis=S}
             %rstd     = div %one, sqrt(var + eps)               %rstd      = div %one, sqrt(var + eps)
             %xhat     = mul %xc, %rstd                          %shift     = mul %off, %rstd
                                                                 %xhat      = fma %far, %rstd, %shift

    Let c be the approximate mean of a segment of n elements. The sum of (x - mean)^2 over the segment is that of
    (x - c)^2 plus n (c - mean)^2. This is Chan, Golub and LeVeque, Algorithms for Computing the Sample Variance, The
    American Statistician 37(3), 1983. The blocks that share a long row then exchange numbers of segments once, not the
    sum first and the squares later. A block continues with the distances it has. If another row sum depends on the
    mean, but not on the variance, the blocks would exchange the sum anyway, and nothing changes. The elements of a
    backward are still measured from the mean: blocks that have only a few columns may compute its sums over rows. So
    are elements whose scale may be infinite (eps = 0): the two parts of the distance, both times infinity, may cancel
    to NaN. An eps that is passed by value counts as above zero: its bits are those of every baked eps that
    is not 0 in f32. Where ``is_rounded``, the mean is corrected by the mean of the distances from it, as in
    ``compensate``. The sum of these distances is, over the segments, that of sum(%far) + n (centre - mean). The
    equations are in topological order, so a sum comes before its uses.
    """
    rule, (row, _) = rule_of(order), orders(graph, d, order=order)
    if not rule.centred_least <= -(-d // row.segment) <= rule.centred_most:
        return graph
    b = Builder(graph.name, params=graph.params, taken=graph.values())
    spread = _Spread(b, graph, d)
    for eqn in graph.eqns:
        b.eqns.append(spread.rewritten(eqn))
    return dce(b.build(*graph.results, stage="place_spread"))


class _Spread:
    """What ``place_spread`` knows of a graph, and the equations that it writes to a builder in place of the graph's."""

    def __init__(self, b: Builder, graph: Graph, d: int) -> None:
        self.b, self.graph, self.d = b, graph, d
        self.producer, self.known = graph.producers(), centred(graph, d)
        found = ((e, centred_operand(e, self.known)) for e in graph.eqns)
        rows = ((e, c) for e, c in found if c and c.to is None)
        self.variances = {e.out: c for e, c in rows if not _depends_between(graph, e, c.x)}
        self.sums, self.means = ({getattr(c, key): c.x for c in self.variances.values()} for key in ("total", "mean"))
        self.rescales = not any(map(is_column_fold, graph.eqns))
        self.parts: dict[Value, _Segments] = {}

    def rewritten(self, eqn: Eqn) -> Eqn:
        """The equation that computes ``eqn.out`` from the segments, after those it needs; ``eqn`` where none does."""
        b, out = self.b, eqn.out
        if out in self.sums:
            x = self.sums[out]
            self.parts[x] = part = _segments(b, x, corrected=is_rounded(self.graph, x, self.d))
            return Eqn(out, "reduce_sum", (part.sums,), (("axis", part.axis),))
        if out in self.means and (part := self.parts[self.means[out]]).rest is not None:
            return _corrected_mean(b, eqn, part, part.rest)
        if out in self.variances:
            variance = self.variances[out]
            return _variance_sum(b, out, variance, self.parts[variance.x])
        scaled = _scaled(eqn, self.known, self.producer, self.variances) if self.rescales else None
        if scaled and scaled[0] in self.variances.values():
            return _from_segments(b, out, scaled[0], self.parts[scaled[0].x], scaled[1])
        return eqn


def is_rounded(graph: Graph, x: Value, d: int) -> bool:
    """Whether sums of up to ``d`` equal elements of ``x`` may be rounded: not those of 16-bit numbers of short rows."""
    eqn = graph.producers().get(x)
    stored = eqn.args[0].type.dtype if eqn is not None and eqn.op == "cast" else x.type.dtype
    return x.type.dtype is F32 and d > 2 ** (F32.digits - min(stored.digits or stored.bits, F32.digits))


def segments(axes: Iterable[Axis]) -> Axis:
    """The axis of the segments of a row: S, or S_1 where a graph has an S of its own."""
    return Axis(fresh("S", {a.name for a in axes if not a.of_order}), D, "/")


def _segments(b: Builder, x: Value, *, corrected: bool) -> _Segments:
    """The means of the segments of ``x`` and the distances from them, computed per segment."""
    s = segments(a for v in (*b.params, *(e.out for e in b.eqns)) for a in v.type.axes)
    sums, n = b.reduce_sum(f"{x.name}_sums", x, axis=D, to=s), b.size("n", D, x.type.dtype, per=s)
    centre = b.mul("centre", sums, b.div("n_inverse", b.const("one", 1.0, x.type.dtype), n))
    far = b.sub("far", x, centre)
    rest = b.reduce_sum("rest", far, axis=D, to=s) if corrected else None
    return _Segments(sums, n, centre, far, b.reduce_dot("squares", far, far, axis=D, to=s), rest, s)


def _corrected_mean(b: Builder, mean: Eqn, part: _Segments, rest: Value) -> Eqn:
    """The mean of a row, corrected by the mean of the distances from it."""
    first = b.div(f"{mean.out.name}_first", *mean.args)
    left = b.fma("left", part.n, b.sub("off_first", part.centre, first), rest)
    return Eqn(
        mean.out, "add", (first, b.div("correction", b.reduce_sum("off_sum", left, axis=part.axis), mean.args[1]))
    )


def _variance_sum(b: Builder, out: Value, centred: Centred, part: _Segments) -> Eqn:
    """The sum of squares of distances from the mean of the row, from those of its segments."""
    off = part.off(b, centred.mean)
    term = b.fma("term", b.mul("n_off", part.n, off), off, part.squares)
    return Eqn(out, "reduce_sum", (term,), (("axis", part.axis),))


def _from_segments(b: Builder, out: Value, centred: Centred, part: _Segments, scale: Value) -> Eqn:
    """A scaled distance from the mean: the scaled distance from the segment's mean, plus the scaled remainder."""
    return Eqn(out, "fma", (part.far, scale, b.mul("shift", part.off(b, centred.mean), scale)))


def centred(graph: Graph, d: int) -> dict[Value, Centred]:
    """Every x - mean(x) over D of rows."""
    producer, found = graph.producers(), {}
    for eqn in graph.eqns:
        if eqn.op == "sub" and M in eqn.args[0].type.axes and (one := _centred(eqn, producer, d)):
            found[eqn.out] = one
    return found


def _centred(sub: Eqn, producer: dict[Value, Eqn], d: int) -> Centred | None:
    """x - mean if the mean is the sum of x over D, or over blocks of D, divided by the length."""
    x, mean = sub.args
    by = producer.get(mean)
    total, count = (producer.get(a) for a in by.args) if by is not None and by.op == "div" else (None, None)
    if total is None or count is None or (total.op, count.op) != ("reduce_sum", "const"):
        return None
    found = Centred(x, mean, total.out, total.to)
    return found if (total.args, total.attrs) == ((x,), found.attrs) and count.value == _length(found, d) else None


def _length(of: Centred, d: int) -> int:
    """The elements of which it is the mean."""
    return d if of.to is None or of.to.base is not D else Lengths({D: d}).per(D, of.to)


def centred_operand(eqn: Eqn, found: dict[Value, Centred]) -> Centred | None:
    """The operand of a sum of squares over D, if it is a distance from a mean."""
    squares = eqn.op == "reduce_dot" and eqn.args[0] == eqn.args[1]
    centre = found.get(eqn.args[0]) if squares else None
    return centre if centre is not None and eqn.attrs == centre.attrs else None


def _scaled(
    eqn: Eqn, found: dict[Value, Centred], producer: dict[Value, Eqn], spread: Collection[Value]
) -> tuple[Centred, Value] | None:
    """A distance from a mean, and the number per row, never infinite, that scales it."""
    if eqn.op == "mul":
        for value, scale in (eqn.args, eqn.args[::-1]):
            if value in found and _is_reciprocal_std(scale, producer, spread):
                return found[value], scale
    return None


def _is_reciprocal_std(v: Value, producer: dict[Value, Eqn], spread: Collection[Value]) -> bool:
    """True for c / sqrt(s / n + eps), where ``spread`` has s, and c, n and eps are above zero; never infinite.

    Of an eps that is passed by value, the smallest number above zero decides; c may then be up to 2^53.
    """

    def operands(value: Value | None, op: str, count: int) -> Sequence[Value | None]:
        eqn = producer.get(value) if value is not None else None
        return eqn.args if eqn is not None and eqn.op == op else [None] * count

    def positive(value: Value | None) -> np.float32:
        """The value of a finite constant above zero; NaN for anything else."""
        eqn = producer.get(value) if value is not None else None
        number = np.float32(eqn.value if eqn is not None and eqn.op == "const" else np.nan)
        return number if 0 < number < np.inf else np.float32(np.nan)

    def least(value: Value | None) -> np.float32:
        return np.finfo(np.float32).smallest_subnormal if isinstance(value, ByValue) else positive(value)

    factor, root = operands(v, "div", 2)
    (raised,) = operands(root, "sqrt", 1)
    var, eps = operands(raised, "add", 2)
    if least(var) > 0:
        var, eps = eps, var
    total, count = operands(var, "div", 2)
    with np.errstate(over="ignore"):
        largest = positive(factor) / np.sqrt(least(eps))
    return total in spread and bool(largest < np.inf) and bool(positive(count) > 0)


def _depends_between(graph: Graph, spread: Eqn, x: Value) -> bool:
    """True if another reduction of the row depends on the sum of x and not on the spread of x."""
    sums = [e.out for e in graph.eqns if e.op == "reduce_sum" and e.attrs == ALONG_D and e.args == (x,)]
    of_sum, of_spread = downstream(graph.eqns, sums), downstream(graph.eqns, [spread.out])
    between = [e for e in graph.eqns if is_row_fold(e) and e != spread and e.out not in sums]
    return any(e.out in of_sum and e.out not in of_spread for e in between)


def compensate(graph: Graph, d: int) -> Graph:
    """Correct every mean of rows of ``d``, or of blocks, whose distances are squared and summed anyway (f32 only).

    before:                                         after:  %mean_first = div %mean_sum, %d_size
                                                            %xc_first   = sub %x, %mean_first
                                                            %off_sum    = reduce_sum %xc_first {axis=D}
                                                            %squares    = reduce_dot %xc_first, %xc_first {axis=D}
                                                            %off        = div %off_sum, %d_size
            %mean    = div %mean_sum, %d_size               %mean       = add %mean_first, %off
            %xc      = sub %x, %mean                        %xc         = sub %x, %mean
                                                            %neg_off    = neg %off
                                                            %less       = fma %neg_off, %off_sum, %squares
            %var_sum = reduce_dot %xc, %xc {axis=D}         %var_sum    = maximum %less, %zero

    An f32 sum is rounded at every step. So the mean of a row of equal elements may differ from them, and eps may be
    small beside the square of that difference. The corrected mean does not differ. Its two sums are one reduction: the
    corrected two-pass algorithm (Chan, Golub and LeVeque, Algorithms for Computing the Sample Variance, The American
    Statistician 37(3), 1983). The fma overflows only where the squares do. Rows whose mean cannot differ in this way
    stay as they are (``is_rounded``).
    """
    known = centred(graph, d)
    found = ((e, centred_operand(e, known)) for e in graph.eqns)
    sums = {e.out: e.args[0] for e, c in found if c and is_rounded(graph, c.x, _length(c, d))}
    corrected = {known[xc].mean: (xc, var_sum) for var_sum, xc in sums.items()}
    if not corrected:
        return graph
    b = Builder(graph.name, params=graph.params, taken=graph.values())
    for eqn in graph.eqns:
        if eqn.out in corrected:
            xc, var_sum = corrected[eqn.out]
            _correct(b, eqn, known[xc], xc, var_sum)
        elif eqn.out not in sums and eqn.out not in sums.values():
            b.eqns.append(eqn)
    return b.build(*graph.results, stage="compensate")


def _correct(b: Builder, mean: Eqn, row: Centred, xc: Value, var_sum: Value) -> None:
    """The equations that define the mean, the distances from it and the sum of their squares."""
    first = b.div(f"{mean.out.name}_first", *mean.args)
    far = b.sub(f"{xc.name}_first", row.x, first)
    off_sum = b.reduce_sum("off_sum", far, axis=D, to=row.to)
    squares = b.reduce_dot("squares", far, far, axis=D, to=row.to)
    off = b.div("off", off_sum, mean.args[1])
    less = b.fma("less", b.neg("neg_off", off), off_sum, squares)
    b.eqns += [Eqn(mean.out, "add", (first, off)), Eqn(xc, "sub", (row.x, mean.out))]
    b.eqns.append(Eqn(var_sum, "maximum", (less, b.const("zero", 0.0, F32))))
