"""The products that a forward pass computes: values as products of others, and products by their names."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

from lngen.ir import D, Eqn, Value
from lngen.passes.polynomial import ONE, Poly, Product, Size, Sum, atom, axes_of, length

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

    def absorb(self, product: Product, s: Sum) -> Product:
        """Move factors from outside a sum into the sum where that completes a named product in all of its terms."""
        # Several terms may have sums of their own, which are shortened first, when they are written.
        terms = {p if s.product is None else self.shorten(p): c for p, c in s.terms}
        for named, value in self._named:
            inside, outside = named.split(lambda a: s.axis in axes_of(a))
            if inside == ONE or outside == ONE or not outside.divides(product):
                continue
            if all(inside.divides(p) for p in terms):
                terms = {p * inside.inverse() * atom(value): c for p, c in terms.items()}
                product = product * outside.inverse()
        moved = frozenset(terms.items())
        return product if moved == s.terms else product * atom(s).inverse() * atom(Sum(s.axis, moved))

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
                product = atom(Size(eqn.axis))
        return (product, coefficient) if fits({product: coefficient}, POWERS) else (atom(eqn.out), Fraction(1))

    def _is_reciprocal(self, eqn: Eqn) -> bool:
        """True for 1 / s."""
        return eqn.op == "div" and self.monomial(eqn.args[0]) == (ONE, Fraction(1))

    def _name(self, v: Value) -> None:
        """Record a product by its name, unless a number or a parameter over D is a factor.

        dy * gamma is common to the terms of a cotangent, and naming xhat * gamma would hide it. So would naming the
        square of x before that of xhat: powers of one atom come last.
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
