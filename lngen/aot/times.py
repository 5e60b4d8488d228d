"""How long a kernel takes to make: each of the golden set, emitted and compiled."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import TypeVar

from lngen.aot.catalog import plans
from lngen.emit import emit
from lngen.toolchain import compile_cubin, compiler_build

Result = TypeVar("Result")


@dataclass(frozen=True)
class Times:
    """Milliseconds: a plan's text, its compilation, both together, and the cubin from the disk cache instead."""

    emit_ms: float
    compile_ms: float
    total_ms: float
    cached_ms: float


def measure(arch: str) -> Iterator[tuple[str, Times]]:
    """Name and times of each golden kernel, compiled whatever the cache has; MissingError without a compiler."""
    compiler_build()  # loading the library is no kernel's time
    for plan in plans():
        source, emitted = _timed(partial(emit, plan))
        compiled, cached = (
            _timed(partial(compile_cubin, source, arch, name=f"{plan.name}.cu", fresh=fresh))[1]
            for fresh in (True, False)
        )
        yield plan.name, Times(emitted, compiled, emitted + compiled, cached)


def median(times: Sequence[Times]) -> Times:
    """The median of each column."""
    return Times(*map(statistics.median, zip(*map(astuple, times), strict=True)))


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    start = time.perf_counter()
    result = work()
    return result, 1e3 * (time.perf_counter() - start)
