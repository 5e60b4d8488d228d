"""The parts of a spec's text, and of its slug, that name inputs and options."""

from __future__ import annotations

import re

from lngen.graphs.options import Chosen

# Words of slugs that are not names of inputs; 'no' and 'q' are prefixes of such names.
_OTHER_WORDS = re.compile(r"(w|out|grad)(f16|bf16|f32|f64)|(eps|save|blocks|order|no|q).*|wrt|of|acc|set")


def word(name: str) -> str:
    """The name of an input as one lower-case word of a slug, distinct from the words that are not inputs."""
    if "_" not in name and name.islower() and not _OTHER_WORDS.fullmatch(name):
        return name
    return "q" + re.sub("([A-Z])", r"qx\1", name.replace("q", "qq").replace("_", "qu")).lower()


def text_of(value: Chosen) -> str:
    """The value of an option as a spec has it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return repr(value) if isinstance(value, float) else value


def number_word(value: float) -> str:
    """A number as a part of a slug."""
    return repr(value).replace("-", "m").replace(".", "p").replace("+", "")


def value_word(value: float | str) -> str:
    """The value of an option as one word of a slug."""
    return number_word(value) if isinstance(value, float) else word(value)
