"""Where digits can be lost: facts and hazards of the graph, and what adversarial inputs do to its numbers.

Each hazard, to cancel, overflow or lose digits, is found by its pattern and by ranges; one that the ranges exclude is
not reported. What depends on the numbers is said as "if"; a guard is named where the graph has it, or a later pass
writes it. Error bounds: Higham, Accuracy and Stability of Numerical Algorithms, 2002, chapters 1 and 4.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import isfinite, log, log2, sqrt
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from lngen.compiler.interpret import interpret
from lngen.compiler.ir import (
    F16,
    F64,
    WIDE,
    D,
    DType,
    Eqn,
    Lengths,
    Type,
    Value,
    is_over_segments,
    print_eqn,
    values_of,
)
from lngen.compiler.ir.evaluate import evaluate
from lngen.compiler.ir.numerics import Array, column_depth, row_depth
from lngen.compiler.ir.places import downstream, upstream
from lngen.compiler.passes.variance import is_rounded
from lngen.dtypes import QUANTISED
from lngen.errors import SpecError
from lngen.lab.explain.ranges import Facts, Range
from lngen.lab.explain.section import Lines, Section, Subject, Table, Text, wrapped
from lngen.lab.explain.statements import full
from lngen.proof.check.conform import CASES, run_case
from lngen.proof.check.conform.implementations import Found as Judged
from lngen.proof.check.conform.implementations import Ran
from lngen.proof.check.conform.number_cases import spread
from lngen.proof.check.conform.suites import GraphSuite

SUMS = ("reduce_sum", "reduce_mean")
BOUNDED = 2.0**16  # a factor of at most this size makes infinite only what nearly is so by itself


class Hazard(NamedTuple):
    """A hazard of one equation: what goes wrong and for which inputs, what prevents it, the number in ``risk``."""

    name: str
    risk: str
    guard: str = ""
    limit: float | None = None


def unit(e: Eqn) -> str:
    """The unit roundoff of a result as a power of two."""
    return f"2^{log2(e.out.type.dtype.roundoff):.0f}"


def one_pass(g: Facts, e: Eqn) -> Iterator[Hazard]:
    """mean(x^2) - mean(x)^2."""
    centre = g.root_of(e.args[1]) if e.op == "sub" else None
    if centre is None:
        return
    mean, of = g.made[centre], g.made[e.args[0]]
    if mean.op == of.op == "reduce_mean" and mean.attrs == of.attrs and g.root_of(of.args[0]) == mean.args[0]:
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
    if any(is_over_segments(f.out) and e.args[0] in f.args for f in final):
        guards.append("the variance is computed from segments about their own means")
    risk = f"loses digits, if the mean of {x} is far from 0 beside its spread. The error of {mean} is in every "
    risk += f"difference: up to {depth} * {unit(e)} of the mean of |{x}|"
    yield Hazard("mean removed", risk, "; ".join(guards))


def complement(g: Facts, e: Eqn) -> Iterator[Hazard]:
    """Subtractions that can cancel: c - v and v - c with v near a constant c; v - v^2, which is v (1 - v)."""
    if not (found := g.difference(e)):
        return
    (a, b, taken), one = found, Range(1, 1)
    pairs = [(one, a)] if g.root_of(b) == a else [(g.ranges[a], b), (taken, a)]
    for whole, v in pairs:
        if (c := whole.low) == whole.high != 0 and g.ranges[v].low <= c <= g.ranges[v].high and v not in g.exact:
            risk = f"loses its leading digits, if {g.names[v]} is near {c:.4g}; its error stays near {unit(e)} of that"
            yield Hazard("complement", risk, limit=c)


def remainder(g: Facts, e: Eqn) -> Iterator[Hazard]:
    """a - b, where b sums what a is of."""
    if not (found := g.difference(e)) or any((*mean_removed(g, e), *one_pass(g, e))):
        return
    a, b, _ = found
    eqns = [f for f in g.made.values() if f.op not in ("const", "size")]
    sums = {f.out for f in eqns if f.op in SUMS} & upstream(eqns, [b])
    if upstream(eqns, [a]) & upstream(eqns, sums) & {f.out for f in eqns}:
        risk = f"cancels, if {g.names[b]} is nearly all of {g.names[a]}; both depend on the same values. Their "
        risk += f"rounding errors, {unit(e)} of their size or more, are then large beside the rest"
        yield Hazard("remainder", risk)


def cancellation(g: Facts, e: Eqn) -> Iterator[Hazard]:
    """a - b of rounded values that may be nearly equal, such as (x + z) - z and sqrt(x x + 1) - x."""
    known = (mean_removed, one_pass, complement, remainder)
    if not (found := g.difference(e)) or g.exact.issuperset(found[:2]) or any(any(of(g, e)) for of in known):
        return
    a, b, taken = found
    low, high = max(g.ranges[a].low, taken.low), min(g.ranges[a].high, taken.high)
    if low <= high and (low, high) != (0, 0):
        risk = f"cancels, if {g.names[a]} and {g.names[b]} are nearly equal. Their rounding errors, {unit(e)} of their "
        yield Hazard("cancellation", f"{risk}size or more, are then large beside the difference")


def multiplied(g: Facts, e: Eqn) -> Iterator[Hazard]:
    """A product or power that may exceed the largest number; the squares of a sum are said with it."""
    if e.op != "mul" or isfinite(g.ranges[e.out].most) or min(g.ranges[a].most for a in e.args) <= BOUNDED:
        return
    if any(scaled(g, f) and e.out in f.args for f in g.made.values()):  # an infinity saturates: see given_scale
        return
    most, powers = e.out.type.dtype.largest, g.factors(e.out)
    if len(powers) > 1:
        a, b = (g.names[v] for v in e.args)
        yield Hazard("product", f"is infinite, if |{a} * {b}| exceeds {most:.4g}", limit=most)
    elif any(e.out in f.args and f.op not in SUMS for f in g.made.values()):
        ((v, n),) = powers.items()
        yield Hazard("product", f"is infinite, if |{g.names[v]}| exceeds {most ** (1 / n):.4g}", limit=most ** (1 / n))


def exponential(g: Facts, e: Eqn) -> Iterator[Hazard]:
    """A power that may exceed the largest number."""
    if e.op in ("exp", "exp2"):
        high, most = g.ranges[e.args[0]].high, log(e.out.type.dtype.largest) / (1 if e.op == "exp" else log(2))
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


def logarithm(g: Facts, e: Eqn) -> Iterator[Hazard]:
    """The logarithm of a rounded value that may be near 1, such as log(1 + x)."""
    if e.op == "log" and e.args[0] not in g.exact and g.ranges[v := e.args[0]].low <= 1 <= g.ranges[v].high:
        risk = f"is near 0 and loses its digits, if {g.names[v]} is near 1: the error of that, {unit(e)} or more, stays"
        yield Hazard("logarithm", risk, limit=1)


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
        return
    taken, guard = [f for f in g.made.values() if e.out in f.args], ""
    if taken and all(f.op == "minimum" for f in taken) and g.ranges[e.args[0]].low > 0:
        guard = f"{g.names[taken[0].out]} is at most {g.ranges[taken[0].out].high:.4g}"
    yield Hazard("division", f"divides by 0, if {y} is 0: infinity, or NaN for 0 / 0", guard, 0)


def casts(g: Facts, e: Eqn) -> Iterator[Hazard]:
    """A cast to f16 of what may be larger, and one to 16 bits that other equations compute from."""
    if e.op != "cast" or (to := e.out.type.dtype).size > 2:
        return
    if to is F16 and g.ranges[e.args[0]].most > (most := to.largest):
        risk = f"is infinite, if |{g.names[e.args[0]]}| exceeds {most:.0f}, the largest number of f16"
        yield Hazard("f16 overflow", risk, limit=most)
    if any(e.out in f.args for _, f in g.eqns):
        yield Hazard("early rounding", f"has relative errors of up to {unit(e)}, as has what is computed from it")


class Scaled(NamedTuple):
    """What a cast rounds to 8 bits: v, divided or multiplied by a scale that is given, or that follows from max |v|.

    amax  the equation of the largest |v| of a row or a block, where the scale follows from it
    path  the equations from there to the scale
    """

    v: Value
    scale: Value | None = None
    divides: bool = True
    amax: Eqn | None = None
    path: tuple[Eqn, ...] = ()


def scaled(g: Facts, e: Eqn) -> Scaled | None:
    """What a cast to 8 bits rounds; None for other equations."""
    if e.op != "cast" or e.out.type.dtype not in QUANTISED:
        return None
    of = g.made[e.args[0]]
    if of.op not in ("mul", "div", "div_scale") or of.args[0].type.axes == of.args[1].type.axes:
        return Scaled(of.out)
    divides = of.op != "mul"
    v, scale = of.args if divides or of.args[0].type.axes == WIDE else of.args[::-1]
    if not divides and g.made[scale].op == "div" and g.ranges[g.made[scale].args[0]] == Range(1, 1):
        scale, divides = g.made[scale].args[1], True
    eqns = [*g.made.values()]
    before = upstream(eqns, [scale])
    for amax in (f for f in eqns if f.op == "reduce_max" and f.out in before):
        if (g.made[amax.args[0]].op, g.made[amax.args[0]].args) == ("abs", (v,)):
            path = before & downstream(eqns, [amax.out]) - {amax.out}
            return Scaled(v, scale, divides, amax, tuple(f for f in eqns if f.out in path))
    return Scaled(v, scale, divides)


def given_scale(g: Facts, e: Eqn) -> Iterator[Hazard]:
    """A cast to 8 bits by a scale that does not follow from the row, or without one."""
    if (found := scaled(g, e)) is None or found.amax:
        return
    to, v, s = e.out.type.dtype, g.names[found.v], _source(g, found.scale) if found.scale else ""
    by = f" {'*' if found.divides else '/'} {s}" if s else ""

    def where(bound: float, size: float) -> str:
        return f"{s} is {size / bound if found.divides else bound / size:.3g}"

    most, side, guard = g.ranges[found.v].most, "more" if found.divides else "less", ""
    if s and 0 < most <= BOUNDED:
        guard = f"|{v}| is at most {most:.4g}, too little for it if {where(to.largest, most)} or {side}"
    # Of normal numbers 1 % are beyond 2.576 standard deviations, and 1 % within 0.01253.
    for name, risk, limit, deviations in (
        ("saturation", "saturates, if |{}| exceeds", to.largest, 2.576),
        ("underflow", "is 0, if |{}| is at most", to.floor, 0.01253),
    ):
        share = f". Of numbers with standard deviation 1 it is 1 %, if {where(limit, deviations)}" if s else ""
        yield Hazard(name, f"{risk.format(v)} {limit:.4g}{by}{share}", guard if name == "saturation" else "", limit)


def own_scale(g: Facts, e: Eqn) -> Iterator[Hazard]:
    """A cast to 8 bits by a scale that follows from the largest number of a row or block, and what bounds that."""
    if (found := scaled(g, e)) is None or found.amax is None:
        return
    to, v, amax, inverted = e.out.type.dtype, g.names[found.v], g.names[found.amax.out], False
    for f in found.path:
        of = next(a for a in f.args if a == found.amax.out or any(a == h.out for h in found.path))
        inverted ^= f.op == "div" and f.args[1] == of
        if f.op in ("minimum", "maximum"):
            yield _bounded(g, to, of, f, inverted)
        if f.op == "ceil_power":
            risk = f"loses up to 1 bit of its range, as {g.names[f.out]} is up to twice the scale that {amax} needs"
            yield Hazard("power of two", risk, "a product with its inverse is exact")
    times = to.largest / to.floor
    blocks = [a.number for a in found.amax.out.type.axes if a.base is D and a.by == "/"]
    features = next((n for n in blocks if isinstance(n, int)), g.d)
    normal = NormalDist()
    near = normal.inv_cdf(1 - 0.5 / (features + 1)) / times  # beside the deviation, where the largest number has amax
    risk = f"is 0, if |{v}| is {amax} / {times:.6g} or less: about {200 * normal.cdf(near) - 100:.2g} % of {features} "
    risk += "normal numbers, more beside an outlier"
    digits = f"; it has fewer digits, if it is below {amax} / {to.largest / to.normal:.6g}" if to.digits else ""
    yield Hazard("underflow", risk + digits, limit=times)


def _source(g: Facts, value: Value) -> str:
    """The name of a value, or of what is handed on to it as it is."""
    of = g.made[value]
    return _source(g, of.args[0]) if of.op in ("detach", "stop_gradient") or _widens(of) else g.names[value]


def _widens(e: Eqn) -> bool:
    return e.op == "cast" and e.out.type.dtype.size >= e.args[0].type.dtype.size


def _bounded(g: Facts, to: DType, of: Value, eqn: Eqn, inverted: bool) -> Hazard:
    """A least or largest scale, or of its inverse: ``of`` is what follows from the row, the other operand the bound."""
    bound = next(a for a in eqn.args if a != of)
    number = g.ranges[bound].low if g.ranges[bound].low == g.ranges[bound].high else None
    x, name = _source(g, of), _source(g, bound) if number is None else f"{number:.4g}"
    beyond = f"{x} {'exceeds' if eqn.op == 'minimum' else 'is below'} {name}"
    if (eqn.op == "minimum") != inverted:
        return Hazard("saturation", f"saturates where numbers are large, if {beyond}", limit=number)
    risk = f"has fewer digits, if {beyond}; it is 0, if by a factor of {to.largest / to.floor:.6g}"
    return Hazard("least scale", risk, "zeros are divided by a number above 0", number)


def sums(g: Facts, e: Eqn) -> Iterator[Hazard]:
    """A sum or a mean over the features of a row or over rows, and the squares in it."""
    if e.op not in SUMS or e.axis.of_order or (e.axis is D and g.d == 1):
        return
    of_row, terms, x = e.axis is D, g.ranges[e.args[0]], g.root_of(e.args[0])
    depth, count = (row_depth(g.d), g.d) if of_row else (column_depth(g.rows, g.d), max(g.rows, 1))
    most = sqrt(e.out.type.dtype.largest)
    if x and g.ranges[x].most > most / sqrt(count):
        risk = f"is infinite, if |{g.names[x]}| exceeds {most:.2g} in one place, or {most / sqrt(count):.2g} in all"
        yield Hazard("squares", risk, limit=most)
    risk = f"may be off by {depth} * {unit(e)} of the sum of |terms|"
    risk += ". That is much beside the sum, if terms of both signs nearly cancel" if terms.low < 0 < terms.high else ""
    guard = f"added as a tree: at most {depth} roundings of a term, not {count - 1}" if depth < count - 1 else ""
    yield Hazard("row sum" if of_row else "column sum", risk, guard)


HAZARDS: tuple[Callable[[Facts, Eqn], Iterator[Hazard]], ...] = (
    one_pass, division, root, logarithm, exponential, mean_removed, complement, remainder, cancellation, casts,
    given_scale, own_scale, sums, multiplied,
)  # fmt: skip


def hazards(facts: Facts) -> list[tuple[Eqn, Hazard]]:
    """The hazards of each equation that the ranges do not exclude: without a guard first, then as in the table."""
    found = [(eqn, hazard) for of in HAZARDS for eqn, same in facts.eqns for hazard in of(facts, same)]
    return sorted(found, key=lambda pair: bool(pair[1].guard))


# ---- the section ----

ROWS, ELEMENTS = 5, 2**16  # of a measurement; long rows are fewer
SHOWN = 10  # facts
TRIED = (
    "Measured with inputs of 'lngen conform', against float64. The condition is the largest sum of |terms| over |sum| "
    "of a row. The other columns are errors, in units in the last place of the row's largest number."
)
# The cases of the conformance suite that show a hazard; of the means, the largest that the dtype can hold.
MEANS = ("large-mean-1e4", "large-mean-1e3", "large-mean-1e2")
CASES_OF = {"one-pass variance": MEANS, "mean removed": MEANS, "root of 0": ("tiny-variance", "constant-rows")}
CASES_OF |= dict.fromkeys(("squares", "product", "exponential", "f16 overflow"), ("huge",))
CASES_OF |= {"division": ("gamma-zero",)}
Found = list[tuple[Eqn, Hazard]]


def stability(subject: Subject) -> Section:
    """What holds for the graph's numbers, what can go wrong with its guards, and measured conditions and errors."""
    facts = Facts(subject.compilation.spec, subject.rows)
    found = hazards(facts)
    ranges = [text for eqn, same in facts.eqns if (text := facts.ranges[same.out].text(str(eqn.out)))]
    measured = _measured(facts, found)
    more = f"; {len(ranges) - SHOWN} more with --json" if len(ranges) > SHOWN else ""
    known = Text(f"Ranges that hold for any finite input, unless a value is a NaN: {'; '.join(ranges[:SHOWN])}{more}.")
    listed = Lines(tuple(_listed(found)), "What can go wrong, for which inputs, and what stands against it:")
    tried = (Text(measured),) if isinstance(measured, str) else (Text(TRIED), _table(measured))
    findings = [{"value": e.out.name, "equation": print_eqn(e), **hazard._asdict()} for e, hazard in found]
    data = {"facts": ranges, "findings": findings, "measured": measured}
    return Section("stability", "Stability", (*[known] * bool(ranges), listed, *tried), data)


def _listed(found: Found) -> list[str]:
    """Each hazard once for a limit, without a guard and with one, at its first equation; the others by name."""
    groups: dict[tuple[str, bool, float | None], Found] = {}
    for e, hazard in found:
        groups.setdefault((hazard.name, bool(hazard.guard), hazard.limit), []).append((e, hazard))
    lines = []
    for (first, hazard), *others in groups.values():
        likewise = f". The same holds for {', '.join(str(e.out) for e, _ in others)}" if others else ""
        guard = f"guard: {hazard.guard}" if hazard.guard else ""
        lines.append(f"{print_eqn(first)}   ({hazard.name})")
        lines += [line for text in (hazard.risk + likewise, guard) for line in wrapped(text, "  ", "  ")]
    return lines or ["none of the hazards that lngen looks for"]


class _Few(GraphSuite):
    """Cases on few rows for the interpreter; in place of a verdict their inputs and results are kept."""

    def __init__(self, facts: Facts) -> None:
        self.name, self.specs = str(facts.spec), tuple(dict.fromkeys((facts.spec.with_direction("fwd"), facts.spec)))
        self.gradients: tuple[str, ...] = ()  # no case asks for them
        super().__init__(self, facts.spec)

    def rows(self, most: int, d: int | None = None) -> int:
        return max(1, min(most, ROWS, ELEMENTS // (d or self.d)))

    def run(self, inputs: Mapping[str, Array]) -> Ran:
        """The results of the spec, a backward's after those of forward."""
        known = {**inputs, **values_of(self.forward, self.spec.eps_or_default)}
        for spec in self.specs:
            known |= (results := interpret(spec.graph(), known))
        return Ran(results, dict)

    def judged(self, inputs: Mapping[str, Array], results: Mapping[str, Array]) -> Judged:
        self.last = inputs, results
        return Judged("")


def _measured(facts: Facts, found: Found) -> list[dict[str, Any]] | str:
    """The condition numbers and errors of each case that shows a hazard, or why there are none; None for infinity."""
    try:
        suite = _Few(facts)
    except SpecError as error:
        return f"Nothing is measured: {error}"
    if any(suite.type_of(name).dtype is F64 for name in suite.matrices):
        return "Nothing is measured: float64, in which the errors of other dtypes are measured, is not wider."
    runs = {case.name: partial(case.of_graph, suite) for case in CASES if callable(case.of_graph)}
    runs["huge"] = partial(spread, suite, std=suite.dtype.largest / 6)
    measured: list[dict[str, Any]] = []
    for name in dict.fromkeys(("ordinary", *(case for _, hazard in found for case in CASES_OF.get(hazard.name, ())))):
        known = name in MEANS and any(row["inputs"] in MEANS for row in measured)
        if not known and run_case(runs[name])[0] == "pass":
            measured.append({"inputs": name, **_numbers(suite, found)})
    return measured


def _numbers(suite: _Few, found: Found) -> dict[str, dict[str, float | None]]:
    """Condition numbers and errors against float64, which begins at the inputs, by name of the value."""
    inputs, results = suite.last
    sums = {e.out.name: e for e, _ in found if e.op == "sub"}
    sums = sums or {e.out.name: e for e, hazard in found if hazard.name == "row sum"}
    known = {**inputs, **values_of(suite.forward, suite.spec.eps_or_default)}
    for spec in suite.specs:
        graph = spec.trace()["cse"]
        operands = {v: 1 for e in sums.values() for v in e.args if spec == suite.spec}
        graph = replace(graph, results=tuple(dict.fromkeys((*graph.results, *operands))))
        known |= {name: real.value for name, real in evaluate(graph, known).items()}
        if spec.direction == "bwd":  # no pass is trusted: the truth is the derivative of each equation
            known |= {name: real.value for name, real in evaluate(spec.trace().raw, known).items()}
    conditions = {name: _condition(e, known, suite.spec.d) for name, e in sums.items()}
    errors = {name: _error(suite.type_of(name), got, known[name]) for name, got in results.items()}
    return {
        kind: {name: n if isfinite(n) else None for name, n in numbers.items()}
        for kind, numbers in (("conditions", conditions), ("errors", errors))
    }


def _condition(e: Eqn, known: Mapping[str, Array], d: int) -> float:
    """The sum of |terms| over |sum|, the largest of a row; differences are added along the row."""
    sizes = Lengths({a: n for v in e.args for a, n in zip(v.type.axes, known[v.name].shape, strict=True)} | {D: d})
    args = [full(v, known[v.name], sizes) for v in e.args]
    size = np.abs(args[0]) + (np.abs(args[1]) if e.op == "sub" else 0)
    rest = np.abs(args[0] - args[1] if e.op == "sub" else args[0].sum(axis=1, keepdims=True))
    with np.errstate(all="ignore"):
        ratio = size.sum(axis=1) / rest.sum(axis=1)
    return float(np.nan_to_num(ratio, nan=1.0, posinf=np.inf).max(initial=1.0))


def _error(typ: Type, got: Array, want: Array) -> float:
    """The largest error in units in the last place of the row's largest number that ``typ`` has; infinite for a NaN."""
    held = np.abs(want) <= typ.dtype.largest
    size = np.where(held, np.abs(want), 0.0)
    most = size.max(axis=-1, keepdims=True) if D in typ.axes else size
    unit = np.maximum(np.ldexp(typ.dtype.roundoff, np.frexp(most)[1]), 2 * typ.dtype.floor)
    with np.errstate(all="ignore"):
        error = np.where(held, np.abs(got.astype(np.float64) - want), np.where(np.isnan(got), np.inf, 0.0))
    return float(np.nan_to_num(error / unit, nan=np.inf, posinf=np.inf).max(initial=0.0))


def _table(measured: list[dict[str, Any]]) -> Table:
    def cell(n: float | None) -> str:
        return "inf" if n is None else f"{round(n, 2):.2g}"

    names, rows = tuple(measured[0]["errors"]), []
    for row in measured:
        name, worst = max(row["conditions"].items(), key=lambda item: item[1] or np.inf, default=("", 0.0))
        where = f"{cell(worst)} at %{name}" if name else "-"
        rows.append((row["inputs"], where, *(cell(row["errors"][name]) for name in names)))
    return Table(("inputs", "condition", *names), tuple(rows))
