"""The names that values and graphs may have.

A value's name is also its name in C; ``lngen.lower.c_names`` keeps the names that kernels declare distinct from it.
"""

from __future__ import annotations

import re
from collections.abc import Container

# C++ reserves names with two underscores in a row; names that kernels invent end in one.
_VALUE = re.compile(r"[A-Za-z][A-Za-z0-9]*+(?:_[A-Za-z0-9]++)*+")
_GRAPH = re.compile(r"[a-z][a-z0-9]*+(?:_[a-z0-9]++)*+")


def is_name(name: object) -> bool:
    """True for words of letters and digits with one underscore between two words, the names of values."""
    return isinstance(name, str) and _VALUE.fullmatch(name) is not None


def is_graph_name(name: object) -> bool:
    """True for lower-case words of that kind, the names of graphs, of which files and kernels get their names."""
    return isinstance(name, str) and _GRAPH.fullmatch(name) is not None


def fresh(name: str, taken: Container[str]) -> str:
    """``name``, or ``name_1``, ``name_2``, ... if it is taken."""
    found, n = name, 0
    while found in taken:
        n += 1
        found = f"{name}_{n}"
    return found
