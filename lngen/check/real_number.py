"""A real number with the error bound of its rounded evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lngen.check.tolerances import FLOOR, ROUNDOFF
from lngen.ir import Axis, Eqn

Array = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Real:
    """Numbers over the axes [M, D] or [M, S], of length 1 along absent axes.

    ``error``: the error bound of a rounded evaluation.
    """

    value: Array
    error: Array

    @property
    def most(self) -> Array:
        """The largest absolute value that the rounded number may have."""
        return np.abs(self.value) + self.error


Sizes = Mapping[Axis, int]
Meaning = Callable[[Eqn, Sizes, tuple[Real, ...]], Real]


def rounded(eqn: Eqn, value: Array, error: Array, times: float | Array = 1.0) -> Real:
    """A result that is rounded ``times`` times to the equation's dtype."""
    dtype = eqn.out.type.dtype
    return Real(value, error + times * ROUNDOFF[dtype] * (np.abs(value) + error) + FLOOR[dtype])
