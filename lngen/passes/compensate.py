"""Correct the mean of a row by the mean of what is left without it."""

from __future__ import annotations

from lngen.ir import F32, Builder, D, Eqn, Graph, Value
from lngen.passes.spread import Centred, centred, is_rounded, squared


def compensate(graph: Graph, d: int) -> Graph:
    """Correct every mean of ``d`` elements whose distances are squared and summed anyway (f32 only).

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

    An f32 sum is rounded at every step, so the mean of a row may differ from its elements where all of them are equal,
    and eps may be small beside the square of that difference. The corrected mean does not differ, and its sums are of
    one reduction: the corrected two-pass algorithm (Chan, Golub and LeVeque, Algorithms for Computing the Sample
    Variance, The American Statistician 37(3), 1983). The fma does not overflow where the squares do not. Rows whose
    mean cannot differ in this way stay as they are (``is_rounded``).
    """
    known = centred(graph, d)
    sums = {e.out: e.args[0] for e in graph.eqns if (c := squared(e, known)) and is_rounded(graph, c.x, d)}
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
    off_sum, squares = b.reduce_sum("off_sum", far, axis=D), b.reduce_dot("squares", far, far, axis=D)
    off = b.div("off", off_sum, mean.args[1])
    less = b.fma("less", b.neg("neg_off", off), off_sum, squares)
    b.eqns += [Eqn(mean.out, "add", (first, off)), Eqn(xc, "sub", (row.x, mean.out))]
    b.eqns.append(Eqn(var_sum, "maximum", (less, b.const("zero", 0.0, F32))))
