"""The identities by which a backward is derived, and the log in which the passes note where each of them acted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lngen.ir import Eqn, Value
from lngen.passes.polynomial import Poly, Term

Terms = tuple[Term, ...]  # a sum; like terms are not added

IDENTITIES: Mapping[str, str] = {
    "repeated": "a repeated operand has the sum of the cotangents of its copies",
    "maximum": "what equations do with this maximum cancels in the results, so they add nothing to its cotangent",
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
class Contribution:
    """What an equation adds to the cotangent of an operand; ``given`` is the cotangent of its result."""

    eqn: Eqn
    given: Value
    operand: Value
    added: Value


@dataclass
class Log:
    """How a backward was derived: by ``vjp``, then ``simplify``, then ``save``.

    ``cotangents``: of the forward's values, in the graph after ``vjp``. ``polys``: what ``simplify`` read values as.
    """

    contributions: list[Contribution] = field(default_factory=list)
    cotangents: dict[Value, Value] = field(default_factory=dict)
    polys: dict[Value, Poly] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
