"""The parts of a spec's text, of its C identifier and of its file's name that name inputs and options."""

from __future__ import annotations

import re
from collections.abc import Callable

from lngen.graphs import Chosen

# Words that are not names of inputs; 'no' and 'q' are prefixes of such names.
_OTHER_WORDS = re.compile(r"(w|out|grad)(f16|bf16|f32|f64)|(eps|save|blocks|order|no|q).*|wrt|of|acc|set")


def c_word(name: str) -> str:
    """The name of an input as one lower-case word of a C identifier, distinct from the words that are not inputs."""
    return name if "_" not in name and _plain(name) else _escaped(name).replace("_", "qu")


def file_word(name: str) -> str:
    """The same as a word of a file's name: ``round-sum`` for round_sum."""
    return (name if _plain(name) else _escaped(name)).replace("_", "-")


def _plain(name: str) -> bool:
    return name.islower() and not _OTHER_WORDS.fullmatch(name)


def _escaped(name: str) -> str:
    return "q" + re.sub("([A-Z])", r"qx\1", name.replace("q", "qq")).lower()


def text_of(value: Chosen) -> str:
    """The value of an option as a spec has it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return repr(value) if isinstance(value, float) else value


def number_word(value: float) -> str:
    """A number as a word of either."""
    return repr(value).replace("-", "m").replace(".", "p").replace("+", "")


def value_word(value: float | str, word: Callable[[str], str]) -> str:
    """The value of an option as one word."""
    return number_word(value) if isinstance(value, float) else word(value)
