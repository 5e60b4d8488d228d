"""Facts of sign and range about the values of a graph, true for any finite input.

A range is computed at its ends, in the arithmetic of the value: rounding is monotone, so it holds with all roundings.
It says nothing about a value that is a NaN. The graph is the one before ``decompose``, where a mean, a root and a
function are one equation each; what later passes write in their place may differ from it by roundings.
"""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from math import copysign, inf, isnan, sqrt

import numpy as np

from lngen.compiler.interpret import value_of
from lngen.compiler.ir import ByValue, D, Eqn, Lengths, Value
from lngen.compiler.ir.numerics import NUMPY_DTYPE, row_depth
from lngen.compiler.passes.edit import eqn_key
from lngen.compiler.spec import Spec

# Monotone in each operand; a root needs one that is not negative, a division a divisor of one sign.
MONOTONE = {
    "cast", "detach", "stop_gradient", "neg", "sqrt", "rsqrt", "rint", "relu", "clamp", "exp", "exp2", "log",
    "tanh", "sigmoid", "softplus", "erf", "normal_cdf", "add", "sub", "mul", "div", "maximum", "minimum", "const",
    "ceil_power",
}  # fmt: skip
# The result is an operand, perhaps with another sign; so is that of a cast, unless it is to fewer bytes.
CHOOSING = {
    "input", "const", "size", "expand", "detach", "stop_gradient", "neg", "abs", "relu", "clamp", "maximum", "minimum",
    "reduce_max", "select_eq", "select_gt", "where_gt", "copysign", "take", "gather",
}  # fmt: skip
NORMAL = 2.0**-126  # an eps from here on outweighs squares that underflow
ROUNDINGS = 1 + 2.0**-20  # more than those of an element over the root of a sum that has its square


@dataclass(frozen=True)
class Range:
    """``low <= value <= high``; every row has the element ``top``."""

    low: float = -inf
    high: float = inf
    top: float | None = None

    @property
    def most(self) -> float:
        """The largest absolute value."""
        return max(-self.low, self.high)

    def text(self, name: str) -> str:
        """What a person reads; empty for a constant, and for a number that may have either sign and any size."""
        if self.low == self.high or (self.low < 0 < self.high and self.most >= 65504):
            return ""
        above = f"{self.low:.4g} <= " if self.low > -1e30 else ""
        return above + name + (f" <= {self.high:.4g}" if self.high < 1e30 else "")


class Facts:
    """What is known of the values of a spec's graph; a backward's include those that forward saves for it.

    ``made`` has the equation of each value, in both graphs and in order; inputs have the op ``input``. Values that both
    compute alike are one value of it, that of forward; ``eqns`` pairs the graph's own equations with those. ``names``
    are those in the graph. ``exact`` are the values that no rounding precedes.
    """

    def __init__(self, spec: Spec, rows: int) -> None:
        self.spec, self.d, self.rows = spec, spec.d, rows
        self.made: dict[Value, Eqn] = {}
        self.ranges: dict[Value, Range] = {}
        self.names: dict[Value, str] = {}
        self.exact: set[Value] = set()
        self.eqns: list[tuple[Eqn, Eqn]] = []
        positive, known = spec.definition.positive(spec.options), dict[object, Value]()
        for graph in [s.trace()["cse"] for s in dict.fromkeys((spec.with_direction("fwd"), spec))]:
            for p in graph.params:
                if p not in self.made:  # what forward saves is a value of it already
                    self._add(Eqn(p, "input"), _of_input(p, p.name in positive))
            same, self.eqns = {p: p for p in graph.params}, []
            for eqn in graph.eqns:
                new = replace(eqn, args=tuple(same[a] for a in eqn.args))
                key = eqn_key(new, new.args)
                if key not in known:
                    taken = eqn.out in self.made  # by another equation of forward; no name has a '
                    known[key] = replace(eqn.out, name=f"{eqn.out.name}'") if taken else eqn.out
                    new = replace(new, out=known[key])
                    self._add(new, self._range(new))
                same[eqn.out] = known[key]
                self.names[known[key]] = str(eqn.out)
                self.eqns.append((eqn, self.made[known[key]]))

    def _add(self, eqn: Eqn, found: Range) -> None:
        self.made[eqn.out], self.ranges[eqn.out], self.names[eqn.out] = eqn, found, str(eqn.out)
        wider = eqn.op == "cast" and eqn.out.type.dtype.size >= max(a.type.dtype.size for a in eqn.args)
        if (wider or eqn.op in CHOOSING) and self.exact.issuperset(eqn.args):
            self.exact.add(eqn.out)

    def is_row(self, op: str, value: Value, of: Value) -> bool:
        """True if ``value`` is ``op`` over D of another."""
        eqn = self.made[value]
        return (eqn.op, eqn.args) == (op, (of,)) and eqn.axis is D

    def root_of(self, value: Value) -> Value | None:
        """The value whose square this is, if it is one."""
        eqn = self.made[value]
        return eqn.args[0] if eqn.op == "mul" and eqn.args[0] == eqn.args[1] else None

    def factors(self, value: Value) -> Counter[Value]:
        """How often each value is a factor of a product, whose factors may be products."""
        eqn = self.made[value]
        return self.factors(eqn.args[0]) + self.factors(eqn.args[1]) if eqn.op == "mul" else Counter([value])

    def difference(self, eqn: Eqn) -> tuple[Value, Value, Range] | None:
        """The values of a - b, or of a + b with a negated value or a number b, and the range of what is taken away."""
        if eqn.op == "sub":
            return eqn.args[0], eqn.args[1], self.ranges[eqn.args[1]]
        for a, b in (eqn.args, eqn.args[::-1]) if eqn.op == "add" else ():
            negated, found = self.made[b], self.ranges[b]
            if negated.op == "neg":
                return a, negated.args[0], self.ranges[negated.args[0]]
            if found.low == found.high:
                return a, b, Range(-found.high, -found.low)
        return None

    def _range(self, eqn: Eqn) -> Range:
        args = [self.ranges[a] for a in eqn.args]
        if eqn.op == "expand":
            return args[0]
        if eqn.op in ("size", "reduce_max", "reduce_sum", "reduce_mean"):
            return self._along(eqn, *args)
        if eqn.op == "abs" or (eqn.op == "mul" and eqn.args[0] == eqn.args[1]):
            least, most = max(args[0].low, -args[0].high, 0), args[0].most
            return Range(_at(eqn, *[least] * len(args)), _at(eqn, *[most] * len(args)))
        if eqn.op in ("silu", "gelu", "gelu_tanh"):  # x times a number from 0 to 1, never less than -0.2785
            return Range(-0.3 if args[0].low < 0 else 0, max(args[0].high, 0))
        if eqn.op == "decay":
            return Range(0, 1 if args[0].high <= 0 else inf, 1 if args[0].top == 0 else None)
        if eqn.op == "sub" and self.is_row("reduce_max", self._same(eqn.args[1]), eqn.args[0]):
            return Range(high=0, top=0)
        divisor = args[-1] if eqn.op in ("div", "rsqrt") else Range(1)
        if eqn.op not in MONOTONE or divisor.low <= 0 <= divisor.high:
            return Range()
        found, most = _of_ends(eqn, args), self._of_norm(eqn) if eqn.op in ("mul", "div") else inf
        return replace(found, low=max(found.low, -most), high=min(found.high, most))

    def _same(self, value: Value) -> Value:
        """The value that a gradient does not pass, if this is its constant."""
        while self.made[value].op in ("detach", "stop_gradient"):
            (value,) = self.made[value].args
        return value

    def _of_norm(self, eqn: Eqn) -> float:
        """The bound of x / sqrt(mean(x^2) + eps), sqrt(D), or 1 with a sum of squares; infinite for other equations."""
        for x, root in (eqn.args, eqn.args[::-1]) if eqn.op == "mul" else (eqn.args,):
            inverse = self.made[root]
            if inverse.op != ("rsqrt" if eqn.op == "mul" else "sqrt"):
                continue
            under = self.made[inverse.args[0]]
            for total, eps in (under.args, under.args[::-1]) if under.op in ("add", "maximum") else ():
                squares = self.made[total]
                most = {"reduce_mean": sqrt(self.d), "reduce_sum": 1.0}.get(squares.op)
                if most and squares.axis is D and self.root_of(squares.args[0]) == x and self.ranges[eps].low >= NORMAL:
                    return most * ROUNDINGS
        return inf

    def _along(self, eqn: Eqn, terms: Range = Range(1, 1)) -> Range:
        """A size, a maximum, or a sum; a sum of terms that are not negative is at least each, with roundings, too."""
        if eqn.op == "reduce_max":
            least = terms.low if terms.top is None else terms.top
            return Range(least if eqn.axis is D else -inf, terms.high)
        if eqn.axis is not D:
            return Range(0 if terms.low >= 0 else -inf, 0 if terms.high <= 0 else inf)
        off = 0 if eqn.op == "size" else 2 * row_depth(self.d) * eqn.out.type.dtype.roundoff
        low = self.d * terms.low * (1 - off if terms.low > 0 else 1 + off)
        high = self.d * terms.high * (1 + off if terms.high > 0 else 1 - off)
        if terms.low >= 0:
            low = max(low, terms.low, terms.top or 0)
        low, high = (n if abs(n) <= eqn.out.type.dtype.largest else copysign(inf, n) for n in (low, high))
        return Range(low / self.d, high / self.d) if eqn.op == "reduce_mean" else Range(low, high)


def _of_input(p: Value, positive: bool) -> Range:
    """Any finite number of its dtype; a number that a launch passes by value is at least 0."""
    most, least = p.type.dtype.largest, 0.0 if isinstance(p, ByValue) else p.type.dtype.least
    return Range(least if positive or isinstance(p, ByValue) else -most, most)


def _at(eqn: Eqn, *operands: float) -> float:
    """The result for numbers, in the arithmetic of the equation."""
    with np.errstate(all="ignore"):
        arrays = (np.full((1, 1), n, NUMPY_DTYPE[a.type.dtype]) for n, a in zip(operands, eqn.args, strict=True))
        return float(value_of(eqn, tuple(arrays), Lengths({}))[0, 0])


def _of_ends(eqn: Eqn, args: list[Range]) -> Range:
    """The range from the ends of the operands'; what every row has, it has after a change by numbers, too."""
    corners = [_at(eqn, *ends) for ends in product(*((r.low, r.high) for r in args))]
    known = [c for c in corners if not isnan(c)]  # a NaN is infinity less infinity, or 0 times infinity
    if not known or (len(args) == 1 and len(known) < len(corners)):
        return Range()
    tops = [r.low if r.low == r.high else r.top for r in args]
    top = _at(eqn, *(t for t in tops if t is not None)) if args and None not in tops else None
    return Range(min(known), max(known), top)
