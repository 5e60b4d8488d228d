"""To be written."""

from __future__ import annotations

from lngen.explain.section import Section
from lngen.explain.subject import Subject


def reasons(subject: Subject) -> Section:
    """To be written."""
    return Section("reasons", "Schedule", ())
