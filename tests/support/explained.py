"""Subjects of explanations, and the equations that the interpreter computes."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from lngen.compiler import interpret as interpreter
from lngen.compiler.compile import Compilation
from lngen.compiler.devices import Device
from lngen.compiler.ir import Eqn, Graph
from lngen.compiler.ir.numerics import Array
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


def computed(graph: Graph, inputs: Mapping[str, Array], patch: pytest.MonkeyPatch) -> list[tuple[Eqn, Any, Array]]:
    """The equations of which the interpreter has arrays, with their operands and results."""
    done, value_of = list[tuple[Eqn, Any, Array]](), interpreter.value_of

    def watched(eqn: Eqn, args: Any, size: Any) -> Array:
        done.append((eqn, args, value_of(eqn, args, size)))
        return done[-1][2]

    patch.setattr(interpreter, "value_of", watched)
    interpreter.interpret(graph, inputs)
    return done
