"""Options of a graph: those of every graph, and the keys that a description declares, with their defaults."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lngen.errors import SpecError, VerifyError, short
from lngen.files import shown
from lngen.ir import DType
from lngen.ir.names import is_name
from lngen.numbers import decimal

Chosen = bool | float | str

LARGEST = 1e30  # of a number
_WORD = re.compile(r"[a-z][a-z0-9]*+(?:_[a-z0-9]++)*+")


@dataclass(frozen=True)
class Option:
    """An option with its default: True or False, a number, or one of the words ``choices``; ``about`` explains it."""

    default: Chosen
    choices: tuple[str, ...] = ()
    about: str = ""

    @property
    def values(self) -> str:
        """The values that it takes, in words."""
        if isinstance(self.default, bool):
            return "yes or no"
        return f"one of {', '.join(self.choices)}" if self.choices else "a number"

    def check(self, graph: str, name: str) -> None:
        """VerifyError for a name that no key can have, or a default that is no value of the option."""
        if not is_name(name):
            raise VerifyError(
                f"graph @{graph}: an option is expected to be called by words of letters and digits, one underscore "
                f"between two, got {name!r}."
            )
        for word in self.choices:
            if not _WORD.fullmatch(word):
                raise VerifyError(
                    f"graph @{graph}: the values of '{name}' are expected to be lower-case words of letters and "
                    f"digits, one underscore between two, got {word!r}."
                )
        if self.read(self.default) is None:
            raise VerifyError(
                f"graph @{graph}: the default of '{name}' is expected to be {self.values}, got {self.default!r}."
            )

    def read(self, value: object) -> Chosen | None:
        """A value, from text or a Python object; None if the option does not take it."""
        if isinstance(self.default, bool):
            return value if isinstance(value, bool) else {"yes": True, "no": False}.get(short(value))
        if self.choices:
            return short(value) if short(value) in self.choices else None
        if isinstance(value, str) and value.startswith("-"):
            number = decimal(value[1:], 0, LARGEST)
            return None if number is None else -number
        return decimal(value, -LARGEST, LARGEST)


@dataclass(frozen=True)
class Options:
    """What a spec says to the description of a graph: dtypes, eps, options that differ from their defaults, ``save``.

    ``save``: ``stats``, ``none``, or the names of the results that forward saves for backward, joined by ``+``.
    """

    dtype: DType
    weight: DType
    out: DType
    eps: float = 1e-5
    chosen: tuple[tuple[str, Chosen], ...] = ()
    save: str = "stats"


def chosen_value(graph: str, name: str, option: Option, value: object) -> Chosen:
    """The value of an option; SpecError if the option does not take it."""
    found = option.read(value)
    if found is None:
        graph = graph.removesuffix("_fwd")
        raise SpecError(f"graph '{graph}': '{name}' is expected to be {option.values}, got {shown(value)}.")
    return found
