"""Sums of products: the normal form in which ``simplify`` adds up cotangents, and the products of a forward pass.

A polynomial is a sum of terms. A term is a rational coefficient times powers of atoms. An atom is a value
of the graph, the length of an axis, or the sum of a polynomial over an axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from lngen.compiler.ir import Axis, D, Eqn, Value, axes_union
from lngen.compiler.ir.axes import along


@dataclass(frozen=True)
class Product:
    """Atoms with their exponents, none of them zero, in order of first appearance; compared as a set."""

    powers: frozenset[tuple[Atom, int]] = frozenset()

    @cached_property
    def _exponents(self) -> dict[Atom, int]:
        return dict(self.powers)

    def get(self, atom: Atom) -> int:
        """The exponent of ``atom``, 0 if it is absent."""
        return self._exponents.get(atom, 0)

    def __mul__(self, other: Product) -> Product:
        powers = dict(self.powers)
        for atom, n in other.powers:
            powers[atom] = powers.get(atom, 0) + n
        return Product(frozenset((a, n) for a, n in powers.items() if n))

    def inverse(self) -> Product:
        """1 / self."""
        return Product(frozenset((a, -n) for a, n in self.powers))

    def divides(self, other: Product) -> bool:
        """True if every power in self, of a factor or of a divisor, also occurs in ``other``."""
        return all(other.get(a) >= n if n > 0 else other.get(a) <= n for a, n in self.powers)

    def split(self, inside: Callable[[Atom], bool]) -> tuple[Product, Product]:
        """The factors for which ``inside`` holds, and the others."""
        kept = frozenset((a, n) for a, n in self.powers if inside(a))
        return Product(kept), Product(self.powers - kept)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes along which the product varies."""
        return axes_union(*(axes_of(a) for a, _ in self.powers))


@dataclass(frozen=True)
class Size:
    """The length of an axis, or the elements of it that one of ``per`` has."""

    axis: Axis
    per: Axis | None = None


@dataclass(frozen=True)
class AxisSum:
    """The sum of ``terms`` over ``axis``, divided by the axis' length if ``mean``; ``to`` as in a reduction."""

    axis: Axis
    terms: frozenset[tuple[Product, Fraction]]
    mean: bool = False
    to: Axis | None = None

    @property
    def product(self) -> Product | None:
        """The summand, if it is one product; its coefficient is then 1."""
        return next(p for p, _ in self.terms) if len(self.terms) == 1 else None


Atom = Value | Size | AxisSum
Term = tuple[Product, Fraction]
Poly = dict[Product, Fraction]

ONE = Product()


def atom(a: Atom) -> Product:
    """The product of ``a`` alone."""
    return Product(frozenset([(a, 1)]))


def axes_of(a: Atom) -> tuple[Axis, ...]:
    """The axes along which an atom varies."""
    match a:
        case Value():
            return a.type.axes
        case AxisSum():
            summed = axes_union((a.axis,), *(p.axes for p, _ in a.terms))
            return tuple(x for x in (a.to if x is a.axis else x for x in summed) if x is not None)
        case Size():
            return ()


def varies(a: Atom, axis: Axis, to: Axis | None) -> bool:
    """True if an atom is not constant along ``axis``, or along its elements that belong to one of ``to``."""
    has = along(axes_of(a), axis.root)
    return has is not None and (to is None or not to.is_finer(has))


def collect(terms: Iterable[tuple[Product, Fraction]]) -> Poly:
    """Like terms added, without those that cancel."""
    poly: Poly = {}
    for product, coefficient in terms:
        poly[product] = poly.get(product, Fraction(0)) + coefficient
    return {p: c for p, c in poly.items() if c}


def times(a: Poly, b: Poly) -> Poly:
    """The product of two polynomials."""
    return collect((p * q, c * d) for p, c in a.items() for q, d in b.items())


def common(products: Iterable[Product]) -> Product:
    """The largest product that divides all of ``products``."""
    first, *others = products
    shared = {a: n for a, n in first.powers if n > 0}
    for other in others:
        shared = {a: min(n, other.get(a)) for a, n in shared.items()}
    return Product(frozenset((a, n) for a, n in shared.items() if n > 0))


def content(coefficients: Iterable[Fraction]) -> Fraction:
    """The common magnitude of ``coefficients``, 1 if they differ."""
    magnitudes = {abs(c) for c in coefficients}
    return magnitudes.pop() if len(magnitudes) == 1 else Fraction(1)


def length(terms: Iterable[tuple[Product, Fraction]]) -> int:
    """Number of factors in ``terms``, including those inside sums."""
    return sum(abs(n) * (1 + (length(a.terms) if isinstance(a, AxisSum) else 0)) for p, _ in terms for a, n in p.powers)


class Order:
    """A total order that depends on the graph only: seeds, narrow values, wide values, sums, sizes.

    ``linear`` are the values that depend on a seed; values of one kind come in the order of ``values``.
    """

    def __init__(self, linear: set[Value], values: Iterable[Value]) -> None:
        self.linear = linear
        self._place = {v: i for i, v in enumerate(values)}

    def add(self, value: Value) -> None:
        """Adds a value that depends on a seed; a new value comes after all others."""
        self.linear.add(value)
        self._place.setdefault(value, len(self._place))

    def key(self, product: Product) -> tuple[object, ...]:
        """The sort key of products."""
        return tuple((self._atom_key(a), n) for a, n in self.sorted(product))

    def sorted(self, product: Product) -> list[tuple[Atom, int]]:
        """The powers of a product in order."""
        return sorted(product.powers, key=lambda p: self._atom_key(p[0]))

    def sums(self, product: Product) -> list[AxisSum]:
        """The sums that are factors of a product, in order."""
        return [a for a, n in self.sorted(product) if isinstance(a, AxisSum) and n == 1]

    def _atom_key(self, a: Atom) -> tuple[object, ...]:
        match a:
            case Value():
                return 0, a not in self.linear, len(a.type.axes), self._place[a], ()
            case AxisSum():
                terms = sorted((self.key(p), c) for p, c in a.terms)
                return 1, a.mean, len(axes_of(a)), _axes_key(a.axis, a.to), terms
            case Size():
                return 2, False, 0, _axes_key(a.axis, a.per), ()


def _axes_key(axis: Axis, other: Axis | None) -> tuple[object, ...]:
    return axis.key, () if other is None else other.key


POWERS = 8  # factors of a product
RANGE = 2**32  # a larger number might overflow where the values that it scales do not


class ForwardProducts:
    """``eqns`` are those of the forward pass, in their order."""

    def __init__(self, eqns: Iterable[Eqn]) -> None:
        self._products: dict[Value, tuple[Product, Fraction]] = {}
        self._named: list[tuple[Product, Value]] = []
        self._powers: list[tuple[Product, Value]] = []
        for eqn in eqns:
            self._products[eqn.out] = self._expand(eqn)
            if eqn.op == "mul" or self._is_reciprocal(eqn):
                self._name(eqn.out)

    def monomial(self, v: Value) -> tuple[Product, Fraction]:
        """A value as a coefficient times a product; a value that is no product of the forward pass is an atom."""
        return self._products.get(v, (atom(v), Fraction(1)))

    def shorten(self, product: Product) -> Product:
        """The product with every named product in it replaced by its name."""
        return _by_names(self._powers, _by_names(self._named, product))

    def absorb(self, product: Product, s: AxisSum) -> Product:
        """Move factors into a sum where this completes a named product in each of its terms."""
        # A single term is shortened here. Several are shortened when they are written, after the sums in them.
        terms = {p if s.product is None else self.shorten(p): c for p, c in s.terms}
        for named, value in self._named:
            inside, outside = named.split(lambda a: varies(a, s.axis, s.to))
            if inside == ONE or outside == ONE or not outside.divides(product):
                continue
            if all(inside.divides(p) for p in terms):
                terms = {p * inside.inverse() * atom(value): c for p, c in terms.items()}
                product = product * outside.inverse()
        moved = frozenset(terms.items())
        return product if moved == s.terms else product * atom(s).inverse() * atom(replace(s, terms=moved))

    def _expand(self, eqn: Eqn) -> tuple[Product, Fraction]:
        """Sums and roots are atoms, and so are values with too many factors."""
        product, coefficient = atom(eqn.out), Fraction(1)
        match eqn.op:
            case "mul" | "div":
                (p, c), (q, d) = (self.monomial(a) for a in eqn.args)
                if eqn.op == "mul":
                    product, coefficient = p * q, c * d
                elif d:  # a literal 0 is left to IEEE
                    product, coefficient = p * q.inverse(), c / d
            case "neg":
                p, c = self.monomial(eqn.args[0])
                product, coefficient = p, -c
            case "const" if math.isfinite(eqn.value):
                product, coefficient = ONE, Fraction(eqn.value)
            case "size":
                product = atom(Size(eqn.axis, eqn.per))
        return (product, coefficient) if fits({product: coefficient}, POWERS) else (atom(eqn.out), Fraction(1))

    def _is_reciprocal(self, eqn: Eqn) -> bool:
        """True for 1 / s."""
        return eqn.op == "div" and self.monomial(eqn.args[0]) == (ONE, Fraction(1))

    def _name(self, v: Value) -> None:
        """Record a product by its name, unless a number or a parameter over D is a factor.

        dy * gamma is common to the terms of a cotangent, and the name of xhat * gamma would hide it. The square of x
        would hide that of xhat, so powers of one atom come last.
        """
        product, coefficient = self.monomial(v)
        product = _by_names(self._named, product)
        if coefficient != 1 or any(axes_of(a) == (D,) for a, _ in product.powers):
            return
        if len(product.powers) > 1:
            self._named.append((product, v))
        elif length([(product, coefficient)]) > 1 or any(n < 0 for _, n in product.powers):
            self._powers.append((_by_names(self._powers, product), v))


def fits(poly: Poly, factors: int) -> bool:
    """True if a polynomial has at most that many factors, and no number that might overflow."""
    in_range = all(1 <= abs(c) * RANGE <= RANGE**2 for c in poly.values() if c)
    return in_range and length(poly.items()) <= factors


def _by_names(names: Iterable[tuple[Product, Value]], product: Product) -> Product:
    for named, value in names:
        while named.divides(product):
            product = product * named.inverse() * atom(value)
    return product
