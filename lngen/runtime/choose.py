"""The default schedule of a spec: the first of the model's ranking that the compiler does not spill."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lngen import config
from lngen.emit import emit
from lngen.errors import MissingError, ScheduleError
from lngen.lower import Plan, lower
from lngen.runtime.stages import show_stages
from lngen.schedule import MINIMUM_ARCH, Schedule, capability, check_arch, fits, problem, ranked
from lngen.spec import Spec
from lngen.toolchain import Binary, compile_cubin

DEFAULT_ARCH = "sm_90"


def compile_plan(plan: Plan, arch: str) -> Binary:
    """The plan's kernels as a cubin for ``arch``; LNGEN_DEBUG 3 and 4 print, LNGEN_DUMP writes, every stage.

    ScheduleError if the plan's form does not exist there.
    """
    check_arch(plan.schedule, arch)
    source = emit(plan)
    if config.debug_level() >= 3 or config.dump_dir() is not None:
        show_stages(plan, source)
    return compile_cubin(source, arch, name=f"{plan.name}.cu")


def default_schedule(
    spec: Spec,
    arch: str = DEFAULT_ARCH,
    vec: int | None = None,
    also: Sequence[str] = (),
    rows: int | None = None,
) -> Schedule:
    """The schedule for ``spec`` on ``arch`` that needs no tuning; its accesses ``vec`` elements wide at most.

    ``rows``: how many there will be, None for many.

    The model ranks, the compile log decides: a candidate with spills is passed over. Without a compiler the model's
    first choice stands. With ``also`` it is one schedule for all of these archs: the best for the
    oldest that fits the others.
    """
    facts = problem(spec.graph(), spec.d)
    oldest, *others = sorted({arch, *also}, key=capability)
    candidates = [
        s
        for s in ranked(facts, max(capability(oldest), min(MINIMUM_ARCH.values())), vec, rows)
        if all(fits(s, facts, capability(a)) for a in others)
    ]
    if not candidates:
        raise ScheduleError(f"no schedule for {spec} fits {', '.join((oldest, *others))} alike; build them apart.")
    for candidate in candidates:
        plan = lower(spec, candidate)
        try:
            built = _until_one_spills(plan, (oldest, *others))
        except MissingError:
            return candidate
        *_, (arch, last) = built.items()
        if not _spills(last):
            return candidate
        if config.debug_level() >= 2:
            print(f"lngen: {spec}: {candidate} spills on {arch}", file=sys.stderr)
    return candidates[0]


def _until_one_spills(plan: Plan, arches: Sequence[str]) -> dict[str, Binary]:
    """The plan compiled for one arch after the other, the last of them the first for which registers spill."""
    built = {}
    for arch in arches:
        built[arch] = compile_plan(plan, arch)
        if _spills(built[arch]):
            break
    return built


def _spills(binary: Binary) -> bool:
    return any(r.spills for r in binary.resources.values())
