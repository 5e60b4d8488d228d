"""Which schedules are worth trying: the only place where the tuner asks the model."""

from __future__ import annotations

from lngen.schedule import Schedule, capability, problem, ranked
from lngen.spec import Spec


def candidates(spec: Spec, rows: int, arch: str) -> list[Schedule]:
    """The schedules for ``spec`` with ``rows`` rows on ``arch``, each once, the model's favourite first."""
    return ranked(problem(spec.graph(), spec.d), capability(arch), rows=rows)
