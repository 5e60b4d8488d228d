"""What to write instead, for a description of a graph that asks a value or a builder for something they lack."""

from __future__ import annotations

import difflib

from lngen.graphs.builder import GraphBuilder
from lngen.ir import Value

MOST = 3  # names in a hint
_OPERATORS = (
    "; values have the operators + - * / and ** 2, other ops are methods ('lngen help graph'), and in place of a "
    "comparison there are x.relu(), x.maximum(z), x.clamp(low, high) and b.where_gt(name, a, b, c, d)."
)


def hint(error: BaseException) -> str:
    """The end of a message about ``error``: the nearest methods, or the operators of values."""
    if isinstance(error, AttributeError) and isinstance(error.obj, Value | GraphBuilder):
        near = _nearest(str(error.name), isinstance(error.obj, Value))
        return f"; did you mean {' or '.join(near)}?" if near else "; 'lngen help graph' lists the methods."
    return _OPERATORS if isinstance(error, TypeError) and "Value" in str(error) else "."


def _nearest(word: str, of_value: bool) -> list[str]:
    """The methods of values, x, and of builders, b, whose names contain ``word``, or else resemble it."""
    kinds = {"b": GraphBuilder, "x": Value} if of_value else {"x": Value, "b": GraphBuilder}
    known = {name: f"{x}.{name}" for x, kind in kinds.items() for name in dir(kind) if not name.startswith("_")}
    near = sorted((n for n in known if word in n), key=len) or difflib.get_close_matches(word, known, n=MOST)
    return [known[n] for n in near[:MOST]]
