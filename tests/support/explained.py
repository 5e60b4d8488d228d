"""Subjects of explanations."""

from functools import cache

from lngen.compiler.compile import Compilation
from lngen.compiler.devices import Device
from lngen.compiler.problem import Schedule
from lngen.compiler.spec import Spec, parse_spec
from lngen.lab.explain.section import Subject
from lngen.packs.catalog import CATALOG
from plans import H200


def subject_of(spec: Spec | str, schedule: Schedule | str = "", rows: int | None = 8, device: Device = H200) -> Subject:
    """A spec under a schedule, or under the default one with changes."""
    compilation = Compilation(parse_spec(spec) if isinstance(spec, str) else spec)
    if isinstance(schedule, Schedule):
        return Subject(compilation, compilation.kernels(schedule), device, rows)
    kernels = compilation.changed(schedule, device.arch, rows=rows, device=device, compiled=False)
    return Subject(compilation, kernels, device, rows, schedule)


@cache
def golden(spec: str, schedule: str | None = None) -> Subject:
    """A spec under its schedule in the golden set, or under another one."""
    return subject_of(spec, CATALOG[spec] if schedule is None else schedule, None)
