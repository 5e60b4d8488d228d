"""The times to emit and to compile each kernel of the golden set.

All times are processor time. NVRTC runs in one thread, so processor time equals elapsed time on an idle machine, and
other processes do not lengthen it.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from lngen.aot.catalog import plans
from lngen.emit import emit
from lngen.errors import LngenError
from lngen.lower import Plan
from lngen.toolchain import compile_cubin, compiler_build

REPEATS = 3  # repetitions, of which the median counts

Times = dict[str, float]  # milliseconds of one kernel set


def measure(arch: str, against: Path | None = None) -> Iterator[tuple[str, Times]]:
    """Name and times of each golden kernel, compiled even if it is cached; MissingError without a compiler.

    emit_ms     to lay out the text
    compile_ms  to compile the text to a cubin
    total_ms    both together
    cached_ms   to read the cubin from the disk cache instead
    against_ms  to compile another text of the same spec, if there is one

    ``against``: a folder with another golden set. Its texts and those of this set are compiled in turn, so that a
    change in the machine's speed affects both. LngenError if the folder has no text of a spec.
    """
    others = {} if against is None else texts(against, plans())
    compiler_build()  # loading the library is not part of a kernel's time
    for plan in plans():
        source = emit(plan)
        compile_it = partial(compile_cubin, arch=arch, name=f"{plan.name}.cu")
        works: list[Callable[[], object]] = [
            partial(emit, plan),
            partial(compile_it, source, fresh=True),
            partial(compile_it, source),
        ]
        works += [partial(compile_it, others[plan.name], fresh=True)] if others else []
        rounds = [[_milliseconds(work) for work in works] for _ in range(REPEATS)]
        emitted, compiled, cached, *other = map(statistics.median, zip(*rounds, strict=True))
        times = {"emit_ms": emitted, "compile_ms": compiled, "total_ms": emitted + compiled, "cached_ms": cached}
        if other:
            times["against_ms"] = other[0]
        yield plan.name, times


def texts(folder: Path, wanted: Sequence[Plan]) -> dict[str, str]:
    """The CUDA texts in ``folder`` by the name of the plan that has the same spec; LngenError if one is missing."""
    found = {}
    for path in sorted(folder.glob("*.cu")):
        text = path.read_text(encoding="utf-8")
        if spec := re.search(r"^// +spec +: (\S+)$", text, re.MULTILINE):
            found[spec[1]] = text
    if missing := [str(plan.spec) for plan in wanted if str(plan.spec) not in found]:
        raise LngenError(
            f"{folder} is expected to hold a golden set, but no .cu file there is of {', '.join(missing)}; "
            "name the folder generated/kernels of another checkout."
        )
    return {plan.name: found[str(plan.spec)] for plan in wanted}


def _milliseconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return 1e3 * (time.process_time() - start)
