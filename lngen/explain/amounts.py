"""Amounts of operations and of bytes: polynomials in the lengths of axes, such as 6*M*D + 8*M, and their text."""

from collections import Counter
from collections.abc import Iterable
from math import prod
from typing import Any

from lngen.explain.section import Subject
from lngen.ir import Axis, D, Eqn, M, S, Value

Amount = Counter[tuple[Axis, ...]]
PREFIXES = ((12, "T"), (9, "G"), (6, "M"), (3, "k"))
MOST_NAMES = 10  # that a line lists


def is_free(eqn: Eqn) -> bool:
    """True for an equation that neither computes nor moves anything: a number, a view, a cast to its own dtype."""
    same = eqn.op == "cast" and eqn.out.type == eqn.args[0].type
    return same or eqn.op in ("const", "size", "expand", "detach", "segment_size")


def joined(amounts: Iterable[Amount]) -> Amount:
    """Their sum."""
    return sum(amounts, Counter[tuple[Axis, ...]]())


def bytes_of(*values: Value) -> Amount:
    """The bytes of the values."""
    return joined(Counter({v.type.axes: v.type.dtype.size}) for v in values)


def formula(amount: Amount) -> str:
    """The polynomial, its highest terms first; S is the number of segments of a row."""
    ordered = sorted(amount.items(), key=lambda item: (-len(item[0]), [[*Axis].index(axis) for axis in item[0]]))
    terms = ([*([str(n)] if n > 1 or not axes else []), *map(str, axes)] for axes, n in ordered)
    return " + ".join(map("*".join, terms)) or "0"


def at(amount: Amount, subject: Subject) -> int:
    """Its value for the subject's rows."""
    length = {M: subject.rows, D: subject.problem.d, S: subject.problem.segments}
    return sum(n * prod(length[axis] for axis in axes) for axes, n in amount.items())


def as_json(amount: Amount, subject: Subject) -> dict[str, Any]:
    """Formula and value."""
    return {"formula": formula(amount), "value": at(amount, subject)}


def si(number: float, unit: str = "") -> str:
    """Four digits and a decimal prefix: 100.7 MB."""
    power, prefix = next(((p, word) for p, word in PREFIXES if number >= 10**p), (0, ""))
    return f"{number / 10**power:.4g} {prefix}{unit}".rstrip()


def listed(names: Iterable[str]) -> str:
    """Names, each once; of many, the first."""
    every = [*dict.fromkeys(names)]
    more = len(every) - MOST_NAMES
    return ", ".join(every[:MOST_NAMES]) + f" and {more} more" * (more > 0)
