"""Sums of products: the normal form in which ``simplify`` adds up cotangents.

A polynomial is a sum of terms, a term a rational coefficient times powers of atoms. An atom is a value
of the graph, the length of an axis, or a sum over an axis of a product of atoms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

from lngen.ir import Axis, Value


@dataclass(frozen=True)
class Product:
    """Atoms with their exponents, none of them zero, in order of first appearance; compared as a set."""

    powers: frozenset[tuple[Atom, int]] = frozenset()

    def get(self, atom: Atom) -> int:
        """The exponent of ``atom``, 0 if it is absent."""
        return dict(self.powers).get(atom, 0)

    def __mul__(self, other: Product) -> Product:
        powers = dict(self.powers)
        for atom, n in other.powers:
            powers[atom] = powers.get(atom, 0) + n
        return Product(frozenset((a, n) for a, n in powers.items() if n))

    def inverse(self) -> Product:
        """1 / self."""
        return Product(frozenset((a, -n) for a, n in self.powers))

    def divides(self, other: Product) -> bool:
        """True if every power of self fits into ``other``."""
        return all(other.get(a) >= n > 0 for a, n in self.powers)

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
    """The sum over ``axis`` of a product, divided by the axis' length if ``mean``."""

    axis: Axis
    of: Product
    mean: bool = False


Atom = Value | Size | Sum
Poly = dict[Product, Fraction]

ONE = Product()


def atom(a: Atom) -> Product:
    """The product that is just ``a``."""
    return Product(frozenset([(a, 1)]))


def axes_of(a: Atom) -> tuple[Axis, ...]:
    """The axes along which an atom varies."""
    match a:
        case Value():
            return a.type.axes
        case Sum():
            return tuple(x for x in a.of.axes if x is not a.axis)
        case Size():
            return ()


def collect(terms: Iterable[tuple[Product, Fraction]]) -> Poly:
    """Like terms added up, those that cancel dropped."""
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
