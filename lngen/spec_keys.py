"""Values of a spec's keys, from text or Python objects; a SpecError says what is wrong and names the nearest word."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, NoReturn

from lngen.errors import SpecError
from lngen.ir import DType
from lngen.numbers import whole


def some_of(text: str, key: str, value: Any, known: list[str]) -> tuple[str, ...] | None:
    """The names in ``known`` that ``value`` lists, in their order; None for all."""
    given = known if value is None else value.split("+") if isinstance(value, str) else value
    names = [*map(str, given if isinstance(given, Iterable) else [given])]
    if not names:
        raise SpecError(f"spec '{text}': '{key}' is expected to be one of {', '.join(known)} at least, got none.")
    for name in names:
        if name not in known:
            wrong(text, key, name, known)
    ordered = tuple(n for n in known if n in names)
    return None if list(ordered) == known else ordered


def dtype_of(text: str, key: str, value: Any) -> DType:
    """A dtype by any name that ``DType.of`` takes."""
    try:
        return DType.of(value)
    except ValueError:
        wrong(text, key, value, [t.value for t in DType])


def flag(text: str, key: str, value: Any) -> bool:
    """True for yes, False for no."""
    if isinstance(value, bool):
        return value
    if value is None:
        raise SpecError(f"spec '{text}': '{key}' is expected to be yes or no, got None; {key}=no leaves it out.")
    if not isinstance(value, str) or value not in ("yes", "no"):
        wrong(text, key, value, ("yes", "no"))
    return value == "yes"


def whole_number(text: str, key: str, value: object, most: int) -> int:
    """A whole number from 1 to ``most``."""
    number = whole(value, 1, most)
    if number is None:
        raise SpecError(
            f"spec '{text}': '{key}' is expected to be a whole number from 1 to {most}, got '{short(value)}'."
        )
    return number


def wrong(text: str, what: str, got: Any, known: list[str] | tuple[str, ...]) -> NoReturn:
    """SpecError: there is no ``what`` called ``got``."""
    near = difflib.get_close_matches(str(got), known, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    raise SpecError(f"spec '{text}': there is no {what} '{short(got)}', expected one of {', '.join(known)}{hint}")


def short(value: Any) -> str:
    """The text of a value, or the start of it."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
