"""Sums of products: the normal form in which ``simplify`` adds up cotangents.

A polynomial is a sum of terms, a term a rational coefficient times powers of atoms. An atom is a value
of the graph, the length of an axis, or the sum of a polynomial over an axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from lngen.ir import Axis, Value


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
        return tuple(x for x in Axis if any(x in axes_of(a) for a, _ in self.powers))


@dataclass(frozen=True)
class Size:
    """The length of an axis."""

    axis: Axis


@dataclass(frozen=True)
class Sum:
    """The sum of ``terms`` over ``axis``, divided by the axis' length if ``mean``."""

    axis: Axis
    terms: frozenset[tuple[Product, Fraction]]
    mean: bool = False

    @property
    def product(self) -> Product | None:
        """The summand, if it is one product; its coefficient is then 1."""
        return next(p for p, _ in self.terms) if len(self.terms) == 1 else None


Atom = Value | Size | Sum
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
        case Sum():
            return tuple(x for x in Axis if x is not a.axis and any(x in p.axes for p, _ in a.terms))
        case Size():
            return ()


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
    return sum(abs(n) * (1 + (length(a.terms) if isinstance(a, Sum) else 0)) for p, _ in terms for a, n in p.powers)


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

    def sums(self, product: Product) -> list[Sum]:
        """The sums that are factors of a product, in order."""
        return [a for a, n in self.sorted(product) if isinstance(a, Sum) and n == 1]

    def _atom_key(self, a: Atom) -> tuple[object, ...]:
        match a:
            case Value():
                return 0, a not in self.linear, len(a.type.axes), self._place[a], ()
            case Sum():
                terms = sorted((self.key(p), c) for p, c in a.terms)
                return 1, a.mean, len(axes_of(a)), list(Axis).index(a.axis), terms
            case Size():
                return 2, False, 0, list(Axis).index(a.axis), ()
