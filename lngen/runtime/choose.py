"""The default schedule of a spec: the first of the model's ranking that the compiler does not spill."""

from __future__ import annotations

import sys

from lngen import config
from lngen.emit import emit
from lngen.errors import MissingError
from lngen.lower import Plan, lower
from lngen.runtime.stages import show_stages
from lngen.schedule import MINIMUM_ARCH, Schedule, problem, ranked
from lngen.spec import Spec
from lngen.toolchain import Binary, compile_cubin

DEFAULT_ARCH = "sm_90"


def compile_plan(plan: Plan, arch: str) -> Binary:
    """The plan's kernels as a cubin for ``arch``; LNGEN_DEBUG 3 and 4 print, LNGEN_DUMP writes, every stage."""
    source = emit(plan)
    if config.debug_level() >= 3 or config.dump_dir() is not None:
        show_stages(plan, source)
    return compile_cubin(source, arch, name=f"{plan.name}.cu")


def capability(arch: str) -> int:
    """The compute capability that an arch names: 90 for sm_90 and sm_90a; no less than the oldest that has a form.

    What is no arch is the compiler's to refuse.
    """
    number = int("".join(c for c in arch if c in "0123456789") or 0)
    return max(number, min(MINIMUM_ARCH.values()))


def default_schedule(spec: Spec, arch: str = DEFAULT_ARCH, vec: int | None = None) -> Schedule:
    """The schedule for ``spec`` on ``arch`` that needs no tuning; its accesses ``vec`` elements wide at most.

    The model ranks, the compile log decides: a candidate with spills is passed over. Without a compiler
    the model's first choice stands.
    """
    candidates = ranked(problem(spec.graph(), spec.d), capability(arch), vec)
    for candidate in candidates:
        try:
            binary = compile_plan(lower(spec, candidate), arch)
        except MissingError:
            return candidate
        if not any(r.spills for r in binary.resources.values()):
            return candidate
        if config.debug_level() >= 2:
            print(f"lngen: {spec}: {candidate} spills on {arch}", file=sys.stderr)
    return candidates[0]
