"""To be written."""

from __future__ import annotations

from lngen.explain.section import Section
from lngen.explain.subject import Subject


def stability(subject: Subject) -> Section:
    """To be written."""
    return Section("stability", "Stability", ())
