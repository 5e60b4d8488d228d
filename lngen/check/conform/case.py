"""A case: what it runs on a norm, and what on any other graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lngen.check.conform.contract import Found
from lngen.check.conform.graph_suite import GraphSuite
from lngen.check.conform.suite import Calls, Suite


@dataclass(frozen=True)
class Case:
    """A named case; ``why`` is the meaning of a failure, in one line.

    ``of_graph`` is its form for a graph that is not one of the two norms, or the reason why it has none.
    """

    name: str
    why: str
    run: Callable[[Suite], Found]
    of_graph: Callable[[GraphSuite], Found] | str


def general(name: str, why: str, run: Callable[[Calls], Found]) -> Case:
    """A case that says nothing about what is computed."""
    return Case(name, why, run, run)
