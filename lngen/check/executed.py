"""The compiled kernels without a GPU: their PTX executed on NumPy, bits compared, every access checked."""

from __future__ import annotations

from collections.abc import Mapping

from lngen.check.inputs import mismatches
from lngen.check.result import Result
from lngen.compile import KernelSet
from lngen.ir.numerics import Array
from lngen.ptx import run_plan


def executed(
    kernels: KernelSet, arch: str, rows: int, inputs: Mapping[str, Array], want: Mapping[str, Array]
) -> Result:
    """One call of the ``kernels`` on ``arch``: equal bits and no finding, or the first finding."""
    plan = kernels.plan
    outcome = run_plan(plan, inputs, source=kernels.text, ptx=kernels.ptx(arch, lines=True), rows=rows)
    parts = [*mismatches(outcome.results, want), *(str(f) for f in outcome.findings[:1])]
    detail = "; ".join(parts) or f"{sum(a.size for a in want.values())} numbers equal, nothing found"
    return Result(str(plan.spec), str(plan.schedule), rows, "ptx", not parts, detail)
