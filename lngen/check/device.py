"""Launch on a GPU and compare every bit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from lngen.check.inputs import POISON, mismatches
from lngen.check.result import Result
from lngen.ir.numerics import Array
from lngen.lower import Plan
from lngen.runtime.launch import Launcher
from lngen.runtime.numpy_arrays import launch_numpy
from lngen.toolchain import Binary


def bits(plan: Plan, binary: Binary, rows: int, inputs: Mapping[str, Array], want: Mapping[str, Array]) -> Result:
    """One launch on poisoned outputs and workspace against the interpreter's results."""
    parts = mismatches(launch_numpy(_launcher(plan, binary.image), rows, inputs, POISON), want)
    detail = "; ".join(parts) or f"{sum(a.size for a in want.values())} numbers equal"
    return Result(str(plan.spec), str(plan.schedule), rows, "bits", not parts, detail)


@lru_cache(maxsize=8)
def _launcher(plan: Plan, image: bytes) -> Launcher:
    return Launcher(plan, image, 0, overlap=True)  # which allows a launch more than the default
