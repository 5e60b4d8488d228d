"""Turn the derivation's raw cotangents into the stable closed form one would derive by hand."""

from __future__ import annotations

import math
from fractions import Fraction

from lngen.ir import Axis, Builder, D, Eqn, Graph, Value
from lngen.passes.clean import cse
from lngen.passes.edit import downstream, upstream
from lngen.passes.polynomial import ONE, Atom, Poly, Product, Size, Sum, atom, axes_of, collect, common, times


def simplify(graph: Graph, *seeds: str) -> Graph:
    """Write every value that depends on ``seeds`` as a sum of products, shorten it, and write it out again.

    ``seeds`` are cotangents: what depends on them is linear in all of them together.
    Forward values are left as they are; the rules for the rest:

    - reductions are linear, and a factor constant along the reduced axis moves out;
    - the sum of a centred row (x - mean of x) is zero;
    - like terms are added, common factors taken out;
    - a product the forward pass has a name for (xhat = xc * rstd) is used by that name, also under a sum,
      where it keeps the terms of the order of one: rstd * sum(dy * xc) becomes sum(dy * xhat);
    - a sum over the length of its axis is a mean.

    before (LayerNorm, 20 equations, three row sums one after the other)
    after:  dx = rstd * (dy_gamma - mean(dy_gamma) - xhat * mean(dy_gamma * xhat))
    """
    return cse(_Simplifier(graph, seeds).run())


class _Simplifier:
    """One run over one graph: ``poly`` reads values as polynomials, ``_write`` emits them."""

    def __init__(self, graph: Graph, seeds: tuple[str, ...]) -> None:
        self.graph = graph
        self.linear = downstream(graph.eqns, map(graph.param, seeds))
        forward = tuple(e for e in graph.eqns if e.out not in self.linear)
        self.producer = graph.producers()
        self.order = {v: i for i, v in enumerate(graph.values().values())}
        self.b = Builder(graph.name, params=graph.params, eqns=forward, taken=graph.values())
        self.polys: dict[Value, Poly] = {}
        self.named: list[tuple[Product, Value]] = []
        for eqn in forward:
            self._name(eqn)
        self.written: dict[Atom, Value] = {}
        self.pairs: dict[tuple[str, Value, Value], Value] = {}

    def run(self) -> Graph:
        """The simplified graph: each result's argument rewritten, the result's own equation kept."""
        live = upstream(self.graph.eqns, self.graph.results)
        for eqn in self.graph.eqns:
            if eqn.out in self.linear and eqn.out in live and eqn.out not in self.graph.results:
                self.polys[eqn.out] = self._read(eqn)
        for result in self.graph.results:
            if result not in self.linear:  # zeros
                continue
            eqn = self.producer[result]  # every gradient ends in the cast to its input's dtype
            source = self._write(self.poly(eqn.args[0]), f"{result.name}32", eqn.args[0])
            self.b.eqns.append(Eqn(result, "cast", (source,), eqn.attrs))
        return self.b.build(*self.graph.results, stage="simplify")

    # ---- reading ----

    def poly(self, v: Value) -> Poly:
        """The polynomial of a value."""
        if v in self.polys:
            return self.polys[v]
        product, coefficient = self._monomial(v)
        return {product: coefficient} if coefficient else {}

    def _read(self, eqn: Eqn) -> Poly:
        args = [self.poly(a) for a in eqn.args]
        match eqn.op:
            case "add":
                return collect([*args[0].items(), *args[1].items()])
            case "sub":
                return collect([*args[0].items(), *((p, -c) for p, c in args[1].items())])
            case "neg":
                return {p: -c for p, c in args[0].items()}
            case "mul":
                return times(args[0], args[1])
            case "div" if eqn.args[1] not in self.linear:
                product, coefficient = self._monomial(eqn.args[1])
                if coefficient:  # a literal 0 is left to IEEE
                    return times(args[0], {product.inverse(): 1 / coefficient})
            case "reduce_sum" | "reduce_dot" | "reduce_mean":
                terms = times(*args) if eqn.op == "reduce_dot" else args[0]
                total = collect(t for p, c in terms.items() for t in self._sum(p, c, eqn.axis))
                scale = atom(Size(eqn.axis)).inverse() if eqn.op == "reduce_mean" else ONE
                return times(total, {scale: Fraction(1)})
        return {atom(self._opaque(eqn)): Fraction(1)}

    def _sum(self, product: Product, coefficient: Fraction, axis: Axis) -> list[tuple[Product, Fraction]]:
        inside, outside = product.split(lambda a: axis in axes_of(a))
        if inside == ONE:
            return [(outside * atom(Size(axis)), coefficient)]
        if self._centred(inside, axis):
            return []
        return [(outside * atom(Sum(axis, inside)), coefficient)]

    def _centred(self, product: Product, axis: Axis) -> bool:
        """True for x - mean(x) over ``axis``, whose sum is zero."""
        ((a, n), *rest) = product.powers
        eqn = self.producer.get(a) if isinstance(a, Value) else None
        if rest or n != 1 or eqn is None or eqn.op != "sub":
            return False
        mean = self.producer.get(eqn.args[1])
        return mean is not None and (mean.op, mean.args) == ("reduce_mean", eqn.args[:1]) and mean.axis is axis

    def _opaque(self, eqn: Eqn) -> Value:
        """An equation the normal form does not look into: its arguments are written, the equation kept."""
        args = tuple(self._write(self.polys[a], a.name, a) if a in self.polys else a for a in eqn.args)
        self.b.eqns.append(Eqn(eqn.out, eqn.op, args, eqn.attrs))
        return eqn.out

    def _monomial(self, v: Value) -> tuple[Product, Fraction]:
        """A forward value as one coefficient times a product; sums and roots are atoms."""
        eqn = self.producer.get(v)
        if eqn is None or v in self.linear:
            return atom(v), Fraction(1)
        match eqn.op:
            case "mul" | "div":
                (p, c), (q, d) = (self._monomial(a) for a in eqn.args)
                if eqn.op == "mul":
                    return p * q, c * d
                return (p * q.inverse(), c / d) if d else (atom(v), Fraction(1))
            case "neg":
                p, c = self._monomial(eqn.args[0])
                return p, -c
            case "const" if math.isfinite(eqn.value):
                return ONE, Fraction(eqn.value)
            case "size":
                return atom(Size(eqn.axis)), Fraction(1)
        return atom(v), Fraction(1)

    def _name(self, eqn: Eqn) -> None:
        """Remember a forward product by its name, unless a number or a parameter over D is a factor.

        dy * gamma is what the terms of a cotangent share; naming xhat * gamma would hide it.
        """
        product, coefficient = self._monomial(eqn.out)
        product = self._shorten(product)
        narrow = any(axes_of(a) == (D,) for a, _ in product.powers)
        if eqn.op == "mul" and coefficient == 1 and len(product.powers) > 1 and not narrow:
            self.named.append((product, eqn.out))

    def _shorten(self, product: Product) -> Product:
        """The product with every named product in it by its name."""
        for named, value in self.named:
            while named.divides(product):
                product = product * named.inverse() * atom(value)
        return product

    # ---- writing ----

    def _write(self, poly: Poly, name: str, like: Value) -> Value:
        """Equations for a polynomial, over the axes of ``like``; its value is called ``name`` if it takes any."""
        value = self._write_poly(poly, name, like)
        for axis in like.type.axes:  # terms that varied along an axis may have cancelled
            if axis not in value.type.axes:
                value = self.b.expand(f"{_plain(value)}_{axis.value.lower()}", value, axis=axis)
        return value

    def _write_poly(self, poly: Poly, name: str, like: Value) -> Value:
        terms = collect((self._use_names(p), c) for p, c in poly.items())
        if not terms:
            return self.b.const("zero", 0.0, like.type.dtype)
        factor = common(terms) if len(terms) > 1 else ONE
        rest = [(p * factor.inverse(), c) for p, c in terms.items()]
        rest.sort(key=lambda t: (t[1] < 0, self._sums_in(t[0]), len(t[0].powers), self._key(t[0])))
        if factor == ONE:
            return self._write_sum(rest, name, like)
        total = self._write_sum(rest, f"{name}_part", like)
        return self.b.mul(name, self._write_product(factor, like), total)

    def _write_sum(self, terms: list[tuple[Product, Fraction]], name: str, like: Value) -> Value:
        total: Value | None = None
        for left, (product, coefficient) in zip(range(len(terms) - 1, -1, -1), terms, strict=True):
            term = self._write_term(product, abs(coefficient), like)
            part = f"{name.removesuffix('_part')}_part" if left else name
            if total is None:
                total = self.b.neg(part, term) if coefficient < 0 else term
            else:
                total = (self.b.sub if coefficient < 0 else self.b.add)(part, total, term)
        assert total is not None
        return total

    def _write_term(self, product: Product, coefficient: Fraction, like: Value) -> Value:
        if product == ONE:
            return self.b.const("factor", float(coefficient), like.type.dtype)
        if coefficient == 1:
            return self._write_product(product, like)
        # Scale the narrow part: once per row is cheaper than once per element.
        narrow, wide = product.split(lambda a: len(axes_of(a)) < len(product.axes))
        factor = self.b.const("factor", float(coefficient), like.type.dtype)
        part = factor if narrow == ONE else self.b.mul("scaled_factor", self._write_product(narrow, like), factor)
        return part if wide == ONE else self.b.mul("scaled_term", self._write_product(wide, like), part)

    def _write_product(self, product: Product, like: Value) -> Value:
        """The factors multiplied: seeds first, then by axes, so that equal beginnings are shared."""
        above = [a for a, n in self._sorted(product) for _ in range(n)]
        below = [a for a, n in self._sorted(product) for _ in range(-n)]
        value = self._write_atom(above[0], like) if above else self.b.const("one", 1.0, like.type.dtype)
        for a in above[1:]:
            right = self._write_atom(a, like)
            value = self._write_pair("mul", value, right)
        for a in below:
            value = self._write_pair("div", value, self._write_atom(a, like))
        return value

    def _write_pair(self, op: str, a: Value, b: Value) -> Value:
        key = op, a, b
        if key not in self.pairs:
            self.pairs[key] = self.b.emit(op, f"{_plain(a)}_{_plain(b)}", (a, b))
        return self.pairs[key]

    def _write_atom(self, a: Atom, like: Value) -> Value:
        if isinstance(a, Value):
            return a
        if a not in self.written:
            if isinstance(a, Size):
                self.written[a] = self.b.size(f"{a.axis.value.lower()}_size", a.axis, like.type.dtype)
            else:
                of = self._write_product(self._use_names(a.of), like)
                reduce = self.b.reduce_mean if a.mean else self.b.reduce_sum
                self.written[a] = reduce(f"{'mean' if a.mean else 'sum'}_{_plain(of)}", of, axis=a.axis)
        return self.written[a]

    def _use_names(self, product: Product) -> Product:
        """Forward products by their names, first inside the sums, then outside; sums over sizes as means."""
        for s in self._sums(product):
            product = self._absorb(product, s)
        product = self._shorten(product)
        for s in self._sums(product):
            size = atom(Size(s.axis)).inverse()
            if not s.mean and product.get(Size(s.axis)) < 0:
                product = product * atom(s).inverse() * size.inverse() * atom(Sum(s.axis, s.of, mean=True))
        return product

    def _absorb(self, product: Product, s: Sum) -> Product:
        """Move factors from outside a sum into it where that completes a product with a name."""
        of = self._shorten(s.of)
        for named, value in self.named:
            inside, outside = named.split(lambda a: s.axis in axes_of(a))
            if inside != ONE and outside != ONE and inside.divides(of) and outside.divides(product):
                of = of * inside.inverse() * atom(value)
                product = product * outside.inverse()
        return product * atom(s).inverse() * atom(Sum(s.axis, of)) if of != s.of else product

    # ---- orders ----

    def _sums(self, product: Product) -> list[Sum]:
        return [a for a, n in self._sorted(product) if isinstance(a, Sum) and n == 1]

    def _sums_in(self, product: Product) -> int:
        return sum(isinstance(a, Sum) for a, _ in product.powers)

    def _sorted(self, product: Product) -> list[tuple[Atom, int]]:
        return sorted(product.powers, key=lambda p: self._atom_key(p[0]))

    def _key(self, product: Product) -> tuple[object, ...]:
        return tuple((self._atom_key(a), n) for a, n in self._sorted(product))

    def _atom_key(self, a: Atom) -> tuple[object, ...]:
        """A total order that depends on the graph only: seeds, narrow values, wide values, sums, sizes."""
        match a:
            case Value():
                return 0, a not in self.linear, len(a.type.axes), self.order.get(a, len(self.order)), ()
            case Sum():
                return 1, a.mean, len(axes_of(a)), list(Axis).index(a.axis), self._key(a.of)
            case Size():
                return 2, False, 0, list(Axis).index(a.axis), ()


def _plain(v: Value) -> str:
    return v.name.removesuffix("32").rstrip("_")
