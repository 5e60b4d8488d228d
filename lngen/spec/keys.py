"""Values of a spec's keys, from text or Python objects; a SpecError says what is wrong and names the nearest word."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, NoReturn

from lngen.errors import SpecError, short
from lngen.graphs import Chosen, Option
from lngen.ir import DType
from lngen.numbers import whole


def some_of(text: str, key: str, value: Any, known: list[str]) -> tuple[str, ...] | None:
    """The names in ``known`` that ``value`` lists, in their order; None for all."""
    given = known if value is None else value.split("+") if isinstance(value, str) else value
    one = isinstance(given, bytes) or getattr(given, "shape", None) == ()  # an array without axes
    names = [*map(short, given if isinstance(given, Iterable) and not one else [given])]
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


def option_value(text: str, key: str, option: Option, value: Any) -> Chosen:
    """The value of an option of the graph: True for yes and False for no, a number, or a word."""
    found = option.read(value)
    if found is not None:
        return found
    if value is None:
        hint = f"; {key}=no leaves it out" if isinstance(option.default, bool) else ""
        raise SpecError(f"spec '{text}': '{key}' is expected to be {option.values}, got None{hint}.")
    if isinstance(option.default, bool) or option.choices:
        wrong(text, key, value, option.choices or ("yes", "no"))
    raise SpecError(f"spec '{text}': '{key}' is expected to be a number, got '{short(value)}'.")


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
    near = difflib.get_close_matches(short(got), known, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    raise SpecError(f"spec '{text}': there is no {what} '{short(got)}', expected one of {', '.join(known)}{hint}")
