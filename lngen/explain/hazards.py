"""Where a graph can cancel, overflow or lose digits: named hazards, each found by its pattern and by ranges.

A hazard that the ranges exclude is not reported. What depends on the numbers is said as "if"; a guard is named where
the graph has it, or a later pass writes it. Error bounds: Higham, Accuracy and Stability of Numerical Algorithms, 2002,
chapters 1 and 4.
"""

from collections.abc import Callable, Iterator
from math import log, log2, sqrt
from typing import NamedTuple

from lngen.check.oracles import column_depth, row_depth
from lngen.explain.ranges import Facts, Range, largest
from lngen.ir import F16, D, Eqn, S
from lngen.passes import upstream
from lngen.passes.variance import is_rounded

SUMS = ("reduce_sum", "reduce_mean")
EXACT = ("input", "cast", "const")  # no rounding precedes the difference of such values


class Hazard(NamedTuple):
    """What an equation can do and for which numbers, what stands against it, and the number that ``risk`` names."""

    name: str
    risk: str
    guard: str = ""
    limit: float | None = None


def unit(e: Eqn) -> str:
    """The unit roundoff of a result as a power of two."""
    return f"2^{log2(e.out.type.dtype.roundoff):.0f}"


def one_pass(g: Facts, e: Eqn) -> Iterator[Hazard]:
    """mean(x^2) - mean(x)^2."""
    centre = g.squared(e.args[1]) if e.op == "sub" else None
    if centre is None:
        return
    mean, of = g.made[centre], g.made[e.args[0]]
    if mean.op == of.op == "reduce_mean" and mean.attrs == of.attrs and g.squared(of.args[0]) == mean.args[0]:
        x, most = g.names[mean.args[0]], e.out.type.dtype.roundoff**-0.5
        risk = f"loses all digits and may be negative, if the mean of {x} is {most:.4g} standard deviations or more"
        yield Hazard("one-pass variance", f"{risk}; the mean of ({x} - mean)^2 does not", limit=most)


def mean_removed(g: Facts, e: Eqn) -> Iterator[Hazard]:
    """x - mean(x)."""
    if e.op != "sub" or not g.is_row("reduce_mean", e.args[1], e.args[0]):
        return
    (x, mean), depth = (g.names[a] for a in e.args), row_depth(g.d) + 1
    final = [f for s in (g.spec.with_direction("fwd"), g.spec) for f in s.graph().eqns]
    source, guards = (g.made[e.args[0]].args or e.args)[0].type.dtype, []
    if any((str(f.out), f.op) == (mean, "add") for f in final):
        guards.append("the mean is corrected by the mean of the differences from it")
    elif source.size == 2 and not is_rounded(g.spec.forward(), e.args[0], g.d):
        guards.append(f"equal numbers of {source} add up exactly, short of overflow: a constant row gives 0")
    if any(S in f.out.type.axes and e.args[0] in f.args for f in final):
        guards.append("the variance is computed from segments about their own means")
    risk = f"loses digits, if the mean of {x} is far from 0 beside its spread: the error of {mean}, up to {depth} * "
    risk += f"{unit(e)} of the mean of |{x}|, is in every difference"
    yield Hazard("mean removed", risk, "; ".join(guards))


def remainder(g: Facts, e: Eqn) -> Iterator[Hazard]:
    """c - v with a constant c that v may be near, v - v^2, which is v (1 - v), and a - b, where b sums what a is of."""
    if e.op != "sub" or any((*mean_removed(g, e), *one_pass(g, e))):
        return
    (a, b), one = e.args, Range(1, 1)
    whole, v = (one, a) if g.squared(b) == a else (g.ranges[a], b)
    if (c := whole.low) == whole.high != 0 and g.ranges[v].low <= c <= g.ranges[v].high and g.made[v].op not in EXACT:
        risk = f"loses its leading digits, if {g.names[v]} is near {c:.4g}; its error stays near {unit(e)} of that"
        yield Hazard("complement", risk, limit=c)
    eqns = [f for f in g.made.values() if f.op not in ("const", "size")]
    sums = {f.out for f in eqns if f.op in SUMS} & upstream(eqns, [b])
    if upstream(eqns, [a]) & upstream(eqns, sums) & {f.out for f in eqns}:
        risk = f"cancels, if {g.names[b]}, which depends on what {g.names[a]} does, takes nearly all of it away: the "
        risk += f"rounding errors of both, {unit(e)} of their size or more, are then large beside the rest"
        yield Hazard("remainder", risk)


def exponential(g: Facts, e: Eqn) -> Iterator[Hazard]:
    """A power that may exceed the largest number."""
    if e.op in ("exp", "exp2"):
        high, most = g.ranges[e.args[0]].high, log(largest(e.out.type.dtype)) / (1 if e.op == "exp" else log(2))
        guard = f"it is at most {high:.4g}" if high <= most else ""
        yield Hazard("exponential", f"is infinite, if {g.names[e.args[0]]} exceeds {most:.4g}", guard, most)


def root(g: Facts, e: Eqn) -> Iterator[Hazard]:
    """The root of v, its inverse, also as a division by the root, and the logarithm of v."""
    of = g.made[e.args[1]] if e.op == "div" else e
    if of.op not in (("sqrt",) if e.op == "div" else ("sqrt", "rsqrt", "log")):
        return
    v, least = g.made[of.args[0]], g.ranges[of.args[0]].low
    if least < 0 and e.op != "div":
        yield Hazard("domain", f"is NaN, if {g.names[v.out]} is negative", limit=0)
    if least <= 0 and e.op == "log":
        yield Hazard("domain", f"is -infinity, if {g.names[v.out]} is 0", limit=0)
    elif least <= 0 and e.op != "sqrt":
        risk = f"divides by 0, if {g.names[v.out]} is 0: infinity, and NaN where 0 is multiplied by it"
        yield Hazard("root of 0", risk, limit=0)
    elif e.op != "sqrt" and v.op in ("add", "maximum") and D not in v.out.type.axes:
        small = next((g.names[a] for a in v.args if g.ranges[a].low != least), "it")
        risk = f"scales by {1 / sqrt(least):.4g} where {small} is small beside {least:.4g}, not by the row's own size"
        yield Hazard("root of 0", risk, f"{least:.4g} is the least number under the root: no division by 0", least)


def division(g: Facts, e: Eqn) -> Iterator[Hazard]:
    """A division by what may be 0 or, where a 0 is replaced, near 0."""
    if e.op != "div":
        return
    divisor, found, (x, y) = g.made[e.args[1]], g.ranges[e.args[1]], (g.names[v] for v in e.args)
    if divisor.op in ("sqrt", "size") or not found.low <= 0 <= found.high:
        return
    chosen = [f for f in map(g.made.__getitem__, divisor.args) if f.op == "select_eq" and f.args[0] in divisor.args]
    if divisor.op == "add" and any(g.ranges[f.args[1]] == Range(0, 0) and g.ranges[f.args[2]].low > 0 for f in chosen):
        yield Hazard("division", f"multiplies the errors of {x} by 1 / |{y}|, which may be large", "0 is replaced")
    else:
        yield Hazard("division", f"divides by 0, if {y} is 0: infinity, or NaN for 0 / 0", limit=0)


def casts(g: Facts, e: Eqn) -> Iterator[Hazard]:
    """A cast to f16 of what may be larger, and one to 16 bits that other equations compute from."""
    if e.op != "cast" or (to := e.out.type.dtype).size > 2:
        return
    if to is F16 and g.ranges[e.args[0]].most > (most := largest(F16)):
        risk = f"is infinite, if |{g.names[e.args[0]]}| exceeds {most:.0f}, the largest number of f16"
        yield Hazard("f16 overflow", risk, limit=most)
    if any(e.out in f.args for _, f in g.eqns):
        yield Hazard("early rounding", f"has relative errors of up to {unit(e)}, as has what is computed from it")


def sums(g: Facts, e: Eqn) -> Iterator[Hazard]:
    """A sum or a mean over the features of a row or over rows, and the squares in it."""
    if e.op not in SUMS or e.axis is S or (e.axis is D and g.d == 1):
        return
    of_row, terms, x = e.axis is D, g.ranges[e.args[0]], g.squared(e.args[0])
    depth, count = (row_depth(g.d), g.d) if of_row else (column_depth(g.rows, g.d), max(g.rows, 1))
    most = sqrt(largest(e.out.type.dtype))
    if x and g.ranges[x].most > most / sqrt(count):
        risk = f"is infinite, if |{g.names[x]}| exceeds {most:.2g} in one place, or {most / sqrt(count):.2g} in all"
        yield Hazard("squares", risk, limit=most)
    risk = f"may be off by {depth} * {unit(e)} of the sum of |terms|"
    risk += ", much beside the sum, if terms of both signs nearly cancel" if terms.low < 0 < terms.high else ""
    guard = f"added as a tree: at most {depth} roundings of a term, not {count - 1}" if depth < count - 1 else ""
    yield Hazard("row sum" if of_row else "column sum", risk, guard)


HAZARDS: tuple[Callable[[Facts, Eqn], Iterator[Hazard]], ...] = (
    one_pass, division, root, exponential, mean_removed, remainder, casts, sums,
)  # fmt: skip


def hazards(facts: Facts) -> list[tuple[Eqn, Hazard]]:
    """The hazards of each equation that the ranges do not exclude: without a guard first, then as in the table."""
    found = [(eqn, hazard) for of in HAZARDS for eqn, same in facts.eqns for hazard in of(facts, same)]
    return sorted(found, key=lambda pair: bool(pair[1].guard))
