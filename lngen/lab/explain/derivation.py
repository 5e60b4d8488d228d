"""How the equations of a kernel came about: the forward, the derivative of each equation, the identities that acted.

All of it is read from the graphs after the passes and from their history. Every text in ``data`` is in the notation of
mathematics, so both sides of each statement can be evaluated: ``names`` has the value of each name. A power is written
``x^2``, a reduction with its axis, ``sum_M(x)``, and one to a coarser axis with both, ``sum_D_H(x)``; D and M alone are
the lengths, and D_H is what an element of H has of D. Roundings are left out, and a value has one name however it is
rounded. Read as Python (``^`` as ``**``), a text gives its value.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

from lngen.compiler.ir import OPS, WIDE, D, Eqn, Graph, M, S, Value, derived_axes, is_row_fold
from lngen.compiler.ir.names import fresh
from lngen.compiler.ir.places import depths, downstream
from lngen.compiler.passes import Trace
from lngen.compiler.passes.polynomial import Atom, AxisSum, Product, Size
from lngen.compiler.passes.simplify import Terms
from lngen.compiler.spec import Spec
from lngen.lab.explain.history import IDENTITIES, history
from lngen.lab.explain.section import WIDTH, Lines, Section, Table, Text, wrapped
from lngen.lab.explain.statements import FOLDED, along, check_equations

Factors = Mapping[str, int]  # texts that need no parentheses, with their exponents
Term = tuple[Fraction, Factors]
ONE = Fraction(1)
PLAIN = 64  # a number is written as a fraction if its denominator is no larger

# What no value is called: lengths and functions.
AXES = (M, D, S)
RESERVED = {*map(str, AXES), *OPS, "where", *(f"{name}_{axis}" for name in FOLDED for axis in AXES)}
CHOICES: Mapping[str, Callable[..., str]] = {
    "select_gt": lambda a, b, c: f"where({a} > {b}, {c}, 0)",
    "select_eq": lambda a, b, c: f"where({a} == {b}, {c}, 0)",
    "take": lambda a, b: f"{a}[{b}]",
    "gather": lambda a, b: f"{a}[{b}]",
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
    lengths = {along(a, to) for a in (*WIDE, *derived_axes(graph)) for to in (None, *derived_axes(graph))}
    reserved = RESERVED | lengths | {f"{name}_{each}" for name in FOLDED for each in lengths}
    label = {root[r]: r.name for r in reversed(graph.results) if r in root and root[r] not in graph.params}
    names: dict[Value, str] = {}
    for r in dict.fromkeys(root.values()):
        names[r] = fresh(label.get(r, r.name), reserved.union(names.values()))
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
            case "cast" | "expand" | "detach" | "stop_gradient" | "sealed":
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
                return [_factor(along(eqn.axis, eqn.per))]
            case "mul" | "weighted":
                return [self._product(*args)]
            case "div" | "div_scale":
                return [_times(self._factors(args[0]), _power(self._factors(args[1]), -1))]
            case "rsqrt":
                return [(ONE, {f"sqrt({self.text(args[0])})": -1})]
            case "reduce_dot":
                return [_factor(f"sum_{along(eqn.axis, eqn.to)}({_sum([self._product(*args)])})")]
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
        name = f"{eqn.op.removeprefix('reduce_')}_{along(eqn.axis, eqn.to)}" if "axis" in attrs else eqn.op
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
                return _factor(along(a.axis, a.per))
            case AxisSum():
                return _factor(f"{'mean' if a.mean else 'sum'}_{along(a.axis, a.to)}({self.polynomial(a.terms)})")


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


# ---- the section ----

STOPPED = "The gradient is not that of the forward: the cotangents of {} are stopped, as the graph says."
EXAMPLES = 2  # steps of one identity that are printed; ``data`` has all

PASSES: Mapping[str, str] = {
    "decompose": "means, reciprocal roots and functions are written as the equations that they stand for",
    "place_fma": "a product that is only added or summed is added without a rounding of its own",
    "place_spread": "each segment of a long row is measured from its own mean, so that one exchange gives all sums",
    "compensate": "a mean whose distances are squared is corrected by their mean, and so is the sum of the squares",
    "order_sums": "each sum has one order, which its attributes spell",
}


def derivation(spec: Spec) -> Section:
    """The derivation of a backward; of a forward its equations, and what the passes made of them."""
    of_forward = spec.direction == "fwd" or spec.by_sets  # sums over sets have no words yet
    return _forward(spec) if of_forward else _Derivation(spec).section()


def _forward(spec: Spec) -> Section:
    graph, changed = spec.forward(), _changed(spec.trace())
    names = forward_names(graph)
    equations = _equations(graph, names)
    named = {v.name: text for v, text in names.items()}
    passes = (f"{key} ({', '.join(named.get(v, v) for v in vs)}): {PASSES[key]}" for key, vs in changed.items())
    blocks = (
        Lines(_continued(f"{e['name']} = {e['equation']}" for e in equations), "Equations, without roundings"),
        Lines(_continued(passes), "What the passes changed, in their order"),
        Text(f"lngen explain {spec.with_direction('bwd')} shows the gradients that are derived from these equations."),
    )
    data = {"names": _by_text(names), "forward": equations, "passes": changed}
    return Section("derivation", "Derivation", blocks, data)


class _Derivation:
    """One backward: names of its values, and the statements about them."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.trace, self.history = spec.trace(), history(spec)
        self.forward, self.raw, self.saved = (self.trace[name] for name in ("build", "vjp", "save"))
        self.values = forward_names(self.forward)
        self.totals = {self.values[v]: ct for v, ct in self.history.cotangents.items()}  # by the values they belong to
        given = {p: p.name for p in self.raw.params if p not in self.values}
        given |= {e.out: e.args[0].name for e in self.raw.eqns if e.op == "cast" and e.args[0] in given}
        seeds = {self.values[r]: f"d{r.name}" for r in self.forward.results if r.name in spec.differentiated}
        self.names = self.values | given
        self.labels: dict[str, str] = {}  # of the totals
        for name, ct in self.totals.items():
            taken = {*RESERVED, *self.names.values(), *self.labels.values()}
            label = fresh(f"d{name}_total" if name in seeds else f"d{name}", taken)
            self.labels[name] = seeds[name] if name in seeds and ct in given else label
            self.names.setdefault(ct, self.labels[name])
        self.shared = self._shared()
        # Cotangents are not named in the closed form; in polynomials they are the atoms that simplify left as they are.
        closed = {v: text for v, text in self.names.items() if v not in self.history.polys} | self.shared
        self.closed = Notation(closed, self.saved, self.raw)
        graphs = self.raw, self.trace["simplify"], self.saved
        self.polynomials = Notation(self.names | self.shared, *graphs, shared=self.shared)

    def _shared(self) -> dict[Value, str]:
        """Names of values that forward does not have: those used more than once, and factors of cotangents."""
        own = [
            e for e in self.saved.eqns if e.out not in self.names and e.op not in ("const", "size", "cast", "expand")
        ]
        linear = downstream(self.saved.eqns, (p for p in self.saved.params if p not in self.values))
        uses = Counter(a for e in self.saved.eqns if e.out not in self.values for a in e.args)
        of_linear = {a for e in own if e.out in linear for a in e.args}
        found: dict[Value, str] = {}
        for value in (e.out for e in own):
            if uses[value] > 1 or (value in of_linear and value not in linear):
                short = "g" if value.type.axes == WIDE else "s"
                taken = {*RESERVED, *self.names.values(), *found.values()}
                found[value] = fresh(short if value in linear else value.name, taken)
        return found

    # ---- statements ----

    @cached_property
    def derivatives(self) -> list[dict[str, str]]:
        """What each equation adds to the cotangents of its operands; casts add what they are given."""
        found = []
        for c in self.history.contributions:
            of, by = self.values[c.eqn.out], self.values[c.operand]
            text = Notation({**self.values, c.given: self.labels[of]}, self.raw).text(c.added)
            statement = {"of": of, "by": by, "given": self.labels[of], "to": self.labels[by], "adds": text}
            found += [statement | {"value": c.added.name}] if of != by else []
        return found

    @cached_property
    def cotangents(self) -> list[dict[str, str]]:
        """Each cotangent as the sum of what equations add to it, and as the polynomial that simplify read."""
        raw, found = Notation(self.names, self.raw), []
        for name, ct in self.totals.items():
            if ct in self.history.polys and self.names[ct] == self.labels[name]:
                after = self.polynomials.polynomial(self.history.polys[ct].items())
                statement = {"cotangent": self.labels[name], "before": raw.definition(ct), "after": after}
                found.append(statement | {"value": ct.name})
        return found

    @cached_property
    def steps(self) -> list[dict[str, str]]:
        """The identities, in the order in which they acted; equal steps once."""
        owner = {**self.names}  # the cotangent that an unnamed value becomes a part of
        for eqn in reversed(self.raw.eqns):
            owner |= {a: owner[eqn.out] for a in eqn.args if a not in self.names and eqn.out in owner}
        undone, found = Notation(self.values, self.saved), []
        for s in self.history.steps:
            step = {"identity": s.identity, "on": owner.get(s.at, s.at.name), "value": s.at.name}
            if s.before:
                step |= {"before": self.polynomials.product(s.before), "after": self.polynomials.product(s.after)}
            elif s.identity == "undone":
                step |= {"before": self.values[s.at], "after": undone.definition(s.at)}
            found += [step] if step not in found else []
        return found

    @cached_property
    def gradients(self) -> dict[str, str]:
        """The closed form of each result; one that equals an earlier one is that one."""
        producer, first, found = self.saved.producers(), dict[Value, str](), dict[str, str]()
        for result in self.saved.results:
            source = producer[result].args[0]
            found[result.name] = first.get(source) or self.closed.text(source)
            first.setdefault(source, result.name)
        return found

    @cached_property
    def phases(self) -> list[list[str]]:
        """The reductions of a row, by the number of reductions that each has to wait for."""
        graph = self.trace["decompose"]
        levels, notation, found = depths(graph), Notation(self.closed.names, graph), dict[int, list[str]]()
        for eqn in filter(is_row_fold, graph.eqns):
            found.setdefault(levels[eqn.out], []).append(notation.definition(eqn.out))
        return [found[level] for level in sorted(found)]

    # ---- the section ----

    def section(self) -> Section:
        """All statements in ``data``, the telling ones in the blocks."""
        equations, acted = _equations(self.forward, self.values), {s["identity"] for s in self.steps}
        shared = {name: self.closed.definition(v) for v, name in self.shared.items()}
        totals = {self.labels[name]: ct.name for name, ct in self.totals.items()}
        stopped = [self.values[e.out] for e in self.forward.eqns if e.op == "stop_gradient"]
        data = {
            "names": _by_text(self.names) | totals | _by_text(self.shared),
            "forward": equations,
            "derivatives": self.derivatives,
            "cotangents": self.cotangents,
            "steps": self.steps,
            "identities": {key: why for key, why in IDENTITIES.items() if key in acted},
            "shared": shared,
            "gradients": self.gradients,
            "phases": self.phases,
            "passes": _changed(self.trace),
            "stopped": stopped,
        }
        check_equations(data, self.spec)
        changed = {s["on"] for s in self.steps if s["identity"] != "repeated"}
        lines = [f"with {name} = {text}" for name, text in shared.items()]
        lines += [f"{c['cotangent']} = {c['after']}" for c in self.cotangents if c["cotangent"] in changed]
        head = "Forward, and the derivative of each equation (dv is the cotangent of v)"
        blocks = (
            Table(("equation", "adds to the cotangents"), tuple(self._rows(equations)), head),
            Lines(_continued(lines), "Cotangents as sums of products, where identities simplified them"),
            Lines(_continued(self._identities()), "These identities, and where each acted"),
            Lines(_continued(self._closed_form()), "The gradients"),
        )
        first = (Text(STOPPED.format(", ".join(stopped))),) if stopped else ()
        return Section("derivation", "Derivation", (*first, *blocks), data)

    def _rows(self, equations: Iterable[Mapping[str, str]]) -> Iterator[tuple[str, str]]:
        """The equations, and what each adds to the cotangents of its operands."""
        for e in equations:
            adds = (f"{d['to']} += {d['adds']}" for d in self.derivatives if d["of"] == e["name"])
            yield f"{e['name']} = {e['equation']}", ";  ".join(adds) or "-"

    def _identities(self) -> Iterator[str]:
        for key, why in IDENTITIES.items():
            acted = [s for s in self.steps if s["identity"] == key]
            if acted:
                yield f"{key} ({', '.join(dict.fromkeys(s['on'] for s in acted))}): {why}"
            for step in (shown := [s for s in acted if "before" in s])[:EXAMPLES]:
                line = f"  {step['before']} = {step['after']}"
                yield from [line] if len(line) <= WIDTH - 2 else [f"  {step['before']}", f"    = {step['after']}"]
            if len(shown) > EXAMPLES:
                yield f"  and {len(shown) - EXAMPLES} more"

    def _closed_form(self) -> Iterator[str]:
        yield from (f"{name} = {text}" for name, text in self.gradients.items())
        for number, sums in enumerate(self.phases, 1):
            what = f"Sums of a row{f', phase {number}' if len(self.phases) > 1 else ''}: {', '.join(sums)}"
            yield f"{what}: none waits for another, so they are one reduction phase" if len(sums) > 1 else what


def _by_text(names: Mapping[Value, str]) -> dict[str, str]:
    """The value of each name: the first of those that are casts of one another."""
    return {text: value.name for value, text in reversed([*names.items()])}


def _equations(graph: Graph, names: Mapping[Value, str]) -> list[dict[str, str]]:
    """The equations of a forward, less casts."""
    notation = Notation(names, graph)
    kept = [e.out for e in graph.eqns if e.out in names and e.op != "cast"]
    return [{"name": names[v], "equation": notation.definition(v), "value": v.name} for v in kept]


def _changed(trace: Trace) -> dict[str, list[str]]:
    """The values that each pass computes by another equation than the pass before."""
    found = {}
    for before, after in pairwise(trace):
        was = trace[before].producers()
        found[after] = [e.out.name for e in trace[after].eqns if was.get(e.out, e) != e]
    return {key: found[key] for key in PASSES if found.get(key)}


def _continued(lines: Iterable[str]) -> tuple[str, ...]:
    """Lines that fit the section; what continues one is indented."""
    indented = ((line.lstrip(), " " * (len(line) - len(line.lstrip()))) for line in lines)
    return tuple(part for text, indent in indented for part in wrapped(text, indent, f"{indent}    "))
