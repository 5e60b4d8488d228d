"""Compiles candidates side by side, without the GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass

from lngen.compile import Compilation
from lngen.errors import CompileError, EmitError, LowerError, ScheduleError
from lngen.files import sha256
from lngen.schedule import Schedule


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
