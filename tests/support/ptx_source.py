"""A CUDA source whose kernel ``k`` the PTX executor runs, and what a test asks of the outcome."""

from __future__ import annotations

from typing import Any

from lngen.ptx import Outcome, parse, run_kernel
from lngen.toolchain import compile_ptx


def run(source: str, grid: Any, block: int, *arguments: Any, dynamic: int = 0, order: int = 0) -> Outcome:
    """What the kernel ``k`` of a CUDA source does."""
    module = parse(compile_ptx(source, "sm_90", name="k.cu", lines=True))
    return run_kernel(module, "k", grid, block, arguments, source=source, dynamic=dynamic, order=order)


def kinds(outcome: Outcome) -> set[str]:
    return {f.kind for f in outcome.findings}


def clean(outcome: Outcome) -> dict[str, Any]:
    """The results of a run without findings."""
    assert outcome.findings == (), "\n".join(map(str, outcome.findings))
    return outcome.results


def broken(source: str, old: str, new: str) -> str:
    """The source with one defect."""
    assert old in source, old
    return source.replace(old, new)
