"""What is asked of machine code: loads of 16 bytes, no local memory, and, of golden kernels, no more instructions.

How many instructions a golden kernel has is recorded for each build of the compiler in ``generated/sass-budget.json``.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from lngen.compiler.devices import DEFAULT_ARCH
from lngen.compiler.lower import Kernel, Plan
from lngen.compiler.lower.cuda.fragments import Tensor
from lngen.compiler.lower.cuda.row_text import SIZES
from lngen.compiler.problem import STAGED
from lngen.compiler.problem.facts import CHUNK_BYTES
from lngen.compiler.problem.footprint import are_alike, vectors_per_thread
from lngen.compiler.toolchain import compiler_build
from lngen.errors import ScheduleError
from lngen.files import parse_json, write_all
from lngen.lab.inspect.machine_code import KernelCode, machine_code, mix
from lngen.packs.catalog import kernel_sets

ARCHES = (DEFAULT_ARCH, "sm_80")

Numbers = dict[str, dict[str, int]]  # by kernel and arch


def lint(plan: Plan, codes: Sequence[KernelCode]) -> list[str]:
    """What is wrong with the machine code of a plan's kernels, a sentence for each fault."""
    found = []
    for kernel, code in zip(plan.kernels, codes, strict=True):
        counted, of = mix(code.code), f"{code.name} on {code.arch}"
        if local := sum(n for name, n in counted.items() if name.startswith(("LDL", "STL"))):
            found.append(f"{of}: {local} instructions access local memory, expected none.")
        found += [
            f"{of}: rows of {plan.spec} allow at least {least} of '{name}', got {counted.get(name, 0)}."
            for name, least in promised(kernel, plan).items()
            if counted.get(name, 0) < least
        ]
    return found


def promised(kernel: Kernel, plan: Plan) -> dict[str, int]:
    """The fewest instructions by kind with which a row kernel loads rows and weights, 16 bytes of a thread at a time.

    Where D leaves fewer neighbouring elements, and of rows at any alignment, only bulk copies are promised. A thread
    whose vectors have the same columns of a head loads one of them.
    """
    form, p = plan.schedule.form, plan.problem
    if kernel.row is None:
        return {}
    chunks = 0 if form == "tma_unaligned" else vectors_per_thread(plan.schedule, p)

    def loads(t: Tensor) -> int:
        alike, size = t.period and are_alike(plan.schedule, p, t.period), SIZES[t.ctype]
        return (min(chunks, 1) if alike else chunks) * p.chunk * size // CHUNK_BYTES * (p.run * size >= CHUNK_BYTES)

    rows, weights = (sum(map(loads, tensors)) for tensors in kernel.inputs[:2])
    if form not in STAGED:
        return {"LDG 16": rows + weights}
    copies = {"LDGSTS 16": rows} if form == "cp_async" else {"bulk load": len(kernel.inputs.element)}
    return {**copies, "LDS 16": rows, "LDG 16": weights}


# ---- the golden set ----


def golden(arches: Iterable[str] = ARCHES) -> tuple[list[str], Numbers]:
    """The faults of the golden set on each arch, and the numbers of its instructions.

    On other archs than the set's own, schedules that do not fit or spill are left out: no default would be one of them.
    ``instructions``: of the whole kernel; ``row``: of its row loop, or of a kernel without one; ``fp32``: of those the
    FP32 additions, multiplications and multiply-adds.
    """
    faults: list[str] = []
    numbers: Numbers = {}
    for arch in arches:
        for kernels in kernel_sets():
            try:
                if arch != DEFAULT_ARCH and kernels.spilled(arch):
                    continue
            except ScheduleError:
                continue
            codes = machine_code(kernels, arch)
            faults += lint(kernels.plan, codes)
            for code in codes:
                row = code.row[1]
                counts = {"instructions": len(code.code), "row": len(row), "fp32": mix(row).get("FP32", 0)}
                numbers[f"{code.name} {arch}"] = counts
    return faults, numbers


def build() -> str:
    """The version of the compiler with its patch, as in "13.5.37"."""
    found = re.search(r"\bV([\d.]*\d)", compiler_build())
    return found[1] if found else compiler_build()


def recorded(file: Path) -> dict[str, Numbers]:
    """The numbers of each build of the compiler in the file; none if there is no file."""
    found: dict[str, Numbers] = parse_json(file.read_bytes()) if file.exists() else {}
    return found


def record(file: Path, numbers: Numbers) -> None:
    """Replace the numbers of this build of the compiler."""
    builds = recorded(file) | {build(): numbers}
    write_all({file: (json.dumps(dict(sorted(builds.items())), indent=1) + "\n").encode()})


def above(numbers: Numbers, most: Numbers) -> list[str]:
    """The numbers that are larger than the recorded ones, a sentence each; what is not recorded counts as 0."""
    return [
        f"{of}: '{key}' is {number} instructions, and {most.get(of, {}).get(key, 0)} are recorded."
        for of, counts in numbers.items()
        for key, number in counts.items()
        if number > most.get(of, {}).get(key, 0)
    ]
