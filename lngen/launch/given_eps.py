"""The eps that a call gives to kernels that take numbers by value."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from ..errors import ArrayError
from ..files import shown


def given_eps(spec: str, given: Any) -> float:
    """The eps of a call as a number; ArrayError if it is missing, or anything but one finite real number."""
    if given is None:
        raise ArrayError(f"'{spec}' expects eps in every call, which is missing; add for example eps=1e-6.")
    eps = finite(given)
    if eps is None:
        got = f"{type(given).__module__}.{type(given).__name__}" if hasattr(given, "shape") else shown(given)
        raise ArrayError(f"'{spec}' expects eps to be a finite number, got {got}; pass for example eps=1e-6.")
    return eps


def finite(value: object) -> float | None:
    """The finite number in ``value``, without the sign of a zero; None for anything that is not one real number."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        number = float(value) + 0.0
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
