"""Equations and polynomials in the notation of mathematics, as plain text: ``dx = rstd * (g - mean_D(g))``.

A power is written ``x^2``, a reduction with its axis, ``sum_M(x)``; D and M alone are the lengths. Roundings are left
out, and a value has one name however it is rounded. Read as Python (``^`` as ``**``), a text gives its value.
"""

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction

from lngen.ir import OPS, Axis, Eqn, Graph, Value
from lngen.ir.builder import fresh
from lngen.passes.identities import Terms
from lngen.passes.polynomial import Atom, AxisSum, Product, Size

Factors = Mapping[str, int]  # texts that need no parentheses, with their exponents
Term = tuple[Fraction, Factors]
ONE = Fraction(1)
PLAIN = 64  # a number is written as a fraction if its denominator is no larger

# What no value is called: lengths and functions.
RESERVED = {*map(str, Axis), *OPS, "where", *(f"{name}_{axis}" for name in ("sum", "mean", "max") for axis in Axis)}
CHOICES: Mapping[str, Callable[..., str]] = {
    "select_gt": lambda a, b, c: f"where({a} > {b}, {c}, 0)",
    "select_eq": lambda a, b, c: f"where({a} == {b}, {c}, 0)",
    "where_gt": lambda a, b, c, d: f"where({a} > {b}, {c}, {d})",
}


def is_plain(value: float) -> bool:
    """True for a number that is written as it is; others have the name of their value."""
    return abs(value) < PLAIN and Fraction(value).denominator <= PLAIN


def forward_names(graph: Graph) -> dict[Value, str]:
    """A name for each value of a forward graph: casts of one value share that of an input or a result, if one has it.

    Plain constants and lengths have none.
    """
    root: dict[Value, Value] = {p: p for p in graph.params}
    for e in graph.eqns:
        if e.op != "size" and not (e.op == "const" and is_plain(e.value)):
            root[e.out] = root.get(e.args[0], e.out) if e.op == "cast" else e.out
    label = {root[r]: r.name for r in reversed(graph.results) if r in root and root[r] not in graph.params}
    names: dict[Value, str] = {}
    for r in dict.fromkeys(root.values()):
        names[r] = fresh(label.get(r, r.name), RESERVED.union(names.values()))
    return {v: names[r] for v, r in root.items()}


class Notation:
    """The texts of values: the name of one that has any, else the expression that computes it from such values.

    Polynomials have the products ``shared`` by their names as well.
    """

    def __init__(self, names: Mapping[Value, str], *graphs: Graph, shared: Mapping[Value, str] | None = None) -> None:
        self.names = names
        self.eqns = {e.out: e for graph in reversed(graphs) for e in graph.eqns}
        products = {name: self.eqns[v] for v, name in (shared or {}).items()}
        self._shared = {name: self._product(*e.args) for name, e in products.items() if e.op == "mul"}

    def text(self, value: Value) -> str:
        """The name or the expression."""
        return _sum(self._terms(value))

    def definition(self, value: Value) -> str:
        """The right side of the equation that defines a value, whether or not it has a name."""
        return _sum(self._expression(self.eqns[value])) if value in self.eqns else self.names[value]

    def _terms(self, value: Value) -> list[Term]:
        named = value in self.names or value not in self.eqns
        return [_factor(self.names.get(value, value.name))] if named else self._expression(self.eqns[value])

    def _expression(self, eqn: Eqn) -> list[Term]:
        """A value as a sum of products."""
        args = eqn.args
        match eqn.op:
            case "cast" | "expand" | "detach":
                return self._terms(args[0])
            case "add":
                return [*self._terms(args[0]), *self._terms(args[1])]
            case "sub":
                return [*self._terms(args[0]), *((-c, f) for c, f in self._terms(args[1]))]
            case "neg":
                return [(-c, f) for c, f in self._terms(args[0])]
            case "fma":
                return [self._product(*args[:2]), *self._terms(args[2])]
            case "const":
                value, sign = float(eqn.value), Fraction(-1 if eqn.value < 0 else 1)
                return [(Fraction(value), {}) if is_plain(value) else (sign, {repr(abs(value)): 1})]
            case "size":
                return [_factor(str(eqn.axis))]
            case "mul":
                return [self._product(*args)]
            case "div":
                return [_times(self._factors(args[0]), _power(self._factors(args[1]), -1))]
            case "rsqrt":
                return [(ONE, {f"sqrt({self.text(args[0])})": -1})]
            case "reduce_dot":
                return [_factor(f"sum_{eqn.axis}({_sum([self._product(*args)])})")]
        return [_factor(self._call(eqn))]

    def _product(self, a: Value, b: Value) -> Term:
        return _times(self._factors(a), self._factors(b))

    def _factors(self, value: Value) -> Term:
        terms = self._terms(value)
        return terms[0] if len(terms) == 1 else _factor(f"({_sum(terms)})")

    def _call(self, eqn: Eqn) -> str:
        args, attrs = [self.text(a) for a in eqn.args], dict(eqn.attrs)
        if eqn.op in CHOICES:
            return CHOICES[eqn.op](*args)
        args += [f"{key}={value!r}" for key, value in attrs.items() if isinstance(value, float)]
        name = f"{eqn.op.removeprefix('reduce_')}_{eqn.axis}" if "axis" in attrs else eqn.op
        return f"{name}({', '.join(args)})"

    # ---- polynomials ----

    def product(self, sums: tuple[Terms, ...]) -> str:
        """A product of sums of terms; a sum of no terms is 0."""
        several = len(sums) > 1
        return " * ".join(f"({self.polynomial(s)})" if several and len(s) > 1 else self.polynomial(s) for s in sums)

    def polynomial(self, terms: Iterable[tuple[Product, Fraction]]) -> str:
        """A sum of terms, positive ones first, short ones before long ones, factors by their names."""
        return _sum(sorted((self._monomial(*t) for t in terms), key=lambda t: (t[0] < 0, len(t[1]), [*t[1].items()])))

    def _monomial(self, product: Product, c: Fraction) -> Term:
        term: Term = c, {}
        for a, n in product.powers:
            term = _times(term, _power(self._atom(a), n))
        for name, shared in self._shared.items():
            if shared[1].items() <= term[1].items():
                term = _times(term, _times(_power(shared, -1), _factor(name)))
        return term[0], dict(sorted(term[1].items(), key=lambda f: ("(" in f[0], f)))

    def _atom(self, a: Atom) -> Term:
        match a:
            case Value():
                return self._factors(a)
            case Size():
                return _factor(str(a.axis))
            case AxisSum():
                return _factor(f"{'mean' if a.mean else 'sum'}_{a.axis}({self.polynomial(a.terms)})")


def _factor(text: str) -> Term:
    return ONE, {text: 1}


def _times(a: Term, b: Term) -> Term:
    powers = {f: a[1].get(f, 0) + b[1].get(f, 0) for f in (*a[1], *b[1])}
    return a[0] * b[0], {f: n for f, n in powers.items() if n}


def _power(a: Term, n: int) -> Term:
    """The power; 1 / 0 keeps its zero."""
    return (a[0] ** n, {f: m * n for f, m in a[1].items()}) if a[0] else (ONE, {"0": n})


def _sum(terms: Iterable[Term]) -> str:
    text = ""
    for c, factors in terms:
        sign = ("-" if c < 0 else "") if not text else " - " if c < 0 else " + "
        text += sign + _product_text(abs(c), factors)
    return text or "0"


def _product_text(c: Fraction, factors: Factors) -> str:
    above = [f if n == 1 else f"{f}^{n}" for f, n in factors.items() if n > 0]
    below = [f if n == -1 else f"{f}^{-n}" for f, n in factors.items() if n < 0]
    number = str(c) if c.denominator <= PLAIN else repr(float(c))
    return " / ".join([" * ".join([number, *above] if c != 1 or not above else above), *below])
