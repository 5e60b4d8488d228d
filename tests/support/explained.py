"""Subjects of explanations: a spec under a schedule, by default the model's, for a number of rows on an H200."""

from __future__ import annotations

from lngen.compile import Compilation
from lngen.devices import default_device
from lngen.explain.subject import Subject
from lngen.problem import Schedule
from lngen.schedule import ranked
from lngen.spec import Spec, parse_spec


def subject_of(spec: Spec | str, schedule: Schedule | None = None, rows: int = 8) -> Subject:
    compilation = Compilation(parse_spec(spec) if isinstance(spec, str) else spec)
    kernels = compilation.kernels(schedule or ranked(compilation.problem)[0])
    return Subject(compilation, kernels, default_device(), rows)
