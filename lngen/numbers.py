"""Numbers from users, in specs, schedules and options: one strict reading of them.

``int`` and ``float`` accept more: digits of any script, underscores, spaces, NaN, and any number of digits.
"""

from __future__ import annotations

import operator
import re

LARGEST = 2**31 - 1
MOST_CHARACTERS = 32
_DECIMAL = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)


def whole(value: object, least: int = 0, most: int = LARGEST) -> int | None:
    """The whole number in ``value``, a text of ASCII digits or an integer; None if it is not one in range."""
    if isinstance(value, str):
        if not (value.isascii() and value.isdigit() and len(value) <= MOST_CHARACTERS):
            return None
        number = int(value)
    else:
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            return None
        if isinstance(value, bool):
            return None
    return number if least <= number <= most else None


def decimal(value: object, least: float = 0.0, most: float = float("inf")) -> float | None:
    """The number in ``value``, a text such as 1e-5 or a number; None if it is not one in range, NaN included."""
    if isinstance(value, str) and not (len(value) <= MOST_CHARACTERS and _DECIMAL.fullmatch(value)):
        return None
    try:
        number = float(value) + 0.0  # type: ignore[arg-type]  # no negative zero
    except (TypeError, ValueError, OverflowError):
        return None
    return number if least <= number <= most and number != float("inf") else None
