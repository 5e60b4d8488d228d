"""Candidates: which schedules are tried, in what order, and their kernels, compiled side by side without the GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from lngen.compile import Compilation
from lngen.devices import Device, device_for
from lngen.errors import CompileError, EmitError, LowerError, ScheduleError
from lngen.files import sha256
from lngen.problem import Schedule
from lngen.schedule import ranked
from lngen.spec import Spec


def ranking(spec: Spec, rows: int, arch: str, device: Device | None = None) -> list[Schedule]:
    """The schedules for ``spec`` with ``rows`` rows, each once: measured ones first, then in the model's order.

    ``device``: the GPU; None for the one that represents ``arch``.
    """
    return ranked(Compilation(spec).problem, device or device_for(arch), rows=rows)


def candidates(compilation: Compilation, rows: int, arch: str) -> list[Schedule]:
    """The schedules in the order of trial: the default, then alternately the next by rank and the best of each kind.

    A model that is wrong about a whole kind would otherwise exclude it: kinds are first structures, then block
    shapes.
    """
    listed = ranked(compilation.problem, device_for(arch), rows=rows)
    kinds = [*_best(listed, _structure), *_best(listed, _shape)]
    turns = chain.from_iterable(zip_longest(listed, kinds))
    first = compilation.schedule(arch, rows=rows)
    return [*dict.fromkeys(s for s in (first, *turns) if s is not None)]


def _best(listed: Sequence[Schedule], kind: Callable[[Schedule], Any]) -> list[Schedule]:
    """The first of each kind."""
    found: dict[Any, Schedule] = {}
    for s in listed:
        found.setdefault(kind(s), s)
    return [*found.values()]


def _structure(s: Schedule) -> tuple[Any, ...]:
    return *s.kind, s.cached_weights


def _shape(s: Schedule) -> tuple[Any, ...]:
    return s.form, s.threads, s.rows_per_block, s.blocks_per_sm, s.cluster


# ---- compiling ----


@dataclass(frozen=True)
class Candidate:
    """A schedule to be measured: a cubin, or the reason why there is none.

    status     correct (ready to be measured), constraints or compile
    kernel     hash of the emitted CUDA, empty for an illegal schedule
    """

    schedule: Schedule
    rank: int
    status: str
    reason: str = ""
    kernel: str = ""
    image: bytes = b""
    registers: int = 0
    shared: int = 0
    compile_ms: float = 0.0


def build(compilation: Compilation, schedule: Schedule, rank: int, arch: str) -> Candidate:
    """Lower, emit and compile one candidate; MissingError without a compiler. Runs on any executor."""
    start = time.perf_counter()
    try:
        kernels = compilation.kernels(schedule)
        kernel = sha256(kernels.bundle.encode())[:16]
    except (ScheduleError, LowerError, EmitError) as error:
        return Candidate(schedule, rank, "constraints", _sentence(error))
    try:
        binary = kernels.cubin(arch)
    except CompileError as error:
        return Candidate(schedule, rank, "compile", _sentence(error), kernel)
    except ScheduleError as error:
        return Candidate(schedule, rank, "constraints", _sentence(error), kernel)
    used = binary.resources.values()
    spilled = [f"{name} {r.spilled}" for name, r in binary.resources.items() if r.spills]
    return Candidate(
        schedule,
        rank,
        "compile" if spilled else "correct",
        f"spills, in bytes a thread: {', '.join(spilled)}" if spilled else "",
        kernel,
        b"" if spilled else binary.image,
        max((r.registers for r in used), default=0),
        max((r.shared for r in used), default=0),
        round(1e3 * (time.perf_counter() - start), 1),
    )


def build_all(
    compilation: Compilation,
    schedules: Sequence[tuple[int, Schedule]],
    arch: str,
    *,
    executor: Executor | None = None,
    seconds: float = float("inf"),
    stopped: Callable[[], bool] = lambda: False,
) -> list[Candidate]:
    """Build (rank, schedule) pairs on ``executor``, by default as many threads as there are processors.

    Returns them in rank order, without those not built within ``seconds`` or before ``stopped``; at least one is built.
    """
    if executor is None:
        with ThreadPoolExecutor() as pool:
            return build_all(compilation, schedules, arch, executor=pool, seconds=seconds, stopped=stopped)
    futures = [executor.submit(build, compilation, schedule, rank, arch) for rank, schedule in schedules]
    try:
        _wait(futures, time.monotonic() + seconds, stopped)
    finally:
        for future in futures:
            future.cancel()
    built = [f.result() for f in futures if f.done() and not f.cancelled()]
    return sorted(built, key=lambda c: c.rank)


def _wait(futures: Sequence[Future[Candidate]], deadline: float, stopped: Callable[[], bool]) -> None:
    """Waits until all are done, or the first is done and it is time to stop; an error of a job is raised at once."""
    pending: Iterable[Future[Candidate]] = futures
    while pending:
        try:
            for future in as_completed(pending, timeout=0.1):
                future.result()
                if stopped():
                    return
        except Late:
            pass
        pending = [f for f in futures if not f.done()]
        if stopped() or (time.monotonic() > deadline and futures[0].done()):
            return


def _sentence(error: Exception) -> str:
    """The first lines of an error as one sentence."""
    return " ".join(str(error).split())[:300]
