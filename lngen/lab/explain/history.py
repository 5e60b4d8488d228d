"""How a backward was derived: what its graphs differ in after each pass, and the identities that act on the way.

The passes keep no log. They run once more here, and what they do is watched.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lngen.compiler.ir import Value
from lngen.compiler.passes.exchange import undone
from lngen.compiler.passes.polynomial import Poly, Term
from lngen.compiler.passes.simplify import Simplifier, Terms
from lngen.compiler.passes.vjp import Contribution, constants, sum_cotangents
from lngen.compiler.spec import Spec

IDENTITIES: Mapping[str, str] = {
    "repeated": "a repeated operand has the sum of the cotangents of its copies",
    "maximum": "the results do not depend on this maximum, so equations add nothing to its cotangent",
    "distributive": "a product of sums is the sum of the products of their terms",
    "like": "like terms are one term, with the sum of their coefficients",
    "linear": "the sum of several terms is the sum of the sums of each, since addition commutes",
    "waits": "a term with a factor that is a sum over the same axis has a sum of its own, which waits for none",
    "centred": "the elements of a row less their mean add up to zero, as the mean is defined",
    "leaves": "a factor that is constant along an axis leaves the sum over it; the sum of 1 is the length",
    "names": "a product or a reciprocal that forward has is that value, which is used again",
    "mean": "a sum over an axis, divided by its length, is the mean",
    "factor": "a common factor of all terms is multiplied once, by their sum",
    "saved": "forward stores this value, so it is read and not computed again",
    "undone": "forward stores a result of this value, by an equation that can be solved for it",
}


@dataclass(frozen=True)
class Step:
    """One identity where it acted, on the cotangent or the forward value ``at``.

    ``before`` and ``after`` are products of sums, equal in real numbers; empty where no polynomial changed.
    """

    identity: str
    at: Value
    before: tuple[Terms, ...] = ()
    after: tuple[Terms, ...] = ()


@dataclass(frozen=True)
class History:
    """How a backward was derived: by ``vjp``, then ``simplify``, then ``save``.

    ``cotangents``: of the forward's values, in the graph after ``vjp``. ``polys``: what ``simplify`` read values as.
    """

    contributions: list[Contribution]
    cotangents: dict[Value, Value]
    polys: dict[Value, Poly]
    steps: list[Step]


class _Watched(Simplifier):
    """A simplifier that notes the identities that act, and what it reads values as."""

    def watch(self) -> tuple[dict[Value, Poly], list[Step]]:
        self.read, self.steps = dict[Value, Poly](), list[Step]()
        self.run()
        return self.read, self.steps

    def acts(self, identity: str, before: Iterable[Iterable[Term]], after: Iterable[Iterable[Term]]) -> None:
        self.steps.append(Step(identity, self.at, tuple(map(tuple, before)), tuple(map(tuple, after))))

    def bounded(self, poly: Poly, v: Value) -> Poly:
        self.read[v] = poly
        found = super().bounded(poly, v)
        if found is not poly:  # it is too large: its value goes on as one factor
            self.read |= {a: poly for product in found for a, _ in product.powers if isinstance(a, Value)}
        return found


def history(spec: Spec) -> History:
    """The history of a spec's backward."""
    forward, raw, saved = (spec.trace()[name] for name in ("build", "vjp", "save"))
    wrt, of = spec.differentiates, spec.differentiated
    inputs, results = {p.name: p for p in forward.params}, {r.name: r for r in forward.results}
    constant = constants(forward, wrt, of, spec.eps_or_default, spec.definition.positive(spec.options))
    _, cotangents, contributions = sum_cotangents(
        forward, tuple(inputs[name] for name in wrt), tuple(results[name] for name in of), constant
    )
    polys, simplified = _Watched(raw, tuple(p.name for p in raw.params if p not in forward.params)).watch()
    before = forward.producers()
    steps = [
        *(Step("maximum", e.out) for e in forward.eqns if e.out in constant),
        *(Step("repeated", c.added) for c in contributions if c.added != c.each),
        *simplified,
        *(Step("saved", p) for p in saved.params if p in before),
        *(Step("undone", e.out) for e in undone(saved, forward) if e.op != "cast"),
    ]
    return History(contributions, cotangents, polys, steps)
