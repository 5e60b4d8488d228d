"""Kernels of heads on the executor: of any spec, schedule and arch, with the interpreter's bits."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from lngen.compiler.compile import Compilation
from lngen.compiler.interpret import interpret
from lngen.compiler.lower import Plan
from lngen.compiler.problem import Schedule
from lngen.compiler.spec import parse_spec
from lngen.proof.check.inputs import mismatches, random_inputs
from lngen.proof.check.spec_checks import others
from lngen.proof.ptx import run_plan
from schedules import cp_async, multipass, registers, tma

ARCHES = ("sm_80", "sm_90", "sm_120")
FORMS: dict[str, Schedule] = {
    "registers": registers(64, 2, 8),
    "tma": tma(128, 1, 8, 2, "cached", grid=3),
    "stored": tma(64, 2, 8, 2, "store", grid=3),
    "cp_async": cp_async(128, 1, 8, 2, grid=2),
    "multipass": multipass(128, 8),
}
MOST = 6144  # features of a row: those of heads that meet in shared memory, in backward
any_seed = pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[] if n < 3 else pytest.mark.full) for n in range(375)]
)


@cache
def compilation(text: str) -> Compilation:
    return Compilation(parse_spec(text))


def executed(plan: Plan, rows: int, arch: str = "sm_90", seed: int = 0, **how: Any) -> None:
    """The executor has the interpreter's bits, and finds nothing wrong."""
    inputs = random_inputs(plan.spec, rows, seed)
    outcome = run_plan(plan, inputs, rows=rows, arch=arch, order=seed, **how)
    what = (str(plan.spec), str(plan.schedule), rows, arch)
    assert not outcome.findings, (what, str(outcome.findings[0]))
    assert not mismatches(outcome.results, interpret(plan.graph, inputs)), what


def by_default(text: str, arch: str) -> None:
    """The schedule that a call would have, with no rows, few and several."""
    found = compilation(text)
    for rows in (0, 1, 37):
        executed(found.kernels(found.schedule(arch)).plan, rows, arch)


def by_chance(specs: Sequence[str], seed: int) -> None:
    """Any legal schedule of any of these specs."""
    rng = np.random.default_rng(seed)
    text, arch = specs[seed % len(specs)], ARCHES[rng.integers(3)]
    listed = others(compilation(text), 12, arch) or [compilation(text).schedule(arch)]
    executed(compilation(text).kernels(listed[rng.integers(len(listed))]).plan, int(rng.integers(1, 60)), arch, seed)


def two_schedules(text: str, seed: int) -> None:
    """The default schedule and another one, with any number of rows, for any arch."""
    rng = np.random.default_rng(seed)
    arch, found = ARCHES[rng.integers(3)], Compilation(parse_spec(text))
    for schedule in (found.schedule(arch), *others(found, 2, arch)[:1]):
        executed(found.kernels(schedule).plan, int(rng.integers(1, 40)), arch, seed)


def text_of(said: Mapping[str, str], heads: str) -> str:
    """The spec of a graph under these keys, whose rows have so many heads, or as many as backward always takes."""
    keys = ",".join(f"{key}={value}" for key, value in said.items() if key not in ("graph", "way"))
    head = int(said["head"])
    return f"{said['graph']}.{said['way']}:d={head * min(int(heads), MOST // head)},{keys}"
