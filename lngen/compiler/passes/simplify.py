"""Turn the raw cotangents of the derivation into the stable closed form that one derives by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction

from lngen.compiler.ir import Attr, Axis, Builder, D, Eqn, Graph, M, Value
from lngen.compiler.ir.axes import along
from lngen.compiler.ir.names import LONGEST_OF_COTANGENTS, describing, of_number, of_size, plain, widened
from lngen.compiler.ir.places import downstream, upstream
from lngen.compiler.passes.edit import cse, eqn_key
from lngen.compiler.passes.polynomial import (
    ONE,
    Atom,
    AxisSum,
    ForwardProducts,
    Order,
    Poly,
    Product,
    Size,
    Term,
    atom,
    axes_of,
    collect,
    common,
    content,
    fits,
    times,
    varies,
)

Terms = tuple[Term, ...]  # a sum; like terms are not added

# The most factors of a polynomial. A larger one is written out and goes on as one value. So the output grows with the
# number of equations, not with the number of paths through them.
FACTORS = 64


def simplify(graph: Graph, *seeds: str) -> Graph:
    """Write every value that depends on ``seeds`` as a sum of products, shorten it, and write it out again.

    ``seeds`` are cotangents: the values that depend on them are linear in all of them together.
    Forward values do not change; the rules for the others are:

    - reductions are linear, and a factor constant along the reduced axis moves out;
    - several terms are one sum. Only a term with a factor that is a sum over the same axis has a sum of its own: no sum
      waits for another;
    - the sum of a centred row (x - mean of x) is zero;
    - like terms are added, common factors taken out, and also a number per row that most terms share;
    - a product that the forward pass names (xhat = xc * rstd, or 1 / sum) is used by that name. Under a sum this keeps
      the terms near one in size: rstd * sum(dy * xc) becomes sum(dy * xhat);
    - a sum over the length of its axis is a mean.

    before (LayerNorm, 20 equations, three row sums one after the other)
    after:  dx = rstd * (dy_gamma - mean(dy_gamma) - xhat * mean(dy_gamma * xhat))
    """
    return cse(Simplifier(graph, seeds).run())


class Simplifier:
    """One run over one graph: ``poly`` reads values as polynomials, ``_write`` emits them.

    A subclass learns from ``acts`` and ``bounded`` which identities act, and what values are read as.
    """

    at: Value  # the cotangent that is read or written
    part_of: str  # and its name, for the parts of it

    def __init__(self, graph: Graph, seeds: tuple[str, ...]) -> None:
        self.graph = graph
        self.linear = downstream(graph.eqns, map(graph.param, seeds))
        forward = tuple(e for e in graph.eqns if e.out not in self.linear)
        self.producer = graph.producers()
        self.order = Order(self.linear, graph.values().values())
        self.products = ForwardProducts(forward)
        self.b = Builder(graph.name, params=graph.params, eqns=forward, taken=[r.name for r in graph.results])
        self.polys: dict[Value, Poly] = {}
        self.written: dict[Atom, Value] = {}
        self.known = {eqn_key(e, e.args): e.out for e in reversed(forward)}

    def run(self) -> Graph:
        """The simplified graph: each result's argument rewritten, the result's own equation kept."""
        live = upstream(self.graph.eqns, self.graph.results)
        for eqn in self.graph.eqns:
            if eqn.out in self.linear and eqn.out in live and eqn.out not in self.graph.results:
                self.at, self.part_of = eqn.out, plain(eqn.out.name)
                self.polys[eqn.out] = self.bounded(self._read(eqn), eqn.out)
        for result in self.graph.results:
            if result not in self.linear:  # zeros
                continue
            eqn = self.producer[result]  # every gradient ends in the cast to its input's dtype
            self.at, self.part_of = eqn.args[0], result.name
            source = self._write(self.poly(eqn.args[0]), widened(result.name), eqn.args[0])
            self.b.eqns.append(Eqn(result, "cast", (source,), eqn.attrs))
        return self.b.build(*self.graph.results, stage="simplify")

    def acts(self, identity: str, before: Iterable[Iterable[Term]], after: Iterable[Iterable[Term]]) -> None:
        """Called where an identity acts on ``at``; both sides are products of sums."""

    # ---- reading ----

    def poly(self, v: Value) -> Poly:
        """The polynomial of a value."""
        if v in self.polys:
            return self.polys[v]
        product, coefficient = self.products.monomial(v)
        return {product: coefficient} if coefficient else {}

    def bounded(self, poly: Poly, v: Value) -> Poly:
        """The polynomial of ``v``, or ``v`` as an atom if the polynomial is too large, or a sum of what is rotated."""
        if fits(poly, FACTORS) and not self._turns(poly, v):
            return poly
        value = self._write(poly, v.name, v)
        self.order.add(value)
        return {atom(value): Fraction(1)}

    def _turns(self, poly: Poly, v: Value) -> bool:
        """True for a sum with a rotated term: rotated elements are others, so that none of its terms cancel later."""
        eqn = self.producer[v]
        rotated = (self.producer.get(a) for p in poly for a, _ in p.powers if isinstance(a, Value))
        return eqn.op in ("add", "sub") and any(e is not None and e.op == "rotate" for e in rotated)

    def _read(self, eqn: Eqn) -> Poly:
        args = [self.poly(a) for a in eqn.args]
        match eqn.op:
            case "add":
                return self._added([*args[0].items(), *args[1].items()])
            case "sub":
                return self._added([*args[0].items(), *((p, -c) for p, c in args[1].items())])
            case "neg":
                return {p: -c for p, c in args[0].items()}
            case "mul":
                return self._multiplied(args[0], args[1])
            case "div" if len(args[1]) == 1:  # a literal 0 has no term, and is left to IEEE
                ((product, coefficient),) = args[1].items()
                return times(args[0], {product.inverse(): 1 / coefficient})
            case "reduce_sum" | "reduce_dot" | "reduce_mean":
                terms = self._multiplied(*args) if eqn.op == "reduce_dot" else args[0]
                scale = atom(Size(eqn.axis, eqn.to)).inverse() if eqn.op == "reduce_mean" else ONE
                return times(self._sum(terms, eqn.axis, eqn.to), {scale: Fraction(1)})
        return {atom(self._opaque(eqn)): Fraction(1)}

    def _added(self, terms: list[Term]) -> Poly:
        poly, often = collect(terms), Counter(p for p, _ in terms)
        alike = [(p, c) for p, c in terms if often[p] > 1]
        if alike:
            self.acts("like", [alike], [[(p, poly[p]) for p in dict(alike) if p in poly]])
        return poly

    def _multiplied(self, a: Poly, b: Poly) -> Poly:
        poly = times(a, b)
        if a and b and len(a) + len(b) > 2:
            self.acts("distributive", [a.items(), b.items()], [poly.items()])
        return poly

    def _sum(self, terms: Poly, axis: Axis, to: Axis | None) -> Poly:
        """The sum over an axis: one sum of all terms. Constant terms are multiplied, and centred ones are zero.

        Terms that vary along a coarser axis alone are summed over that, times the elements that one of it has.

        A sum over rows holds an accumulator per column, and sums of single terms may be far larger than their total.
        But a term with a factor that is a sum over the same axis is summed by itself, without the factor. Then no sum
        waits for another, and the gradient's sums over D are one phase of a kernel.
        """
        constant: Poly = {}
        centred: Poly = {}
        together: dict[Product, Poly] = {}
        coarse: dict[Axis, Poly] = {}
        for product, c in terms.items():
            inside, outside = product.split(lambda a: varies(a, axis, to))
            has = along(inside.axes, axis.root)
            if has is not None and has is not axis and (to is None or has.is_finer(to)):
                coarse.setdefault(has, {})[product] = c
            elif inside == ONE:
                constant[product] = c
            elif self._centred(inside, axis, to):
                centred[product] = c
            else:
                waits = any(isinstance(a, AxisSum) and (a.axis, a.to) == (axis, to) for a, _ in outside.powers)
                together.setdefault(outside if waits else ONE, {})[product] = c
        parts = [_total(part, axis, to) for part in (constant, centred, *together.values()) if part]
        if len(parts) > 1:
            self.acts("waits" if len(together) > 1 else "linear", [[_total(terms, axis, to)]], [parts])
        if centred:
            self.acts("centred", [[_total(centred, axis, to)]], [[]])
        found = [(product * atom(Size(axis, to)), c) for product, c in constant.items()]
        if constant:
            self.acts("leaves", [[_total(constant, axis, to)]], [found])
        for has, part in coarse.items():
            found += times(self._sum(part, has, to), {atom(Size(axis, has)): Fraction(1)}).items()
        return collect([*found, *(self._one_sum(group, axis, to) for group in together.values())])

    def _one_sum(self, terms: Poly, axis: Axis, to: Axis | None) -> Term:
        """The sum of the terms over an axis, times the factors that are constant along it in all of them."""
        outsides = [p.split(lambda a: not varies(a, axis, to))[0] for p in terms]
        outside = outsides[0] if len(terms) == 1 else common(outsides)
        first = terms[min(terms, key=self.order.key)]
        scale = content(terms.values()) * (-1 if first < 0 else 1)
        inside = frozenset((p * outside.inverse(), c / scale) for p, c in terms.items())
        found = outside * atom(AxisSum(axis, inside, to=to)), scale
        if found != _total(terms, axis, to):
            self.acts("leaves", [[_total(terms, axis, to)]], [[found]])
        return found

    def _centred(self, product: Product, axis: Axis, to: Axis | None) -> bool:
        """True for x - mean(x) over ``axis``, whose sum is zero."""
        ((a, n), *rest) = product.powers
        eqn = self.producer.get(a) if isinstance(a, Value) and a not in self.linear else None
        if rest or n != 1 or eqn is None or eqn.op != "sub":
            return False
        mean = self.producer.get(eqn.args[1])
        if mean is None or (mean.op, mean.args) != ("reduce_mean", eqn.args[:1]):
            return False
        return (mean.axis, mean.to) == (axis, to)

    def _opaque(self, eqn: Eqn) -> Value:
        """An equation outside the normal form: its arguments are written, the equation is kept."""
        args = tuple(self._write(self.polys[a], a.name, a) if a in self.polys else a for a in eqn.args)
        if self.b.is_free(eqn.out.name):
            self.b.reserve(eqn.out.name, "a cotangent")
            self.b.eqns.append(Eqn(eqn.out, eqn.op, args, eqn.attrs))
            return eqn.out
        value = self.b.emit(eqn.op, eqn.out.name, args, **dict(eqn.attrs))
        self.order.add(value)
        return value

    # ---- writing ----

    def _write(self, poly: Poly, name: str, like: Value) -> Value:
        """Equations for a polynomial, over the axes of ``like``; its value is called ``name`` if it needs any."""
        value = self._write_poly(poly, name, like)
        for axis in like.type.axes:  # terms that varied along an axis may have cancelled
            if axis not in value.type.axes:
                name = f"{plain(value.name)}_{axis.name.lower()}"
                value = self._emit("expand", name, value, axis=axis)
        return value

    def _write_poly(self, poly: Poly, name: str, like: Value) -> Value:
        terms = self._grouped(self._added(self._use_names(poly.items())), name, like)
        if not terms:
            return self._number(0.0, like)
        several = len(terms) > 1
        factor, scale = (common(terms), content(terms.values())) if several else (ONE, Fraction(1))
        rest = [(p * factor.inverse(), c / scale) for p, c in terms.items()]
        if (factor, scale) != (ONE, Fraction(1)):
            self.acts("factor", [terms.items()], [[(factor, scale)], rest])
        rest.sort(key=lambda t: (t[1] < 0, self._sums_in(t[0]), len(t[0].powers), self.order.key(t[0])))
        factors = self._in_turn(factor, scale)
        value = self._write_sum(rest, _part(name) if factors else name, like)
        for left, (product, c) in zip(range(len(factors) - 1, -1, -1), factors, strict=True):
            value = self._emit("mul", _part(name) if left else name, self._write_term(product, c, like), value)
        return value

    def _grouped(self, terms: Poly, name: str, like: Value) -> Poly:
        """The terms; those that share a number per row become one term, if other terms lack that number.

        rstd * a - rstd * b + dh is rstd * (a - b) + dh: the terms of a norm's gradient cancel before dh is added.
        """
        shared = Counter(a for p in terms for a, n in p.powers if n > 0 and axes_of(a) == (M,) and self._is_forward(a))
        several = {a: n for a, n in shared.items() if 1 < n < len(terms)}
        if not several:
            return terms
        most = min(several, key=lambda a: (-several[a], self.order.key(atom(a))))
        group = {p: c for p, c in terms.items() if p.get(most) > 0}
        value = self._write_poly(group, _part(name), like)
        self.order.add(value)
        return {p: c for p, c in terms.items() if p not in group} | {atom(value): Fraction(1)}

    def _is_forward(self, a: Atom) -> bool:
        return isinstance(a, Value) and a not in self.linear

    def _in_turn(self, factor: Product, scale: Fraction) -> list[Term]:
        """The factors of a sum: a cotangent times all else at once, forward values one after the other.

        Factors that are constant along a row come first, so that other uses of the sum share the product with them.
        """
        if any(a in self.linear or isinstance(a, AxisSum) for a, _ in factor.powers):
            return [(factor, scale)]
        rows, wide = factor.split(lambda a: along(axes_of(a), D) is None)
        turns = [(rows, scale)] + [(atom(a), Fraction(1)) for a, n in self.order.sorted(wide) for _ in range(n)]
        return [t for t in turns if t != (ONE, Fraction(1))]

    def _write_sum(self, terms: list[Term], name: str, like: Value) -> Value:
        total: Value | None = None
        for left, (product, coefficient) in zip(range(len(terms) - 1, -1, -1), terms, strict=True):
            term = self._write_term(product, abs(coefficient), like)
            part = _part(name) if left else name
            if total is None:
                total = self._emit("neg", part, term) if coefficient < 0 else term
            else:
                total = self._emit("sub" if coefficient < 0 else "add", part, total, term)
        assert total is not None
        return total

    def _write_term(self, product: Product, coefficient: Fraction, like: Value) -> Value:
        if product == ONE:
            return self._number(float(coefficient), like)
        if coefficient == 1:
            return self._write_product(product, like)
        # Scale the narrow part: once per row is cheaper than once per element.
        narrow, wide = product.split(lambda a: len(axes_of(a)) < len(product.axes))
        factor = self._number(float(coefficient), like)
        part = factor if narrow == ONE else self._describe("mul", self._write_product(narrow, like), factor)
        return part if wide == ONE else self._describe("mul", self._write_product(wide, like), part)

    def _write_product(self, product: Product, like: Value) -> Value:
        """The product of the factors: seeds first, then by axes, so that equal prefixes are shared.

        A divisor that is constant along a row divides the factors that are constant as well, if there are any.
        """
        divisors = product.split(lambda a: product.get(a) < 0)[0]
        rows, wide = product.split(lambda a: along(axes_of(a), D) is None)
        if divisors != ONE and along(divisors.axes, D) is None and wide != ONE and rows != divisors:
            return self._describe("mul", self._write_product(wide, like), self._write_product(rows, like))
        above = [a for a, n in self.order.sorted(product) for _ in range(n)]
        below = [a for a, n in self.order.sorted(product) for _ in range(-n)]
        value = self._write_atom(above[0], like) if above else self._number(1.0, like)
        for a in above[1:]:
            right = self._write_atom(a, like)
            value = self._describe("mul", value, right)
        for a in below:
            value = self._describe("div", value, self._write_atom(a, like))
        return value

    def _emit(self, op: str, name: str, *args: Value, **attrs: Attr) -> Value:
        """A value called ``name``, or the one that the equation has already, whatever that is called."""
        key = eqn_key(Eqn(self.at, op, args, tuple(sorted(attrs.items()))), args)
        if key not in self.known:
            self.known[key] = self.b.emit(op, name, args, **attrs)
        return self.known[key]

    def _describe(self, op: str, *args: Value, **attrs: Attr) -> Value:
        """A value with the name that its operands give it, or what it is a part of."""
        return self._emit(op, describing(op, args, self.part_of, LONGEST_OF_COTANGENTS), *args, **attrs)

    def _number(self, value: float, like: Value) -> Value:
        return self._emit("const", of_number(value), value=value, dtype=like.type.dtype)

    def _write_atom(self, a: Atom, like: Value) -> Value:
        if isinstance(a, Value):
            return a
        if a not in self.written:
            if isinstance(a, Size):
                name, per = of_size(a.axis, a.per), {} if a.per is None else {"per": a.per}
                self.written[a] = self._emit("size", name, axis=a.axis, dtype=like.type.dtype, **per)
            else:
                of, to = self._write_summed(a, like), {} if a.to is None else {"to": a.to}
                if a.axis not in of.type.axes:
                    of = self._emit("expand", f"{plain(of.name)}_{a.axis.name.lower()}", of, axis=a.axis)
                self.written[a] = self._describe("reduce_mean" if a.mean else "reduce_sum", of, axis=a.axis, **to)
        return self.written[a]

    def _write_summed(self, s: AxisSum, like: Value) -> Value:
        if s.product is None:
            return self._write_poly(dict(s.terms), f"{self.part_of}_terms", like)
        ((product, _),) = self._use_names([(s.product, Fraction(1))])
        return self._write_product(product, like)

    def _use_names(self, terms: Iterable[Term]) -> list[Term]:
        """Forward products by their names, first inside the sums, then outside; sums over sizes as means."""
        return self._each("mean", self._with_means, self._each("names", self._with_names, [*terms]))

    def _each(self, identity: str, rule: Callable[[Product], Product], terms: list[Term]) -> list[Term]:
        """The terms after a rule, which acts on those that it changes."""
        after = [(rule(p), c) for p, c in terms]
        changed = [pair for pair in zip(terms, after, strict=True) if pair[0] != pair[1]]
        if changed:
            self.acts(identity, [[old for old, _ in changed]], [[new for _, new in changed]])
        return after

    def _with_names(self, product: Product) -> Product:
        for s in self.order.sums(product):
            product = self.products.absorb(product, s)
        return self.products.shorten(product)

    def _with_means(self, product: Product) -> Product:
        for s in self.order.sums(product):
            size = atom(Size(s.axis, s.to)).inverse()
            if not s.mean and product.get(Size(s.axis, s.to)) < 0:
                product = product * atom(s).inverse() * size.inverse() * atom(replace(s, mean=True))
        return product

    def _sums_in(self, product: Product) -> int:
        return sum(isinstance(a, AxisSum) for a, _ in product.powers)


def _total(terms: Poly, axis: Axis, to: Axis | None) -> Term:
    """The sum of all terms over an axis, as it is before any rule."""
    return atom(AxisSum(axis, frozenset(terms.items()), to=to)), Fraction(1)


def _part(name: str) -> str:
    """The name of a part of the value that gets ``name``."""
    return f"{name.removesuffix('_part')}_part"
