"""Numbers that a launch passes by value: what a graph may derive from the eps of a call, and by which rules.

A rule is one line of C over the double ``eps``. Its result is rounded once, to the dtype of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lngen.ir.numerics import NUMPY_DTYPE, Array
from lngen.ir.types import Graph

Run = Literal["run"]
RUN: Run = "run"  # the value of the key eps for a graph that gets it from every call
DEFAULT_EPS = 1e-5


@dataclass(frozen=True)
class Rule:
    """How a number follows from eps: an expression in C, with ``max`` as its one function, and the same in Python."""

    text: str
    of: Callable[[float], float]


RULES = {
    "eps": Rule("eps", lambda eps: eps),
    # The square of a divisor that is eps at least: a square of f32 that is 0 would be no divisor.
    "eps_squared": Rule("max(eps * eps, 0x1p-126)", lambda eps: max(eps * eps, 2.0**-126)),
}


def values_of(graph: Graph, eps: float) -> dict[str, Array]:
    """The parameters that ``graph`` takes by value, by name: NumPy arrays of shape (), rounded once to their dtypes.

    Nothing may write to them.
    """
    with np.errstate(over="ignore", under="ignore"):
        found = {v.name: np.array(RULES[v.rule].of(eps), NUMPY_DTYPE[v.type.dtype]) for v in graph.by_value}
    for number in found.values():
        number.setflags(write=False)
    return found


def bits_of(value: Array) -> int:
    """The bits of a number of 4 or 8 bytes, as an argument block holds them."""
    return int.from_bytes(value.tobytes(), "little")
