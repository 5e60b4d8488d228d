"""Why a kernel is what it is, from its graph, its plan and its records: derivation, stability, cost, fusion, schedule.

Nothing here is written about one graph: every sentence is chosen by a fact of the subject. ``explain`` stands above
check, tune and the column: it calls them and reads their files, and nothing but the command line calls it.
"""

from collections.abc import Callable, Iterable, Mapping

from lngen.lab.explain.cost import cost
from lngen.lab.explain.derivation import derivation
from lngen.lab.explain.fusion import fusion
from lngen.lab.explain.reasons import reasons
from lngen.lab.explain.section import Section, Subject
from lngen.lab.explain.stability import stability

__all__ = ["SECTIONS", "Section", "Subject", "explain"]

SECTIONS: Mapping[str, Callable[[Subject], Section]] = {
    "derivation": lambda subject: derivation(subject.plan.spec),  # which no schedule changes
    "stability": stability,
    "cost": cost,
    "fusion": fusion,
    "schedule": reasons,
}


def explain(subject: Subject, names: Iterable[str] = SECTIONS) -> tuple[Section, ...]:
    """The sections of an explanation, in their order."""
    return tuple(make(subject) for name, make in SECTIONS.items() if name in {*names})
